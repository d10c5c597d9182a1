//! kvdock's storage plugin that keeps KV pages in a Mooncake Store, beside clients of other engines.
//!
//! It speaks the store's own protocols; PROTOCOL.md says which bytes travel, README.md how to run it.

mod config;
pub mod data;
pub mod limit;
mod linker;
mod member;
pub mod metadata;
pub mod names;
mod net;
pub mod rpc;
pub mod serve;
pub mod store;
pub mod wire;

use std::sync::Arc;
use std::time::Duration;

use kvdock_plugin_api::v0_1::Stats;
use kvdock_plugin_api::{
    Backend, Batch, Call, Capabilities, ClearScope, Error, Exists, Get, Health, LogLevel, Open, Pool, Remove, Result,
    Set, export_plugin,
};

use config::Config;
pub use config::SCHEMA;
use limit::Limit;
use linker::{Face, MooncakeLinker};
use member::Member;
use names::Names;
use store::Store;

/// Time to start when the host sets none.
const START: Duration = Duration::from_secs(60);
/// Time for figures.
const FIGURES: Duration = Duration::from_secs(2);

/// The backend: a member of the cluster, and the pages of one namespace.
#[derive(Debug)]
pub struct MooncakeBackend {
    store: Arc<Store>,
    face: Face,
}

impl Drop for MooncakeBackend {
    fn drop(&mut self) {
        self.face.close();
        // The heartbeat holds the member too: it has to be told.
        self.store.member.leave();
    }
}

impl Backend for MooncakeBackend {
    type Linker = MooncakeLinker;

    fn open(open: &Open<'_>) -> Result<Self> {
        let config = Config::read(open)?;
        let identity = open.identity();
        let ranks = u64::from(identity.tp.1) * u64::from(identity.pp.1) * u64::from(identity.cp.1);
        let limit = Limit::of(open.call(), START);
        let named =
            |error: Error| Error { message: format!("storage.{}: {}", open.instance_name(), error.message), ..error };
        let names = Names::of(&config.tag, identity, open.cache_mode()).map_err(named)?;
        let member = Member::join(&config, ranks, open.host(), &limit).map_err(named)?;
        for note in &config.notes {
            let level = if note.warns { LogLevel::Warn } else { LogLevel::Info };
            open.host().log(level, "config", &note.text);
        }
        if names.are_foreign() {
            let text = "key_scheme = \"sglang\": names bind the model's name, rank and pool, but no weights, element type, layout or page \
                        size, and objects carry no seal: whoever stores other bytes under them is believed";
            open.host().log(LogLevel::Warn, "store", text);
        }
        let writer = identity.writer || !identity.replicated;
        let store = Arc::new(Store::new(member, config, names, writer));
        Ok(MooncakeBackend { store, face: Face::default() })
    }

    fn capabilities(&self, declared: Capabilities) -> Capabilities {
        // Names of another engine do not say whose they are.
        let clear_namespace = declared.clear_namespace && !self.store.names_are_foreign();
        Capabilities { clear_namespace, ..declared }
    }

    fn register_mem_pool_host(&self, pool: &Pool) -> Result<()> {
        self.store.register(pool)
    }

    fn register_v2_side_pools(&self, pools: &[Pool]) -> Result<()> {
        if let Err(error) = pools.iter().try_for_each(|pool| self.store.register(pool)) {
            pools.iter().for_each(|pool| self.store.unregister(pool));
            return Err(error);
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
        self.store.clear(call, scope)
    }

    fn stats(&self, call: &Call<'_>) -> Result<Stats> {
        let config = &self.store.config;
        let master = self.store.member.master.address();
        Ok(self.store.figures.stats(master.host(), config.metrics_port, &Limit::of(call, FIGURES)))
    }

    fn health(&self, _call: &Call<'_>) -> Result<Health> {
        Ok(self.store.member.state.report())
    }

    fn close(&self, _call: &Call<'_>) -> Result<()> {
        self.face.close();
        self.store.member.leave();
        Ok(())
    }
}

export_plugin! {
    backend: MooncakeBackend,
    name: "mooncake",
    capabilities: Capabilities {
        linker: true,
        ranges: true,
        remove: true,
        clear_namespace: true,
        shared: true,
        logical_pools: true,
        preferred_batch: 128,
        concurrency: 4,
        ..Capabilities::NONE
    },
    config_schema: config::SCHEMA,
    check_config: config::CHECK_CONFIG,
}
