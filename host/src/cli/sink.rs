//! The cache as the plugin manager sees it.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::cache::{PolicyUpdate, PrefetchPolicy, StorageHandle, WritePolicy};
use crate::plugin::backend::{
    BackendSink, CacheMode, DevicePools, GuardReport, HostPoolDescription, Place, PolicyChange, StorageBackend,
};

/// Passes backends and policies to the cache, and remembers the policies in use.
pub(super) struct CacheSink {
    storage: StorageHandle,
    linked: bool,
    policies: Mutex<(PrefetchPolicy, WritePolicy)>,
}

impl CacheSink {
    /// A sink for a cache that was started with these policies.
    pub fn new(storage: StorageHandle, linked: bool, prefetch: PrefetchPolicy, write: WritePolicy) -> Self {
        CacheSink { storage, linked, policies: Mutex::new((prefetch, write)) }
    }
}

fn parse(change: &PolicyChange) -> Result<PolicyUpdate, String> {
    let wrong = |error: crate::cache::CacheError| error.to_string();
    Ok(PolicyUpdate {
        prefetch_policy: change.prefetch.as_deref().map(str::parse).transpose().map_err(wrong)?,
        write_policy: change.write.as_deref().map(str::parse).transpose().map_err(wrong)?,
        prefetch_threshold: change.prefetch_threshold,
        prefetch_timeout_base: change.prefetch_timeout_base,
        prefetch_timeout_per_ki_token: change.prefetch_timeout_per_ki_token,
        break_even: None,
    })
}

impl BackendSink for CacheSink {
    fn host_pools(&self) -> Vec<HostPoolDescription> {
        self.storage.host_pools()
    }

    fn cache_mode(&self) -> CacheMode {
        if self.linked { CacheMode::Linker } else { CacheMode::Hierarchical }
    }

    fn rank_pools(&self) -> Vec<Vec<HostPoolDescription>> {
        self.storage.rank_pools()
    }

    fn device_pools(&self) -> Option<DevicePools> {
        self.storage.device_pools()
    }

    fn attached(&self, backend: Arc<dyn StorageBackend>, place: Place) {
        self.storage.attached(backend, place);
    }

    fn detached(&self, name: &str) -> bool {
        self.storage.detached(name)
    }

    fn emptied(&self, name: &str) {
        self.storage.emptied(name);
    }

    fn guards(&self, name: &str) -> Option<GuardReport> {
        self.storage.guards(name)
    }

    fn policies(&self) -> (String, String) {
        let (prefetch, write) = *self.policies.lock();
        (prefetch.to_string(), write.to_string())
    }

    fn check_policies(&self, change: &PolicyChange) -> Result<(), String> {
        let update = parse(change)?;
        if self.linked && update.write_policy == Some(WritePolicy::WriteBack) {
            return Err(
                "write_back keeps pages in the host tier, and cache.mode = \"linker\" has none; set write_through or \
                        write_through_selective"
                    .into(),
            );
        }
        Ok(())
    }

    fn set_policies(&self, change: &PolicyChange) {
        // `check_policies` let only those pass that can be read.
        let Ok(update) = parse(change) else { return };
        let mut policies = self.policies.lock();
        policies.0 = update.prefetch_policy.unwrap_or(policies.0);
        policies.1 = update.write_policy.unwrap_or(policies.1);
        drop(policies);
        self.storage.update_policies(update);
    }
}
