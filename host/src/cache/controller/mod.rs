//! The threads that move pages: copies between device and host, reads and writes of storage.
//!
//! The scheduler hands jobs down and takes events up; the two share nothing of the tree. A job owns
//! copies of the keys and page numbers it works on, so whatever happens to the tree meanwhile, it
//! reads and writes its own pages. Every job ends in exactly one event, whatever fails.

mod attached;
mod backup;
mod belief;
mod copy;
mod prefetch;
mod registry;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use kvdock_kernels::KvPool;

pub(crate) use attached::CancelSet;
pub(crate) use backup::{StoreJob, StoreReport};
pub(crate) use copy::{BackupJob, LoadJob, copy_in, copy_out};
pub(crate) use prefetch::Fetch;
pub(crate) use registry::Registry;

use super::config::{CacheConfig, PolicyUpdate};
use super::pool::HostPool;
use super::stats::{CacheCounters, CacheEvents};
use super::types::CacheError;
use attached::Way;
use prefetch::Batch;

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
    /// Backends made durable what they have.
    Flushed,
    /// A backend came, went or was emptied.
    StorageChanged,
    /// Settings changed.
    Policies(PolicyUpdate),
}

/// A job of the storage writers.
#[derive(Debug)]
pub(crate) enum WriteJob {
    /// Store pages.
    Store(StoreJob),
    /// Make durable what was stored.
    Flush,
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

impl Shared {
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
        };
        for number in 0..controller.copy_workers {
            controller.spawn(format!("kvdock-copy-{number}"), copy::work)?;
        }
        for number in 0..config.prefetch_workers.max(1) {
            let stopped = stopped.clone();
            controller.spawn(format!("kvdock-read-{number}"), move |shared| read_storage(shared, &stopped))?;
        }
        for number in 0..config.backup_workers.max(1) {
            controller.spawn(format!("kvdock-write-{number}"), write_storage)?;
        }
        Ok(controller)
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
                Ok(batch) => prefetch::read(shared, &batch),
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
            WriteJob::Flush => {
                for attached in shared.registry.current().iter() {
                    let result =
                        attached.call(Way::Write, &CancelSet::default(), |backend, options| backend.flush(options));
                    if let Err(fault) = result {
                        tracing::warn!(backend = attached.name(), ?fault, "storage could not be flushed");
                    }
                }
                shared.send(Event::Flushed);
            }
        }
    }
}
