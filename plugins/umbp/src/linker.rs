//! The linker face: loads that are queued and run, one after the other offloads, and what has completed.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvdock_plugin_api::{
    Backend, Call, Completed, Error, ErrorKind, Exists, Linker, Load, LogLevel, Offload, Result, Start, Transfer,
    monotonic_ns,
};
use parking_lot::{Condvar, Mutex};

use crate::UmbpBackend;
use crate::store::Store;
use crate::store::linked::fail_rest;

/// Between two looks at a deadline.
const LOOK: Duration = Duration::from_millis(5);
/// How long before its deadline an offload ends that still waits for its turn: at the deadline the host takes it for one that hangs.
const EARLY: Duration = Duration::from_millis(50);
/// Offloads that may wait; their pages are kept for them.
const MOST_WAITING: usize = 4096;

/// How loads and offloads are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cuts {
    /// Layers that are read together.
    pub layer_group: usize,
    /// Pages of offloads that are stored together.
    pub coalesce: usize,
}

/// The linker face of the backend.
#[derive(Debug)]
pub struct UmbpLinker;

/// A load under way.
#[derive(Debug)]
struct Batch {
    stop: Arc<AtomicBool>,
    result: Arc<(Mutex<Option<Result<()>>>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Offload>,
    completed: VecDeque<Completed>,
    stop: Arc<AtomicBool>,
    running: bool,
    closed: bool,
}

/// What is queued and what runs.
#[derive(Debug)]
pub struct Face {
    cuts: Cuts,
    loads: Mutex<Vec<Load>>,
    batches: Mutex<HashMap<u64, Batch>>,
    offloads: Arc<(Mutex<Queue>, Condvar)>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Queue {
    /// Ends those that wait and have no time left. The one before them may be with a server that does not answer, so their turn may not come.
    fn expire(&mut self) {
        let now = monotonic_ns() + EARLY.as_nanos() as u64;
        for offload in std::mem::take(&mut self.waiting) {
            if offload.deadline_ns == 0 || offload.deadline_ns > now {
                self.waiting.push_back(offload);
                continue;
            }
            fail_rest(offload.transfers());
            let text = "the time of the offload was over before its turn came";
            let result = Err(Error::new(ErrorKind::TimedOut, text).retryable());
            self.completed.push_back(Completed { operation: offload.operation, result });
        }
    }
}

fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let panicked = |_| Err(Error::new(ErrorKind::Internal, "a thread of the linker face panicked"));
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(panicked)
}

impl Batch {
    /// Waits for the end; at the end of the call's time it is brought about.
    fn wait(self, call: &Call<'_>) -> Result<()> {
        let (result, wake) = &*self.result;
        let mut result = result.lock();
        let mut late = None;
        while result.is_none() {
            if late.is_none()
                && let Err(error) = call.check()
            {
                self.stop.store(true, Ordering::Release);
                late = Some(error);
            }
            wake.wait_for(&mut result, LOOK);
        }
        let ended = result.take().unwrap_or(Ok(()));
        drop(result);
        if let Some(thread) = self.thread {
            // What it panics with was caught, and is its result.
            let _ = thread.join();
        }
        match (ended, late) {
            (Err(_), Some(late)) => Err(late),
            (ended, _) => ended,
        }
    }
}

fn offload_loop(store: &Store, (queue, wake): &(Mutex<Queue>, Condvar), coalesce: usize) {
    let mut state = queue.lock();
    loop {
        let Some(first) = state.waiting.pop_front() else {
            if state.closed {
                return;
            }
            wake.wait(&mut state);
            continue;
        };
        let pages = |offload: &Offload| offload.transfers().iter().map(Transfer::len).sum::<usize>();
        let mut sum = pages(&first);
        let mut batch = vec![first];
        // What could wait long for its pages is not joined with others, nor is what has another deadline.
        let joins = |next: &Offload| next.ready.iter().all(|ready| ready.is_set().unwrap_or(false));
        while batch.iter().all(joins) {
            let fits = |next: &&Offload| sum + pages(next) <= coalesce && joins(next) && next.deadline_ns == 0;
            if batch.iter().any(|one| one.deadline_ns != 0)
                || state.waiting.front().as_ref().is_none_or(|next| !fits(next))
            {
                break;
            }
            let Some(next) = state.waiting.pop_front() else { break };
            sum += pages(&next);
            batch.push(next);
        }
        let stop = state.stop.clone();
        state.running = true;
        drop(state);
        let result = caught(|| store.offload(&batch, &stop));
        if let Err(error) = &result {
            let operations: Vec<String> = batch.iter().map(|one| one.operation.to_string()).collect();
            let text = format!("offload {}: {}", operations.join(", "), error.message);
            // What is never done need not be told each time.
            let level = if error.kind == ErrorKind::Unsupported { LogLevel::Debug } else { LogLevel::Warn };
            store.host.log(level, "umbp", &text);
        }
        batch.iter().for_each(|offload| fail_rest(offload.transfers()));
        state = queue.lock();
        state.running = false;
        let wanted = !stop.load(Ordering::Acquire);
        if wanted {
            let completed = batch.iter().map(|one| Completed { operation: one.operation, result: result.clone() });
            state.completed.extend(completed);
        }
        wake.notify_all();
        if wanted {
            batch.iter().for_each(|_| store.host.offload_completed());
        }
    }
}

impl Face {
    /// Nothing queued yet.
    pub fn new(cuts: Cuts) -> Face {
        let (loads, batches, worker) = (Mutex::default(), Mutex::default(), Mutex::default());
        Face { cuts, loads, batches, offloads: Arc::default(), worker }
    }

    fn start(&self, store: &Arc<Store>, start: Start) -> Result<()> {
        let loads = std::mem::take(&mut *self.loads.lock());
        start.ready.iter().try_for_each(|ready| ready.is_set().map(drop))?;
        let mut batches = self.batches.lock();
        if batches.contains_key(&start.batch) {
            let text = format!("batch {} runs already; finish it first", start.batch);
            return Err(Error::new(ErrorKind::InvalidConfig, text));
        }
        let transfers: Vec<Transfer<'static>> =
            loads.iter().flat_map(|load| load.transfers().iter().cloned()).collect();
        let (number, stop) = (start.batch, Arc::new(AtomicBool::new(false)));
        let result: Arc<(Mutex<Option<Result<()>>>, Condvar)> = Arc::default();
        if transfers.iter().all(Transfer::is_empty) {
            start.done.settle_all();
            *result.0.lock() = Some(Ok(()));
            batches.insert(number, Batch { stop, result, thread: None });
            return Ok(());
        }
        let (own_store, own_stop, own_result, group) =
            (store.clone(), stop.clone(), result.clone(), self.cuts.layer_group);
        let work = move || {
            let loaded = caught(|| own_store.load(&transfers, &start, &own_stop, group));
            // After a panic as well every status is written and every layer settled.
            fail_rest(&transfers);
            start.done.settle_all();
            *own_result.0.lock() = Some(loaded);
            own_result.1.notify_all();
        };
        let thread = std::thread::Builder::new().name("kvdock-umbp-load".to_owned()).spawn(work);
        let failed = |error| Error::new(ErrorKind::Unavailable, format!("no thread for loads: {error}"));
        batches.insert(number, Batch { stop, result, thread: Some(thread.map_err(failed)?) });
        Ok(())
    }

    fn offload(&self, store: &Arc<Store>, offload: Offload) -> Result<()> {
        offload.ready.iter().try_for_each(|ready| ready.is_set().map(drop))?;
        let mut worker = self.worker.lock();
        if worker.is_none() {
            let (store, offloads, coalesce) = (store.clone(), self.offloads.clone(), self.cuts.coalesce);
            let thread = std::thread::Builder::new().name("kvdock-umbp-store".to_owned());
            let thread = thread.spawn(move || offload_loop(&store, &offloads, coalesce));
            let failed = |error| Error::new(ErrorKind::Unavailable, format!("no thread for offloads: {error}"));
            *worker = Some(thread.map_err(failed)?);
        }
        let mut state = self.offloads.0.lock();
        if state.waiting.len() >= MOST_WAITING {
            let text = format!("{MOST_WAITING} offloads wait already: the store is slower than what comes");
            return Err(Error::new(ErrorKind::Unavailable, text).retryable());
        }
        state.waiting.push_back(offload);
        self.offloads.1.notify_all();
        Ok(())
    }

    /// Ends what is queued and what runs.
    fn end(&self, call: &Call<'_>) -> Result<()> {
        self.loads.lock().clear();
        let batches: Vec<Batch> = self.batches.lock().drain().map(|(_, batch)| batch).collect();
        batches.iter().for_each(|batch| batch.stop.store(true, Ordering::Release));
        // Their pages are given back when this returns, so it waits however long it takes. How they end is of no interest.
        batches.into_iter().for_each(|batch| drop(batch.wait(&Call::unbounded())));
        let (queue, wake) = &*self.offloads;
        let mut state = queue.lock();
        state.waiting.clear();
        std::mem::take(&mut state.stop).store(true, Ordering::Release);
        while state.running {
            call.check()?;
            wake.wait_for(&mut state, LOOK);
        }
        state.completed.clear();
        Ok(())
    }

    /// Ends everything, and the threads.
    pub fn close(&self) {
        // Without a deadline there is no error.
        let _ = self.end(&Call::unbounded());
        self.offloads.0.lock().closed = true;
        self.offloads.1.notify_all();
        if let Some(worker) = self.worker.lock().take() {
            // It catches what panics.
            let _ = worker.join();
        }
    }
}

impl Linker for UmbpLinker {
    type Backend = UmbpBackend;

    fn lookup(backend: &UmbpBackend, exists: &mut Exists<'_>) -> Result<()> {
        backend.batch_exists(exists)
    }

    fn load(backend: &UmbpBackend, load: Load) -> Result<()> {
        load.transfers().iter().try_for_each(|transfer| backend.store.knows(transfer))?;
        let mut loads = backend.face.loads.lock();
        if loads.iter().any(|queued| queued.request == load.request) {
            let text = format!("a load of request {} is queued already", load.request);
            return Err(Error::new(ErrorKind::InvalidConfig, text));
        }
        loads.push(load);
        Ok(())
    }

    fn start_layer_wise_loading(backend: &UmbpBackend, start: Start) -> Result<()> {
        backend.face.start(&backend.store, start)
    }

    fn finish_layer_wise_loading(backend: &UmbpBackend, call: &Call<'_>, batch: u64) -> Result<()> {
        let running = backend.face.batches.lock().remove(&batch);
        running.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("batch {batch} does not run")))?.wait(call)
    }

    fn cancel_queued_load(backend: &UmbpBackend, request: u64) -> Result<()> {
        let mut loads = backend.face.loads.lock();
        let queued = loads.iter().position(|load| load.request == request);
        let queued =
            queued.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("request {request} is not queued")))?;
        loads.remove(queued);
        Ok(())
    }

    fn offload(backend: &UmbpBackend, offload: Offload) -> Result<()> {
        offload.transfers().iter().try_for_each(|transfer| backend.store.knows(transfer))?;
        backend.face.offload(&backend.store, offload)
    }

    fn num_completed_offloads(backend: &UmbpBackend) -> u64 {
        let mut state = backend.face.offloads.0.lock();
        state.expire();
        state.completed.len() as u64
    }

    fn pop_completed_offload(backend: &UmbpBackend) -> Option<Completed> {
        let mut state = backend.face.offloads.0.lock();
        state.expire();
        state.completed.pop_front()
    }

    fn reset(backend: &UmbpBackend, call: &Call<'_>) -> Result<()> {
        backend.face.end(call)
    }
}
