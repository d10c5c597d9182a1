//! The stable boundary between kvdock and its storage plugins.
//!
//! A plugin is a shared library that stores KV pages. Its author implements [`Backend`] and calls
//! [`export_plugin!`]; everything else here is what those two take and give. Authors in C or C++ meet the same contract
//! through `include/kvdock_plugin.h`. `GUIDE.md` builds a backend step by step; what the boundary promises, and why, stands in `ABI.md`.
//!
//! * [`v0_1`]: the frozen C types and tables.
//! * [`Backend`], [`Linker`]: the safe traits over them.
//! * [`note`]: what a plugin says of itself before any of its code runs.
//! * [`values`]: sizes and switches as configurations hold them.

mod backend;
mod batch;
mod call;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod describe;
mod error;
mod exists;
#[doc(hidden)]
pub mod export;
mod host;
mod kinds;
mod linker;
#[cfg(feature = "mock-host")]
pub mod mock;
pub mod note;
mod pool;
#[doc(hidden)]
pub mod raw;
#[cfg(feature = "tracing")]
mod trace;
pub mod v0_1;
pub mod values;

pub use backend::{Backend, Health, HeldPages, Identity, Open};
pub use batch::{Batch, Get, Page, Remove, Set, Transfer};
pub use call::{Call, Chain, monotonic_ns};
pub use error::{Error, ErrorKind, PageStatus, Result};
pub use exists::{Exists, PoolQuery};
pub use host::{CONTENTS_LOST, Host};
pub use kinds::{
    CacheMode, Capability, ClearScope, ComponentKind, Dtype, HealthState, HeldChange, HeldTier, HitPolicy, LogLevel,
    MemoryKind, MetricKind, PoolRole, ReadyKind,
};
pub use linker::{Completed, LayerDone, Linker, Load, NoLinker, Offload, Ready, Start};
pub use note::Capabilities;
pub use pool::{Component, Pool, Region, Segment};
#[cfg(feature = "tracing")]
pub use trace::forward_tracing;
pub use v0_1::PageKey;
