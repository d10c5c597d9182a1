//! The linker face: loads run on a thread a batch, offloads on one thread in the order of their queueing.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvdock_plugin_api::{
    Backend as _, Call, Completed, Error, ErrorKind, Exists, Get, Host, Linker, Load, Offload, Page, PageStatus, Ready,
    ReadyKind, Result, Set, Start, monotonic_ns,
};
use parking_lot::{Condvar, Mutex};

use crate::backend::Backend;
use crate::fault::{self, Fault, is};
use crate::pages::{self, Run};
use crate::store::{Name, Store, Stored};

/// How often a wait looks at flags.
const LOOK: Duration = Duration::from_micros(200);

/// Queued loads, running batches and offloads of an instance, and the threads that serve them.
pub struct Loads {
    shared: Arc<Shared>,
    offloads: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    host: Host,
    store: Arc<Store>,
    namespace: [u8; 32],
    /// Of the instance, among all ranks.
    rank: u32,
    /// While this file is there a load waits; looked at by one kind of plugin alone.
    hold: Option<PathBuf>,
    state: Mutex<State>,
    changed: Condvar,
    /// Loads that were queued so far; looked at by a fault alone.
    loads: AtomicUsize,
}

#[derive(Default)]
struct State {
    queued: Vec<Load>,
    batches: HashMap<u64, Running>,
    offloads: VecDeque<Queued>,
    /// Set while the thread of the offloads touches pages.
    busy: bool,
    closing: bool,
}

/// Why a batch ends before its time.
const NOT: u8 = 0;
const BY_FINISH: u8 = 1;
const BY_RESET: u8 = 2;

struct Running {
    stop: Arc<AtomicU8>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

struct Queued {
    offload: Arc<Offload>,
    stop: Arc<AtomicBool>,
    done: Option<Result<()>>,
}

impl Loads {
    /// Starts the thread of the offloads.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        host: Host,
        store: Arc<Store>,
        namespace: [u8; 32],
        rank: u32,
        folder: Option<&Path>,
    ) -> Result<Loads> {
        let shared = Arc::new(Shared {
            host,
            store,
            namespace,
            rank,
            hold: folder.map(|folder| folder.join("hold")),
            state: Mutex::default(),
            changed: Condvar::new(),
            loads: AtomicUsize::new(0),
        });
        let thread = spawn("offloads", {
            let shared = shared.clone();
            move || shared.run_offloads()
        })?;
        Ok(Loads { shared, offloads: Mutex::new(Some(thread)) })
    }

    /// Ends everything that runs, forgets everything that waits. When it returns, no page is touched.
    fn reset(&self) {
        let mut state = self.shared.state.lock();
        state.queued.clear();
        state.offloads.iter().for_each(|queued| queued.stop.store(true, Ordering::Release));
        let batches = std::mem::take(&mut state.batches);
        self.shared.changed.notify_all();
        while state.busy {
            self.shared.changed.wait(&mut state);
        }
        if is(Fault::ResetKeepsCompletions) {
            state.offloads.retain(|queued| queued.done.is_some());
        } else {
            state.offloads.clear();
        }
        drop(state);
        batches.values().for_each(|running| running.stop.store(BY_RESET, Ordering::Release));
        for thread in batches.into_values().filter_map(|running| running.thread) {
            // What became of the load has nobody to go to.
            let _ = thread.join();
        }
    }

    /// Ends the threads.
    pub fn stop(&self) {
        self.shared.state.lock().closing = true;
        self.reset();
        if let Some(thread) = self.offloads.lock().take() {
            // It ends by itself once `closing` is set.
            let _ = thread.join();
        }
    }
}

impl Drop for Loads {
    fn drop(&mut self) {
        self.stop();
    }
}

fn spawn<T: Send + 'static>(name: &str, body: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    std::thread::Builder::new()
        .name(format!("broken-{name}"))
        .spawn(body)
        .map_err(|e| Error::new(ErrorKind::Unavailable, format!("no thread for {name}: {e}")).retryable())
}

/// Waits until every handle says that pages may be touched.
fn wait_until_ready(ready: &[Ready], check: &dyn Fn() -> Result<()>) -> Result<()> {
    for handle in ready {
        while !handle.is_set()? {
            check()?;
            std::thread::sleep(LOOK);
        }
    }
    check()
}

fn refuse_devices(ready: &[Ready]) -> Result<()> {
    match ready.iter().find(|handle| !matches!(handle.kind(), ReadyKind::Now | ReadyKind::HostFlag)) {
        Some(handle) => Err(Error::unsupported(&format!("waiting for a {}", handle.kind()))),
        None => Ok(()),
    }
}

/// A page of a load and what it is filled from.
struct Item {
    page: Page<'static, Get>,
    found: std::result::Result<Arc<Stored>, PageStatus>,
}

impl Shared {
    fn name<M>(&self, page: &Page<'_, M>) -> Name {
        Name { namespace: self.namespace, pool: page.pool().name().to_owned(), key: *page.key() }
    }

    /// Whether a fault of the second rank is planted, and this is its instance.
    fn is_of_rank_1(&self, fault: Fault) -> bool {
        self.rank == 1 && is(fault)
    }

    fn run_batch(&self, loads: Vec<Load>, start: &Start, stop: &AtomicU8) -> Result<()> {
        let check = || match stop.load(Ordering::Acquire) {
            NOT => start.call.check(),
            _ => Err(Error::new(ErrorKind::Cancelled, "the load was ended")),
        };
        let tired = self.loads.load(Ordering::Relaxed) > 60 && is(Fault::TiresAfterMany);
        let mut items: Vec<Item> = loads.into_iter().flat_map(Load::into_pages).map(|page| self.find(page)).collect();
        let waits = is(Fault::DeviceMemoryWaits) && self.hold.as_ref().is_some_and(|hold| hold.exists());
        while waits && self.hold.as_ref().is_some_and(|hold| hold.exists()) {
            std::thread::sleep(LOOK);
        }
        if is(Fault::LoadWritesEarly) || waits {
            items.iter_mut().for_each(write_all);
        }
        let result = wait_until_ready(&start.ready, &check).and_then(|()| {
            if is(Fault::LayersSettledEarly) {
                start.done.settle_all();
                std::thread::sleep(Duration::from_millis(15));
            }
            fill_by_layer(&mut items, start, &check)
        });
        if result.is_err() {
            leave_a_writer(&items, start, stop.load(Ordering::Acquire));
        }
        for item in items {
            let status = match item.found {
                Ok(_) if result.is_err() => PageStatus::Failed,
                Ok(_) if tired => PageStatus::Missing,
                Ok(_) => PageStatus::Ok,
                Err(PageStatus::Missing) if is(Fault::LoadUnsetMissing) => continue,
                Err(status) => status,
            };
            item.page.finish(status);
        }
        start.done.settle_all();
        result
    }

    fn find(&self, page: Page<'static, Get>) -> Item {
        let found = match self.store.get(&self.name(&page)) {
            None => Err(PageStatus::Missing),
            Some(stored) if stored.bytes.len() != page.len() || !stored.is_sound() => Err(PageStatus::Corrupt),
            Some(stored)
                if page.pool().name() == "side" && is(Fault::LoadWrongBytes)
                    || self.is_of_rank_1(Fault::GarbageLoadOfRank1) =>
            {
                Ok(Stored::new(stored.bytes.iter().map(|byte| byte ^ 1).collect()))
            }
            Some(stored) => Ok(stored),
        };
        Item { page, found }
    }

    fn run_offloads(&self) {
        let mut state = self.state.lock();
        loop {
            if state.closing {
                return;
            }
            let Some(next) = state.offloads.iter().position(|queued| queued.done.is_none()) else {
                self.changed.wait(&mut state);
                continue;
            };
            let (offload, stop) = (state.offloads[next].offload.clone(), state.offloads[next].stop.clone());
            state.busy = true;
            drop(state);
            let result = self.store_all(&offload, &stop);
            state = self.state.lock();
            state.busy = false;
            // `reset` waits for `busy` before it forgets the queue, so the entry is where it was.
            if let Some(queued) = state.offloads.iter_mut().find(|queued| queued.done.is_none()) {
                queued.done = Some(result);
            }
            self.changed.notify_all();
            drop(state);
            self.host.offload_completed();
            state = self.state.lock();
        }
    }

    /// Stores all pages of an offload or none, and writes their statuses.
    fn store_all(&self, offload: &Offload, stop: &AtomicBool) -> Result<()> {
        let check = || {
            if stop.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::Cancelled, "the offload was ended"));
            }
            if offload.deadline_ns != 0 && monotonic_ns() >= offload.deadline_ns {
                return Err(Error::new(ErrorKind::TimedOut, "the deadline of the offload has passed").retryable());
            }
            Ok(())
        };
        let read = |page: Page<'static, Set>| {
            check()?;
            Ok((self.name(&page), Stored::new(page.to_vec()?)))
        };
        let read_all = || offload.pages().map(read).collect::<Result<Vec<_>>>();
        let full = || Error::new(ErrorKind::NoSpace, "the store is full");
        let put = |pages| match self.is_of_rank_1(Fault::RefuseOffloadsOfRank1) {
            true => Err(full()),
            false => self.store.put(pages).map_err(|_| full()),
        };
        let early = is(Fault::OffloadReadsEarly).then(read_all);
        let result =
            wait_until_ready(&offload.ready, &check).and_then(|()| early.unwrap_or_else(read_all)).and_then(|pages| {
                if is(Fault::OffloadPageByPage) {
                    return pages.into_iter().try_for_each(|page| {
                        std::thread::sleep(Duration::from_micros(300));
                        put(vec![page])
                    });
                }
                put(pages)
            });
        if result.as_ref().is_err_and(|error| error.kind == ErrorKind::TimedOut) && is(Fault::OffloadLateStores) {
            self.store_first_part(offload);
        }
        let status = match &result {
            Ok(()) => PageStatus::Ok,
            Err(error) if error.kind == ErrorKind::NoSpace => PageStatus::Refused,
            Err(_) => PageStatus::Failed,
        };
        let forgotten = offload
            .transfers()
            .get(1)
            .filter(|_| result.is_ok() && is(Fault::OffloadForgetsStatus))
            .map(|part| part.pool().id());
        offload.pages().filter(|page| forgotten != Some(page.pool().id())).for_each(|page| page.finish(status));
        result
    }

    /// What a fault does with an offload that is late.
    fn store_first_part(&self, offload: &Offload) {
        let first = offload.transfers().first().map(|part| part.pool().id());
        let pages = offload.pages().filter(|page| first == Some(page.pool().id()));
        let read = |page: Page<'static, Set>| page.to_vec().ok().map(|bytes| (self.name(&page), Stored::new(bytes)));
        // A store that is full spoils the fault, and nothing else.
        let _ = self.store.put(pages.filter_map(read).collect());
    }
}

/// Writes whole pages, without regard to layers.
fn write_all(item: &mut Item) {
    let pool = item.page.pool().clone();
    // A range of layers has a rule of its own.
    if let (Ok(stored), None) = (&item.found, item.page.layers()) {
        let runs =
            (0..pool.layers()).flat_map(|layer| pages::layer(&pool, layer)).chain(pages::outside_of_layers(&pool));
        // A page that can't be written early is written later.
        let _ = pages::copy(&mut item.page, stored, runs);
    }
}

/// What two faults leave behind when a load was ended: a thread that writes the pages once the flags come.
fn leave_a_writer(items: &[Item], start: &Start, why: u8) {
    let leaves = match fault::planted() {
        Ok(Fault::FinishLeavesWriter) => why == BY_FINISH,
        Ok(Fault::ResetLeavesWriter) => why == BY_RESET,
        _ => false,
    };
    if !leaves {
        return;
    }
    let places = items.iter().filter(|item| item.found.is_ok()).filter_map(|item| item.page.piece(0).ok());
    let places: Vec<usize> = places.map(|(place, _)| place as usize).collect();
    let ready = start.ready.clone();
    fault::later(0, move || {
        let end = std::time::Instant::now() + Duration::from_secs(1);
        while !ready.iter().all(|handle| handle.is_set() == Ok(true)) && std::time::Instant::now() < end {
            std::thread::sleep(LOOK);
        }
        for place in places {
            // SAFETY: none: the page is the host's again. This is the fault.
            unsafe { std::ptr::write_volatile(place as *mut u8, 0xee) }
        }
    });
}

fn fill_by_layer(items: &mut [Item], start: &Start, check: &dyn Fn() -> Result<()>) -> Result<()> {
    // Bytes of no layer come first: once the layers are settled nothing is written any more.
    let mut outside = HashMap::new();
    for Item { page, found } in items.iter_mut() {
        check()?;
        let Ok(stored) = found else { continue };
        let pool = page.pool().clone();
        let runs: Vec<Run> = if page.layers().is_some() && !is(Fault::LoadAllLayers) {
            pages::seal(&pool).into_iter().collect()
        } else {
            outside.entry(pool.id()).or_insert_with(|| pages::outside_of_layers(&pool)).clone()
        };
        if pages::copy(page, stored, runs).is_err() {
            *found = Err(PageStatus::Failed);
        }
    }
    let layers =
        items.iter().map(|item| item.page.pool().layers() as usize).max().unwrap_or(0).max(start.done.layers());
    for layer in 0..layers {
        for Item { page, found } in items.iter_mut() {
            check()?;
            let Ok(stored) = found else { continue };
            let wanted = page.layers().filter(|_| !is(Fault::LoadAllLayers));
            if wanted.is_some_and(|wanted| !wanted.contains(&(layer as u32))) {
                continue;
            }
            let pool = page.pool().clone();
            if pages::copy(page, stored, pages::layer(&pool, layer as u32)).is_err() {
                *found = Err(PageStatus::Failed);
            }
        }
        start.done.settle(layer);
    }
    Ok(())
}

/// The linker face.
pub struct Face;

impl Linker for Face {
    type Backend = Backend;

    fn lookup(backend: &Backend, exists: &mut Exists<'_>) -> Result<()> {
        backend.batch_exists(exists)
    }

    fn load(backend: &Backend, load: Load) -> Result<()> {
        let mut state = backend.loads.shared.state.lock();
        if state.queued.iter().any(|queued| queued.request == load.request) {
            let message = format!("request {} is queued already; cancel its load or start it first", load.request);
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        state.queued.push(load);
        backend.loads.shared.loads.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn start_layer_wise_loading(backend: &Backend, start: Start) -> Result<()> {
        let shared = &backend.loads.shared;
        if shared.is_of_rank_1(Fault::HangInLoadOfRank1) {
            fault::hang();
        }
        assert!(!shared.is_of_rank_1(Fault::PanicInLoadOfRank1), "planted: a panic in a load of the second rank");
        let mut state = shared.state.lock();
        // Forgotten with every error below.
        let loads = std::mem::take(&mut state.queued);
        if shared.is_of_rank_1(Fault::ErrorInLoadOfRank1) {
            return Err(Error::new(ErrorKind::Unavailable, "planted: a load of the second rank fails"));
        }
        refuse_devices(&start.ready)?;
        if state.batches.contains_key(&start.batch) {
            let message = format!("batch {} was started already and is not finished", start.batch);
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        let (stop, ended) = (Arc::new(AtomicU8::new(NOT)), Arc::new(AtomicBool::new(loads.is_empty())));
        let number = start.batch;
        let thread = if loads.is_empty() {
            if !is(Fault::EmptyStartUnsettled) {
                start.done.settle_all();
            }
            None
        } else {
            let (shared, stop, ended) = (shared.clone(), stop.clone(), ended.clone());
            Some(spawn("loads", move || {
                let result = shared.run_batch(loads, &start, &stop);
                ended.store(true, Ordering::Release);
                // Taken, so that a waiting `finish` is either before its look at `ended` or in its wait.
                drop(shared.state.lock());
                shared.changed.notify_all();
                result
            })?)
        };
        state.batches.insert(number, Running { stop, ended, thread });
        Ok(())
    }

    fn finish_layer_wise_loading(backend: &Backend, call: &Call<'_>, batch: u64) -> Result<()> {
        let shared = &backend.loads.shared;
        let mut state = shared.state.lock();
        let Some(running) = state.batches.remove(&batch) else {
            if is(Fault::FinishUnknownOk) {
                return Ok(());
            }
            return Err(Error::new(ErrorKind::NotFound, format!("batch {batch} was not started, or is finished")));
        };
        let mut late = Ok(());
        while !running.ended.load(Ordering::Acquire) {
            if let Err(error) = call.check() {
                late = Err(error);
                running.stop.store(BY_FINISH, Ordering::Release);
                break;
            }
            let left = call.remaining().unwrap_or(Duration::MAX).min(Duration::from_millis(2));
            if is(Fault::FinishKeepsLock) {
                std::thread::sleep(left);
            } else {
                shared.changed.wait_for(&mut state, left);
            }
        }
        drop(state);
        let result = match running.thread.map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(Error::new(ErrorKind::Internal, "the thread of the load panicked")),
        };
        // A load that ended by itself before it was told to is no failure of the call.
        if result.is_err() { late.and(result) } else { Ok(()) }
    }

    fn cancel_queued_load(backend: &Backend, request: u64) -> Result<()> {
        let mut state = backend.loads.shared.state.lock();
        match state.queued.iter().position(|queued| queued.request == request) {
            Some(_) if state.queued.len() > 1 && is(Fault::CancelKeepsLoad) => Ok(()),
            Some(index) => {
                state.queued.remove(index);
                Ok(())
            }
            None if is(Fault::CancelAlwaysOk) => Ok(()),
            None => Err(Error::new(ErrorKind::NotFound, format!("request {request} is not queued, or has started"))),
        }
    }

    fn offload(backend: &Backend, offload: Offload) -> Result<()> {
        refuse_devices(&offload.ready)?;
        let shared = &backend.loads.shared;
        shared.state.lock().offloads.push_back(Queued { offload: Arc::new(offload), stop: Arc::default(), done: None });
        shared.changed.notify_all();
        Ok(())
    }

    fn num_completed_offloads(backend: &Backend) -> u64 {
        let state = backend.loads.shared.state.lock();
        state.offloads.iter().take_while(|queued| queued.done.is_some()).count() as u64
    }

    fn pop_completed_offload(backend: &Backend) -> Option<Completed> {
        let mut state = backend.loads.shared.state.lock();
        let next = match is(Fault::OffloadLastFirst) {
            true => state.offloads.iter().rposition(|queued| queued.done.is_some())?,
            false => 0,
        };
        let done = state.offloads.get(next)?.done.clone()?;
        let queued = state.offloads.remove(next)?;
        Some(Completed { operation: queued.offload.operation, result: done })
    }

    fn reset(backend: &Backend, _: &Call<'_>) -> Result<()> {
        backend.loads.reset();
        Ok(())
    }
}
