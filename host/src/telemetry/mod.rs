//! Logs and metrics.

mod backends;
mod calls;
mod collector;
mod events;
mod http;
mod logs;
mod metrics;
mod write;

pub use events::CacheObserver;
pub use http::HttpMetrics;
pub use logs::{check_filter, init_logs};
pub use metrics::{METRICS_CONTENT_TYPE, MetricSources, Metrics};
