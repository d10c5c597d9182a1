//! The linker face: what is queued, what runs, and what has completed.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvdock_plugin_api::{
    Backend, Call, Completed, Error, ErrorKind, Exists, Linker, Load, Offload, Result, Start, Transfer,
};
use parking_lot::{Condvar, Mutex};

use crate::MooncakeBackend;
use crate::store::Store;
use crate::store::linked::fail_rest;

/// How often a wait looks at the call that waits.
const LOOK: Duration = Duration::from_millis(10);
/// Offloads that may wait: their pages are kept from other use meanwhile.
const MOST_OFFLOADS: usize = 4096;

/// The linker face of the backend.
#[derive(Debug)]
pub struct MooncakeLinker;

/// What is queued and what runs.
#[derive(Debug, Default)]
pub struct Face {
    loads: Mutex<Vec<Load>>,
    batches: Mutex<HashMap<u64, Running>>,
    offloads: Arc<Offloads>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

/// A batch of loads under way.
#[derive(Debug)]
struct Running {
    stop: Arc<AtomicBool>,
    ended: Arc<Ended>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Ended {
    result: Mutex<Option<Result<()>>>,
    wake: Condvar,
}

impl Running {
    /// Waits for the end of the batch; when the call's time is over it is ended.
    fn wait(self, call: &Call<'_>) -> Result<()> {
        let mut late = Ok(());
        let mut result = self.ended.result.lock();
        while result.is_none() {
            if late.is_ok() {
                late = call.check();
                if late.is_err() {
                    self.stop.store(true, Ordering::Release);
                }
            }
            self.ended.wake.wait_for(&mut result, LOOK);
        }
        let ended = result.take().unwrap_or(Ok(()));
        drop(result);
        if let Some(thread) = self.thread {
            // It has told its result; a panic was caught before that.
            let _ = thread.join();
        }
        if ended.is_err() { late.and(ended) } else { Ok(()) }
    }
}

#[derive(Debug)]
struct Offloads {
    state: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Debug)]
struct Queue {
    waiting: VecDeque<Offload>,
    completed: VecDeque<Completed>,
    /// Set when what runs, and all before it, is to end.
    stop: Arc<AtomicBool>,
    runs: bool,
    closed: bool,
}

impl Default for Offloads {
    fn default() -> Offloads {
        let queue = Queue {
            waiting: VecDeque::new(),
            completed: VecDeque::new(),
            stop: Arc::default(),
            runs: false,
            closed: false,
        };
        Offloads { state: Mutex::new(queue), wake: Condvar::new() }
    }
}

fn panicked() -> Error {
    Error::new(ErrorKind::Internal, "a thread of the linker face panicked")
}

impl Offloads {
    /// Stores one offload after the other, until the face is closed.
    fn work(&self, store: &Store) {
        let mut state = self.state.lock();
        loop {
            let Some(offload) = state.waiting.pop_front() else {
                if state.closed {
                    return;
                }
                self.wake.wait(&mut state);
                continue;
            };
            let stop = state.stop.clone();
            state.runs = true;
            drop(state);
            let stored = catch_unwind(AssertUnwindSafe(|| store.offload(&offload, &stop)));
            let result = stored.unwrap_or_else(|_| {
                fail_rest(offload.transfers());
                Err(panicked())
            });
            state = self.state.lock();
            state.runs = false;
            let is_wanted = !stop.load(Ordering::Acquire);
            if is_wanted {
                state.completed.push_back(Completed { operation: offload.operation, result });
            }
            self.wake.notify_all();
            if is_wanted {
                store.member.host.offload_completed();
            }
        }
    }

    /// Ends what runs and forgets the rest.
    fn end(&self, call: &Call<'_>) -> Result<()> {
        let mut state = self.state.lock();
        state.waiting.clear();
        std::mem::take(&mut state.stop).store(true, Ordering::Release);
        while state.runs {
            call.check()?;
            self.wake.wait_for(&mut state, LOOK);
        }
        state.completed.clear();
        Ok(())
    }
}

impl Face {
    /// Ends everything that is queued or runs.
    fn end(&self, call: &Call<'_>) -> Result<()> {
        self.loads.lock().clear();
        let batches: Vec<Running> = self.batches.lock().drain().map(|(_, running)| running).collect();
        batches.iter().for_each(|running| running.stop.store(true, Ordering::Release));
        for running in batches {
            // How it ended is of no interest. Its memory is given back when this returns, so the end of the call's time is no end of the wait.
            let _ = running.wait(&Call::unbounded());
        }
        self.offloads.end(call)
    }

    /// Ends everything, and the threads.
    pub fn close(&self) {
        // Without a deadline there is no error.
        let _ = self.end(&Call::unbounded());
        self.offloads.state.lock().closed = true;
        self.offloads.wake.notify_all();
        if let Some(worker) = self.worker.lock().take() {
            // It catches what panics.
            let _ = worker.join();
        }
    }

    fn start(&self, store: &Arc<Store>, start: Start) -> Result<()> {
        let loads = std::mem::take(&mut *self.loads.lock());
        start.ready.iter().try_for_each(|ready| ready.is_set().map(drop))?;
        let mut batches = self.batches.lock();
        if batches.contains_key(&start.batch) {
            let text = format!("batch {} runs already; finish it first", start.batch);
            return Err(Error::new(ErrorKind::InvalidConfig, text));
        }
        let (stop, ended, number) = (Arc::new(AtomicBool::new(false)), Arc::new(Ended::default()), start.batch);
        let thread = match loads.iter().all(|load| load.transfers().iter().all(Transfer::is_empty)) {
            true => {
                start.done.settle_all();
                *ended.result.lock() = Some(Ok(()));
                None
            }
            false => {
                let (store, stop, ended) = (store.clone(), stop.clone(), ended.clone());
                let work = move || {
                    let transfers: Vec<Transfer<'static>> =
                        loads.iter().flat_map(|load| load.transfers().iter().cloned()).collect();
                    let loaded = catch_unwind(AssertUnwindSafe(|| store.load(&transfers, &start, &stop)));
                    let result = loaded.unwrap_or_else(|_| {
                        fail_rest(&transfers);
                        start.done.settle_all();
                        Err(panicked())
                    });
                    *ended.result.lock() = Some(result);
                    ended.wake.notify_all();
                };
                let spawned = std::thread::Builder::new().name("kvdock-mc-load".to_owned()).spawn(work);
                let failed = |error| Error::new(ErrorKind::Unavailable, format!("no thread for loads: {error}"));
                Some(spawned.map_err(failed)?)
            }
        };
        batches.insert(number, Running { stop, ended, thread });
        Ok(())
    }

    fn offload(&self, store: &Arc<Store>, offload: Offload) -> Result<()> {
        offload.ready.iter().try_for_each(|ready| ready.is_set().map(drop))?;
        let mut worker = self.worker.lock();
        if worker.is_none() {
            let (store, offloads) = (store.clone(), self.offloads.clone());
            let work = move || offloads.work(&store);
            let spawned = std::thread::Builder::new().name("kvdock-mc-store".to_owned()).spawn(work);
            let failed = |error| Error::new(ErrorKind::Unavailable, format!("no thread for offloads: {error}"));
            *worker = Some(spawned.map_err(failed)?);
        }
        let mut state = self.offloads.state.lock();
        if state.waiting.len() >= MOST_OFFLOADS {
            let text = format!("{MOST_OFFLOADS} offloads wait already; the store is slower than what is offloaded");
            return Err(Error::new(ErrorKind::Unavailable, text).retryable());
        }
        state.waiting.push_back(offload);
        self.offloads.wake.notify_all();
        Ok(())
    }
}

impl Linker for MooncakeLinker {
    type Backend = MooncakeBackend;

    fn lookup(backend: &MooncakeBackend, exists: &mut Exists<'_>) -> Result<()> {
        backend.batch_exists(exists)
    }

    fn load(backend: &MooncakeBackend, load: Load) -> Result<()> {
        load.transfers().iter().try_for_each(|transfer| backend.store.knows(transfer.pool()))?;
        backend.face.loads.lock().push(load);
        Ok(())
    }

    fn start_layer_wise_loading(backend: &MooncakeBackend, start: Start) -> Result<()> {
        backend.face.start(&backend.store, start)
    }

    fn finish_layer_wise_loading(backend: &MooncakeBackend, call: &Call<'_>, batch: u64) -> Result<()> {
        let running = backend.face.batches.lock().remove(&batch);
        let running = running.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("batch {batch} does not run")))?;
        running.wait(call)
    }

    fn cancel_queued_load(backend: &MooncakeBackend, request: u64) -> Result<()> {
        let mut loads = backend.face.loads.lock();
        let queued = loads.iter().position(|load| load.request == request);
        let queued =
            queued.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("request {request} is not queued")))?;
        loads.remove(queued);
        Ok(())
    }

    fn offload(backend: &MooncakeBackend, offload: Offload) -> Result<()> {
        offload.transfers().iter().try_for_each(|transfer| backend.store.knows(transfer.pool()))?;
        backend.face.offload(&backend.store, offload)
    }

    fn num_completed_offloads(backend: &MooncakeBackend) -> u64 {
        backend.face.offloads.state.lock().completed.len() as u64
    }

    fn pop_completed_offload(backend: &MooncakeBackend) -> Option<Completed> {
        backend.face.offloads.state.lock().completed.pop_front()
    }

    fn reset(backend: &MooncakeBackend, call: &Call<'_>) -> Result<()> {
        backend.face.end(call)
    }
}
