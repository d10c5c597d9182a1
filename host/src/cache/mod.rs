//! The KV cache: radix tree, device and host pools, and the storage tier behind them.
//!
//! [`CacheManager`] belongs to the scheduler's thread. It decides; copies between device and host,
//! hashing and everything that touches storage run on threads of its own, and what they finish
//! is taken in by [`CacheManager::tick`] (which most other calls do first by themselves). After
//! each such event the *waker* given at the start is called, so the scheduler can sleep in
//! between.
//!
//! The life of a request:
//!
//! 1. [`begin`](CacheManager::begin): matches the prompt against the tree and starts to fetch from
//!    storage what may be missing.
//! 2. [`poll`](CacheManager::poll): whether the request still waits for that.
//! 3. [`acquire`](CacheManager::acquire): brings host pages to the device, locks the prefix, and
//!    grants its page table.
//! 4. [`alloc_pages`](CacheManager::alloc_pages): pages for tokens to be computed.
//! 5. [`commit`](CacheManager::commit): whole pages computed so far go into the tree, where other
//!    requests find them; the write policy backs them up.
//! 6. [`finish`](CacheManager::finish), [`abort`](CacheManager::abort) or
//!    [`preempt`](CacheManager::preempt): locks and unfinished pages are given back.
//!
//! In linker mode there is no host tier: a grant may have pages that storage still brings, layer by layer ([`Grant::arriving`]).
//! [`start_loads`](CacheManager::start_loads) starts them, and [`settle_load`](CacheManager::settle_load) takes in what came.
//!
//! Nothing that goes wrong in storage fails a request: what does not come is computed.

mod checksum;
mod config;
mod controller;
#[cfg(test)]
pub(crate) mod fake_store;
pub mod hash;
pub mod layout;
mod linker;
mod manager;
mod stats;
mod types;

mod pool;
mod seal;
pub mod unified;

pub use config::{BreakEvenMode, CacheConfig, EvictionPolicy, PolicyUpdate, PrefetchPolicy, WritePolicy};
pub use controller::Guarded;
pub use layout::HostLayout;
pub use linker::{Arriving, Gate, Verdict};
pub use manager::{CacheManager, Settled, StorageHandle, Waker};
pub use pool::{CacheMemory, CacheRoom, DeviceMemory, StateMemory, WindowMemory};
pub use stats::{
    BackendCounters, CacheCounters, CacheEvents, CacheStats, CallFigures, NoEvents, StorageOp, StorageResult,
};
pub use types::{
    Acquire, Admission, CacheError, CacheNamespace, Drained, Flushed, Grant, Miss, MissReason, PageTables, Prefetch,
    RequestId, ReuseHints, Tiers,
};
