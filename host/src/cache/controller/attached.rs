//! Attached backends, and calls to them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::{Condvar, Mutex};

use super::belief::{Belief, Breaker};
use crate::cache::pool::HostPool;
use crate::cache::stats::{BackendCounters, CacheCounters, StorageResult};
use crate::plugin::backend::{BackendError, BackendLimits, CallOptions, ErrorKind, PageStatus, StorageBackend};

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

/// Calls that can be cancelled together: those of an operation, or those of a backend.
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

/// A backend in use, with what the host knows of it.
pub(crate) struct Attached {
    backend: Arc<dyn StorageBackend>,
    /// Pages by call and result.
    pub pages: Arc<BackendCounters>,
    counters: Arc<CacheCounters>,
    belief: Mutex<Belief>,
    breakers: [Mutex<Breaker>; 2],
    /// Host pages that late calls hold, once a call.
    quarantine: Mutex<Vec<u32>>,
    calls: CancelSet,
    running: Mutex<usize>,
    idle: Condvar,
}

impl Attached {
    fn new(backend: Arc<dyn StorageBackend>, counters: Arc<CacheCounters>) -> Self {
        Attached {
            pages: counters.backend(backend.name()),
            counters,
            backend,
            belief: Mutex::default(),
            breakers: Default::default(),
            quarantine: Mutex::default(),
            calls: CancelSet::default(),
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

    /// How long one call may take.
    pub fn timeout(&self) -> Duration {
        self.backend.timeout()
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
        // Counted before the look at `calls`, so that whoever saw none running after a detach sees none later.
        *self.running.lock() += 1;
        if self.calls.is_cancelled() || !breaker.lock().allows(Instant::now()) {
            self.leave();
            self.counters.breaker_skips.fetch_add(1, Ordering::Relaxed);
            return Err(CallFault::Skipped);
        }
        let options = CallOptions::within(self.timeout());
        operation.enter(&options.cancel);
        self.calls.enter(&options.cancel);
        let result = catch_unwind(AssertUnwindSafe(|| call(&*self.backend, &options)));
        operation.leave(&options.cancel);
        self.calls.leave(&options.cancel);
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
            Err(error) => {
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

    /// Takes note that a late call still holds `pages`, for which it holds the pool's pages.
    pub fn hold(&self, pages: &[u32]) {
        self.quarantine.lock().extend_from_slice(pages);
    }

    /// Gives back the pages of late calls that have returned.
    pub fn collect(&self, host: &HostPool) {
        let mut quarantine = self.quarantine.lock();
        if quarantine.is_empty() {
            return;
        }
        let mut back = Vec::new();
        for page in self.backend.reclaim() {
            match quarantine.iter().position(|&held| held == page) {
                Some(at) => back.push(quarantine.swap_remove(at)),
                None => tracing::warn!(page, "a page came back that no late call holds"),
            }
        }
        drop(quarantine);
        host.release(&back);
    }

    /// Pages of late calls.
    pub fn held(&self) -> Vec<u32> {
        self.quarantine.lock().clone()
    }

    /// Runs with what is believed of the store.
    pub fn with_belief<R>(&self, run: impl FnOnce(&mut Belief) -> R) -> R {
        run(&mut self.belief.lock())
    }

    fn leave(&self) {
        *self.running.lock() -= 1;
        self.idle.notify_all();
    }

    fn is_done_with(&self) -> bool {
        *self.running.lock() == 0 && self.quarantine.lock().is_empty()
    }

    fn wait_idle(&self, deadline: Instant) -> bool {
        let mut running = self.running.lock();
        while *running > 0 {
            if self.idle.wait_until(&mut running, deadline).timed_out() {
                return *running == 0;
            }
        }
        true
    }
}

/// The backends in use, in order, and those that were, as long as calls of theirs run.
pub(crate) struct Registry {
    current: ArcSwap<Vec<Arc<Attached>>>,
    past: Mutex<Vec<Arc<Attached>>>,
    epoch: AtomicU32,
    counters: Arc<CacheCounters>,
}

impl Registry {
    /// No backend.
    pub fn new(counters: Arc<CacheCounters>) -> Self {
        Registry {
            current: ArcSwap::default(),
            past: Mutex::default(),
            // 0 stands for "never stored" in the tree.
            epoch: AtomicU32::new(1),
            counters,
        }
    }

    /// The backends in use. The list does not change under the caller.
    pub fn current(&self) -> Arc<Vec<Arc<Attached>>> {
        self.current.load_full()
    }

    /// Grows with every attach: pages stored in an earlier epoch may be missing in a backend of a later one.
    pub fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    /// A store was emptied: nothing is believed of it, and pages count as not stored.
    pub fn emptied(&self, name: &str) {
        for attached in self.current().iter().filter(|attached| attached.name() == name) {
            attached.with_belief(Belief::clear);
        }
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// Puts a backend to use; one of the same name is replaced where it stood.
    pub fn attach(&self, backend: Arc<dyn StorageBackend>) {
        let mut past = self.past.lock();
        let mut list = Vec::clone(&self.current());
        let attached = Arc::new(Attached::new(backend, Arc::clone(&self.counters)));
        match list.iter_mut().find(|other| other.name() == attached.name()) {
            Some(place) => past.push(std::mem::replace(place, attached)),
            None => list.push(attached),
        }
        self.current.store(Arc::new(list));
        self.epoch.fetch_add(1, Ordering::AcqRel);
        past.iter().for_each(|gone| gone.calls.cancel());
    }

    /// Stops using a backend. False if there is none of this name.
    pub fn detach(&self, name: &str) -> bool {
        let mut past = self.past.lock();
        let mut list = Vec::clone(&self.current());
        let Some(at) = list.iter().position(|attached| attached.name() == name) else {
            return false;
        };
        past.push(list.remove(at));
        self.current.store(Arc::new(list));
        past.iter().for_each(|gone| gone.calls.cancel());
        true
    }

    /// Waits until no call of a backend that was detached or replaced under this name is running.
    pub fn quiesced(&self, name: &str, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let gone: Vec<_> = self.past.lock().iter().cloned().collect();
        gone.iter().filter(|attached| attached.name() == name).all(|attached| attached.wait_idle(deadline))
    }

    /// Gives back what late calls held, and forgets past backends that hold nothing any more. Returns the
    /// pages that are still held.
    pub fn collect(&self, host: &HostPool) -> usize {
        let mut past = self.past.lock();
        let current = self.current();
        let mut held = 0;
        for attached in current.iter().chain(past.iter()) {
            attached.collect(host);
            held += attached.quarantine.lock().len();
        }
        past.retain(|attached| !attached.is_done_with());
        held
    }

    /// All pages that late calls hold, once a call.
    pub fn held(&self) -> Vec<u32> {
        let past = self.past.lock();
        let current = self.current();
        current.iter().chain(past.iter()).flat_map(|attached| attached.held()).collect()
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

/// How a page's status counts. A page the backend forgot to answer for has failed.
pub(super) fn page_result(status: PageStatus) -> StorageResult {
    match status {
        PageStatus::Ok => StorageResult::Ok,
        PageStatus::Missing => StorageResult::Missing,
        PageStatus::Corrupt => StorageResult::Corrupt,
        PageStatus::Refused => StorageResult::Refused,
        PageStatus::Failed | PageStatus::Unset => StorageResult::Failed,
    }
}
