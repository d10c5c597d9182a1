//! A plugin written against 0.1 as it was released. It stays as it is: what it uses is what 0.1 promises.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use kvdock_plugin_api::v0_1::Stats;
use kvdock_plugin_api::{
    Backend, Batch, Call, Capabilities, ClearScope, Error, Exists, Get, NoLinker, Open, PageKey, PageStatus, Remove,
    Result, Set, export_plugin,
};

/// Pages by pool and key.
#[derive(Default)]
struct Memory {
    pages: RwLock<HashMap<(String, PageKey), Vec<u8>>>,
}

impl Backend for Memory {
    type Linker = NoLinker<Self>;

    fn open(_: &Open<'_>) -> Result<Self> {
        Ok(Memory::default())
    }

    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        let pages = self.pages.read().unwrap_or_else(PoisonError::into_inner);
        let keys = exists.keys();
        let pools: Vec<String> = exists.pools().iter().map(|query| query.pool.name().to_owned()).collect();
        for (pool, name) in pools.iter().enumerate() {
            for (index, key) in keys.iter().enumerate() {
                if pages.contains_key(&(name.clone(), *key)) {
                    exists.set(pool, index, PageStatus::Ok);
                }
            }
        }
        Ok(())
    }

    fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
        let pages = self.pages.read().unwrap_or_else(PoisonError::into_inner);
        for page in batch.into_pages() {
            match pages.get(&(page.pool().name().to_owned(), *page.key())) {
                Some(bytes) => page.fill(bytes),
                None => page.finish(PageStatus::Missing),
            }
        }
        Ok(())
    }

    fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
        let mut pages = self.pages.write().unwrap_or_else(PoisonError::into_inner);
        for page in batch.into_pages() {
            let bytes = page.to_vec()?;
            pages.entry((page.pool().name().to_owned(), *page.key())).or_insert(bytes);
            page.finish(PageStatus::Ok);
        }
        Ok(())
    }

    fn batch_remove(&self, batch: Batch<'_, Remove>) -> Result<()> {
        let mut pages = self.pages.write().unwrap_or_else(PoisonError::into_inner);
        for page in batch.into_pages() {
            pages.remove(&(page.pool().name().to_owned(), *page.key()));
            page.finish(PageStatus::Ok);
        }
        Ok(())
    }

    fn clear(&self, _: &Call<'_>, scope: ClearScope) -> Result<()> {
        if scope != ClearScope::Namespace {
            return Err(Error::unsupported("clearing more than the namespace"));
        }
        self.pages.write().unwrap_or_else(PoisonError::into_inner).clear();
        Ok(())
    }

    fn stats(&self, _: &Call<'_>) -> Result<Stats> {
        let pages = self.pages.read().unwrap_or_else(PoisonError::into_inner);
        let bytes_used = pages.values().map(|bytes| bytes.len() as u64).sum();
        let pages = pages.len() as u64;
        Ok(Stats { pages, bytes_used, bytes_total: 0, failures: 0, get_mean_ns: 0, set_mean_ns: 0 })
    }
}

export_plugin! {
    backend: Memory,
    name: "frozen-rust",
    capabilities: Capabilities { remove: true, clear_namespace: true, logical_pools: true, ..Capabilities::NONE },
    config_schema: r#"{"type": "object", "additionalProperties": false}"#,
    check_config: "{}",
}
