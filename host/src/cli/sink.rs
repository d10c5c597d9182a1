//! The cache as the plugin manager sees it.

use std::sync::Arc;

use crate::cache::StorageHandle;
use crate::plugin::backend::{BackendSink, HostPoolDescription, StorageBackend};

/// Passes backends to the cache; knows the policies it was started with.
pub(super) struct CacheSink {
    pub storage: StorageHandle,
    /// `cache.prefetch_policy`
    pub prefetch_policy: String,
    /// `cache.write_policy`
    pub write_policy: String,
}

impl BackendSink for CacheSink {
    fn host_pool(&self) -> Option<HostPoolDescription> {
        self.storage.host_pool()
    }

    fn attached(&self, backend: Arc<dyn StorageBackend>) {
        self.storage.attached(backend);
    }

    fn detached(&self, name: &str) -> bool {
        self.storage.detached(name)
    }

    fn policies(&self) -> (String, String) {
        (self.prefetch_policy.clone(), self.write_policy.clone())
    }

    fn check_policies(&self, prefetch: Option<&str>, write: Option<&str>) -> Result<(), String> {
        let fixed = |key: &str, asked: Option<&str>, used: &str| match asked {
            Some(asked) if asked != used => Err(format!(
                "{key} is {used:?} since the start, and this build does not change it while running (asked for: {asked:?})"
            )),
            _ => Ok(()),
        };
        fixed("cache.prefetch_policy", prefetch, &self.prefetch_policy)?;
        fixed("cache.write_policy", write, &self.write_policy)
    }

    fn set_policies(&self, _prefetch: Option<&str>, _write: Option<&str>) {
        // `check_policies` let only those pass that are in use.
    }
}
