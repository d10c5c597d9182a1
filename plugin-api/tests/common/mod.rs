//! A backend in memory that implements everything, the linker face included: the backend of the contract tests, and an
//! example for authors. It needs no `unsafe`.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each test binary uses a part of it; it plants panics"
)]

mod linker;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvdock_plugin_api::v0_1::{PageKey, Stats};
use kvdock_plugin_api::*;

/// A stored page is named by the pool's name and its key.
type Pages = HashMap<(String, PageKey), Vec<u8>>;

/// What an instance does wrong on purpose, and what it says when it is opened.
#[derive(Debug, Clone, Default, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Panics in every `batch_exists`, with this text.
    pub panic_in_exists: Option<String>,
    /// Fails every `stats` with this text.
    pub fail_stats: Option<String>,
    /// `pools_ready` refuses.
    pub refuse_pools: bool,
    /// Does not speak of pages beyond the first missing one of the anchor.
    pub stop_at_gap: bool,
    /// Milliseconds that each page of a get or set takes.
    pub page_ms: u64,
}

/// The backend.
pub struct Memory {
    config: Config,
    host: Host,
    pages: Arc<Mutex<Pages>>,
    journal: Mutex<Vec<String>>,
    queues: Arc<linker::Queues>,
    failures: AtomicU64,
    /// Counted by [`instances_alive`].
    _alive: Arc<()>,
}

/// How many instances have been opened and not dropped.
static ALIVE: Mutex<Option<Arc<()>>> = Mutex::new(None);
/// What was called on the instances that are gone, in order.
static JOURNALS: Mutex<Vec<Vec<String>>> = Mutex::new(Vec::new());

pub fn instances_alive() -> usize {
    lock(&ALIVE).as_ref().map_or(0, |alive| Arc::strong_count(alive) - 1)
}

pub fn journals() -> Vec<Vec<String>> {
    lock(&JOURNALS).clone()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    fn note(&self, call: &str) {
        lock(&self.journal).push(call.to_owned());
    }

    fn work(&self) {
        std::thread::sleep(Duration::from_millis(self.config.page_ms));
    }
}

/// Fills a page with what is stored.
fn copy_out(pages: &Mutex<Pages>, page: Page<'_, Get>) {
    let stored = lock(pages).get(&(page.pool().name().to_owned(), *page.key())).cloned();
    match stored {
        Some(bytes) => page.fill(&bytes),
        None => page.finish(PageStatus::Missing),
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        lock(&JOURNALS).push(std::mem::take(&mut *lock(&self.journal)));
    }
}

impl Backend for Memory {
    type Linker = Memory;

    fn open(open: &Open<'_>) -> Result<Self> {
        open.host().log(LogLevel::Info, "memory", &format!("opened for {}", open.identity().model_name));
        let alive = lock(&ALIVE).get_or_insert_with(|| Arc::new(())).clone();
        Ok(Memory {
            config: open.config()?,
            host: open.host(),
            pages: Arc::default(),
            journal: Mutex::new(vec!["open".to_owned()]),
            queues: Arc::default(),
            failures: AtomicU64::new(0),
            _alive: alive,
        })
    }

    fn register_mem_pool_host(&self, pool: &Pool) -> Result<()> {
        self.note(&format!("anchor {}", pool.name()));
        Ok(())
    }

    fn register_v2_side_pools(&self, pools: &[Pool]) -> Result<()> {
        self.note(&format!("sides {}", pools.iter().map(Pool::name).collect::<Vec<_>>().join(" ")));
        Ok(())
    }

    fn unregister(&self, pools: &[Pool]) -> Result<()> {
        self.note(&format!("unregister {}", pools.iter().map(Pool::name).collect::<Vec<_>>().join(" ")));
        Ok(())
    }

    fn pools_ready(&self) -> Result<()> {
        self.note("ready");
        if self.config.refuse_pools { Err(Error::unsupported("these pools")) } else { Ok(()) }
    }

    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        if let Some(text) = &self.config.panic_in_exists {
            panic!("{text}");
        }
        exists.call().check()?;
        let names: Vec<String> = exists.pools().iter().map(|query| query.pool.name().to_owned()).collect();
        let pages = lock(&self.pages);
        for (pool, name) in names.iter().enumerate() {
            for (index, key) in exists.keys().iter().enumerate() {
                let there = pages.contains_key(&(name.clone(), *key));
                exists.set(pool, index, if there { PageStatus::Ok } else { PageStatus::Missing });
                if !there && pool == 0 && self.config.stop_at_gap {
                    break;
                }
            }
        }
        Ok(())
    }

    fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
        let call = *batch.call();
        for page in batch.into_pages() {
            call.check()?;
            self.work();
            copy_out(&self.pages, page);
        }
        Ok(())
    }

    fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
        let call = *batch.call();
        for page in batch.into_pages() {
            call.check()?;
            self.work();
            let name = (page.pool().name().to_owned(), *page.key());
            // A logical pool's page is a marker: no bytes.
            let bytes = page.to_vec()?;
            lock(&self.pages).entry(name).or_insert(bytes);
            page.finish(PageStatus::Ok);
        }
        Ok(())
    }

    fn batch_remove(&self, batch: Batch<'_, Remove>) -> Result<()> {
        for page in batch.into_pages() {
            let removed = lock(&self.pages).remove(&(page.pool().name().to_owned(), *page.key()));
            page.finish(if removed.is_some() { PageStatus::Ok } else { PageStatus::Missing });
        }
        Ok(())
    }

    fn clear(&self, _: &Call<'_>, _: ClearScope) -> Result<()> {
        lock(&self.pages).clear();
        Ok(())
    }

    fn stats(&self, _: &Call<'_>) -> Result<Stats> {
        if let Some(text) = &self.config.fail_stats {
            self.failures.fetch_add(1, Ordering::Relaxed);
            return Err(Error::new(ErrorKind::Unavailable, text.clone()).retryable());
        }
        let pages = lock(&self.pages);
        Ok(Stats {
            pages: pages.len() as u64,
            bytes_used: pages.values().map(|bytes| bytes.len() as u64).sum(),
            bytes_total: 0,
            failures: self.failures.load(Ordering::Relaxed),
            get_mean_ns: 0,
            set_mean_ns: 0,
        })
    }

    fn health(&self, _: &Call<'_>) -> Result<Health> {
        if self.config.page_ms == 0 {
            return Ok(Health::ok());
        }
        let health = Health { state: HealthState::Degraded, reason: "every page takes a while".to_owned() };
        self.host.health_changed(health.state, &health.reason);
        self.host.metric(MetricKind::GaugeSet, "memory_slow", "", 1.0);
        Ok(health)
    }

    fn flush(&self, _: &Call<'_>) -> Result<()> {
        self.note("flush");
        Ok(())
    }

    fn close(&self, _: &Call<'_>) -> Result<()> {
        self.note("close");
        self.queues.end();
        Ok(())
    }
}

export_plugin! {
    backend: Memory,
    name: "memory",
    capabilities: Capabilities {
        remove: true,
        clear_namespace: true,
        clear_everything: true,
        logical_pools: true,
        ..Capabilities::NONE
    },
    config_schema: r#"{"type":"object"}"#,
    check_config: "{}",
}
