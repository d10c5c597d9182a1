//! kvdock's storage plugin that keeps KV pages in UMBP: in memory and segment files of this process, in those of a node's server, or in the memory
//! of a cluster that this process is a node of.
//!
//! FORMAT.md says which bytes lie in segment files, PROTOCOL.md what travels between nodes, README.md how to run it.

#![allow(clippy::len_without_is_empty, reason = "lengths in bytes, of things that are not collections")]

mod config;
mod crew;
pub mod distributed;
mod linker;
pub mod local;
mod names;
pub mod object;
pub mod segment;
pub mod standalone;
mod store;
pub mod wire;

use std::sync::Arc;

use kvdock_plugin_api::v0_1::Stats;
use kvdock_plugin_api::{
    Backend, Batch, Call, Capabilities, ClearScope, Error, Exists, Get, Health, HeldPages, LogLevel, Open, Pool,
    Remove, Result, Set, export_plugin,
};

pub use config::SCHEMA;
use config::{Config, Scheme};
use linker::{Face, UmbpLinker};
use names::Names;
use object::Objects;
use store::Store;

/// The backend.
#[derive(Debug)]
pub struct UmbpBackend {
    store: Arc<Store>,
    face: Face,
    /// There is somebody who wants to know what this worker holds.
    reports: bool,
    remote: bool,
}

impl Drop for UmbpBackend {
    fn drop(&mut self) {
        self.face.close();
    }
}

impl Backend for UmbpBackend {
    type Linker = UmbpLinker;

    fn open(open: &Open<'_>) -> Result<Self> {
        let config = Config::read(open)?;
        let (host, name) = (open.host(), open.instance_name());
        if config.scheme == Scheme::Sglang {
            host.log(
                LogLevel::Warn,
                "umbp",
                "names = \"sglang\": these names bind no dtype, layout or weights, and pages carry no seal; only workers of one model with one layout may share this store",
            );
        }
        let objects: Box<dyn Objects> = match (&config.standalone, &config.distributed) {
            (Some(server), _) => {
                Box::new(standalone::Remote::open(server, config.ranges_per_call, name, host, open.call())?)
            }
            (None, Some(cluster)) => {
                Box::new(distributed::Cluster::open(&config, cluster, open.identity(), name, host, open.call())?)
            }
            (None, None) => {
                let local = local::Local::open(&config, host);
                Box::new(
                    local.map_err(|error| Error { message: format!("storage.{name}.{}", error.message), ..error })?,
                )
            }
        };
        let names = Names::new(config.scheme, &config.tag, open.identity());
        let has_name = config.standalone.as_ref().is_some_and(|server| !server.node_id.is_empty());
        let reports = has_name || config.distributed.is_some();
        let remote = config.standalone.is_some() || config.distributed.is_some();
        let store = Arc::new(Store::new(objects, names, host));
        Ok(UmbpBackend { store, face: Face::new(config.cuts), reports, remote })
    }

    fn capabilities(&self, declared: Capabilities) -> Capabilities {
        let objects = &self.store.objects;
        let removes = objects.can_remove();
        Capabilities {
            remove: removes,
            clear_namespace: removes && !self.store.names.prefix().is_empty(),
            // Memory alone is this instance's own, and pages of others are out of its reach.
            clear_everything: removes && objects.is_durable(),
            durable: objects.is_durable(),
            ranges: objects.has_ranges(),
            // Layers are read as ranges of objects.
            linker: objects.has_ranges(),
            checksums: !self.remote,
            held_pages: self.reports,
            ..declared
        }
    }

    fn register_mem_pool_host(&self, pool: &Pool) -> Result<()> {
        self.store.register(pool, &Call::unbounded())
    }

    fn register_v2_side_pools(&self, pools: &[Pool]) -> Result<()> {
        for (done, pool) in pools.iter().enumerate() {
            if let Err(error) = self.store.register(pool, &Call::unbounded()) {
                pools.iter().take(done).for_each(|pool| self.store.unregister(pool));
                return Err(error);
            }
        }
        Ok(())
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
        self.store.objects.clear(self.store.names.prefix(), scope, call)
    }

    fn stats(&self, _call: &Call<'_>) -> Result<Stats> {
        Ok(self.store.stats())
    }

    fn health(&self, _call: &Call<'_>) -> Result<Health> {
        Ok(self.store.objects.health())
    }

    fn flush(&self, call: &Call<'_>) -> Result<()> {
        self.store.objects.flush(call)
    }

    fn report_held_pages(&self, held: &HeldPages<'_>) -> Result<()> {
        self.store.objects.report(held)
    }

    fn close(&self, call: &Call<'_>) -> Result<()> {
        self.face.close();
        self.store.objects.close(call)
    }
}

export_plugin! {
    backend: UmbpBackend,
    name: "umbp",
    capabilities: Capabilities {
        linker: true,
        ranges: true,
        remove: true,
        clear_namespace: true,
        clear_everything: true,
        durable: true,
        checksums: true,
        logical_pools: true,
        held_pages: true,
        preferred_batch: 128,
        concurrency: 4,
        ..Capabilities::NONE
    },
    config_schema: config::SCHEMA,
    check_config: config::CHECK_CONFIG,
}
