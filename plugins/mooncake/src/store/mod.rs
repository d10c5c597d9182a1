//! Pages in the store.

mod elsewhere;
mod exists;
pub mod figures;
mod get;
mod gone;
mod items;
pub mod linked;
mod put;
mod remove;
mod session;
mod set;
pub mod shape;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Call, Error, ErrorKind, LogLevel, MemoryKind, Pool, PoolRole, Result};
use parking_lot::{Mutex, RwLock};

use crate::config::Config;
use crate::limit::Limit;
use crate::member::Member;
use crate::names::Names;
use figures::Figures;
use shape::PoolShape;

/// Time of a call for which the host sets none.
pub(crate) const CALL_TIME: Duration = Duration::from_secs(60);
/// How long a page that was said to be there and could not be read counts as missing: its owner may be gone, which the master
/// notices later.
const FORGET_FAILED: Duration = Duration::from_secs(5);
/// How many such pages are remembered.
const MOST_FAILED: usize = 65_536;
/// Names that one question to the master has at most.
const MOST_NAMES: usize = 4096;

/// The object of a page without bytes.
const MARKER: [u8; 1] = *b"1";

/// Pages of one namespace.
#[derive(Debug)]
pub struct Store {
    /// This process in the cluster.
    pub member: Arc<Member>,
    /// The configuration.
    pub config: Config,
    names: Names,
    /// All ranks hold the same bytes, and another one stores them.
    reads_only: bool,
    pools: RwLock<HashMap<u32, PoolShape>>,
    failed: Mutex<HashMap<String, Instant>>,
    /// When it was last said that the store is full.
    full_said: Mutex<Option<Instant>>,
    /// Held for writing while objects become visible together, and for reading by those who look.
    commit: RwLock<()>,
    /// What was counted.
    pub figures: Figures,
}

impl Store {
    /// A store of a namespace. `writer`: this rank stores pages that are the same on all ranks.
    pub fn new(member: Arc<Member>, config: Config, names: Names, writer: bool) -> Store {
        Store {
            member,
            config,
            names,
            reads_only: !writer,
            pools: RwLock::default(),
            failed: Mutex::default(),
            full_said: Mutex::default(),
            commit: RwLock::default(),
            figures: Figures::default(),
        }
    }

    /// Takes a pool.
    ///
    /// # Errors
    /// When its memory is on a device, or its pages have no names.
    pub fn register(&self, pool: &Pool) -> Result<()> {
        let on_host = |kind| matches!(kind, MemoryKind::Host | MemoryKind::CudaPinned);
        if !pool.regions().iter().all(|region| on_host(region.memory_kind)) {
            let text = format!(
                "pool {} ({}): it lies in device memory, this backend moves host memory",
                pool.id(),
                pool.name()
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let objects = self.names.objects(pool)?;
        let replicated = pool.is_replicated() || pool.role() == PoolRole::Anchor;
        let shape = PoolShape::new(pool, objects, self.reads_only && replicated);
        if let Some(rdma) = self.member.peers.rdma().filter(|_| !pool.is_logical()) {
            rdma.register(pool).map_err(|error| {
                let text = format!("pool {} ({}): {error}", pool.id(), pool.name());
                Error::new(ErrorKind::Unavailable, text)
            })?;
        }
        self.pools.write().insert(pool.id(), shape);
        Ok(())
    }

    /// Forgets a pool.
    pub fn unregister(&self, pool: &Pool) {
        self.pools.write().remove(&pool.id());
        if let Some(rdma) = self.member.peers.rdma() {
            rdma.unregister(pool);
        }
    }

    /// Whether the names are another engine's, whose objects lie among this server's own.
    pub fn names_are_foreign(&self) -> bool {
        self.names.are_foreign()
    }

    fn limit<'a>(call: &'a Call<'a>) -> Limit<'a> {
        Limit::of(call, CALL_TIME)
    }

    fn warn(&self, text: &str) {
        self.member.host.log(LogLevel::Warn, "store", text);
    }

    /// A page could not be read although it was said to be there.
    fn note_failed(&self, name: &str) {
        let mut failed = self.failed.lock();
        if failed.len() >= MOST_FAILED {
            failed.retain(|_, at| at.elapsed() < FORGET_FAILED);
            if failed.len() >= MOST_FAILED {
                return;
            }
        }
        failed.insert(name.to_owned(), Instant::now());
    }

    /// A page was stored or read.
    fn note_good(&self, name: &str) {
        let mut failed = self.failed.lock();
        if !failed.is_empty() {
            failed.remove(name);
        }
    }

    /// Whether a page could not be read a moment ago.
    fn failed_lately(&self, name: &str) -> bool {
        let failed = self.failed.lock();
        !failed.is_empty() && failed.get(name).is_some_and(|at| at.elapsed() < FORGET_FAILED)
    }

    fn count(value: &AtomicU64, by: u64) {
        value.fetch_add(by, Ordering::Relaxed);
    }
}
