//! A storage plugin that only remembers keys, for measuring what a call through the boundary costs.
//!
//! It is built twice from the same source: as a `.so` that is loaded as any plugin is, and as a module of the
//! benchmark itself. What differs between the two is the boundary alone.

use std::collections::HashSet;
use std::ffi::c_void;
use std::sync::{PoisonError, RwLock};

use kvdock_plugin_api::v0_1::{ErrorOut, ExistsArgs, PageKey, Stats, Status};
use kvdock_plugin_api::{
    Backend, Batch, Call, Capabilities, Exists, Get, NoLinker, Open, PageStatus, Result, Set, export_plugin,
};

/// The keys that were stored, without their pages.
struct Keys {
    stored: RwLock<HashSet<PageKey>>,
}

impl Backend for Keys {
    type Linker = NoLinker<Self>;

    fn open(_: &Open<'_>) -> Result<Self> {
        Ok(Self { stored: RwLock::default() })
    }

    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        let stored = self.stored.read().unwrap_or_else(PoisonError::into_inner);
        let keys = exists.keys();
        for (index, key) in keys.iter().enumerate() {
            let status = if stored.contains(key) { PageStatus::Ok } else { PageStatus::Missing };
            exists.set(0, index, status);
        }
        Ok(())
    }

    fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
        batch.into_pages().for_each(|page| page.finish(PageStatus::Missing));
        Ok(())
    }

    fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
        let mut stored = self.stored.write().unwrap_or_else(PoisonError::into_inner);
        for page in batch.into_pages() {
            stored.insert(*page.key());
            page.finish(PageStatus::Ok);
        }
        Ok(())
    }

    fn stats(&self, _: &Call<'_>) -> Result<Stats> {
        let stored = self.stored.read().unwrap_or_else(PoisonError::into_inner);
        Ok(Stats {
            pages: stored.len() as u64,
            bytes_used: 0,
            bytes_total: 0,
            failures: 0,
            get_mean_ns: 0,
            set_mean_ns: 0,
        })
    }
}

export_plugin! {
    backend: Keys,
    name: "bench-keys",
    capabilities: Capabilities { logical_pools: true, ..Capabilities::NONE },
    config_schema: r#"{"type": "object", "additionalProperties": false}"#,
    check_config: "{}",
}

/// What the table has as `batch_exists`, as a function to link against.
///
/// # Safety
/// As for the function of the table.
pub unsafe fn exists(instance: *mut c_void, args: *const ExistsArgs, error: *mut ErrorOut) -> Status {
    // SAFETY: the caller's promise.
    unsafe { (KVDOCK_TABLE.batch_exists)(instance, args, error) }
}
