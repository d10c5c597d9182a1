//! Threads that work beside a caller, and stay for the next one.
//!
//! Every call to several ranks needs a thread for each of them, as calls into backends block. Callers at the same time get threads of their own, so
//! that none waits behind another one's call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Threads without work that are kept; more of them end.
const KEPT: usize = 64;

/// What a thread is to do, by the number it is given.
type Body = dyn Fn(usize) + Sync;

/// A body that outlives the work on it: [`Hired`] waits for the threads before it goes.
struct Work {
    body: *const Body,
    number: usize,
}

// SAFETY: the body is `Sync`, so that it may be called from any thread; the pointer is used only while it lives, see `Hired`.
unsafe impl Send for Work {}

/// A thread that waits for work.
#[derive(Debug)]
struct Hand {
    work: Sender<Work>,
    done: Receiver<()>,
}

impl Hand {
    fn start() -> std::io::Result<Self> {
        let (work, queue) = channel::<Work>();
        let (ended, done) = channel();
        thread::Builder::new().name("kv-rank".to_owned()).spawn(move || {
            while let Ok(Work { body, number }) = queue.recv() {
                // SAFETY: who sent it waits for `ended` before it lets go of the body.
                let body = unsafe { &*body };
                // Bodies catch their own panics; one that slips through must not keep the caller waiting.
                let _ = catch_unwind(AssertUnwindSafe(|| body(number)));
                if ended.send(()).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { work, done })
    }
}

/// Threads that stay. They end when it is dropped.
#[derive(Debug, Default)]
pub(super) struct Crew {
    idle: Mutex<Vec<Hand>>,
}

/// Threads at work, which are waited for before this goes.
struct Hired<'a> {
    crew: &'a Crew,
    hands: Vec<Hand>,
}

impl Drop for Hired<'_> {
    fn drop(&mut self) {
        // A thread that is gone (it can't be) holds the body no more, and is not taken again.
        self.hands.retain(|hand| hand.done.recv().is_ok());
        let mut idle = self.crew.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let room = KEPT.saturating_sub(idle.len()).min(self.hands.len());
        idle.extend(self.hands.drain(..room));
    }
}

impl Crew {
    /// Calls `body` with each number below `count` on a thread of its own, and `own` on this one meanwhile. Returns when all have returned. Numbers for
    /// which there is no thread are done by this one, after `own`, which is told how many have begun.
    pub(super) fn beside<R>(&self, count: usize, body: &(dyn Fn(usize) + Sync), own: impl FnOnce(usize) -> R) -> R {
        let mut hired = Hired { crew: self, hands: Vec::with_capacity(count) };
        // SAFETY: only the lifetime of the pointee is changed; `hired` waits for every thread that gets the pointer, also where `own` panics.
        let shared: *const Body = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Body>(body) };
        while hired.hands.len() < count {
            let kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(hand) = kept.or_else(|| Hand::start().ok()) else { break };
            // One that takes no work is gone; another one is asked.
            if hand.work.send(Work { body: shared, number: hired.hands.len() }).is_ok() {
                hired.hands.push(hand);
            }
        }
        let begun = hired.hands.len();
        let result = own(begun);
        (begun..count).for_each(body);
        result
    }

    #[cfg(test)]
    fn waiting(&self) -> usize {
        self.idle.lock().unwrap().len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn threads_stay_for_the_next_call() {
        let crew = Crew::default();
        let seen = Mutex::new(BTreeSet::new());
        for _ in 0..20 {
            // All are there at once, so they are threads of their own.
            let meet = Barrier::new(4);
            let (numbers, meet) = (Mutex::new(BTreeSet::new()), &meet);
            let begun = crew.beside(
                3,
                &|number| {
                    meet.wait();
                    numbers.lock().unwrap().insert(number);
                    seen.lock().unwrap().insert(format!("{:?}", thread::current().id()));
                },
                |begun| {
                    meet.wait();
                    begun
                },
            );
            assert_eq!(begun, 3);
            assert_eq!(numbers.into_inner().unwrap(), BTreeSet::from([0, 1, 2]));
        }
        assert_eq!((seen.into_inner().unwrap().len(), crew.waiting()), (3, 3));
    }

    #[test]
    fn callers_at_the_same_time_do_not_wait_for_each_other() {
        let crew = Crew::default();
        let meet = Barrier::new(8);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let body = |_| {
                        meet.wait();
                    };
                    crew.beside(1, &body, |_| meet.wait());
                });
            }
        });
        assert_eq!(crew.waiting(), 4);
    }

    #[test]
    fn a_panic_is_waited_for_and_harms_no_later_call() {
        let crew = Crew::default();
        let ran = AtomicUsize::new(0);
        let body = |number: usize| {
            ran.fetch_add(1, Ordering::SeqCst);
            assert!(number != 0, "planted");
        };
        crew.beside(2, &body, |_| ());
        assert_eq!(ran.load(Ordering::SeqCst), 2);
        let own = catch_unwind(AssertUnwindSafe(|| crew.beside(2, &body, |_| panic!("planted"))));
        assert!(own.is_err());
        assert_eq!((ran.load(Ordering::SeqCst), crew.waiting()), (4, 2));
    }
}
