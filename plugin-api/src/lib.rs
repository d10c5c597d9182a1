//! The stable boundary between kvdock and its storage plugins.

mod error;
mod kinds;

pub use error::{Error, ErrorKind, PageStatus, Result};
pub use kinds::{
    ClearScope, ComponentKind, Dtype, HealthState, HitPolicy, LogLevel, MemoryKind, MetricKind,
    PoolRole, ReadyKind,
};
