//! kvdock's storage plugin that keeps KV pages in a directory.
//!
//! Several processes, models and hosts may share the directory. FORMAT.md says which bytes lie where.

mod config;
mod evict;
mod exists;
mod faults;
mod format;
mod get;
mod health;
mod index;
mod io;
mod keeper;
mod layers;
mod linker;
mod names;
mod pack;
mod remove;
mod root;
mod set;
mod store;
mod walk;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Instant;

use kvdock_plugin_api::v0_1::Stats;
use kvdock_plugin_api::{
    Backend, Batch, Call, Capabilities, ClearScope, Error, ErrorKind, Exists, Get, Health, Open, Pool, Remove, Result,
    Set, export_plugin,
};
use parking_lot::Mutex;

pub use config::SCHEMA;
pub use faults::fail_writes_with;
use store::Store;

/// The backend: a store and its background threads.
#[derive(Debug)]
pub struct FileBackend {
    store: Arc<Store>,
    face: linker::Face,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl FileBackend {
    fn spawn(&self, name: &str, body: fn(&Store)) -> Result<()> {
        let store = self.store.clone();
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || body(&store));
        let thread =
            spawned.map_err(|error| Error::new(ErrorKind::Unavailable, format!("no thread for {name}: {error}")))?;
        self.threads.lock().push(thread);
        Ok(())
    }

    fn stop(&self) {
        self.face.close();
        self.store.request_stop();
        for thread in self.threads.lock().drain(..) {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

impl Drop for FileBackend {
    fn drop(&mut self) {
        self.stop();
        self.store.packs.retire_all();
        self.store.owner.release(&self.store.root());
    }
}

impl Backend for FileBackend {
    type Linker = linker::FileLinker;

    fn open(open: &Open<'_>) -> Result<Self> {
        let backend = FileBackend {
            store: Arc::new(Store::open(open)?),
            face: linker::Face::default(),
            threads: Mutex::default(),
        };
        backend.spawn("kvdock-file-look", Store::first_look)?;
        backend.spawn("kvdock-file-keep", keeper::run)?;
        Ok(backend)
    }

    fn capabilities(&self, declared: Capabilities) -> Capabilities {
        Capabilities { shared: self.store.root().is_shared(), ..declared }
    }

    fn register_mem_pool_host(&self, pool: &Pool) -> Result<()> {
        self.store.register(pool)
    }

    fn register_v2_side_pools(&self, pools: &[Pool]) -> Result<()> {
        pools.iter().try_for_each(|pool| self.store.register(pool))
    }

    fn unregister(&self, pools: &[Pool]) -> Result<()> {
        pools.iter().for_each(|pool| self.store.unregister(pool));
        Ok(())
    }

    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        self.store.exists(exists)
    }

    fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
        self.store.get(&batch)
    }

    fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
        self.store.set(&batch)
    }

    fn batch_remove(&self, batch: Batch<'_, Remove>) -> Result<()> {
        self.store.remove(&batch)
    }

    fn clear(&self, call: &Call<'_>, scope: ClearScope) -> Result<()> {
        self.store.clear(call, scope)
    }

    fn stats(&self, _call: &Call<'_>) -> Result<Stats> {
        let figures = &self.store.figures;
        let mean = |ns: u64, count: u64| ns.checked_div(count).unwrap_or(0);
        let load = |value: &std::sync::atomic::AtomicU64| value.load(Ordering::Relaxed);
        Ok(Stats {
            pages: self.store.index.pages(),
            bytes_used: self.store.bytes_used(),
            bytes_total: self.store.config.max_bytes.unwrap_or(0),
            failures: load(&figures.failures),
            get_mean_ns: mean(load(&figures.get_ns), load(&figures.gets)),
            set_mean_ns: mean(load(&figures.set_ns), load(&figures.sets)),
        })
    }

    fn health(&self, _call: &Call<'_>) -> Result<Health> {
        Ok(self.store.health.report())
    }

    fn flush(&self, _call: &Call<'_>) -> Result<()> {
        let root = self.store.root();
        rustix::fs::syncfs(&root.dir).map_err(|error| {
            Error::new(ErrorKind::Unavailable, format!("{}: {error}", self.store.config.dir.display())).retryable()
        })
    }

    fn close(&self, call: &Call<'_>) -> Result<()> {
        self.stop();
        let until = call.remaining().map(|left| Instant::now() + left / 2);
        self.store.save_uses(&self.store.root(), 0, until);
        Ok(())
    }
}

export_plugin! {
    backend: FileBackend,
    name: "file",
    capabilities: Capabilities {
        remove: true,
        clear_namespace: true,
        clear_everything: true,
        durable: true,
        shared: true,
        checksums: true,
        logical_pools: true,
        ranges: true,
        preferred_batch: 128,
        concurrency: 4,
        ..Capabilities::NONE
    },
    config_schema: config::SCHEMA,
    check_config: config::CHECK_CONFIG,
}
