//! The metrics registry.

use std::sync::Arc;

use prometheus_client::encoding::prometheus_text;
use prometheus_client::registry::Registry;

use super::collector::Figures;
use super::events::CacheObserver;
use super::http::HttpMetrics;
use crate::cache::CacheCounters;
use crate::engine::EngineHandle;
use crate::plugin::PluginManager;
use crate::plugin::admin::StorageAdmin;

/// `Content-Type` of [`Metrics::text`].
pub const METRICS_CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// Where the figures come from.
pub struct MetricSources {
    /// The engine.
    pub engine: EngineHandle,
    /// The cache's figures.
    pub cache: Arc<CacheCounters>,
    /// The cache's distributions.
    pub observer: Arc<CacheObserver>,
    /// State of the storage backends.
    pub storage: Option<Arc<dyn StorageAdmin>>,
    /// Where plugins' own figures are.
    pub plugins: Option<PluginManager>,
    /// Tokens a page.
    pub page_size: u32,
    /// Tensor-parallel ranks.
    pub ranks: usize,
}

/// All metrics of the process. Figures are read when they are asked for.
pub struct Metrics {
    registry: Registry,
}

impl Metrics {
    /// Metrics that carry the label `model_name`.
    pub fn new(model_name: &str, sources: MetricSources) -> Self {
        let mut registry = Registry::default();
        registry
            .sub_registry_with_label(("model_name".into(), model_name.to_owned().into()))
            .register_collector(Box::new(Figures(sources)));
        Self { registry }
    }

    /// All metrics in Prometheus' text format 0.0.4, with those of `http`. May wait for the
    /// storage backends' state.
    pub fn text(&self, http: &HttpMetrics) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        prometheus_text::encode(&mut text, &self.registry)?;
        // These begin to count before there is a model to name.
        let mut own = Registry::default();
        own.register_collector(Box::new(http.snapshot()));
        prometheus_text::encode(&mut text, &own)?;
        Ok(text)
    }
}
