//! The linker face: loads layer by layer, a thread a batch; offloads one after the other, on one thread.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvdock_plugin_api::v0_1::CallContext;
use kvdock_plugin_api::{
    Backend, Call, Completed, Error, ErrorKind, Exists, Linker, Load, LogLevel, Offload, PageStatus, Ready, ReadyKind,
    Result, Start, Transfer,
};
use parking_lot::{Condvar, Mutex};

use crate::FileBackend;
use crate::index::PageId;
use crate::layers::ended;
use crate::store::Store;

/// Between two looks at flags and deadlines.
const LOOK: Duration = Duration::from_millis(1);
/// Offloads that may wait; their pages are kept for them.
const MOST_WAITING: usize = 1024;

/// The linker face of the backend.
#[derive(Debug)]
pub struct FileLinker;

/// Loads that are queued, batches that run, offloads.
#[derive(Debug, Default)]
pub struct Face {
    queued: Mutex<Vec<Load>>,
    batches: Mutex<HashMap<u64, Batch>>,
    offloads: Arc<Offloads>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Batch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

#[derive(Debug, Default)]
struct Offloads {
    state: Mutex<Waiting>,
    changed: Condvar,
    /// Set to end the one that runs.
    stop: AtomicU32,
}

#[derive(Debug, Default)]
struct Waiting {
    queue: VecDeque<Offload>,
    completed: VecDeque<Completed>,
    running: bool,
    closed: bool,
}

fn refuse_devices(ready: &[Ready]) -> Result<()> {
    match ready.iter().find(|ready| !matches!(ready.kind(), ReadyKind::Now | ReadyKind::HostFlag)) {
        Some(ready) => Err(Error::unsupported(&format!("waiting for a {}", ready.kind()))),
        None => Ok(()),
    }
}

fn wait_for(ready: &[Ready], check: &dyn Fn() -> Result<()>) -> Result<()> {
    for ready in ready {
        while !ready.is_set()? {
            check()?;
            std::thread::sleep(LOOK);
        }
    }
    check()
}

fn fail_unset(transfers: &[Transfer<'_>]) {
    for transfer in transfers {
        for number in 0..transfer.len() {
            if transfer.status(number) == PageStatus::Unset {
                transfer.finish(number, PageStatus::Failed);
            }
        }
    }
}

fn no_thread(error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, format!("no thread for the linker face: {error}")).retryable()
}

fn caught(work: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "a thread of the linker face panicked")))
}

impl Face {
    fn start(&self, store: &Arc<Store>, start: Start) -> Result<()> {
        let loads = std::mem::take(&mut *self.queued.lock());
        refuse_devices(&start.ready)?;
        let mut batches = self.batches.lock();
        if batches.contains_key(&start.batch) {
            let message = format!("batch {} runs already; finish it first", start.batch);
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        let stop = Arc::new(AtomicBool::new(false));
        if loads.is_empty() {
            start.done.settle_all();
            batches.insert(start.batch, Batch { stop, thread: None });
            return Ok(());
        }
        let (number, store, stopped) = (start.batch, store.clone(), stop.clone());
        let work = move || {
            let transfers: Vec<Transfer<'static>> =
                loads.iter().flat_map(|load| load.transfers().iter().cloned()).collect();
            let loaded = caught(|| {
                let stop = || if stopped.load(Ordering::Acquire) { Err(ended()) } else { Ok(()) };
                wait_for(&start.ready, &|| stop().and_then(|()| start.call.check()))?;
                store.read_by_layer(&transfers, &start.call, &stop, |layer| start.done.settle(layer))
            });
            // After an error, or a panic, as well: all is settled, and every status is written.
            fail_unset(&transfers);
            start.done.settle_all();
            loaded
        };
        let thread = std::thread::Builder::new().name("kvdock-file-load".to_owned()).spawn(work);
        batches.insert(number, Batch { stop, thread: Some(thread.map_err(|error| no_thread(&error))?) });
        Ok(())
    }

    fn offload(&self, store: &Arc<Store>, offload: Offload) -> Result<()> {
        refuse_devices(&offload.ready)?;
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let (store, offloads) = (store.clone(), self.offloads.clone());
            let spawned = std::thread::Builder::new().name("kvdock-file-store".to_owned());
            let spawned = spawned.spawn(move || offloads.run(&store)).map_err(|error| no_thread(&error))?;
            *thread = Some(spawned);
        }
        let mut state = self.offloads.state.lock();
        if state.queue.len() >= MOST_WAITING {
            let message = format!("{MOST_WAITING} offloads wait already: the disk is slower than what comes");
            return Err(Error::new(ErrorKind::Unavailable, message).retryable());
        }
        state.queue.push_back(offload);
        self.offloads.changed.notify_all();
        Ok(())
    }

    fn end(&self, call: &Call<'_>) -> Result<()> {
        self.queued.lock().clear();
        let batches: Vec<Batch> = self.batches.lock().drain().map(|(_, batch)| batch).collect();
        batches.iter().for_each(|batch| batch.stop.store(true, Ordering::Release));
        // What became of them has nobody to go to.
        batches.into_iter().for_each(|batch| drop(batch.wait(&Call::unbounded())));
        let offloads = &self.offloads;
        let mut state = offloads.state.lock();
        state.queue.clear();
        offloads.stop.store(1, Ordering::Release);
        while state.running {
            call.check()?;
            offloads.changed.wait_for(&mut state, LOOK);
        }
        offloads.stop.store(0, Ordering::Release);
        state.completed.clear();
        Ok(())
    }

    /// Ends everything, and the threads.
    pub fn close(&self) {
        // Without a deadline there is no error.
        let _ = self.end(&Call::unbounded());
        self.offloads.state.lock().closed = true;
        self.offloads.changed.notify_all();
        if let Some(thread) = self.thread.lock().take() {
            // It catches what panics.
            let _ = thread.join();
        }
    }
}

impl Batch {
    /// Waits for its end; brings that about at the end of the call's time.
    fn wait(self, call: &Call<'_>) -> Result<()> {
        let Some(thread) = self.thread else { return Ok(()) };
        let mut late = None;
        while !thread.is_finished() {
            if late.is_none()
                && let Err(error) = call.check()
            {
                self.stop.store(true, Ordering::Release);
                late = Some(error);
            }
            std::thread::sleep(LOOK);
        }
        let ended = thread.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "a load panicked")));
        match (ended, late) {
            (Err(_), Some(late)) => Err(late),
            (ended, _) => ended,
        }
    }
}

impl Offloads {
    fn run(&self, store: &Store) {
        let mut state = self.state.lock();
        loop {
            let Some(offload) = state.queue.pop_front() else {
                if state.closed {
                    return;
                }
                self.changed.wait(&mut state);
                continue;
            };
            state.running = true;
            drop(state);
            let result = caught(|| store.offload(&offload, &self.stop));
            if let Err(error) = &result {
                let message = format!("offload {}: {}", offload.operation, error.message);
                store.host.log(LogLevel::Warn, "linker", &message);
            }
            fail_unset(offload.transfers());
            state = self.state.lock();
            state.running = false;
            // After a reset nobody asks for it.
            let wanted = self.stop.load(Ordering::Acquire) == 0;
            if wanted {
                state.completed.push_back(Completed { operation: offload.operation, result });
            }
            self.changed.notify_all();
            drop(state);
            if wanted {
                store.host.offload_completed();
            }
            state = self.state.lock();
        }
    }
}

impl Store {
    /// Stores the pages of an offload, all or none. None of them is seen before all are there.
    fn offload(&self, offload: &Offload, stop: &AtomicU32) -> Result<()> {
        let context =
            CallContext { deadline_ns: offload.deadline_ns, cancel: std::ptr::from_ref(stop).cast(), trace_id: 0 };
        // SAFETY: the flag is borrowed for longer than the call is used, and is written atomically only.
        let call = unsafe { Call::from_raw(&context) };
        wait_for(&offload.ready, &|| call.check())?;
        let root = self.root();
        let (mut fresh, mut looked, mut opened) = (Vec::new(), false, HashMap::new());
        for transfer in offload.transfers() {
            let info = self.pool(transfer.pool())?;
            for key in transfer.keys() {
                let id = PageId { key: *key, tag: info.tag_number };
                let stored = match info.is_small() {
                    true => self
                        .living_place(&root, &id, &mut looked, &call, &mut opened)
                        .is_some_and(|place| place.len == info.page_bytes),
                    false => self.is_stored(&root, &id, &info).is_some(),
                };
                if !stored {
                    fresh.push((id, info.is_small()));
                }
            }
        }
        let ids: Vec<PageId> = fresh.iter().map(|(id, _)| *id).collect();
        self.hide(&ids, true);
        let _shown = Shown { store: self, ids: &ids };
        let stored = self.set_transfers(offload.transfers(), &call).and_then(|()| {
            let all = |transfer: &Transfer<'_>| (0..transfer.len()).all(|n| transfer.status(n) == PageStatus::Ok);
            match offload.transfers().iter().all(all) {
                true => call.check(),
                false => Err(Error::new(ErrorKind::Unavailable, "not all pages could be stored").retryable()),
            }
        });
        if stored.is_err() {
            self.take_back(&fresh);
            for transfer in offload.transfers() {
                (0..transfer.len()).for_each(|number| transfer.finish(number, PageStatus::Failed));
            }
        }
        stored
    }

    /// Removes what a failed offload has stored already.
    fn take_back(&self, pages: &[(PageId, bool)]) {
        let root = self.root();
        let (mut packed, mut looked, mut opened) = (Vec::new(), false, HashMap::new());
        for (id, small) in pages {
            if *small {
                let place = self.living_place(&root, id, &mut looked, &Call::unbounded(), &mut opened);
                packed.extend(place.map(|place| (*id, place)));
            } else if let Err(error) = self.remove_file(&root, id) {
                self.host.log(LogLevel::Warn, "linker", &format!("a page of a failed offload stays: {error}"));
            }
        }
        self.bury_in_packs(&root, &mut packed);
        packed.iter().for_each(|(id, place)| self.forget_packed(id, place));
    }
}

/// Shows pages again when it is dropped.
struct Shown<'a> {
    store: &'a Store,
    ids: &'a [PageId],
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        self.store.hide(self.ids, false);
    }
}

impl Linker for FileLinker {
    type Backend = FileBackend;

    fn lookup(backend: &FileBackend, exists: &mut Exists<'_>) -> Result<()> {
        backend.batch_exists(exists)
    }

    fn load(backend: &FileBackend, load: Load) -> Result<()> {
        load.transfers().iter().try_for_each(|transfer| backend.store.pool(transfer.pool()).map(drop))?;
        let mut queued = backend.face.queued.lock();
        if queued.iter().any(|other| other.request == load.request) {
            let message = format!("a load of request {} is queued already", load.request);
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        queued.push(load);
        Ok(())
    }

    fn start_layer_wise_loading(backend: &FileBackend, start: Start) -> Result<()> {
        backend.face.start(&backend.store, start)
    }

    fn finish_layer_wise_loading(backend: &FileBackend, call: &Call<'_>, batch: u64) -> Result<()> {
        let running = backend.face.batches.lock().remove(&batch);
        running.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("batch {batch} does not run")))?.wait(call)
    }

    fn cancel_queued_load(backend: &FileBackend, request: u64) -> Result<()> {
        let mut queued = backend.face.queued.lock();
        let at = queued.iter().position(|load| load.request == request);
        let at = at.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("request {request} is not queued")))?;
        queued.remove(at);
        Ok(())
    }

    fn offload(backend: &FileBackend, offload: Offload) -> Result<()> {
        offload.transfers().iter().try_for_each(|transfer| backend.store.pool(transfer.pool()).map(drop))?;
        backend.face.offload(&backend.store, offload)
    }

    fn num_completed_offloads(backend: &FileBackend) -> u64 {
        backend.face.offloads.state.lock().completed.len() as u64
    }

    fn pop_completed_offload(backend: &FileBackend) -> Option<Completed> {
        backend.face.offloads.state.lock().completed.pop_front()
    }

    fn reset(backend: &FileBackend, call: &Call<'_>) -> Result<()> {
        backend.face.end(call)
    }
}
