//! HTTP in and out: the OpenAI API, the native API, the admin endpoints and metrics.

pub use crate::plugin::admin;
