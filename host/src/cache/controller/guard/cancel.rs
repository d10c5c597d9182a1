//! Calling an operation off.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

/// Calls that can be cancelled together: those of an operation.
#[derive(Debug, Default)]
pub(crate) struct CancelSet {
    cancelled: AtomicBool,
    /// It was called off because its time was over.
    expired: AtomicBool,
    /// Some page has come.
    served: AtomicBool,
    /// A backend was blamed for the time.
    blamed: AtomicBool,
    calls: Mutex<SmallVec<[Arc<AtomicU32>; 8]>>,
    called_off: Condvar,
}

impl CancelSet {
    /// Asks all running calls to give up, and all later ones. Whoever waits on behalf of the operation stops waiting.
    pub fn cancel(&self) {
        let calls = self.calls.lock();
        self.cancelled.store(true, Ordering::Release);
        for call in calls.iter() {
            call.store(1, Ordering::Release);
        }
        self.called_off.notify_all();
    }

    /// As `cancel`, because those who wanted it have waited as long as they do.
    pub fn expire(&self) {
        self.expired.store(true, Ordering::Release);
        self.cancel();
    }

    /// Some page has come: whoever delivered it was slow at worst.
    pub fn serve(&self) {
        self.served.store(true, Ordering::Release);
    }

    /// Whether a call that was called off is to blame for it: the time was over and nothing had come. True once, since calls that run side
    /// by side are one experience.
    pub fn blame(&self) -> bool {
        self.expired.load(Ordering::Acquire)
            && !self.served.load(Ordering::Acquire)
            && !self.blamed.swap(true, Ordering::AcqRel)
    }

    /// Whether it was called off.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Sleeps until `until`. True if the operation was cancelled before that.
    pub fn sleep(&self, until: Instant) -> bool {
        let mut calls = self.calls.lock();
        while !self.is_cancelled() {
            if self.called_off.wait_until(&mut calls, until).timed_out() {
                return self.is_cancelled();
            }
        }
        true
    }

    /// A call begins.
    pub fn enter(&self, call: &Arc<AtomicU32>) {
        let mut calls = self.calls.lock();
        if self.is_cancelled() {
            call.store(1, Ordering::Release);
        }
        calls.push(Arc::clone(call));
    }

    /// A call has ended; its flag is not set from here any more.
    pub fn leave(&self, call: &Arc<AtomicU32>) {
        self.calls.lock().retain(|other| !Arc::ptr_eq(other, call));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_call_is_to_blame_when_the_time_is_over_and_nothing_has_come() {
        let (abandoned, expired, served) = (CancelSet::default(), CancelSet::default(), CancelSet::default());
        abandoned.cancel();
        expired.expire();
        served.serve();
        served.expire();
        assert!(expired.is_cancelled());
        assert_eq!([&abandoned, &expired, &served].map(CancelSet::blame), [false, true, false]);
        assert!(!expired.blame(), "once");
    }

    #[test]
    fn cancelling_reaches_calls_before_and_after_and_those_who_sleep() {
        let set = CancelSet::default();
        let (early, gone, late) = (Arc::default(), Arc::default(), Arc::default());
        set.enter(&early);
        set.enter(&gone);
        set.leave(&gone);
        assert!(!set.sleep(Instant::now()), "not cancelled yet");
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| set.sleep(Instant::now() + Duration::from_secs(60)));
            set.cancel();
            assert!(sleeper.join().unwrap());
        });
        set.enter(&late);
        let flags = [&early, &gone, &late].map(|flag| flag.load(Ordering::Acquire));
        assert_eq!(flags, [1, 0, 1]);
    }
}
