//! The threads that call into one instance.
//!
//! A call runs on a thread of the instance's own, so that the caller can give up at the deadline while the plugin still holds the
//! buffers and pages of the call. There are as many threads as the plugin wants concurrent calls; each has one set of buffers, used again
//! for every call, so that a call makes no allocation. A call that is given up stays *late* until it returns; its pages are quarantined.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kvdock_plugin_api::ErrorKind;

use super::abi::{Face, RawInstance};
use super::backend::PoolGroup;
use super::call::{CallBuffers, CallFailure, Operation};
use super::pool_desc::Registered;

/// How long a call may go on after it was cancelled at its deadline, before the caller gives up.
const GRACE: Duration = Duration::from_millis(20);

/// How often a call that is watched is looked at, should the plugin not tell of its progress.
const LOOK: Duration = Duration::from_millis(1);

/// How a data call ended.
#[derive(Debug)]
pub enum Outcome<R> {
    /// It returned.
    Returned(Result<R, CallFailure>),
    /// It has not returned: the plugin holds its pages until it does.
    Late,
    /// It was not made, because all threads are in calls until the deadline.
    Busy,
}

enum Phase {
    Idle,
    Ready(Operation),
    Running,
    Done(Result<(), CallFailure>),
}

struct Slot {
    phase: Phase,
    /// Away while a call runs.
    buffers: Option<Box<CallBuffers>>,
    /// The caller gave up.
    late_since: Option<Instant>,
}

struct Worker {
    slot: Mutex<Slot>,
    wake: Condvar,
    done: Condvar,
    /// Flag of the call that runs, to cancel it from outside.
    cancel: Mutex<Option<Arc<AtomicU32>>>,
}

#[derive(Default)]
struct Late {
    calls: usize,
    pages: usize,
    /// By group.
    returned: [Vec<u32>; PoolGroup::ALL.len()],
}

struct Shared {
    backend: String,
    face: &'static dyn Face,
    instance: RawInstance,
    pools: Vec<Registered>,
    workers: Vec<Worker>,
    free: Mutex<Vec<usize>>,
    freed: Condvar,
    late: Mutex<Late>,
    stop: AtomicU32,
    /// All calls are to end, those that still wait for their turn too.
    cancelled: AtomicU32,
    /// Told when every thread is in a late call.
    on_all_late: Box<dyn Fn() + Send + Sync>,
}

/// The threads of one instance.
pub struct Workers {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers").field("backend", &self.shared.backend).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    /// Starts `count` threads, for calls about `pools`.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        backend: &str,
        face: &'static dyn Face,
        instance: RawInstance,
        pools: Vec<Registered>,
        count: usize,
        on_all_late: Box<dyn Fn() + Send + Sync>,
    ) -> std::io::Result<Workers> {
        let workers = (0..count)
            .map(|_| Worker {
                slot: Mutex::new(Slot { phase: Phase::Idle, buffers: Some(Box::default()), late_since: None }),
                wake: Condvar::new(),
                done: Condvar::new(),
                cancel: Mutex::new(None),
            })
            .collect();
        let shared = Arc::new(Shared {
            backend: backend.to_owned(),
            face,
            instance,
            pools,
            workers,
            free: Mutex::new((0..count).collect()),
            freed: Condvar::new(),
            late: Mutex::default(),
            stop: AtomicU32::new(0),
            cancelled: AtomicU32::new(0),
            on_all_late,
        });
        // Dropping this on an error tells the threads that were started to end.
        let started = Workers { shared };
        for index in 0..count {
            let shared = started.shared.clone();
            thread::Builder::new().name(format!("kv-{backend}-{index}")).spawn(move || shared.work(index))?;
        }
        Ok(started)
    }

    /// Makes a call. `fill` writes the arguments into buffers that still hold those of an earlier call, `read` takes the answers out. `watch`
    /// is called again and again while the call runs, at the latest [`LOOK`] after each [`Workers::nudge`].
    pub fn call<R>(
        &self,
        operation: Operation,
        deadline: Instant,
        fill: impl FnOnce(&mut CallBuffers),
        mut watch: Option<&mut dyn FnMut()>,
        read: impl FnOnce(&CallBuffers) -> R,
    ) -> Outcome<R> {
        let Some(index) = self.take_worker(deadline) else {
            return Outcome::Busy;
        };
        let worker = &self.shared.workers[index];
        let mut slot = lock(&worker.slot);
        let Some(buffers) = slot.buffers.as_mut() else {
            // A worker in the free list has its buffers; this can't be reached.
            return Outcome::Busy;
        };
        fill(buffers);
        let cancel = buffers.cancel.clone();
        *lock(&worker.cancel) = Some(cancel.clone());
        // After the flag can be found, so that no call that begins now escapes.
        if self.shared.cancelled.load(Ordering::SeqCst) != 0 {
            cancel.store(1, Ordering::Release);
        }
        slot.phase = Phase::Ready(operation);
        // Let go of it first, so that the thread does not wake up only to wait for it.
        drop(slot);
        worker.wake.notify_one();
        let mut slot = lock(&worker.slot);
        let mut give_up = deadline;
        let mut cancelled = false;
        loop {
            if matches!(slot.phase, Phase::Done(_)) {
                let Phase::Done(result) = std::mem::replace(&mut slot.phase, Phase::Idle) else { continue };
                let answer = slot.buffers.as_deref().map(read);
                drop(slot);
                *lock(&worker.cancel) = None;
                self.shared.give_back(index);
                let lost = || CallFailure::new(ErrorKind::Internal, false, "the call lost its buffers");
                return Outcome::Returned(result.and_then(|()| answer.ok_or_else(lost)));
            }
            let left = give_up.saturating_duration_since(Instant::now());
            if left.is_zero() {
                if !cancelled {
                    cancel.store(1, Ordering::Release);
                    cancelled = true;
                    give_up = Instant::now() + GRACE;
                    continue;
                }
                slot.late_since = Some(Instant::now());
                drop(slot);
                return Outcome::Late;
            }
            let mut pause = left;
            if let Some(watch) = &mut watch {
                // Without the slot, so that the end of the call need not wait for it.
                drop(slot);
                watch();
                slot = lock(&worker.slot);
                if matches!(slot.phase, Phase::Done(_)) {
                    continue;
                }
                pause = pause.min(LOOK);
            }
            slot = worker.done.wait_timeout(slot, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets those who watch their calls look at once.
    pub fn nudge(&self) {
        self.shared.workers.iter().for_each(|worker| worker.done.notify_all());
    }

    fn take_worker(&self, deadline: Instant) -> Option<usize> {
        let mut free = lock(&self.shared.free);
        loop {
            if let Some(index) = free.pop() {
                return Some(index);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            free = self.shared.freed.wait_timeout(free, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Counts the pages of a call that [`Workers::call`] reported as late.
    pub fn quarantine(&self, pages: usize) {
        let all_late = {
            let mut late = lock(&self.shared.late);
            late.calls += 1;
            late.pages += pages;
            late.calls >= self.shared.workers.len()
        };
        if all_late {
            (self.shared.on_all_late)();
        }
    }

    /// Pages of late calls about a group that have returned since the last call of this function.
    pub fn reclaim(&self, group: PoolGroup) -> Vec<u32> {
        std::mem::take(&mut lock(&self.shared.late).returned[group as usize])
    }

    /// Pages that late calls hold.
    pub fn quarantined(&self) -> usize {
        lock(&self.shared.late).pages
    }

    /// Calls that run now, late ones included.
    pub fn in_flight(&self) -> usize {
        self.shared.workers.len() - lock(&self.shared.free).len()
    }

    /// Sets the cancel flag of every call that runs or comes.
    pub fn cancel_all(&self) {
        self.shared.cancelled.store(1, Ordering::SeqCst);
        for worker in &self.shared.workers {
            if let Some(flag) = lock(&worker.cancel).as_ref() {
                flag.store(1, Ordering::Release);
            }
        }
    }

    /// Waits until no call runs. Says whether that came before the deadline.
    pub fn wait_idle(&self, deadline: Instant) -> bool {
        let mut free = lock(&self.shared.free);
        while free.len() < self.shared.workers.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            free = self.shared.freed.wait_timeout(free, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.stop.store(1, Ordering::Release);
        for worker in &self.shared.workers {
            let _held = lock(&worker.slot);
            worker.wake.notify_all();
        }
    }
}

impl Shared {
    fn give_back(&self, index: usize) {
        lock(&self.free).push(index);
        // Both a caller that wants a thread and one that waits for the end of all calls may be listening.
        self.freed.notify_all();
    }

    fn work(&self, index: usize) {
        let worker = &self.workers[index];
        loop {
            let mut slot = lock(&worker.slot);
            let (operation, mut buffers) = loop {
                if let Phase::Ready(operation) = slot.phase
                    && let Some(buffers) = slot.buffers.take()
                {
                    slot.phase = Phase::Running;
                    break (operation, buffers);
                }
                if self.stop.load(Ordering::Acquire) != 0 {
                    return;
                }
                slot = worker.wake.wait(slot).unwrap_or_else(PoisonError::into_inner);
            };
            drop(slot);
            let result = buffers.run(operation, self.face, self.instance, &self.pools);
            let mut slot = lock(&worker.slot);
            match slot.late_since.take() {
                None => {
                    slot.buffers = Some(buffers);
                    slot.phase = Phase::Done(result);
                    drop(slot);
                    worker.done.notify_one();
                }
                Some(since) => {
                    self.settle_late(&buffers, since, operation);
                    slot.buffers = Some(buffers);
                    slot.phase = Phase::Idle;
                    drop(slot);
                    *lock(&worker.cancel) = None;
                    self.give_back(index);
                }
            }
        }
    }

    fn settle_late(&self, buffers: &CallBuffers, since: Instant, operation: Operation) {
        let mut late = lock(&self.late);
        late.calls = late.calls.saturating_sub(1);
        late.pages = late.pages.saturating_sub(buffers.pages.len());
        for (group, pages) in buffers.pages_by_group() {
            late.returned[group as usize].extend_from_slice(pages);
        }
        drop(late);
        let (backend, pages, seconds) = (self.backend.as_str(), buffers.pages.len(), since.elapsed().as_secs_f64());
        tracing::warn!(
            backend,
            ?operation,
            pages,
            seconds,
            "a call returned after its deadline; its pages are free again"
        );
    }
}
