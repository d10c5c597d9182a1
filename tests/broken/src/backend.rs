//! An instance: from open to close, and the calls beside the data calls.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
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
use crate::raw::{REFUSED, SIDE_REFUSED};
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
    /// Its number among all ranks.
    pub(crate) rank: u32,
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
    pools: Mutex<Pools>,
    /// Keys that are being set; used by a fault alone.
    pub(crate) setting: Mutex<HashSet<Name>>,
    pub(crate) sticks: AtomicBool,
    /// A page that is touched after `close`; used by a fault alone.
    pub(crate) last_page: AtomicUsize,
}

impl Backend {
    /// What a page is stored under.
    pub(crate) fn name(&self, pool: &Pool, key: &PageKey) -> Name {
        let mut name = pool.name().to_owned();
        if fault::is(Fault::GlobalPoolNames)
            && let Some(last) = NAMES.lock().get(&pool.id())
        {
            name.clone_from(last);
        }
        Name { namespace: self.namespace, pool: name, key: *key }
    }

    /// Whether a fault of the second rank is planted, and this is its instance.
    pub(crate) fn is_of_rank_1(&self, fault: Fault) -> bool {
        self.rank == 1 && fault::is(fault)
    }

    /// Takes note of a pool.
    fn add(&self, pool: &Pool) -> Result<()> {
        if fault::is(Fault::GlobalPoolNames) {
            NAMES.lock().insert(pool.id(), pool.name().to_owned());
        }
        let mut pools = self.pools.lock();
        pools.registered = true;
        if let (Some(region), Some(segment)) = (pool.regions().first(), pool.segments().first()) {
            let taken = pools.places.iter().any(|(_, base, offset)| *base == region.base && *offset == segment.offset);
            if taken && fault::is(Fault::RefusesSameBytes) {
                return Err(planted("these bytes are another pool's"));
            }
            pools.places.push((pool.id(), region.base, segment.offset));
        }
        Ok(())
    }
}

/// Registered pools and what became of them, as the faults ask for it.
#[derive(Debug, Default)]
struct Pools {
    registered: bool,
    ready: bool,
    /// Number, and where the first segment begins.
    places: Vec<(u32, usize, u64)>,
}

/// Data calls of all instances of the process.
static DATA_CALLS: AtomicU64 = AtomicU64::new(0);
/// Names of pools by number, of all instances; used by a fault alone.
static NAMES: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());

fn planted(what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, format!("planted: {what}"))
}

impl Config {
    fn read(open: &Open<'_>) -> Result<Config> {
        let ignores = [Fault::IgnoresUnknownKeys, Fault::IgnoresWrongValues].into_iter().any(fault::is);
        if !ignores {
            return open.config();
        }
        let given: serde_json::Value = open.config()?;
        Ok(Config {
            dir: given["dir"].as_str().map(PathBuf::from),
            max_bytes: given["max_bytes"].as_u64().unwrap_or_else(one_gib),
            check: given["check"].as_bool().unwrap_or(false),
        })
    }
}

/// Changes of the process that an instance has no right to.
fn spoil_the_process() {
    match fault::planted() {
        Ok(Fault::LeaksThread) => drop(std::thread::spawn(|| fault::hang())),
        Ok(Fault::LeaksFile) => std::mem::forget(std::fs::File::open("/dev/null")),
        Ok(Fault::ChangesFolder) => drop(std::env::set_current_dir("/")),
        Ok(Fault::DiesAtExit) => {
            static ONCE: std::sync::Once = std::sync::Once::new();
            ONCE.call_once(|| {
                // SAFETY: the function has the type that the C library asks for, and stays mapped.
                let _ = unsafe { atexit(die) };
            });
        }
        _ => {}
    }
}

unsafe extern "C" {
    fn atexit(function: extern "C" fn()) -> std::ffi::c_int;
}

extern "C" fn die() {
    std::process::abort();
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
        let (tp, cp) = (open.identity().tp, open.identity().cp);
        let rank = cp.0 * tp.1.max(1) + tp.0;
        if fault::is(Fault::OpenFailsForRank1) && rank == 1 {
            return Err(planted("the second rank can't be opened"));
        }
        if fault::is(Fault::RefusalIsForEver) && SIDE_REFUSED.load(Ordering::Relaxed) {
            return Err(planted("a pool was refused"));
        }
        let config = Config::read(open)?;
        spoil_the_process();
        if config.check && fault::is(Fault::AbortInCheck) {
            std::process::abort();
        }
        let store = Store::open(config.dir.as_deref(), config.max_bytes)?;
        open.host().log(LogLevel::Debug, "open", &format!("keeps up to {} bytes in memory", config.max_bytes));
        let loads = Loads::start(open.host(), store.clone(), open.identity().namespace, rank, config.dir.as_deref())?;
        Ok(Backend {
            rank,
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
            pools: Mutex::default(),
            setting: Mutex::default(),
            sticks: AtomicBool::new(false),
            last_page: AtomicUsize::new(0),
        })
    }

    fn capabilities(&self, declared: Capabilities) -> Capabilities {
        Capabilities { durable: self.durable, ..declared }
    }

    fn register_mem_pool_host(&self, pool: &Pool) -> Result<()> {
        panic_if(Fault::PanicInRegister, "register_mem_pool_host");
        self.add(pool)
    }

    fn register_v2_side_pools(&self, pools: &[Pool]) -> Result<()> {
        let late = self.pools.lock().ready && fault::is(Fault::NoLaterPools);
        if late && pools.iter().any(|pool| pool.name() == "swa") {
            return Err(planted("the pools are ready"));
        }
        pools.iter().try_for_each(|pool| self.add(pool))
    }

    fn unregister(&self, pools: &[Pool]) -> Result<()> {
        if fault::is(Fault::KeepsPools) && pools.iter().any(|pool| pool.name() == "swa") {
            return Err(planted("it keeps the pool"));
        }
        self.pools.lock().places.retain(|(id, _, _)| !pools.iter().any(|pool| pool.id() == *id));
        Ok(())
    }

    fn pools_ready(&self) -> Result<()> {
        panic_if(Fault::PanicInPoolsReady, "pools_ready");
        self.pools.lock().ready = true;
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
        if fault::is(Fault::HangInGet) || self.is_of_rank_1(Fault::HangInGetOfRank1) {
            fault::hang();
        }
        if self.is_of_rank_1(Fault::PanicInGetOfRank1) {
            panic!("planted: a panic in batch_get of the second rank");
        }
        if self.is_of_rank_1(Fault::ErrorInGetOfRank1) {
            return Err(planted("a get of the second rank fails"));
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
        let foreign = |name: &Name| name.namespace != self.namespace;
        match (scope, fault::planted()) {
            (ClearScope::Namespace, Ok(Fault::ClearsForeign)) => self.store.retain(|_| false),
            (ClearScope::Namespace, Ok(Fault::ClearKeepsSide)) => {
                self.store.retain(|name| foreign(name) || name.pool == "side");
            }
            (ClearScope::Everything, Ok(Fault::ClearEverythingOwn)) | (ClearScope::Namespace, _) => {
                self.store.retain(foreign);
            }
            (ClearScope::Everything, _) => self.store.retain(|_| false),
        }
        self.store.save()
    }

    fn stats(&self, _: &Call<'_>) -> Result<Stats> {
        panic_if(Fault::PanicInStats, "stats");
        let (pages, bytes_used, bytes_total) = self.store.figures(&self.namespace);
        Ok(Stats {
            pages,
            bytes_used: if fault::is(Fault::TooManyBytes) { bytes_total + 1 } else { bytes_used },
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
        if fault::is(Fault::DegradedWithoutReason) {
            return Ok(Health { state: HealthState::Degraded, reason: String::new() });
        }
        Ok(Health::ok())
    }

    fn flush(&self, call: &Call<'_>) -> Result<()> {
        panic_if(Fault::PanicInFlush, "flush");
        if let Err(late) = call.check() {
            self.sticks.store(fault::is(Fault::SticksAfterLate), Ordering::Relaxed);
            return Err(late);
        }
        if self.store.figures(&self.namespace).0 == 0 {
            match fault::planted() {
                Ok(Fault::EmptyFlushFails) => return Err(planted("there is nothing to flush")),
                Ok(Fault::AbortsOnEmptyFlush) => std::process::abort(),
                _ => {}
            }
        }
        self.store.save()
    }

    fn report_held_pages(&self, report: &HeldPages<'_>) -> Result<()> {
        if report.call.remaining() == Some(Duration::ZERO) {
            match fault::planted() {
                Ok(Fault::HangWhenLate) => fault::hang(),
                Ok(Fault::LateReport) => std::thread::sleep(Duration::from_secs(6)),
                _ => {}
            }
        }
        if report.keys.is_empty() && report.change != HeldChange::Cleared && fault::is(Fault::EmptyReportFails) {
            return Err(planted("a report of nothing"));
        }
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
        let page = self.last_page.load(Ordering::Relaxed);
        if page != 0 {
            fault::later(50, move || {
                // SAFETY: none: the page is the host's again. This is the fault.
                unsafe { std::ptr::write_volatile(page as *mut u8, 1) }
            });
        }
        let pools = self.pools.lock();
        let early = pools.registered && !pools.ready && DATA_CALLS.load(Ordering::Relaxed) == 0;
        if early && fault::is(Fault::NoEarlyClose) && !REFUSED.load(Ordering::Relaxed) {
            return Err(planted("the pools were never ready"));
        }
        self.store.save()
    }
}

impl Backend {
    /// The errors of the faults that make data calls fail.
    fn fail_if_planted(&self) -> Result<()> {
        DATA_CALLS.fetch_add(1, Ordering::Relaxed);
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
