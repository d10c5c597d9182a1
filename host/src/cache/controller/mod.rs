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
use kvdock_kernels::KvPool;

pub(crate) use attached::Attached;
pub(crate) use backup::{StoreJob, StoreReport};
pub(crate) use copy::{BackupJob, LoadJob, copy_in, copy_out};
pub(crate) use fetch::{Delivery, Fetch, FetchOrder, FetchState};
pub use guarded::Guarded;
pub(crate) use registry::Registry;

use super::config::{CacheConfig, PolicyUpdate};
use super::pool::HostPool;
use super::stats::{CacheCounters, CacheEvents, StorageOp};
use super::types::CacheError;
use attached::CallInfo;
use guard::break_even::{Part, PrefillSpeed, worth};
use guard::cancel::CancelSet;
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
    FetchNeedsRoom { id: u64, pages: usize },
    /// A fetch has ended, well or not.
    FetchDone(u64),
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
    /// The device pool.
    pub device: Arc<dyn KvPool>,
    /// The host pool.
    pub host: Arc<HostPool>,
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

/// A step of a fetch that a worker takes up.
#[derive(Debug)]
pub(crate) enum FetchStep {
    /// Ask what storage has.
    Query(Arc<Fetch>),
    /// Read it: there is room now.
    Transfer(Arc<Fetch>),
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
        device: Arc<dyn KvPool>,
        host: Arc<HostPool>,
        counters: Arc<CacheCounters>,
        listener: Arc<dyn CacheEvents>,
        waker: Waker,
    ) -> Result<Self, CacheError> {
        let (event_sender, events) = unbounded();
        let (load_sender, load_queue) = unbounded();
        let (copy_sender, copy_queue) = unbounded();
        let (query_sender, query_queue) = unbounded();
        let (batch_sender, batch_queue) = unbounded();
        let (write_sender, write_queue) = unbounded();
        let (stop, stopped) = unbounded::<()>();
        let shared = Arc::new(Shared {
            page_size: device.spec().page_tokens,
            readers: config.prefetch_workers.max(1),
            device,
            host,
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
            for _ in 0..self.copy_workers.min(job.pairs.len().div_ceil(2)) {
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
