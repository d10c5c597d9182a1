//! An instance: from open to close, and the calls beside the data calls.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvdock_plugin_api::v0_1::Stats;
use kvdock_plugin_api::{
    Batch, Call, Capabilities, ClearScope, Error, ErrorKind, Exists, Get, Health, HealthState, HeldChange, HeldPages,
    LogLevel, Open, PageKey, Pool, Remove, Result, Set,
};
use parking_lot::Mutex;
use serde::Deserialize;

use crate::fault::{self, Fault};
use crate::linker::Loads;
use crate::store::{Name, Store};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    dir: Option<PathBuf>,
    #[serde(default = "one_gib")]
    max_bytes: u64,
    #[serde(default)]
    check: bool,
}

fn one_gib() -> u64 {
    1 << 30
}

/// How often a call was made, and how long it took.
#[derive(Debug, Default)]
pub struct Timing {
    calls: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Timing {
    /// Adds a call.
    pub fn add(&self, time: Duration) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }
    fn mean_ns(&self) -> u64 {
        self.nanoseconds.load(Ordering::Relaxed).checked_div(self.calls.load(Ordering::Relaxed)).unwrap_or(0)
    }
}

/// An instance.
pub struct Backend {
    pub(crate) namespace: [u8; 32],
    pub(crate) store: Arc<Store>,
    pub(crate) loads: Loads,
    durable: bool,
    pub(crate) failures: AtomicU64,
    pub(crate) data_calls: AtomicU64,
    pub(crate) gets: Timing,
    pub(crate) sets: Timing,
    health_calls: AtomicU64,
    held: Mutex<HashSet<(u32, PageKey)>>,
}

impl Backend {
    /// What a page is stored under.
    pub(crate) fn name(&self, pool: &Pool, key: &PageKey) -> Name {
        Name { namespace: self.namespace, pool: pool.name().to_owned(), key: *key }
    }
}

fn panic_if(fault: Fault, call: &str) {
    if fault::is(fault) {
        panic!("planted: a panic in {call}");
    }
}

impl kvdock_plugin_api::Backend for Backend {
    type Linker = crate::linker::Face;

    fn open(open: &Open<'_>) -> Result<Self> {
        fault::check()?;
        panic_if(Fault::PanicInOpen, "open");
        if fault::is(Fault::HangInOpen) {
            fault::hang();
        }
        let config: Config = open.config()?;
        if config.check && fault::is(Fault::AbortInCheck) {
            std::process::abort();
        }
        let store = Store::open(config.dir.as_deref(), config.max_bytes)?;
        open.host().log(LogLevel::Debug, "open", &format!("keeps up to {} bytes in memory", config.max_bytes));
        let loads = Loads::start(open.host(), store.clone(), open.identity().namespace)?;
        Ok(Backend {
            namespace: open.identity().namespace,
            store,
            loads,
            durable: config.dir.is_some(),
            failures: AtomicU64::new(0),
            data_calls: AtomicU64::new(0),
            gets: Timing::default(),
            sets: Timing::default(),
            health_calls: AtomicU64::new(0),
            held: Mutex::default(),
        })
    }

    fn capabilities(&self, declared: Capabilities) -> Capabilities {
        Capabilities { durable: self.durable, ..declared }
    }

    fn register_mem_pool_host(&self, _: &Pool) -> Result<()> {
        panic_if(Fault::PanicInRegister, "register_mem_pool_host");
        Ok(())
    }

    fn pools_ready(&self) -> Result<()> {
        panic_if(Fault::PanicInPoolsReady, "pools_ready");
        Ok(())
    }

    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        panic_if(Fault::PanicInExists, "batch_exists");
        if fault::is(Fault::HangInExists) {
            fault::hang();
        }
        self.fail_if_planted()?;
        self.exists(exists)
    }

    fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
        panic_if(Fault::PanicInGet, "batch_get");
        if fault::is(Fault::HangInGet) {
            fault::hang();
        }
        self.fail_if_planted()?;
        self.get(batch)
    }

    fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
        panic_if(Fault::PanicInSet, "batch_set");
        if fault::is(Fault::HangInSet) {
            fault::hang();
        }
        self.fail_if_planted()?;
        self.set(batch)
    }

    fn batch_remove(&self, batch: Batch<'_, Remove>) -> Result<()> {
        panic_if(Fault::PanicInRemove, "batch_remove");
        self.fail_if_planted()?;
        self.remove(batch)
    }

    fn clear(&self, call: &Call<'_>, scope: ClearScope) -> Result<()> {
        panic_if(Fault::PanicInClear, "clear");
        call.check()?;
        match scope {
            ClearScope::Namespace => self.store.retain(|name| name.namespace != self.namespace),
            ClearScope::Everything => self.store.retain(|_| false),
        }
        self.store.save()
    }

    fn stats(&self, _: &Call<'_>) -> Result<Stats> {
        panic_if(Fault::PanicInStats, "stats");
        let (pages, bytes_used, bytes_total) = self.store.figures(&self.namespace);
        Ok(Stats {
            pages,
            bytes_used,
            bytes_total,
            failures: self.failures.load(Ordering::Relaxed),
            get_mean_ns: self.gets.mean_ns(),
            set_mean_ns: self.sets.mean_ns(),
        })
    }

    fn health(&self, _: &Call<'_>) -> Result<Health> {
        if self.health_calls.fetch_add(1, Ordering::Relaxed) > 0 {
            panic_if(Fault::PanicInHealth, "health");
        }
        if fault::is(Fault::HealthFailed) {
            return Ok(Health { state: HealthState::Failed, reason: "planted: nothing works".into() });
        }
        Ok(Health::ok())
    }

    fn flush(&self, call: &Call<'_>) -> Result<()> {
        panic_if(Fault::PanicInFlush, "flush");
        call.check()?;
        self.store.save()
    }

    fn report_held_pages(&self, report: &HeldPages<'_>) -> Result<()> {
        let tier = report.tier.raw();
        let mut held = self.held.lock();
        match report.change {
            HeldChange::Added => held.extend(report.keys.iter().map(|key| (tier, *key))),
            HeldChange::Removed => report.keys.iter().for_each(|key| {
                held.remove(&(tier, *key));
            }),
            HeldChange::Cleared => held.retain(|(of, _)| *of != tier),
            HeldChange::Unknown => {}
        }
        Ok(())
    }

    fn close(&self, _: &Call<'_>) -> Result<()> {
        panic_if(Fault::PanicInClose, "close");
        if fault::is(Fault::HangInClose) {
            fault::hang();
        }
        self.loads.stop();
        self.store.save()
    }
}

impl Backend {
    /// The errors of the faults that make data calls fail.
    fn fail_if_planted(&self) -> Result<()> {
        let call = self.data_calls.fetch_add(1, Ordering::Relaxed);
        let error = Error::new(ErrorKind::Unavailable, format!("planted: data call {call} fails"));
        let result = match fault::planted() {
            Ok(Fault::ErrorRetryableThenOk) if call.is_multiple_of(2) => Err(error.retryable()),
            Ok(Fault::ErrorAlways) => Err(error.retryable()),
            Ok(Fault::ErrorFatal) => Err(error),
            _ => Ok(()),
        };
        if result.is_err() {
            self.failures.fetch_add(1, Ordering::Relaxed);
        }
        result
    }
}
