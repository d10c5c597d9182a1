//! Pages in the store.

mod exists;
pub mod figures;
mod get;
mod remove;
mod set;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Batch, Call, Error, ErrorKind, MemoryKind, Pool, Result, Transfer};
use parking_lot::{Mutex, RwLock};

use crate::config::Config;
use crate::limit::Limit;
use crate::member::Member;
use crate::names::{Names, pool_tag};
use figures::Figures;

/// Time of a call for which the host sets none.
const CALL_TIME: Duration = Duration::from_secs(60);
/// How long a page that was said to be there and could not be read counts as missing: its owner may be gone, which the master
/// notices later.
const FORGET_FAILED: Duration = Duration::from_secs(5);
/// How many such pages are remembered.
const MOST_FAILED: usize = 65_536;

/// The object of a page without bytes.
const MARKER: [u8; 1] = *b"1";

/// A registered pool.
#[derive(Debug, Clone)]
pub struct PoolInfo {
    tag: Arc<str>,
    /// Bytes of the object of a page.
    len: u64,
    logical: bool,
}

/// Pages of one namespace.
#[derive(Debug)]
pub struct Store {
    pub member: Arc<Member>,
    pub config: Config,
    names: Names,
    pools: RwLock<HashMap<u32, PoolInfo>>,
    failed: Mutex<HashMap<String, Instant>>,
    pub figures: Figures,
}

/// A page of a batch.
struct Item<'a> {
    transfer: &'a Transfer<'a>,
    number: usize,
    name: String,
    len: u64,
    logical: bool,
    pieces: std::ops::Range<usize>,
}

/// The pages of a batch, and the pieces of memory they have.
struct Items<'a> {
    list: Vec<Item<'a>>,
    pieces: Vec<libc::iovec>,
}

impl Items<'_> {
    fn pieces(&self, item: &Item<'_>) -> &[libc::iovec] {
        self.pieces.get(item.pieces.clone()).unwrap_or_default()
    }
}

impl Store {
    /// A store of a namespace.
    pub fn new(member: Arc<Member>, config: Config, namespace: &[u8; 32]) -> Store {
        let names = Names::new(&config.tag, namespace);
        Store { member, config, names, pools: RwLock::default(), failed: Mutex::default(), figures: Figures::default() }
    }

    /// Takes a pool.
    ///
    /// # Errors
    /// When its memory is on a device.
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
        let logical = pool.is_logical();
        let len = if logical { MARKER.len() as u64 } else { pool.page_bytes() };
        let info = PoolInfo { tag: pool_tag(pool).into(), len, logical };
        self.pools.write().insert(pool.id(), info);
        Ok(())
    }

    /// Forgets a pool.
    pub fn unregister(&self, pool: &Pool) {
        self.pools.write().remove(&pool.id());
    }

    fn pool(&self, pool: &Pool) -> Result<PoolInfo> {
        self.pools.read().get(&pool.id()).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("pool {} ({}) is not registered", pool.id(), pool.name()))
        })
    }

    fn limit<'a>(call: &'a Call<'a>) -> Limit<'a> {
        Limit::of(call, CALL_TIME)
    }

    fn items<'a, M>(&self, batch: &'a Batch<'a, M>, with_pieces: bool) -> Result<Items<'a>> {
        let mut items = Items { list: Vec::with_capacity(batch.len()), pieces: Vec::new() };
        for transfer in batch.transfers() {
            let info = self.pool(transfer.pool())?;
            for (number, key) in transfer.keys().iter().enumerate() {
                let start = items.pieces.len();
                if with_pieces && info.logical {
                    // A marker is only ever written.
                    items
                        .pieces
                        .push(libc::iovec { iov_base: MARKER.as_ptr().cast_mut().cast(), iov_len: MARKER.len() });
                } else if with_pieces {
                    let page = transfer.pages().get(number).copied();
                    let page = page.ok_or_else(|| Error::new(ErrorKind::Internal, "the call names no page to move"))?;
                    for segment in 0..transfer.pool().segments().len() {
                        let (base, len) = transfer.pool().piece(page, segment)?;
                        items.pieces.push(libc::iovec { iov_base: base.cast(), iov_len: len });
                    }
                }
                let (name, pieces) = (self.names.page(&info.tag, key), start..items.pieces.len());
                items.list.push(Item { transfer, number, name, len: info.len, logical: info.logical, pieces });
            }
        }
        Ok(items)
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
