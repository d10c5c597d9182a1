//! A storage plugin that keeps KV pages in the memory of the process.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kvdock_plugin_api::v0_1::Stats;
use kvdock_plugin_api::{
    Backend, Batch, Call, Capabilities, ClearScope, Error, Exists, Get, Health, HealthState, LogLevel, NoLinker, Open,
    PageKey, PageStatus, Remove, Result, Set, export_plugin,
};
use serde::Deserialize;

/// The configuration; the schema in the note says the same in JSON Schema.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default = "one_gib")]
    max_bytes: u64,
}

fn one_gib() -> u64 {
    1 << 30
}

/// Stored pages: name of the pool, then key. A page of a logical pool is a marker, a page without bytes.
#[derive(Default)]
struct Store {
    pools: HashMap<String, HashMap<PageKey, Vec<u8>>>,
    bytes: u64,
}

impl Store {
    fn page(&self, pool: &str, key: &PageKey) -> Option<&Vec<u8>> {
        self.pools.get(pool)?.get(key)
    }
}

struct Memory {
    max_bytes: u64,
    store: RwLock<Store>,
}

impl Memory {
    // A call that panicked fails the instance; what it left behind is still whole pages.
    fn read(&self) -> RwLockReadGuard<'_, Store> {
        self.store.read().unwrap_or_else(PoisonError::into_inner)
    }
    fn write(&self) -> RwLockWriteGuard<'_, Store> {
        self.store.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for Memory {
    type Linker = NoLinker<Self>;

    fn open(open: &Open<'_>) -> Result<Self> {
        let config: Config = open.config()?;
        open.host().log(LogLevel::Info, "open", &format!("keeps up to {} bytes in memory", config.max_bytes));
        Ok(Memory { max_bytes: config.max_bytes, store: RwLock::default() })
    }

    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        exists.call().check()?;
        let store = self.read();
        let keys = exists.keys();
        let pools: Vec<String> = exists.pools().iter().map(|query| query.pool.name().to_owned()).collect();
        for (pool, name) in pools.iter().enumerate() {
            for (index, key) in keys.iter().enumerate() {
                if store.page(name, key).is_some() {
                    exists.set(pool, index, PageStatus::Ok);
                }
            }
        }
        Ok(())
    }

    fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
        let call = *batch.call();
        let store = self.read();
        for page in batch.into_pages() {
            call.check()?;
            match store.page(page.pool().name(), page.key()) {
                Some(bytes) => page.fill(bytes),
                None => page.finish(PageStatus::Missing),
            }
        }
        Ok(())
    }

    fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
        let call = *batch.call();
        for page in batch.into_pages() {
            call.check()?;
            let bytes = page.to_vec()?;
            let mut store = self.write();
            if store.page(page.pool().name(), page.key()).is_some() {
                page.finish(PageStatus::Ok);
                continue;
            }
            let after = store.bytes + bytes.len() as u64;
            if after > self.max_bytes {
                page.finish(PageStatus::Refused);
                continue;
            }
            store.bytes = after;
            store.pools.entry(page.pool().name().to_owned()).or_default().insert(*page.key(), bytes);
            page.finish(PageStatus::Ok);
        }
        Ok(())
    }

    fn batch_remove(&self, batch: Batch<'_, Remove>) -> Result<()> {
        let mut store = self.write();
        for page in batch.into_pages() {
            let removed = store.pools.get_mut(page.pool().name()).and_then(|pool| pool.remove(page.key()));
            store.bytes -= removed.as_ref().map_or(0, |bytes| bytes.len() as u64);
            page.finish(if removed.is_some() { PageStatus::Ok } else { PageStatus::Missing });
        }
        Ok(())
    }

    fn clear(&self, _call: &Call<'_>, scope: ClearScope) -> Result<()> {
        match scope {
            // An instance serves one worker, so all it has is of one namespace.
            ClearScope::Namespace => *self.write() = Store::default(),
            ClearScope::Everything => return Err(Error::unsupported("clearing other namespaces")),
        }
        Ok(())
    }

    fn stats(&self, _call: &Call<'_>) -> Result<Stats> {
        let store = self.read();
        Ok(Stats {
            pages: store.pools.values().map(|pool| pool.len() as u64).sum(),
            bytes_used: store.bytes,
            bytes_total: self.max_bytes,
            failures: 0,
            get_mean_ns: 0,
            set_mean_ns: 0,
        })
    }

    fn health(&self, _call: &Call<'_>) -> Result<Health> {
        if self.read().bytes * 100 >= self.max_bytes * 99 {
            return Ok(Health { state: HealthState::Degraded, reason: "less than 1% of max_bytes is free".into() });
        }
        Ok(Health::ok())
    }
}

export_plugin! {
    backend: Memory,
    name: "rust-memory",
    capabilities: Capabilities {
        remove: true,
        clear_namespace: true,
        logical_pools: true,
        ..Capabilities::NONE
    },
    config_schema: r#"{
        "type": "object",
        "properties": {
            "max_bytes": {
                "type": "integer", "minimum": 1, "default": 1073741824,
                "description": "Bytes of pages that it keeps"
            }
        },
        "additionalProperties": false
    }"#,
    check_config: r#"{"max_bytes": 67108864}"#,
}

#[cfg(test)]
mod tests {
    use kvdock_plugin_api::mock::{MockHost, MockPool, Options, Part, PoolSpec, Query, identity, key, table_of};

    use super::*;

    #[test]
    fn a_page_comes_back() -> Result<()> {
        // Eight pages of two pieces each, and the host's seal.
        let pool = MockPool::new(PoolSpec::bytes(0, "kv", 8, &[4096, 4096]).with_seal(64));
        let table = table_of(kvdock_plugin_entry)?;
        let store = MockHost::new().attach(table, "{}", &identity("a model"), &[&pool])?;
        let options = Options::default();

        pool.fill(3, 42);
        assert!(store.set(&options, &[Part::new(&pool, &[key(1)], &[3])]).all_ok());
        assert_eq!(store.exists(&options, &[key(1), key(2)], &[Query::of(&pool)])?.longest(), 1);

        let got = store.get(&options, &[Part::new(&pool, &[key(1), key(2)], &[5, 6])]);
        assert_eq!(got.statuses, [[PageStatus::Ok, PageStatus::Missing]]);
        assert!(pool.holds(5, 42));
        store.close()
    }

    #[test]
    fn a_full_store_refuses() -> Result<()> {
        let pool = MockPool::new(PoolSpec::bytes(0, "kv", 8, &[4096]));
        let table = table_of(kvdock_plugin_entry)?;
        let store = MockHost::new().attach(table, r#"{"max_bytes": 5000}"#, &identity("a model"), &[&pool])?;
        let set = store.set(&Options::default(), &[Part::new(&pool, &[key(1), key(2)], &[0, 1])]);
        assert_eq!(set.statuses, [[PageStatus::Ok, PageStatus::Refused]]);
        assert_eq!(store.stats()?.pages, 1);
        store.close()
    }
}
