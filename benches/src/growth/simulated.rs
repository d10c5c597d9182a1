//! Pools and stores without bytes: what is measured is the cache's own work and memory.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdock::plugin::backend::{
    BackendError, BackendLimits, BackendSettings, BackendStats, CallOptions, ChainInfo, Held, PageKey, PageStatus,
    PoolGroup, Restorable, StorageBackend,
};
use kvdock_kernels::{HostPage, KernelError, KvDtype, KvPool, KvSpec};

/// Tokens of a page, as the server's default.
pub const PAGE: usize = 16;

/// A device pool of pages that hold nothing.
pub struct Pool(KvSpec);

impl Pool {
    /// With so many pages. A page has as few bytes as one can have, since the host pool below is real.
    pub fn new(pages: usize) -> Self {
        let dtype = KvDtype::F16;
        Self(KvSpec { layers: 1, kv_heads: 1, head_dim_k: 1, head_dim_v: 1, page_tokens: PAGE, pages, dtype })
    }
}

impl KvPool for Pool {
    fn spec(&self) -> &KvSpec {
        &self.0
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    unsafe fn copy_layer_out(&self, _: u32, _: usize, _: &HostPage) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn copy_layer_in(&self, _: u32, _: usize, _: &HostPage) -> Result<(), KernelError> {
        Ok(())
    }
}

static GENERATION: AtomicU64 = AtomicU64::new(1);

/// A backend that takes every page at once and keeps none.
pub struct Store {
    name: String,
    generation: u64,
    settings: BackendSettings,
}

impl Store {
    /// Under a name of its own.
    pub fn new(name: String) -> Self {
        let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
        Self { name, generation, settings: BackendSettings::default() }
    }
}

impl StorageBackend for Store {
    fn name(&self) -> &str {
        &self.name
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn limits(&self) -> BackendLimits {
        BackendLimits { preferred_batch: 128, concurrency: 2, remove: false, durable: false }
    }

    fn settings(&self) -> &BackendSettings {
        &self.settings
    }

    fn batch_exists(
        &self,
        _: &CallOptions,
        keys: &[PageKey],
        _: &Held,
        _: &ChainInfo<'_>,
    ) -> Result<Restorable, BackendError> {
        Ok(Restorable::up_to(0, keys.len()))
    }

    fn batch_get(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        _: &[u32],
        _: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        status.fill(PageStatus::Missing);
        Ok(())
    }

    fn batch_set(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        _: &[u32],
        _: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        status.fill(PageStatus::Ok);
        Ok(())
    }

    fn batch_remove(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        status.fill(PageStatus::Missing);
        Ok(())
    }

    fn flush(&self, _: &CallOptions) -> Result<(), BackendError> {
        Ok(())
    }

    fn clear(&self, _: &CallOptions) -> Result<(), BackendError> {
        Ok(())
    }

    fn stats(&self) -> Result<BackendStats, BackendError> {
        Ok(BackendStats::default())
    }

    fn reclaim(&self, _: PoolGroup) -> Vec<u32> {
        Vec::new()
    }

    fn quarantined(&self) -> usize {
        0
    }
}
