//! What the host offers to a plugin: log, metrics, health, completions.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use kvdock_plugin_api::v0_1::{self, Bytes, HostTable};
use kvdock_plugin_api::{HealthState, LogLevel, MetricKind, raw};

/// Most series that one instance may report; more are dropped with one warning.
const MOST_SERIES: usize = 1000;

/// A counter that is a message too: what the store behind the instance held is gone, or a part of it that the plugin can't name.
pub const CONTENTS_LOST: &str = "kvdock_contents_lost";

/// A value that a plugin reported.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PluginMetric {
    /// What the value does.
    pub kind: MetricKind,
    /// Sum of a counter or of what was observed, or the value of a gauge.
    pub value: f64,
    /// Number of reports.
    pub count: u64,
}

/// Called when a plugin tells its health.
pub type HealthListener = Box<dyn Fn(HealthState, String) + Send + Sync>;

/// Called when a plugin tells that its store has lost what it held.
pub type LossListener = Box<dyn Fn() + Send + Sync>;

/// Called when a plugin tells of its linker calls.
pub type LinkListener = Box<dyn Fn(LinkNews) + Send + Sync>;

/// What a plugin tells of its linker calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkNews {
    /// An offload has completed.
    OffloadCompleted,
    /// Layers of a batch of loads were settled.
    LayersSettled,
}

/// What stands behind the `host_context` of one instance. It lives as long as the process, because a plugin's threads may
/// call at any time.
pub struct HostContext {
    instance: String,
    metrics: Mutex<BTreeMap<(String, String), PluginMetric>>,
    listener: Mutex<Option<Arc<HealthListener>>>,
    loss_listener: Mutex<Option<Arc<LossListener>>>,
    link_listener: Mutex<Option<Arc<LinkListener>>>,
}

impl std::fmt::Debug for HostContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostContext").field("instance", &self.instance).finish_non_exhaustive()
    }
}

impl HostContext {
    /// A context for the instance of this name; leaked on purpose, a few hundred bytes an attach.
    pub fn leak(instance: &str) -> &'static HostContext {
        Box::leak(Box::new(HostContext {
            instance: instance.to_owned(),
            metrics: Mutex::default(),
            listener: Mutex::default(),
            loss_listener: Mutex::default(),
            link_listener: Mutex::default(),
        }))
    }

    /// Sets who hears of health; none ends it.
    pub fn listen(&self, listener: Option<HealthListener>) {
        *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = listener.map(Arc::new);
    }

    /// Sets who hears of lost contents; none ends it.
    pub fn listen_for_losses(&self, listener: Option<LossListener>) {
        *self.loss_listener.lock().unwrap_or_else(PoisonError::into_inner) = listener.map(Arc::new);
    }

    /// Sets who hears of linker calls; none ends it.
    pub fn listen_for_links(&self, listener: Option<LinkListener>) {
        *self.link_listener.lock().unwrap_or_else(PoisonError::into_inner) = listener.map(Arc::new);
    }

    fn link_news(&self, news: LinkNews) {
        let listener = self.link_listener.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(listener) = listener {
            listener(news);
        }
    }

    /// Tells that what the store held is gone.
    fn contents_lost(&self) {
        let listener = self.loss_listener.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(listener) = listener {
            listener();
        }
    }

    /// What the plugin reported, by name and labels (a JSON object, or empty).
    pub fn metrics(&self) -> BTreeMap<(String, String), PluginMetric> {
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The context as it crosses the boundary.
    pub fn raw(&'static self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    fn record(&self, kind: MetricKind, name: &str, labels: &str, value: f64) {
        let mut metrics = self.metrics.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (name.to_owned(), labels.to_owned());
        if metrics.len() >= MOST_SERIES && !metrics.contains_key(&key) {
            if metrics.len() == MOST_SERIES {
                tracing::warn!(backend = %self.instance, "the plugin reports more than {MOST_SERIES} series; the rest is dropped");
                metrics.insert(
                    ("kvdock_dropped_series".into(), String::new()),
                    PluginMetric { kind, value: 0.0, count: 0 },
                );
            }
            return;
        }
        let entry = metrics.entry(key).or_insert(PluginMetric { kind, value: 0.0, count: 0 });
        entry.count += 1;
        match kind {
            MetricKind::GaugeSet => entry.value = value,
            MetricKind::CounterAdd | MetricKind::Observe => entry.value += value,
        }
    }
}

/// The table given to every plugin.
pub static HOST_TABLE: HostTable = HostTable {
    size: size_of::<HostTable>() as u64,
    abi_version: v0_1::ABI_VERSION,
    reserved: 0,
    log,
    metric,
    health_changed,
    offload_completed,
    layers_settled,
};

/// Runs a host function so that neither a panic nor a bad argument of a plugin reaches the other side.
///
/// # Safety
/// `context` is null or a [`HostContext`] that lives as long as the process.
unsafe fn guarded(context: *mut c_void, body: impl FnOnce(&'static HostContext)) {
    // SAFETY: the caller's promise.
    let Some(context) = (unsafe { context.cast::<HostContext>().cast_const().as_ref() }) else {
        return;
    };
    if catch_unwind(AssertUnwindSafe(|| body(context))).is_err() {
        // Nothing more can be said without risking another panic.
    }
}

unsafe extern "C" fn log(context: *mut c_void, level: u32, target: Bytes, message: Bytes) {
    // SAFETY: rules of the boundary.
    unsafe {
        guarded(context, |context| {
            let (Ok(part), Ok(message)) = (raw::text(target), raw::text(message)) else {
                tracing::warn!(backend = %context.instance, "the plugin logged text that is no UTF-8");
                return;
            };
            let backend = context.instance.as_str();
            match LogLevel::from_raw(level) {
                LogLevel::Error => tracing::error!(backend, part, "{message}"),
                LogLevel::Warn => tracing::warn!(backend, part, "{message}"),
                LogLevel::Info => tracing::info!(backend, part, "{message}"),
                LogLevel::Debug => tracing::debug!(backend, part, "{message}"),
                LogLevel::Trace => tracing::trace!(backend, part, "{message}"),
            }
        });
    }
}

unsafe extern "C" fn metric(context: *mut c_void, kind: u32, name: Bytes, labels: Bytes, value: f64) {
    // SAFETY: rules of the boundary.
    unsafe {
        guarded(context, |context| {
            if let (Ok(name), Ok(labels), Some(kind)) =
                (raw::text(name), raw::text(labels), MetricKind::try_from_raw(kind))
            {
                context.record(kind, name, labels, value);
                if kind == MetricKind::CounterAdd && name == CONTENTS_LOST && value > 0.0 {
                    context.contents_lost();
                }
            }
        });
    }
}

unsafe extern "C" fn health_changed(context: *mut c_void, state: u32, reason: Bytes) {
    // SAFETY: rules of the boundary.
    unsafe {
        guarded(context, |context| {
            let reason = raw::text(reason).unwrap_or("a reason that is no UTF-8").to_owned();
            let listener = context.listener.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(listener) = listener {
                listener(HealthState::from_raw(state), reason);
            }
        });
    }
}

unsafe extern "C" fn offload_completed(context: *mut c_void) {
    // SAFETY: rules of the boundary.
    unsafe { guarded(context, |context| context.link_news(LinkNews::OffloadCompleted)) }
}

unsafe extern "C" fn layers_settled(context: *mut c_void, _batch: u64) {
    // SAFETY: rules of the boundary.
    unsafe { guarded(context, |context| context.link_news(LinkNews::LayersSettled)) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn report(context: &'static HostContext, kind: MetricKind, name: &str, value: f64) {
        // SAFETY: the context lives as long as the process, the texts through the call.
        unsafe { (HOST_TABLE.metric)(context.raw(), kind.raw(), name.into(), "".into(), value) }
    }

    #[test]
    fn a_store_that_lost_everything_could_not_say_so() {
        let context = HostContext::leak("one");
        let heard = Arc::new(AtomicUsize::new(0));
        // Before anybody listens it is a figure alone.
        report(context, MetricKind::CounterAdd, CONTENTS_LOST, 1.0);
        let hears = heard.clone();
        context.listen_for_losses(Some(Box::new(move || {
            hears.fetch_add(1, Ordering::Relaxed);
        })));
        report(context, MetricKind::CounterAdd, CONTENTS_LOST, 1.0);
        report(context, MetricKind::CounterAdd, CONTENTS_LOST, 0.0);
        report(context, MetricKind::GaugeSet, "another", 1.0);
        assert_eq!(heard.load(Ordering::Relaxed), 1);
        context.listen_for_losses(None);
        report(context, MetricKind::CounterAdd, CONTENTS_LOST, 1.0);
        assert_eq!(heard.load(Ordering::Relaxed), 1);
        assert_eq!(
            context.metrics()[&(CONTENTS_LOST.to_owned(), String::new())].value,
            3.0,
            "it is counted as any other"
        );
    }
}
