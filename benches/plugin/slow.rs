//! A storage plugin in memory that takes a given time for each page that is read, or for each layer of a load: a storage that is slower than
//! computing.

#[path = "paced.rs"]
mod paced;

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::Duration;

use kvdock_plugin_api::v0_1::{PageKey, Stats};
use kvdock_plugin_api::{
    Backend, Batch, Call, Capabilities, Exists, Get, Host, Open, PageStatus, Result, Set, export_plugin,
};

/// The configuration; the schema below says the same.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    #[serde(default)]
    micros_per_page: u64,
    #[serde(default)]
    micros_per_layer: u64,
}

/// The pages of the one pool that the bench has.
pub struct Slow {
    page_time: Duration,
    turn: Mutex<()>,
    layer_time: Duration,
    face: paced::Face,
    host: Host,
    pages: RwLock<HashMap<PageKey, Vec<u8>>>,
}

impl Backend for Slow {
    type Linker = paced::Paced;

    fn open(open: &Open<'_>) -> Result<Self> {
        let config: Config = open.config()?;
        Ok(Self {
            page_time: Duration::from_micros(config.micros_per_page),
            turn: Mutex::default(),
            layer_time: Duration::from_micros(config.micros_per_layer),
            face: paced::Face::default(),
            host: open.host(),
            pages: RwLock::default(),
        })
    }

    fn close(&self, _: &Call<'_>) -> Result<()> {
        self.face.close();
        Ok(())
    }

    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        let pages = self.pages.read().unwrap_or_else(PoisonError::into_inner);
        let keys = exists.keys();
        for (index, key) in keys.iter().enumerate() {
            exists.set(0, index, if pages.contains_key(key) { PageStatus::Ok } else { PageStatus::Missing });
        }
        Ok(())
    }

    fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
        let call = *batch.call();
        for page in batch.into_pages() {
            call.check()?;
            {
                // One page at a time, however many calls there are.
                let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
                std::thread::sleep(self.page_time);
            }
            match self.pages.read().unwrap_or_else(PoisonError::into_inner).get(page.key()) {
                Some(bytes) => page.fill(bytes),
                None => page.finish(PageStatus::Missing),
            }
        }
        Ok(())
    }

    fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
        for page in batch.into_pages() {
            let (key, bytes) = (*page.key(), page.to_vec()?);
            self.pages.write().unwrap_or_else(PoisonError::into_inner).insert(key, bytes);
            page.finish(PageStatus::Ok);
        }
        Ok(())
    }

    fn stats(&self, _: &Call<'_>) -> Result<Stats> {
        let pages = self.pages.read().unwrap_or_else(PoisonError::into_inner);
        Ok(Stats {
            pages: pages.len() as u64,
            bytes_used: pages.values().map(|bytes| bytes.len() as u64).sum(),
            bytes_total: 0,
            failures: 0,
            get_mean_ns: 0,
            set_mean_ns: 0,
        })
    }
}

export_plugin! {
    backend: Slow,
    name: "bench-slow",
    capabilities: Capabilities::NONE,
    config_schema: r#"{
        "type": "object",
        "properties": {
            "micros_per_page": {
                "type": "integer", "minimum": 0, "default": 0,
                "description": "Microseconds that reading a page takes"
            },
            "micros_per_layer": {
                "type": "integer", "minimum": 0, "default": 0,
                "description": "Microseconds after which the next layer of a load is settled"
            }
        },
        "additionalProperties": false
    }"#,
    check_config: "{}",
}
