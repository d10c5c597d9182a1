//! What the host puts around every backend, so that plugins can stay thin: each part knows nothing of the others; [`Attached`] puts
//! them together.
//!
//! [`Attached`]: super::attached::Attached

pub(super) mod backoff;
pub(super) mod break_even;
pub(super) mod breaker;
pub(super) mod bucket;
pub(super) mod cancel;
mod speed;
