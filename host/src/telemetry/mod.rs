//! Logs and metrics.

mod logs;

pub use logs::{check_filter, init_logs};
