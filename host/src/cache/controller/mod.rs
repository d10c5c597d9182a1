//! The threads that move pages: copies between device and host, reads and writes of storage.
//!
//! The scheduler hands jobs down and takes events up; the two share nothing of the tree. A job owns
//! copies of the keys and page numbers it works on, so whatever happens to the tree meanwhile, it
//! reads and writes its own pages. Every job ends in exactly one event, whatever fails.

mod attached;
mod backup;
mod belief;
mod copy;
mod fetch;
mod guard;
mod guarded;
mod paged;
mod prefetch;
mod quarantine;
mod read;
mod registry;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};

pub(crate) use attached::{Attached, CallFault, CallInfo};
pub(crate) use backup::{StoreJob, StorePart, StoreReport};
pub(crate) use copy::{BackupJob, LoadJob, PageCopy, by_component, copy_in, copy_out};
pub(crate) use fetch::{Delivery, Fetch, FetchOrder, FetchState};
pub(crate) use guard::cancel::CancelSet;
pub use guarded::Guarded;
pub(crate) use paged::fault_result;
pub(crate) use read::heal;
pub(crate) use registry::Registry;

use super::config::{CacheConfig, PolicyUpdate};
use super::linker::{self, Answer, LoadBatch, Lookup};
use super::pool::{DeviceMemory, DirectPool, HostPool};
use super::stats::{CacheCounters, CacheEvents, StorageOp};
use super::types::CacheError;
use super::unified::{Component, PerComponent, Slots};
use guard::break_even::{Part, PrefillSpeed, worth};
use read::Batch;

/// Most pages in one storage call.
pub(crate) const BATCH_PAGES: usize = 128;

/// How long the end of the cache waits for its threads. A thread that a backend does not let go is left behind.
const JOIN_TIME: Duration = Duration::from_secs(2);

/// Called from worker threads whenever something finished that the scheduler may wait for. Must be
/// cheap and must not call into the cache.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// What a worker tells the scheduler.
#[derive(Debug)]
pub(crate) enum Event {
    /// Device pages are on the host.
    BackedUp { job: BackupJob, ok: bool, took: Duration },
    /// Host pages are on the device.
    Loaded { id: u64, ok: bool, took: Duration },
    /// Pages of a fetch came in.
    FetchProgress(u64),
    /// A fetch found more than the host pool has free.
    FetchNeedsRoom { id: u64, needed: PerComponent<usize> },
    /// A fetch has ended, well or not.
    FetchDone(u64),
    /// Storage was asked what it has, in linker mode.
    LookedUp(Arc<Lookup>, Answer),
    /// The load of a request is over, well or not; nothing of it runs any more but a late call.
    LoadOver(u64),
    /// A write to storage has ended, well or not.
    Stored(StoreReport),
    /// A backend made durable what it has.
    Flushed,
    /// A backend came, went or was emptied.
    StorageChanged,
    /// Settings changed.
    Policies(PolicyUpdate),
}

/// A job of the storage writers.
pub(crate) enum WriteJob {
    /// Store pages.
    Store(StoreJob),
    /// Make durable what was stored.
    Flush(Arc<Attached>),
}

/// What workers share.
pub(crate) struct Shared {
    /// Tokens a page.
    pub page_size: usize,
    /// Threads that read from storage.
    readers: usize,
    /// The device memory.
    pub device: DeviceMemory,
    /// The host pool.
    pub host: HostPool,
    /// Device memory and host pool of windows and of states, where the model has such.
    pub beside: [Option<(DeviceMemory, HostPool)>; 2],
    /// Pages of windows that going on from a page's end needs; none without windows.
    pub window_pages: Option<usize>,
    /// The device's pages as backends see them that take its memory, by component; none where all pages go by way of the host.
    pub direct: Option<PerComponent<Option<DirectPool>>>,
    /// Backends.
    pub registry: Registry,
    /// How fast the engine computes prompts.
    pub prefill: PrefillSpeed,
    /// Figures.
    pub counters: Arc<CacheCounters>,
    /// Listener.
    pub events: Arc<dyn CacheEvents>,
    event_sender: Sender<Event>,
    waker: Waker,
    load_queue: Receiver<Arc<LoadJob>>,
    copy_queue: Receiver<BackupJob>,
    query_queue: Receiver<FetchStep>,
    batch_queue: Receiver<Batch>,
    batch_sender: Sender<Batch>,
    write_queue: Receiver<WriteJob>,
}

/// The pools that workers move pages between.
pub(crate) struct Pools {
    /// Device memory of all tokens.
    pub device: DeviceMemory,
    /// The host pool for it.
    pub host: HostPool,
    /// Device memory and host pool of windows and of states, where the model has such.
    pub beside: [Option<(DeviceMemory, HostPool)>; 2],
    /// Pages of windows that going on from a page's end needs; none without windows.
    pub window_pages: Option<usize>,
    /// The device's pages for backends that take its memory, where that can be.
    pub direct: Option<PerComponent<Option<DirectPool>>>,
}

/// A step of a fetch, or of a load by the linker face, that a worker takes up.
#[derive(Debug)]
pub(crate) enum FetchStep {
    /// Ask what storage has.
    Query(Arc<Fetch>),
    /// Read it: there is room now.
    Transfer(Arc<Fetch>),
    /// Ask what storage has, in linker mode.
    LookUp(Arc<Lookup>),
    /// Load layer by layer.
    Load(LoadBatch),
}

/// What the measured speeds say of a span before storage is asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Forecast {
    /// It may be worth it.
    Unknown,
    /// Computing is faster whatever storage has of it; some of it is read all the same, to measure anew.
    Explore,
    /// Computing is faster whatever storage has of it.
    Refuse,
}

impl Shared {
    /// Whether reading up to `span` pages may be faster than computing them. `shortest` is the fewest tokens storage is asked for.
    pub fn forecast(&self, span: usize, shortest: usize) -> Forecast {
        let Some(prefill) = self.prefill.rate() else { return Forecast::Unknown };
        let (current, page_bytes) = (self.registry.current(), self.host.page_bytes());
        let is_slow = |attached: &Arc<Attached>| {
            let fit = attached.speed.fit();
            fit.is_some()
                && worth(&[Part { source: 0, pages: span, fit }], page_bytes, self.page_size, prefill).pages == 0
        };
        let Some(first) = current.first().filter(|_| current.iter().all(is_slow)) else { return Forecast::Unknown };
        for attached in current.iter() {
            let report = attached.speed.report(Some(prefill), page_bytes as f64 / self.page_size as f64);
            attached.speed.note(attached.name(), report, shortest);
        }
        let explore = first.speed.refuse();
        tracing::debug!(
            span_tokens = span * self.page_size,
            explore,
            "break-even: storage is too slow for this prompt"
        );
        if explore { Forecast::Explore } else { Forecast::Refuse }
    }

    /// Device memory and host pool of a component.
    pub fn pools(&self, component: Component) -> Option<(&DeviceMemory, &HostPool)> {
        match component {
            Component::Full => Some((&self.device, &self.host)),
            Component::Window => self.beside[0].as_ref().map(|(device, host)| (device, host)),
            Component::State => self.beside[1].as_ref().map(|(device, host)| (device, host)),
        }
    }

    /// Layers of the model.
    pub fn layers(&self) -> usize {
        self.hosts().into_iter().map(|(_, host)| host.layers()).max().unwrap_or(0)
    }

    /// Host pool of a component.
    pub fn host_of(&self, component: Component) -> Option<&HostPool> {
        self.pools(component).map(|(_, host)| host)
    }

    /// The device's pages of a component, where calls to a backend are about these.
    pub fn direct_of(&self, attached: &Attached, component: Component) -> Option<&DirectPool> {
        self.direct.as_ref().filter(|_| attached.is_direct())?[component].as_ref()
    }

    /// The components that have a host pool, with it.
    pub fn hosts(&self) -> Vec<(Component, &HostPool)> {
        Component::ALL.into_iter().filter_map(|component| Some((component, self.host_of(component)?))).collect()
    }

    /// Host pages of all components or of none.
    pub fn alloc_host(&self, wanted: &PerComponent<usize>) -> Option<Slots> {
        let mut taken = Slots::default();
        for component in Component::ALL.into_iter().filter(|&component| wanted[component] > 0) {
            match self.host_of(component).and_then(|host| host.alloc(wanted[component])) {
                Some(pages) => taken[component] = pages,
                None => {
                    self.release_host(taken);
                    return None;
                }
            }
        }
        Some(taken)
    }

    /// Takes a holder from each of these host pages.
    pub fn release_host(&self, pages: Slots) {
        for component in Component::ALL.into_iter().filter(|&component| !pages[component].is_empty()) {
            if let Some(host) = self.host_of(component) {
                host.release(&pages[component]);
            }
        }
    }

    /// Sends an event and wakes the scheduler.
    pub fn send(&self, event: Event) {
        // Nobody listens any more once the cache is gone; then nothing is lost.
        let _ = self.event_sender.send(event);
        (self.waker)();
    }
}

/// Queues and threads.
pub(crate) struct Controller {
    /// What workers share.
    pub shared: Arc<Shared>,
    /// Events from the workers.
    pub events: Receiver<Event>,
    load_sender: Option<Sender<Arc<LoadJob>>>,
    copy_sender: Option<Sender<BackupJob>>,
    query_sender: Option<Sender<FetchStep>>,
    write_sender: Option<Sender<WriteJob>>,
    stop: Option<Sender<()>>,
    threads: Vec<JoinHandle<()>>,
    copy_workers: usize,
    writers: usize,
}

impl Controller {
    /// Starts the threads.
    pub fn new(
        config: &CacheConfig,
        pools: Pools,
        counters: Arc<CacheCounters>,
        listener: Arc<dyn CacheEvents>,
        waker: Waker,
    ) -> Result<Self, CacheError> {
        let Pools { device, host, beside, window_pages, direct } = pools;
        let (event_sender, events) = unbounded();
        let (load_sender, load_queue) = unbounded();
        let (copy_sender, copy_queue) = unbounded();
        let (query_sender, query_queue) = unbounded();
        let (batch_sender, batch_queue) = unbounded();
        let (write_sender, write_queue) = unbounded();
        let (stop, stopped) = unbounded::<()>();
        let shared = Arc::new(Shared {
            page_size: device.page_tokens(),
            readers: config.prefetch_workers.max(1),
            device,
            host,
            beside,
            window_pages,
            direct,
            registry: Registry::new(Arc::clone(&counters)),
            prefill: PrefillSpeed::default(),
            counters,
            events: listener,
            event_sender,
            waker,
            load_queue,
            copy_queue,
            query_queue,
            batch_queue,
            batch_sender,
            write_queue,
        });
        let mut controller = Controller {
            shared,
            events,
            load_sender: Some(load_sender),
            copy_sender: Some(copy_sender),
            query_sender: Some(query_sender),
            write_sender: Some(write_sender),
            stop: Some(stop),
            threads: Vec::new(),
            copy_workers: config.copy_workers.max(1),
            writers: 0,
        };
        for number in 0..controller.copy_workers {
            controller.spawn(format!("kvdock-copy-{number}"), copy::work)?;
        }
        for number in 0..config.prefetch_workers.max(1) {
            let stopped = stopped.clone();
            controller.spawn(format!("kvdock-read-{number}"), move |shared| read_storage(shared, &stopped))?;
        }
        controller.need_writers(config.backup_workers.max(1))?;
        Ok(controller)
    }

    /// Threads that write to storage; starts more if there are fewer than `count`.
    pub fn need_writers(&mut self, count: usize) -> Result<(), CacheError> {
        while self.writers < count {
            self.spawn(format!("kvdock-write-{}", self.writers), write_storage)?;
            self.writers += 1;
        }
        Ok(())
    }

    /// Threads that write to storage.
    pub fn writers(&self) -> usize {
        self.writers
    }

    /// Loads host pages to the device; ends in `Event::Loaded`.
    pub fn load(&self, job: &Arc<LoadJob>) {
        if let Some(sender) = &self.load_sender {
            for _ in 0..self.copy_workers.min(job.copies.len().div_ceil(2)) {
                // The receiver lives in `shared` as long as this does.
                let _ = sender.send(Arc::clone(job));
            }
        }
    }

    /// Copies device pages to the host; ends in `Event::BackedUp`.
    pub fn back_up(&self, job: BackupJob) {
        if let Some(sender) = &self.copy_sender {
            let _ = sender.send(job);
        }
    }

    /// Takes a step of a fetch; ends in `Event::FetchNeedsRoom` or `Event::FetchDone`.
    pub fn fetch(&self, step: FetchStep) {
        if let Some(sender) = &self.query_sender {
            let _ = sender.send(step);
        }
    }

    /// Writes to storage; ends in `Event::Stored` or `Event::Flushed`.
    pub fn write(&self, job: WriteJob) {
        if let Some(sender) = &self.write_sender {
            let _ = sender.send(job);
        }
    }

    fn spawn(&mut self, name: String, work: impl FnOnce(&Shared) + Send + 'static) -> Result<(), CacheError> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(name.clone())
            .spawn(move || work(&shared))
            .map_err(|error| CacheError::Thread { name, message: error.to_string() })?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.load_sender = None;
        self.copy_sender = None;
        self.query_sender = None;
        self.write_sender = None;
        self.stop = None;
        let deadline = Instant::now() + JOIN_TIME;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

/// What a storage reader does until it is stopped. Batches of fetches under way come before new ones.
fn read_storage(shared: &Shared, stopped: &Receiver<()>) {
    let (batches, queries) = (&shared.batch_queue, &shared.query_queue);
    loop {
        crossbeam_channel::select_biased! {
            recv(stopped) -> _ => return,
            recv(batches) -> batch => match batch {
                Ok(batch) => read::read(shared, &batch),
                Err(_) => return,
            },
            recv(queries) -> step => match step {
                Ok(FetchStep::Query(fetch)) => prefetch::query(shared, fetch),
                Ok(FetchStep::Transfer(fetch)) => prefetch::transfer(shared, &fetch),
                Ok(FetchStep::LookUp(lookup)) => linker::look_up(shared, &lookup),
                Ok(FetchStep::Load(batch)) => linker::load(shared, &batch),
                Err(_) => return,
            },
        }
    }
}

/// What a storage writer does until its queue closes.
fn write_storage(shared: &Shared) {
    while let Ok(job) = shared.write_queue.recv() {
        match job {
            WriteJob::Store(job) => backup::run(shared, job),
            WriteJob::Flush(target) => {
                let operation = CancelSet::default();
                let info = CallInfo { op: StorageOp::Flush, pages: 0, bytes: 0, operation: &operation, within: None };
                if let Err(fault) = target.call(&info, |backend, options| backend.flush(options)) {
                    tracing::warn!(backend = target.name(), ?fault, "storage could not be flushed");
                }
                shared.send(Event::Flushed);
            }
        }
    }
}
