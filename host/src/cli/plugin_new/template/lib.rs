//! A storage plugin for kvdock: every KV page is a file.
//!
//! `store.rs` is the store and knows nothing of kvdock: put yours in its place. This file is what
//! kvdock calls. It runs on several threads at once, every call has a deadline, and every page
//! gets a status of its own.

mod store;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdock_plugin_api::v0_1::Stats;
use kvdock_plugin_api::{
    Backend, Batch, Call, Capabilities, ClearScope, Error, ErrorKind, Exists, Get, Health,
    HealthState, Host, LogLevel, NoLinker, Open, Page, PageStatus, Pool, Remove, Result, Set,
    export_plugin,
};
use serde::Deserialize;

use store::{Store, Written};

/// The keys under `storage.{{name}}` of kvdock's configuration. The schema below says the same in
/// JSON Schema: kvdock checks the keys by it before it opens the plugin. A key that the user
/// leaves out is left out here too.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    dir: PathBuf,
    #[serde(default = "ten_gib")]
    max_bytes: u64,
}

fn ten_gib() -> u64 {
    10 << 30
}

/// One open instance. There may be several in a process: kvdock opens a new one beside the old
/// when an operator replaces a backend.
struct Plugin {
    store: Store,
    failures: AtomicU64,
    host: Host,
}

impl Plugin {
    /// Counts and logs what went wrong with one page; the others of the call go on.
    fn failed(&self, what: &str, error: &std::io::Error) -> PageStatus {
        if self.failures.fetch_add(1, Ordering::Relaxed) == 0 {
            // Once: a broken disk fails every page, and kvdock counts failed pages itself.
            self.host.log(
                LogLevel::Error,
                what,
                &format!("{}: {error}", self.store.folder().display()),
            );
        }
        PageStatus::Failed
    }

    fn read(&self, page: &mut Page<'_, Get>) -> std::io::Result<PageStatus> {
        let Some(mut file) = self.store.find(page.pool().name(), page.key())? else {
            return Ok(PageStatus::Missing);
        };
        if file.len() != page.len() as u64 {
            return Ok(PageStatus::Corrupt);
        }
        // A page is a few pieces of kvdock's memory. Fill them in their order; the last may be
        // kvdock's seal, which is payload too.
        for index in 0..page.piece_count() {
            file.read_exact(page.piece_mut(index).map_err(std::io::Error::other)?)?;
        }
        Ok(PageStatus::Ok)
    }

    fn write(&self, page: &Page<'_, Set>) -> std::io::Result<PageStatus> {
        let pieces = (0..page.piece_count())
            .map(|index| page.piece_bytes(index))
            .collect::<Result<Vec<_>>>();
        Ok(
            match self.store.put(
                page.pool().name(),
                page.key(),
                &pieces.map_err(std::io::Error::other)?,
            )? {
                // The same key means the same bytes.
                Written::New | Written::ThereAlready => PageStatus::Ok,
                Written::NoRoom => PageStatus::Refused,
            },
        )
    }
}

/// An error of a whole call. Its kind is for kvdock, its message for a person: what is wrong,
/// where, and what would be right.
fn unavailable(what: &str, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{what}: {error}"))
}

impl Backend for Plugin {
    type Linker = NoLinker<Self>;

    fn open(open: &Open<'_>) -> Result<Self> {
        let config: Config = open.config()?;
        // Pages of another model, or of other kernels, have another namespace, and must never be
        // given out.
        let namespace: String = open
            .identity()
            .namespace
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let store = Store::open(&config.dir, &namespace, config.max_bytes).map_err(|error| {
            let key = format!("storage.{}.dir", open.instance_name());
            Error::new(
                ErrorKind::InvalidConfig,
                format!("{key}: {}: {error}", config.dir.display()),
            )
        })?;
        let (pages, bytes) = store.usage();
        let message = format!(
            "{} has {pages} pages of this model, {bytes} bytes",
            config.dir.display()
        );
        open.host().log(LogLevel::Info, "open", &message);
        Ok(Plugin {
            store,
            failures: AtomicU64::new(0),
            host: open.host(),
        })
    }

    fn register_mem_pool_host(&self, pool: &Pool) -> Result<()> {
        self.store
            .add_pool(pool.name())
            .map_err(|error| unavailable(&format!("pool {}", pool.name()), &error))
    }

    fn register_v2_side_pools(&self, pools: &[Pool]) -> Result<()> {
        pools
            .iter()
            .try_for_each(|pool| self.register_mem_pool_host(pool))
    }

    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        let keys = exists.keys();
        let pools: Vec<Pool> = exists
            .pools()
            .iter()
            .map(|query| query.pool.clone())
            .collect();
        for (number, pool) in pools.iter().enumerate() {
            for (index, key) in keys.iter().enumerate() {
                exists.call().check()?;
                // Pages that are not spoken of count as missing.
                if let Ok(Some(file)) = self.store.find(pool.name(), key)
                    && file.len() == pool.page_bytes()
                {
                    exists.set(number, index, PageStatus::Ok);
                }
            }
        }
        Ok(())
    }

    fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
        let call = *batch.call();
        for mut page in batch.into_pages() {
            // Fails when the deadline has passed or kvdock cancelled the call.
            call.check()?;
            let status = self
                .read(&mut page)
                .unwrap_or_else(|error| self.failed("read", &error));
            page.finish(status);
        }
        Ok(())
    }

    fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
        let call = *batch.call();
        for page in batch.into_pages() {
            call.check()?;
            let status = self
                .write(&page)
                .unwrap_or_else(|error| self.failed("write", &error));
            page.finish(status);
        }
        Ok(())
    }

    fn batch_remove(&self, batch: Batch<'_, Remove>) -> Result<()> {
        let call = *batch.call();
        for page in batch.into_pages() {
            call.check()?;
            let status = match self.store.remove(page.pool().name(), page.key()) {
                Ok(true) => PageStatus::Ok,
                Ok(false) => PageStatus::Missing,
                Err(error) => self.failed("remove", &error),
            };
            page.finish(status);
        }
        Ok(())
    }

    fn clear(&self, call: &Call<'_>, scope: ClearScope) -> Result<()> {
        match scope {
            ClearScope::Namespace => self
                .store
                .clear(|| call.check().is_ok())
                .map_err(|e| unavailable("clear", &e))?,
            ClearScope::Everything => return Err(Error::unsupported("clearing other namespaces")),
        }
        call.check()
    }

    fn stats(&self, _call: &Call<'_>) -> Result<Stats> {
        let (pages, bytes_used) = self.store.usage();
        Ok(Stats {
            pages,
            bytes_used,
            bytes_total: self.store.max_bytes(),
            failures: self.failures.load(Ordering::Relaxed),
            // 0: not known. kvdock times every call itself.
            get_mean_ns: 0,
            set_mean_ns: 0,
        })
    }

    fn health(&self, _call: &Call<'_>) -> Result<Health> {
        let state = |state, reason: String| Ok(Health { state, reason });
        if let Err(error) = self.store.try_writing() {
            return state(
                HealthState::Degraded,
                format!("{}: {error}", self.store.folder().display()),
            );
        }
        if self.store.usage().1 > self.store.max_bytes() / 100 * 99 {
            return state(
                HealthState::Degraded,
                "less than 1% of max_bytes is free".to_owned(),
            );
        }
        Ok(Health::ok())
    }
}

// Says what the plugin is, in a part of the file that kvdock reads before any of this code runs.
// Declare only what you keep: a capability that is declared is used.
export_plugin! {
    backend: Plugin,
    name: "{{name}}",
    capabilities: Capabilities {
        remove: true,
        clear_namespace: true,
        // Pages outlive the process, also one that is killed: the system has them once they are
        // renamed. A power cut is not meant by it.
        durable: true,
        logical_pools: true,
        concurrency: 4,
        ..Capabilities::NONE
    },
    config_schema: r#"{
        "type": "object",
        "properties": {
            "dir": {
                "type": "string", "minLength": 1,
                "description": "Folder for the pages; it is made when it is not there"
            },
            "max_bytes": {
                "type": "integer", "minimum": 1, "default": 10737418240,
                "description": "Bytes of pages that it keeps for a model"
            }
        },
        "required": ["dir"],
        "additionalProperties": false
    }"#,
    // For `kvdock plugin check` and `kvdock plugin bench`: {scratch} becomes a fresh folder.
    check_config: r#"{"dir": "{scratch}/pages"}"#,
}
