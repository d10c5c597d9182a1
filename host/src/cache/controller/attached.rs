//! Attached backends, and calls to them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::belief::{Belief, Breaker};
use crate::cache::pool::HostPool;
use crate::cache::stats::{BackendCounters, CacheCounters, StorageResult};
use crate::plugin::backend::{
    BackendError, BackendLimits, BackendSettings, CallOptions, ErrorKind, GuardReport, PageStatus, StorageBackend,
};

/// Why a call brought nothing.
#[derive(Debug)]
pub(crate) enum CallFault {
    /// The backend keeps failing and was not called.
    Skipped,
    /// The call failed.
    Failed(BackendError),
}

/// Reads and writes fail apart: a full store still reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Exists and get.
    Read,
    /// Set, remove, flush.
    Write,
}

/// Calls that can be cancelled together: those of an operation.
#[derive(Debug, Default)]
pub(crate) struct CancelSet {
    cancelled: AtomicBool,
    calls: Mutex<Vec<Arc<AtomicU32>>>,
}

impl CancelSet {
    /// Asks all running calls to give up, and all later ones.
    pub fn cancel(&self) {
        let calls = self.calls.lock();
        self.cancelled.store(true, Ordering::Release);
        for call in calls.iter() {
            call.store(1, Ordering::Release);
        }
    }

    /// Whether `cancel` was called.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    fn enter(&self, call: &Arc<AtomicU32>) {
        let mut calls = self.calls.lock();
        if self.is_cancelled() {
            call.store(1, Ordering::Release);
        }
        calls.push(Arc::clone(call));
    }

    fn leave(&self, call: &Arc<AtomicU32>) {
        self.calls.lock().retain(|other| !Arc::ptr_eq(other, call));
    }
}

/// Host pages of late calls.
#[derive(Debug, Default)]
struct Quarantine {
    /// Pages that calls still hold, once a call.
    held: Vec<u32>,
    /// Pages of calls that returned before their lateness was taken note of.
    early: Vec<u32>,
}

/// A backend in use, with what the host knows of it.
pub(crate) struct Attached {
    backend: Arc<dyn StorageBackend>,
    /// Pages by call and result.
    pub pages: Arc<BackendCounters>,
    counters: Arc<CacheCounters>,
    belief: Mutex<Belief>,
    breakers: [Mutex<Breaker>; 2],
    quarantine: Mutex<Quarantine>,
    retired: AtomicBool,
    running: Mutex<usize>,
    idle: Condvar,
}

impl Attached {
    pub(super) fn new(backend: Arc<dyn StorageBackend>, counters: Arc<CacheCounters>) -> Self {
        Attached {
            pages: counters.backend(backend.name()),
            counters,
            backend,
            belief: Mutex::default(),
            breakers: Default::default(),
            quarantine: Mutex::default(),
            retired: AtomicBool::new(false),
            running: Mutex::new(0),
            idle: Condvar::new(),
        }
    }

    /// Name of the backend.
    pub fn name(&self) -> &str {
        self.backend.name()
    }

    /// What suits the backend.
    pub fn limits(&self) -> BackendLimits {
        self.backend.limits()
    }

    /// How the host treats it.
    pub fn settings(&self) -> &BackendSettings {
        self.backend.settings()
    }

    /// What the guards have seen.
    pub fn report(&self) -> GuardReport {
        let [reads, writes] = [Way::Read, Way::Write].map(|way| self.breakers[way as usize].lock().report());
        GuardReport { reads, writes, break_even: None }
    }

    /// Whether its reads keep failing and it is left alone for now.
    pub fn is_resting(&self) -> bool {
        self.breakers[Way::Read as usize].lock().is_open(Instant::now())
    }

    /// Calls the backend. A panic on the way is an error like any other.
    pub fn call<R>(
        &self,
        way: Way,
        operation: &CancelSet,
        call: impl FnOnce(&dyn StorageBackend, &CallOptions) -> Result<R, BackendError>,
    ) -> Result<R, CallFault> {
        let breaker = &self.breakers[way as usize];
        // Counted before the look at `retired`, so that whoever saw none running after a detach sees none later.
        *self.running.lock() += 1;
        if self.retired.load(Ordering::SeqCst) || !breaker.lock().allows(Instant::now()) {
            self.leave();
            self.counters.breaker_skips.fetch_add(1, Ordering::Relaxed);
            return Err(CallFault::Skipped);
        }
        let options = CallOptions::within(self.settings().timeout);
        operation.enter(&options.cancel);
        let result = catch_unwind(AssertUnwindSafe(|| call(&*self.backend, &options)));
        operation.leave(&options.cancel);
        self.leave();
        let result = result.unwrap_or_else(|_| {
            Err(BackendError {
                backend: self.name().to_owned(),
                kind: ErrorKind::Internal,
                retryable: false,
                message: "the call panicked".to_owned(),
                pages_in_use: false,
            })
        });
        match result {
            Ok(value) => {
                breaker.lock().succeeded();
                Ok(value)
            }
            Err(mut error) => {
                if error.kind == ErrorKind::Cancelled
                    && !operation.is_cancelled()
                    && !self.retired.load(Ordering::SeqCst)
                {
                    // Nobody here called it off: its time was over.
                    error.kind = ErrorKind::TimedOut;
                    error.retryable = true;
                }
                // What was asked to stop did not fail.
                if error.kind != ErrorKind::Cancelled && breaker.lock().failed(Instant::now()) {
                    tracing::warn!(backend = self.name(), %error, "storage keeps failing; it is left alone for a while");
                } else {
                    tracing::debug!(backend = self.name(), %error, "storage call failed");
                }
                Err(CallFault::Failed(error))
            }
        }
    }

    /// Takes note that a late call still holds `pages`. It is one of their holders in the pool.
    pub fn hold(&self, pages: &[u32], host: &HostPool) {
        let mut quarantine = self.quarantine.lock();
        for &page in pages {
            match quarantine.early.iter().position(|&early| early == page) {
                Some(at) => {
                    quarantine.early.swap_remove(at);
                    host.release(&[page]);
                }
                None => quarantine.held.push(page),
            }
        }
    }

    /// Gives back the pages of late calls that have returned. Says how many are still held.
    pub fn collect(&self, host: &HostPool) -> usize {
        let mut quarantine = self.quarantine.lock();
        if quarantine.held.is_empty() {
            return 0;
        }
        for page in self.backend.reclaim() {
            match quarantine.held.iter().position(|&held| held == page) {
                Some(at) => {
                    quarantine.held.swap_remove(at);
                    host.release(&[page]);
                }
                None => quarantine.early.push(page),
            }
        }
        quarantine.held.len()
    }

    /// Pages of late calls.
    pub fn held(&self) -> Vec<u32> {
        self.quarantine.lock().held.clone()
    }

    /// Runs with what is believed of the store.
    pub fn with_belief<R>(&self, run: impl FnOnce(&mut Belief) -> R) -> R {
        run(&mut self.belief.lock())
    }

    /// Makes no new calls. Those that run are left to return; whoever closes the backend cancels them after a while.
    pub(super) fn retire(&self) {
        self.retired.store(true, Ordering::SeqCst);
    }

    fn leave(&self) {
        *self.running.lock() -= 1;
        self.idle.notify_all();
    }

    pub(super) fn is_done_with(&self) -> bool {
        *self.running.lock() == 0 && self.quarantine.lock().held.is_empty()
    }

    pub(super) fn wait_idle(&self, deadline: Instant) -> bool {
        let mut running = self.running.lock();
        while *running > 0 {
            if self.idle.wait_until(&mut running, deadline).timed_out() {
                return *running == 0;
            }
        }
        true
    }
}

/// How a failed call counts for each of its pages.
pub(super) fn fault_result(fault: &CallFault) -> StorageResult {
    match fault {
        CallFault::Skipped => StorageResult::Failed,
        CallFault::Failed(error) => match error.kind {
            ErrorKind::TimedOut => StorageResult::Late,
            ErrorKind::Corrupt => StorageResult::Corrupt,
            ErrorKind::NoSpace => StorageResult::Refused,
            ErrorKind::NotFound => StorageResult::Missing,
            _ => StorageResult::Failed,
        },
    }
}

/// How a page counts after a call. Pages that a failed call answered for all the same count by their answer.
pub(super) fn result_of(result: &Result<(), CallFault>, status: PageStatus) -> StorageResult {
    let answered = !matches!(status, PageStatus::Unset | PageStatus::Failed);
    match result {
        Err(CallFault::Failed(error)) if answered && !error.pages_in_use => page_result(status),
        Err(fault) => fault_result(fault),
        Ok(()) => page_result(status),
    }
}

/// How a page's status counts. A page the backend forgot to answer for has failed.
fn page_result(status: PageStatus) -> StorageResult {
    match status {
        PageStatus::Ok => StorageResult::Ok,
        PageStatus::Missing => StorageResult::Missing,
        PageStatus::Corrupt => StorageResult::Corrupt,
        PageStatus::Refused => StorageResult::Refused,
        PageStatus::Failed | PageStatus::Unset => StorageResult::Failed,
    }
}

#[cfg(test)]
mod tests {
    use kvdock_kernels::{KvDtype, KvSpec};

    use super::*;
    use crate::cache::layout::HostLayout;
    use crate::plugin::backend::{BackendStats, ChainInfo, PageKey, Restorable};

    /// A backend that does nothing but give back what it is told to.
    struct Late(Mutex<Vec<u32>>, ErrorKind, BackendSettings);

    impl Late {
        fn refuse<R>(&self) -> Result<R, BackendError> {
            Err(BackendError {
                backend: "late".to_owned(),
                kind: self.1,
                retryable: false,
                message: "no".to_owned(),
                pages_in_use: false,
            })
        }
    }

    impl StorageBackend for Late {
        fn name(&self) -> &str {
            "late"
        }
        fn generation(&self) -> u64 {
            1
        }
        fn limits(&self) -> BackendLimits {
            BackendLimits { preferred_batch: 1, concurrency: 1, remove: false, durable: false }
        }
        fn settings(&self) -> &BackendSettings {
            &self.2
        }
        fn batch_exists(&self, _: &CallOptions, _: &[PageKey], _: &ChainInfo<'_>) -> Result<Restorable, BackendError> {
            self.refuse()
        }
        fn batch_get(
            &self,
            _: &CallOptions,
            _: &[PageKey],
            _: &[u32],
            _: &ChainInfo<'_>,
            _: &mut [PageStatus],
        ) -> Result<(), BackendError> {
            self.refuse()
        }
        fn batch_set(
            &self,
            _: &CallOptions,
            _: &[PageKey],
            _: &[u32],
            _: &ChainInfo<'_>,
            _: &mut [PageStatus],
        ) -> Result<(), BackendError> {
            self.refuse()
        }
        fn batch_remove(&self, _: &CallOptions, _: &[PageKey], _: &mut [PageStatus]) -> Result<(), BackendError> {
            self.refuse()
        }
        fn flush(&self, _: &CallOptions) -> Result<(), BackendError> {
            self.refuse()
        }
        fn clear(&self, _: &CallOptions) -> Result<(), BackendError> {
            self.refuse()
        }
        fn stats(&self) -> Result<BackendStats, BackendError> {
            self.refuse()
        }
        fn reclaim(&self) -> Vec<u32> {
            std::mem::take(&mut self.0.lock())
        }
        fn quarantined(&self) -> usize {
            self.0.lock().len()
        }
    }

    fn attached(kind: ErrorKind) -> (Arc<Late>, Attached) {
        let backend = Arc::new(Late(Mutex::default(), kind, BackendSettings::default()));
        let counters = Arc::new(CacheCounters::default());
        (Arc::clone(&backend), Attached::new(backend, counters))
    }

    /// Calls return when they like: also between being given up and being taken note of.
    #[test]
    fn i31296_pages_come_back_once_whatever_the_order() {
        let spec = KvSpec {
            layers: 1,
            kv_heads: 1,
            head_dim_k: 8,
            head_dim_v: 8,
            page_tokens: 4,
            pages: 1,
            dtype: KvDtype::F16,
        };
        let host = HostPool::new(&spec, 4, HostLayout::PageFirst, [0; 32]).unwrap();
        let pages = host.alloc(3).unwrap();
        let (backend, attached) = attached(ErrorKind::TimedOut);
        attached.hold(&pages[..2], &host);
        *backend.0.lock() = vec![pages[1], pages[2]];
        assert_eq!(attached.collect(&host), 1, "one is still held");
        assert_eq!(host.free_count(), 2, "the page nobody is known to hold yet is not free");
        attached.hold(&pages[2..], &host);
        assert_eq!((host.free_count(), attached.held()), (3, vec![pages[0]]));
        *backend.0.lock() = vec![pages[0]];
        assert_eq!((attached.collect(&host), host.free_count()), (0, 4));
    }

    #[test]
    fn a_call_that_nobody_called_off_was_late() {
        let (_, attached) = attached(ErrorKind::Cancelled);
        let operation = CancelSet::default();
        let fault = attached.call(Way::Read, &operation, |backend, _| backend.stats()).unwrap_err();
        assert_eq!(fault_result(&fault), StorageResult::Late);
        operation.cancel();
        let fault = attached.call(Way::Read, &operation, |backend, _| backend.stats()).unwrap_err();
        assert_eq!(fault_result(&fault), StorageResult::Failed, "called off by the host");
    }

    #[test]
    fn detached_backends_are_not_called_any_more() {
        let (_, attached) = attached(ErrorKind::Internal);
        attached.retire();
        let result = attached.call(Way::Write, &CancelSet::default(), |_, _| -> Result<(), BackendError> {
            panic!("called after the detach")
        });
        assert!(matches!(result, Err(CallFault::Skipped)));
    }

    #[test]
    fn reads_go_on_while_writes_rest() {
        let (_, attached) = attached(ErrorKind::NoSpace);
        for _ in 0..3 {
            let result = attached.call(Way::Write, &CancelSet::default(), |backend, options| backend.flush(options));
            assert!(matches!(result, Err(CallFault::Failed(_))));
        }
        let rests = attached.call(Way::Write, &CancelSet::default(), |backend, options| backend.flush(options));
        assert!(matches!(rests, Err(CallFault::Skipped)));
        assert!(attached.call(Way::Read, &CancelSet::default(), |_, _| Ok(())).is_ok());
    }
}
