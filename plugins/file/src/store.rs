//! The store: one directory, one namespace, the parts that share them.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Call, Error, ErrorKind, Host, LogLevel, MetricKind, Open, Pool, Result};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::config::{Config, IoChoice};
use crate::health::HealthBook;
use crate::index::{Index, Known, PageId, Place};
use crate::io::{Engine, threads::Threads, uring::Uring};
use crate::names::{self, PoolTag};
use crate::pack::{Look, Packs};
use crate::root::{Owner, Root, now_seconds};

/// Pages of this size and more have a file of their own.
pub const FILE_PAGE_BYTES: u64 = 256 << 10;

/// A registered pool as the store sees it.
#[derive(Debug, Clone)]
pub struct PoolInfo {
    /// Its name in files and packs.
    pub tag: PoolTag,
    /// Number of the tag in the index.
    pub tag_number: u16,
    /// Bytes of a page.
    pub page_bytes: u64,
}

impl PoolInfo {
    /// Whether its pages share packs.
    pub fn is_small(&self) -> bool {
        self.page_bytes < FILE_PAGE_BYTES
    }
}

/// Figures since the start.
#[derive(Debug, Default)]
pub struct Figures {
    /// Calls that failed.
    pub failures: AtomicU64,
    /// Number and time of gets.
    pub gets: AtomicU64,
    pub get_ns: AtomicU64,
    /// Number and time of sets.
    pub sets: AtomicU64,
    pub set_ns: AtomicU64,
}

/// Bytes and pages of the other namespaces in the directory.
#[derive(Debug, Default)]
pub struct Foreign {
    /// Bytes.
    pub bytes: AtomicU64,
}

/// The store.
#[derive(Debug)]
pub struct Store {
    pub host: Host,
    pub config: Config,
    pub namespace: [u8; 32],
    namespace_json: String,
    pub owner: Owner,
    root: RwLock<Arc<Root>>,
    pub engine: Engine,
    pub index: Index,
    pub packs: Packs,
    pools: RwLock<HashMap<u32, PoolInfo>>,
    pub health: HealthBook,
    pub figures: Figures,
    pub foreign: Foreign,
    /// Bytes of sets in flight.
    pub pending: AtomicU64,
    pub temp_number: AtomicU64,
    /// Held while room is made.
    pub evicting: Mutex<()>,
    pub undeletable: AtomicU64,
    /// Pages of offloads under way: nobody sees one before all of them are stored.
    hidden: RwLock<HashSet<PageId>>,
    /// Whether the first look at the whole directory is over.
    pub scanned: AtomicBool,
    stop: Mutex<bool>,
    stopped: Condvar,
}

impl Store {
    /// Opens the directory.
    ///
    /// # Errors
    /// When it can't be made or read, or holds another format.
    pub fn open(open: &Open<'_>) -> Result<Store> {
        let config = Config::read(open)?;
        let instance = open.instance_name();
        let identity = open.identity();
        let directory = |error: io::Error| {
            let kind = match error.kind() {
                io::ErrorKind::InvalidData | io::ErrorKind::NotADirectory => ErrorKind::InvalidConfig,
                _ => ErrorKind::Unavailable,
            };
            Error::new(kind, format!("storage.{instance}.dir: {}: {error}", config.dir.display()))
        };
        let root = Root::create(&config.dir, &identity.namespace, &identity.namespace_json).map_err(directory)?;
        let owner = Owner::new();
        // A full or read-only disk is no reason not to read what is on it.
        let unwritable = root.need_folders().and_then(|()| owner.ensure(&root)).err();
        let engine = engine(&config)
            .map_err(|error| Error::new(ErrorKind::Unavailable, format!("storage.{instance}.io: {error}")))?;
        let host = open.host();
        host.log(
            LogLevel::Info,
            "store",
            &format!("pages are kept in {}, moved by {}", config.dir.display(), engine.name()),
        );
        let store = Store {
            host,
            namespace: identity.namespace,
            namespace_json: identity.namespace_json.clone(),
            owner,
            root: RwLock::new(Arc::new(root)),
            engine,
            index: Index::new(),
            packs: Packs::new(),
            pools: RwLock::default(),
            health: HealthBook::new(host),
            figures: Figures::default(),
            foreign: Foreign::default(),
            pending: AtomicU64::new(0),
            temp_number: AtomicU64::new(0),
            evicting: Mutex::new(()),
            undeletable: AtomicU64::new(0),
            hidden: RwLock::default(),
            scanned: AtomicBool::new(false),
            stop: Mutex::new(false),
            stopped: Condvar::new(),
            config,
        };
        if let Some(error) = unwritable {
            store.write_failed(&error, 0);
        }
        Ok(store)
    }

    /// The open directory.
    pub fn root(&self) -> Arc<Root> {
        self.root.read().clone()
    }

    /// The open directory for writing: made again when it has vanished.
    pub fn root_for_writing(&self) -> io::Result<Arc<Root>> {
        let root = self.root();
        if root.is_linked() { Ok(root) } else { self.make_again() }
    }

    /// Makes the directory again and forgets what was in it.
    pub fn make_again(&self) -> io::Result<Arc<Root>> {
        let mut root = self.root.write();
        if !root.is_at(&self.config.dir, &self.namespace) {
            crate::faults::check()?;
            let fresh = Root::create(&self.config.dir, &self.namespace, &self.namespace_json)?;
            fresh.need_folders()?;
            self.owner.ensure(&fresh)?;
            *root = Arc::new(fresh);
            self.packs.forget();
            for shard in 0..=255 {
                self.index.retain(shard, |_, _| false);
            }
            self.host.log(
                LogLevel::Warn,
                "store",
                &format!("{} had vanished and was made again", self.config.dir.display()),
            );
        }
        root.forget_folders();
        root.need_folders()?;
        Ok(root.clone())
    }

    /// Registers a pool.
    pub fn register(&self, pool: &Pool) -> Result<()> {
        if let Some(max) = self.config.max_bytes.filter(|max| pool.page_bytes() > *max) {
            let message = format!(
                "max_bytes = {max}: a page of pool {} has {} bytes, so that none could be stored; give it room for many pages",
                pool.name(),
                pool.page_bytes()
            );
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        let tag = PoolTag::of(pool);
        let tag_number = self.index.tag(&tag.text).ok_or_else(|| {
            Error::new(
                ErrorKind::Unavailable,
                format!("pool {} ({}): the directory has too many kinds of pools", pool.id(), pool.name()),
            )
        })?;
        let info = PoolInfo { tag, tag_number, page_bytes: pool.page_bytes() };
        self.pools.write().insert(pool.id(), info);
        Ok(())
    }

    /// Forgets a pool.
    pub fn unregister(&self, pool: &Pool) {
        self.pools.write().remove(&pool.id());
    }

    /// A registered pool.
    pub fn pool(&self, pool: &Pool) -> Result<PoolInfo> {
        self.pools.read().get(&pool.id()).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("pool {} ({}) is not registered", pool.id(), pool.name()))
        })
    }

    /// Whether a page is part of an offload that is not whole yet.
    pub fn is_hidden(&self, id: &PageId) -> bool {
        let hidden = self.hidden.read();
        !hidden.is_empty() && hidden.contains(id)
    }

    /// Hides pages, or shows them, all at once.
    pub fn hide(&self, pages: &[PageId], hide: bool) {
        let mut hidden = self.hidden.write();
        for id in pages {
            match hide {
                true => drop(hidden.insert(*id)),
                false => drop(hidden.remove(id)),
            }
        }
    }

    /// A registered pool by its tag.
    pub fn pool_of_tag(&self, tag: &str) -> Option<PoolInfo> {
        self.pools.read().values().find(|info| info.tag.text == tag).cloned()
    }

    /// What is known of a page, unless its time is over.
    pub fn known(&self, id: &PageId) -> Option<Known> {
        self.index.get(id).filter(|known| !self.is_expired(known.used))
    }

    /// Whether a page that was used last at `used` is past its time.
    pub fn is_expired(&self, used: u32) -> bool {
        self.config.ttl.is_some_and(|ttl| u64::from(used).saturating_add(ttl.as_secs()) < now_seconds())
    }

    /// What is known of a page in a pack; looks at what other processes have added, once a call.
    pub fn known_small(&self, root: &Root, id: &PageId, looked: &mut bool, call: &Call<'_>) -> Option<Known> {
        let known = self.known(id);
        if known.is_some() || *looked {
            return known;
        }
        *looked = true;
        let until = call.remaining().map(|left| Instant::now() + left);
        // A folder that can't be looked at has no pages for us; a deadline is the caller's to check.
        let _ = self.look_at_packs(root, Look::New, until);
        self.known(id)
    }

    /// Removes a page's file, and the page from the index.
    pub fn remove_file(&self, root: &Root, id: &PageId) -> io::Result<bool> {
        let path = names::page(&id.key, &self.index.tag_text(id.tag));
        let there = match rustix::fs::unlinkat(&root.namespace, path.as_cstr(), rustix::fs::AtFlags::empty()) {
            Ok(()) => true,
            Err(rustix::io::Errno::NOENT) => false,
            Err(error) => return Err(error.into()),
        };
        self.index.remove_if(id, |known| matches!(known.place, Place::File(_)));
        Ok(there)
    }

    /// A page was read and found damaged: it goes, so that it can be written anew.
    pub fn drop_corrupt(&self, root: &Root, pages: &[(PageId, Option<crate::index::PackPlace>, String)]) {
        let mut packed = Vec::new();
        for (id, place, why) in pages {
            let hex = names::Hex(&id.key).to_string();
            self.host.log(
                LogLevel::Warn,
                "store",
                &format!("page {hex} of {} is damaged and has to go: {why}", self.index.tag_text(id.tag)),
            );
            match place {
                Some(place) => packed.push((*id, *place)),
                None => {
                    if let Err(error) = self.remove_file(root, id) {
                        self.host.log(LogLevel::Warn, "store", &format!("page {hex} can't be removed: {error}"));
                    }
                    self.index.remove_if(id, |_| true);
                }
            }
        }
        self.bury_in_packs(root, &mut packed);
        packed.iter().for_each(|(id, place)| self.forget_packed(id, place));
        self.host.metric(MetricKind::CounterAdd, "file_corrupt_pages", "", pages.len() as f64);
    }

    /// Bytes that the directory holds, as far as is known.
    pub fn bytes_used(&self) -> u64 {
        self.index.file_bytes() + self.packs.disk_bytes() + self.foreign.bytes.load(Ordering::Relaxed)
    }

    /// Asks background work to stop.
    pub fn request_stop(&self) {
        *self.stop.lock() = true;
        self.stopped.notify_all();
    }

    /// Whether background work should stop.
    pub fn is_stopping(&self) -> bool {
        *self.stop.lock()
    }

    /// Waits, or less long when background work should stop. Says whether it should.
    pub fn pause(&self, time: Duration) -> bool {
        let mut stop = self.stop.lock();
        if !*stop {
            self.stopped.wait_for(&mut stop, time);
        }
        *stop
    }
}

fn engine(config: &Config) -> io::Result<Engine> {
    match config.io {
        IoChoice::Threads | IoChoice::Auto => Ok(Engine::Threads(Threads::new(config.io_threads)?)),
        IoChoice::Uring => Ok(Engine::Uring(Uring::new(config.io_threads)?)),
    }
}
