//! A host without an engine, for the tests of a plugin: memfd-backed pools of any layout, a host table that records what the
//! plugin says, and safe calls that go through the plugin's C functions only.
//!
//! ```
//! # use kvdock_plugin_api::{*, mock::*, v0_1::Stats};
//! # struct Nothing;
//! # impl Backend for Nothing {
//! #     type Linker = NoLinker<Self>;
//! #     fn open(_: &Open<'_>) -> Result<Self> { Ok(Nothing) }
//! #     fn batch_exists(&self, _: &mut Exists<'_>) -> Result<()> { Ok(()) }
//! #     fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
//! #         batch.into_pages().for_each(|page| page.finish(PageStatus::Missing));
//! #         Ok(())
//! #     }
//! #     fn batch_set(&self, _: Batch<'_, Set>) -> Result<()> { Ok(()) }
//! #     fn stats(&self, _: &Call<'_>) -> Result<Stats> { Err(Error::unsupported("stats")) }
//! # }
//! # export_plugin! { backend: Nothing, name: "nothing", capabilities: Capabilities::NONE, config_schema: "{}", check_config: "{}" }
//! # fn main() -> Result<()> {
//! let host = MockHost::new();
//! let pool = MockPool::new(PoolSpec::bytes(0, "kv", 8, &[4096, 4096]).with_seal(64));
//! let store = host.attach(table_of(kvdock_plugin_entry)?, "{}", &identity("a model"), &[&pool])?;
//! let got = store.get(&Options::default(), &[Part::new(&pool, &[key(1)], &[0])]);
//! assert_eq!(got.statuses, vec![vec![PageStatus::Missing]]);
//! store.close()?;
//! # Ok(())
//! # }
//! ```

mod instance;
mod linker;
mod pool;

use std::ffi::c_void;
use std::panic::catch_unwind;
use std::sync::{Mutex, PoisonError};

use sha2_const_stable::Sha256;

#[cfg(feature = "conformance")]
pub(crate) use instance::raw_identity;
pub use instance::{Found, Instance, Options, Outcome, Part, Query};
pub use linker::{MockLinker, PendingLoad, PendingOffload};
pub use pool::{KvShape, MockPool, PoolSpec};

use crate::v0_1::{ABI_VERSION, BackendTable, Bytes, EntryFn, HostTable, PageKey};
use crate::{Error, ErrorKind, HealthState, Identity, LogLevel, MetricKind, Result, raw};

/// A log line of the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// How loud.
    pub level: LogLevel,
    /// Part of the plugin.
    pub target: String,
    /// What it says.
    pub message: String,
}

/// A metric value of the plugin.
#[derive(Debug, Clone, PartialEq)]
pub struct Metric {
    /// What the value does.
    pub kind: MetricKind,
    /// Name.
    pub name: String,
    /// Labels as a JSON object, or empty.
    pub labels: String,
    /// Value.
    pub value: f64,
}

#[derive(Debug, Default)]
struct Record {
    logs: Vec<LogLine>,
    metrics: Vec<Metric>,
    health: Vec<(HealthState, String)>,
    offloads: usize,
    layers_settled: usize,
}

/// A host that records. What the plugin holds of it lives as long as the process, as the boundary promises.
#[derive(Debug, Clone, Copy)]
pub struct MockHost {
    record: &'static Mutex<Record>,
}

/// # Safety
/// `context` is the record of a [`MockHost`].
unsafe fn with_record(context: *mut c_void, body: impl FnOnce(&mut Record) + std::panic::UnwindSafe) {
    let record = context.cast::<Mutex<Record>>().cast_const();
    // A panic must not reach the plugin; there is nobody to tell.
    let _ = catch_unwind(move || {
        // SAFETY: the caller's promise; records are leaked and so live for ever.
        if let Some(record) = unsafe { record.as_ref() } {
            body(&mut record.lock().unwrap_or_else(PoisonError::into_inner));
        }
    });
}

fn owned(bytes: Bytes) -> String {
    // SAFETY: rules of the boundary: the bytes live through the call that brings them.
    unsafe { raw::text(bytes) }.unwrap_or("(no UTF-8)").to_owned()
}

unsafe extern "C" fn log(context: *mut c_void, level: u32, target: Bytes, message: Bytes) {
    let line = LogLine { level: LogLevel::from_raw(level), target: owned(target), message: owned(message) };
    // SAFETY: the table goes with its context.
    unsafe { with_record(context, move |record| record.logs.push(line)) }
}

unsafe extern "C" fn metric(context: *mut c_void, kind: u32, name: Bytes, labels: Bytes, value: f64) {
    let metric = Metric { kind: MetricKind::from_raw(kind), name: owned(name), labels: owned(labels), value };
    // SAFETY: the table goes with its context.
    unsafe { with_record(context, move |record| record.metrics.push(metric)) }
}

unsafe extern "C" fn health_changed(context: *mut c_void, state: u32, reason: Bytes) {
    let event = (HealthState::from_raw(state), owned(reason));
    // SAFETY: the table goes with its context.
    unsafe { with_record(context, move |record| record.health.push(event)) }
}

unsafe extern "C" fn offload_completed(context: *mut c_void) {
    // SAFETY: the table goes with its context.
    unsafe { with_record(context, |record| record.offloads += 1) }
}

unsafe extern "C" fn layers_settled(context: *mut c_void, _batch: u64) {
    // SAFETY: the table goes with its context.
    unsafe { with_record(context, |record| record.layers_settled += 1) }
}

static TABLE: HostTable = HostTable {
    size: std::mem::size_of::<HostTable>() as u64,
    abi_version: ABI_VERSION,
    reserved: 0,
    log,
    metric,
    health_changed,
    offload_completed,
    layers_settled,
};

impl Default for MockHost {
    fn default() -> Self {
        MockHost::new()
    }
}

impl MockHost {
    /// A host with an empty record.
    pub fn new() -> MockHost {
        MockHost { record: Box::leak(Box::default()) }
    }

    pub(crate) fn table(&self) -> (&'static HostTable, *mut c_void) {
        (&TABLE, std::ptr::from_ref(self.record).cast_mut().cast())
    }

    fn read<T>(&self, body: impl FnOnce(&Record) -> T) -> T {
        body(&self.record.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Log lines so far.
    pub fn logs(&self) -> Vec<LogLine> {
        self.read(|record| record.logs.clone())
    }
    /// Metric values so far.
    pub fn metrics(&self) -> Vec<Metric> {
        self.read(|record| record.metrics.clone())
    }
    /// The last value that was reported for a metric, or the sum for a counter; none when it was never reported.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.read(|record| {
            record.metrics.iter().filter(|metric| metric.name == name).fold(None, |value, metric| {
                Some(match metric.kind {
                    MetricKind::CounterAdd => value.unwrap_or(0.0) + metric.value,
                    MetricKind::GaugeSet | MetricKind::Observe => metric.value,
                })
            })
        })
    }
    /// Changes of health so far.
    pub fn health_events(&self) -> Vec<(HealthState, String)> {
        self.read(|record| record.health.clone())
    }
    /// How often the plugin said that an offload has completed.
    pub fn offloads_completed(&self) -> usize {
        self.read(|record| record.offloads)
    }

    /// How often the plugin said that layers were settled.
    pub fn layers_settled(&self) -> usize {
        self.read(|record| record.layers_settled)
    }

    /// Opens an instance.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn open(&self, table: &'static BackendTable, config: &str, identity: &Identity) -> Result<Instance> {
        Instance::open(self, table, config, identity, &Options::default())
    }

    /// Opens an instance, registers the pools (the first is the anchor) and says that they are ready. When a step fails, what came before
    /// is rolled back.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn attach(
        &self,
        table: &'static BackendTable,
        config: &str,
        identity: &Identity,
        pools: &[&MockPool],
    ) -> Result<Instance> {
        let instance = self.open(table, config, identity)?;
        if let Some((anchor, side)) = pools.split_first() {
            instance.register(anchor)?;
            instance.register_side(side)?;
        }
        instance.ready()?;
        Ok(instance)
    }
}

/// The table behind an entry function, such as the one that [`crate::export_plugin!`] makes or that a loaded library has.
///
/// # Errors
/// When the entry does not know this version of the boundary.
pub fn table_of(entry: EntryFn) -> Result<&'static BackendTable> {
    let table = entry(ABI_VERSION).cast::<BackendTable>();
    // SAFETY: an entry answers null or the address of a constant table of the version it was asked for.
    unsafe { table.as_ref() }.ok_or_else(|| {
        Error::new(
            ErrorKind::Unsupported,
            format!("the plugin has no table for version {}", crate::v0_1::ABI_VERSION_TEXT),
        )
    })
}

/// A key for tests: the digest of a number.
pub fn key(number: u64) -> PageKey {
    Sha256::new().update(&number.to_le_bytes()).finalize()
}

/// An identity for tests. Models with other names have other namespaces.
pub fn identity(model_name: &str) -> Identity {
    let namespace_json = serde_json::json!({ "model": model_name }).to_string();
    Identity {
        namespace: Sha256::new().update(namespace_json.as_bytes()).finalize(),
        namespace_json,
        model_name: model_name.to_owned(),
        weights_digest: Sha256::new().update(model_name.as_bytes()).finalize(),
        numerics_id: "mock".to_owned(),
        page_tokens: 16,
        tp: (0, 1),
        pp: (0, 1),
        cp: (0, 1),
        dp: (0, 1),
        dcp: (0, 1),
        tp_lcm_size: 0,
        replicated: false,
        writer: true,
    }
}
