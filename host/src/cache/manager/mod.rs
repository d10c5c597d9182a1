//! The face of the cache to the scheduler.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdock_kernels::KvPool;

use super::config::CacheConfig;
use super::stats::{CacheCounters, CacheEvents, CacheStats};
use super::types::{
    Acquire, Admission, CacheError, CacheNamespace, Drained, Flushed, Prefetch, RequestId,
    ReuseHints, Tiers,
};
use crate::plugin::backend::{HostPoolDescription, StorageBackend};

/// Called from worker threads whenever something finished that the scheduler may wait for. Must be
/// cheap and must not call into the cache.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Radix tree, pools and storage controller of one worker. See the module's page for the life of a request.
pub struct CacheManager {
    _private: (),
}

/// The storage tier's switch, for threads other than the scheduler's. Clones share one switch.
#[derive(Clone)]
pub struct StorageHandle {
    _private: (),
}

#[allow(unused_variables)]
impl CacheManager {
    /// Makes an empty cache over `device`, of which it owns all pages, and starts its threads.
    pub fn new(
        config: CacheConfig,
        device: Arc<dyn KvPool>,
        events: Arc<dyn CacheEvents>,
        waker: Waker,
    ) -> Result<Self, CacheError> {
        todo!()
    }

    /// Tokens a page.
    pub fn page_size(&self) -> usize {
        todo!()
    }

    /// Pages in the device pool.
    pub fn device_pages(&self) -> usize {
        todo!()
    }

    /// The switch of the storage tier.
    pub fn storage(&self) -> StorageHandle {
        todo!()
    }

    /// Counters and gauges, for other threads. Gauges are brought up to date by `tick`.
    pub fn counters(&self) -> Arc<CacheCounters> {
        todo!()
    }

    /// Makes a request known: matches `prompt` in device and host, and starts to fetch what is missing
    /// from storage if it is long enough. Beginning a known request again starts it anew (its
    /// grant, if any, must have been given back).
    pub fn begin(
        &mut self,
        request: RequestId,
        prompt: &[u32],
        namespace: &CacheNamespace,
        hints: &ReuseHints,
    ) -> Admission {
        todo!()
    }

    /// Whether `request` still waits for storage. An unknown request is ready.
    pub fn poll(&mut self, request: RequestId) -> Prefetch {
        todo!()
    }

    /// Grants the longest prefix of `tokens` that is in device or host, but never the last token, which
    /// prefill needs. `tokens` is the prompt, or prompt and output after a preemption. Ends a
    /// prefetch that is still running. A request holds at most one grant.
    pub fn acquire(&mut self, request: RequestId, tokens: &[u32]) -> Result<Acquire, CacheError> {
        todo!()
    }

    /// Device pages for new tokens; cached pages that nobody locks make room. None if there are not
    /// enough; then none were taken. The caller owns them until it commits, frees or finishes.
    pub fn alloc_pages(&mut self, count: usize) -> Option<Vec<u32>> {
        todo!()
    }

    /// Gives back pages of `alloc_pages` that were not committed.
    pub fn free_pages(&mut self, pages: &[u32]) {
        todo!()
    }

    /// Device pages that `alloc_pages` could deliver now: free ones and cached ones that nobody locks.
    pub fn available_pages(&self) -> usize {
        todo!()
    }

    /// Takes the whole pages of `tokens` (all tokens of the sequence whose KV is computed) into the tree and
    /// extends the request's lock over them. `pages` is the request's page table from position 0:
    /// granted pages, then pages of `alloc_pages`. Where the tree had the page already, the entry is
    /// replaced by the tree's page and the request's own is freed. Cheap if no page became whole.
    pub fn commit(
        &mut self,
        request: RequestId,
        tokens: &[u32],
        pages: &mut Vec<u32>,
    ) -> Result<(), CacheError> {
        todo!()
    }

    /// Ends a request: commits as `commit` does, unlocks, and frees the pages after the last whole one.
    /// `tokens` and `pages` may be empty for a request that never was granted anything.
    pub fn finish(&mut self, request: RequestId, tokens: &[u32], pages: Vec<u32>) {
        todo!()
    }

    /// Ends a request in any state without committing: unlocks, frees what is not the tree's.
    pub fn abort(&mut self, request: RequestId, pages: Vec<u32>) {
        todo!()
    }

    /// As `finish`, but the request stays known, and `acquire` may be called for it again.
    pub fn preempt(&mut self, request: RequestId, tokens: &[u32], pages: Vec<u32>) {
        todo!()
    }

    /// Takes in what the workers finished. Call when the waker fired; also when no request runs, so that
    /// backups make progress. Returns when to call again at the latest, if retries wait.
    pub fn tick(&mut self) -> Option<Instant> {
        todo!()
    }

    /// Empties tiers of what nobody locks.
    pub fn flush(&mut self, tiers: Tiers) -> Flushed {
        todo!()
    }

    /// The figures now, gauges brought up to date.
    pub fn stats(&mut self) -> CacheStats {
        todo!()
    }

    /// Checks tree, pools and locks against each other: among others, that each page has exactly one owner.
    /// For tests; takes time in proportion to the cache.
    pub fn check_integrity(&mut self) -> Result<(), String> {
        todo!()
    }

    /// Writes outstanding backups to storage, at most until `deadline`. Blocks.
    pub fn drain_backups(&mut self, deadline: Instant) -> Drained {
        todo!()
    }
}

#[allow(unused_variables)]
impl StorageHandle {
    /// What a backend needs to know of the host pool before it is attached. None without a host pool.
    pub fn host_pool(&self) -> Option<HostPoolDescription> {
        todo!()
    }

    /// Puts an opened and registered backend to use, after those already attached; one of the same name is replaced.
    pub fn attached(&self, backend: Arc<dyn StorageBackend>) {
        todo!()
    }

    /// Stops using the backend of this name: no new call is made; running ones are cancelled and their pages
    /// come back when they return. False if there is none.
    pub fn detached(&self, name: &str) -> bool {
        todo!()
    }

    /// Waits until no call into the named backend is running. False if `timeout` passed first.
    pub fn quiesced(&self, name: &str, timeout: Duration) -> bool {
        todo!()
    }

    /// Names of the attached backends, in order.
    pub fn names(&self) -> Vec<String> {
        todo!()
    }
}
