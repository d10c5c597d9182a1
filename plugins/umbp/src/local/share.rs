//! One store of a process, shared by the instances that name the same directories, and by ranks that hold the same bytes.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Weak};
use std::thread::JoinHandle;

use kvdock_plugin_api::{Call, ClearScope, Error, ErrorKind, Health, Host, LogLevel, Pool, Result};
use parking_lot::Mutex;

use super::{Shared, Tiers};
use crate::config::{Config, Role};
use crate::object::{Got, Held, Objects, Put, Read, Stored};

/// Stores that are open, by what instances share them for. While it is locked, none is opened or ended.
static OPEN: LazyLock<Mutex<HashMap<Place, Weak<Running>>>> = LazyLock::new(Mutex::default);

/// What instances share a store for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Place {
    /// Its directories, and whether it follows there: a leader and a follower are two stores.
    Disk(Vec<PathBuf>, bool),
    /// Memory alone: a name of the ranks that share it, and their settings. With others, they have another one.
    Memory(String),
}

impl Place {
    fn of(config: &Config) -> Option<Place> {
        match &config.ssd {
            Some(ssd) => Some(Place::Disk(ssd.dirs.clone(), config.role == Role::Follower)),
            None => config.shared.as_ref().map(|name| Place::Memory(format!("{name} {config:?}"))),
        }
    }
}

/// A store and its threads.
#[derive(Debug)]
struct Running {
    tiers: Shared,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tiers.stop.store(true, Ordering::Release);
        self.tiers.ring();
        for thread in self.threads.drain(..) {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

/// The store as one instance sees it.
#[derive(Debug)]
pub struct Local {
    running: Mutex<Option<Arc<Running>>>,
    tiers: Mutex<Option<Shared>>,
    durable: bool,
    follower: bool,
}

impl Local {
    /// Opens a store, or joins the one that this process has open in the same directories, or for the same ranks.
    ///
    /// # Errors
    /// When memory or directories can't be used.
    pub fn open(config: &Config, host: Host) -> Result<Local> {
        let place = Place::of(config);
        let mut open = OPEN.lock();
        open.retain(|_, running| running.strong_count() > 0);
        let known = place.as_ref().and_then(|place| open.get(place)).and_then(Weak::upgrade);
        let running = match known {
            Some(running) => {
                if running.tiers.config != *config {
                    host.log(
                        LogLevel::Warn,
                        "umbp",
                        "the directory is open in this process with other settings, which stay",
                    );
                }
                running
            }
            None => {
                let running = Arc::new(Running::start(config, host)?);
                if let Some(place) = place {
                    open.insert(place, Arc::downgrade(&running));
                }
                running
            }
        };
        let tiers = running.tiers.clone();
        let follower = tiers.config.role == Role::Follower;
        let durable = tiers.disk.is_some() && !follower;
        Ok(Local { running: Mutex::new(Some(running)), tiers: Mutex::new(Some(tiers)), durable, follower })
    }

    fn tiers(&self) -> Result<Shared> {
        let tiers = self.tiers.lock().clone();
        tiers.ok_or_else(|| Error::new(ErrorKind::Unavailable, "the store is closed"))
    }

    fn leave(&self) {
        let open = OPEN.lock();
        let tiers = self.tiers.lock().take();
        let running = self.running.lock().take();
        drop((running, tiers));
        drop(open);
    }
}

impl Running {
    fn start(config: &Config, host: Host) -> Result<Running> {
        let tiers = Arc::new(Tiers::open(config, host)?);
        let mut running = Running { tiers: tiers.clone(), threads: Vec::new() };
        if let Some(disk) = tiers.disk.as_ref().filter(|_| config.role != Role::Follower) {
            if config.ssd.as_ref().is_some_and(|ssd| ssd.direct)
                && !disk.logs.iter().all(crate::segment::Log::is_direct)
            {
                host.log(
                    LogLevel::Info,
                    "umbp",
                    "the file system has no direct I/O: segments go through the page cache",
                );
            }
            for number in 0..config.pipeline.workers {
                let tiers = tiers.clone();
                let thread = std::thread::Builder::new().name(format!("kvdock-umbp-{number}"));
                let thread = thread.spawn(move || tiers.copy_loop()).map_err(|error| {
                    Error::new(ErrorKind::Unavailable, format!("no thread for copies to disk: {error}"))
                })?;
                running.threads.push(thread);
            }
        }
        Ok(running)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Objects for Local {
    fn exists(&self, names: &[Vec<u8>], _call: &Call<'_>) -> Result<Vec<bool>> {
        Ok(self.tiers()?.exists(names))
    }
    unsafe fn put(&self, puts: &[Put], call: &Call<'_>) -> Result<Vec<Stored>> {
        // SAFETY: passed on to the caller.
        unsafe { self.tiers()?.put(puts, call) }
    }
    unsafe fn get(&self, reads: &[Read], call: &Call<'_>) -> Result<Vec<Got>> {
        // SAFETY: passed on to the caller.
        unsafe { self.tiers()?.get(reads, call) }
    }
    fn remove(&self, names: &[Vec<u8>], _call: &Call<'_>) -> Result<Vec<bool>> {
        self.tiers()?.remove(names)
    }
    fn clear(&self, prefix: &[u8], scope: ClearScope, _call: &Call<'_>) -> Result<()> {
        self.tiers()?.clear(prefix, scope)
    }
    fn flush(&self, call: &Call<'_>) -> Result<()> {
        self.tiers()?.flush(call)
    }
    fn register(&self, _pool: &Pool, _call: &Call<'_>) -> Result<()> {
        Ok(())
    }
    fn unregister(&self, _pool: &Pool) {}
    fn held(&self) -> Held {
        self.tiers().map(|tiers| tiers.held()).unwrap_or_default()
    }
    fn health(&self) -> Health {
        self.tiers().map_or_else(|_| Health::ok(), |tiers| tiers.health())
    }
    fn is_durable(&self) -> bool {
        self.durable
    }
    fn can_remove(&self) -> bool {
        !self.follower
    }
    fn takes_objects(&self) -> bool {
        !self.follower
    }
    fn has_ranges(&self) -> bool {
        true
    }
    fn close(&self, call: &Call<'_>) -> Result<()> {
        let flushed = self.tiers().and_then(|tiers| tiers.flush(call));
        self.leave();
        flushed
    }
}
