//! Figures of the cache, for whoever turns them into metrics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::plugin::backend::BreakerState;

/// Call of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StorageOp {
    /// Pages asked to be read.
    Get,
    /// Pages asked to be stored.
    Set,
    /// Pages asked for.
    Exists,
    /// Pages removed because they were corrupt.
    Remove,
    /// What was stored is made durable.
    Flush,
}

/// What became of a page in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StorageResult {
    /// Done, and for a read its seal was right. For `exists`: stored.
    Ok,
    /// Not stored.
    Missing,
    /// Bytes that are not the page's.
    Corrupt,
    /// The deadline passed.
    Late,
    /// The backend would not.
    Refused,
    /// Anything else.
    Failed,
}

impl StorageOp {
    /// Those whose pages are counted by result.
    pub const ALL: [StorageOp; 3] = [StorageOp::Get, StorageOp::Set, StorageOp::Exists];
    /// All of them.
    pub const CALLS: [StorageOp; 5] =
        [StorageOp::Get, StorageOp::Set, StorageOp::Exists, StorageOp::Remove, StorageOp::Flush];

    /// Label value.
    pub fn as_str(self) -> &'static str {
        match self {
            StorageOp::Get => "get",
            StorageOp::Set => "set",
            StorageOp::Exists => "exists",
            StorageOp::Remove => "remove",
            StorageOp::Flush => "flush",
        }
    }
}

impl StorageResult {
    /// All of them.
    pub const ALL: [StorageResult; 6] = [
        StorageResult::Ok,
        StorageResult::Missing,
        StorageResult::Corrupt,
        StorageResult::Late,
        StorageResult::Refused,
        StorageResult::Failed,
    ];

    /// Label value.
    pub fn as_str(self) -> &'static str {
        match self {
            StorageResult::Ok => "ok",
            StorageResult::Missing => "missing",
            StorageResult::Corrupt => "corrupt",
            StorageResult::Late => "late",
            StorageResult::Refused => "refused",
            StorageResult::Failed => "failed",
        }
    }
}

/// Declares figures of calls once, as atomics and as a snapshot.
macro_rules! call_figures {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Calls of one kind to one backend, so far.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct CallFigures {
            $($(#[$doc])* pub $name: u64,)+
        }

        #[derive(Debug, Default)]
        pub(super) struct CallCounters {
            $(pub $name: AtomicU64,)+
        }

        impl CallCounters {
            fn snapshot(&self) -> CallFigures {
                CallFigures { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

call_figures! {
    /// Calls that went well, retries not counted.
    ok,
    /// Calls that failed after all their retries.
    failed,
    /// Calls that were called off by the host.
    cancelled,
    /// Calls that were not made because the backend rests or left.
    skipped,
    /// Calls that were given up because the bandwidth limit or the calls before them left no time.
    crowded_out,
    /// Calls that were made again.
    retries,
    /// Time in the backend, in nanoseconds.
    nanos,
    /// Calls that waited until another one of the backend had ended.
    queued,
    /// Time they waited, in nanoseconds.
    queued_nanos,
    /// Time calls waited for the bandwidth limit, in nanoseconds.
    limited_nanos,
    /// Bytes of the pages that were read or stored.
    bytes,
}

/// Figures of one backend. Kept for the life of the process, also over a detach.
#[derive(Debug, Default)]
pub struct BackendCounters {
    pages: [[AtomicU64; 6]; 5],
    calls: [CallCounters; 5],
    breakers: [AtomicU8; 2],
}

impl BackendCounters {
    /// Adds `pages`.
    pub fn add(&self, op: StorageOp, result: StorageResult, pages: u64) {
        if pages > 0 {
            self.pages[op as usize][result as usize].fetch_add(pages, Ordering::Relaxed);
        }
    }

    /// Pages so far.
    pub fn get(&self, op: StorageOp, result: StorageResult) -> u64 {
        self.pages[op as usize][result as usize].load(Ordering::Relaxed)
    }

    /// Calls so far.
    pub fn calls(&self, op: StorageOp) -> CallFigures {
        self.calls[op as usize].snapshot()
    }

    /// What the circuit breakers for reads and for writes do now.
    pub fn breakers(&self) -> [BreakerState; 2] {
        [0, 1].map(|way| BreakerState::ALL[usize::from(self.breakers[way].load(Ordering::Relaxed)).min(2)])
    }

    pub(super) fn call(&self, op: StorageOp) -> &CallCounters {
        &self.calls[op as usize]
    }

    pub(super) fn moved(&self, op: StorageOp, bytes: u64) {
        self.call(op).bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn set_breaker(&self, way: usize, state: BreakerState) {
        self.breakers[way].store(state as u8, Ordering::Relaxed);
    }
}

/// Declares the counters once, as atomics and as a snapshot.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Counters and gauges, shared with other threads. Counters run from the start.
        #[derive(Debug, Default)]
        pub struct CacheCounters {
            $($(#[$doc])* pub $name: AtomicU64,)+
            backends: Mutex<BTreeMap<String, Arc<BackendCounters>>>,
        }

        /// The figures at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct CacheStats {
            $($(#[$doc])* pub $name: u64,)+
        }

        impl CacheCounters {
            /// The figures now.
            pub fn snapshot(&self) -> CacheStats {
                CacheStats { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

counters! {
    /// Gauge: tokens the device pool holds at most.
    device_total_tokens,
    /// Gauge: tokens in device pages that are not free.
    device_used_tokens,
    /// Gauge: tokens in cached device pages that no request locks.
    device_evictable_tokens,
    /// Gauge: tokens the host pool holds at most.
    host_total_tokens,
    /// Gauge: tokens in host pages that are not free.
    host_used_tokens,
    /// Gauge: host pages in the hands of calls that are late.
    host_quarantined_pages,
    /// Gauge: tokens that the transit pages of linker mode hold at most.
    transit_total_tokens,
    /// Gauge: tokens in transit pages that are not free.
    transit_used_tokens,
    /// Gauge: nodes of the tree.
    tree_nodes,
    /// Gauge: host pages on their way to storage or waiting for it.
    backup_pending_pages,
    /// Gauge: prefetches running.
    prefetches_running,
    /// Gauge: loads from host to device running.
    load_backs_running,
    /// Gauge: loads from storage to the device, layer by layer, running.
    layer_loads_running,
    /// Prompt tokens granted from device pages.
    granted_device_tokens,
    /// Prompt tokens granted from host pages.
    granted_host_tokens,
    /// Prompt tokens granted from storage.
    granted_storage_tokens,
    /// Tokens that left the device tier.
    evicted_device_tokens,
    /// Tokens that left the host tier.
    evicted_host_tokens,
    /// Tokens copied from device to host.
    host_backup_tokens,
    /// Bytes copied from device to host.
    host_backup_bytes,
    /// Tokens copied from host to device.
    load_back_tokens,
    /// Bytes copied from host to device.
    load_back_bytes,
    /// Tokens not copied to the host because it had no room.
    dropped_host_pressure_tokens,
    /// Tokens evicted from the device without a copy anywhere.
    dropped_unbacked_tokens,
    /// Tokens that left the host before they were stored, or that storage would not take.
    backup_dropped_tokens,
    /// Tokens moved from storage to host, in linker mode to the device.
    prefetched_tokens,
    /// Tokens moved from host to storage, in linker mode from the device.
    backuped_tokens,
    /// Tokens that storage said it has.
    storage_hit_tokens,
    /// Tokens found and not fetched: under the threshold.
    unfulfilled_below_threshold_tokens,
    /// Tokens found and not fetched: no room on the host.
    unfulfilled_host_capacity_tokens,
    /// Tokens found and not delivered.
    unfulfilled_storage_transfer_tokens,
    /// Tokens found that came after the request stopped waiting.
    unfulfilled_deadline_tokens,
    /// Tokens not asked for or found and not fetched: computing them is faster.
    unfulfilled_not_worth_tokens,
    /// Fetches that were made though computing is faster, to measure the backend anew.
    break_even_explored,
    /// Tokens that came from another backend after the first one that has them failed to deliver.
    fallback_tokens,
    /// Tokens that are to be stored in a backend because they were read from one further down.
    promoted_tokens,
    /// Prefetches not begun because too much of the host pool is in their hands.
    prefetch_rate_limited,
    /// Requests that waited for another request's prefetch.
    prefetch_shared,
    /// Backend calls not made because the backend keeps failing.
    breaker_skips,
    /// Pages that came back with wrong bytes.
    corrupt_pages,
    /// Corrupt pages removed from storage so that they can be written anew.
    healed_pages,
    /// Writes to storage tried again.
    backup_retries,
    /// Forward passes given up because a layer from storage was late; they ran again.
    late_layers,
    /// Requests whose tail was computed again because pages from storage that a forward had used were not right.
    recomputed_tails,
    /// Misuses of the cache's calls that were refused; 0 in a right program.
    misuses,
}

impl CacheCounters {
    /// The counters of a backend, made at the first call for its name.
    pub fn backend(&self, name: &str) -> Arc<BackendCounters> {
        let mut backends = self.backends.lock();
        match backends.get(name) {
            Some(counters) => Arc::clone(counters),
            None => Arc::clone(backends.entry(name.to_owned()).or_default()),
        }
    }

    /// The counters of all backends that were ever attached, by name.
    pub fn backends(&self) -> Vec<(String, Arc<BackendCounters>)> {
        let backends = self.backends.lock();
        backends.iter().map(|(name, counters)| (name.clone(), Arc::clone(counters))).collect()
    }
}

/// What happens in the cache, as it happens; for distributions. Called from the scheduler's and
/// from worker threads; must not block.
pub trait CacheEvents: Send + Sync {
    /// Device pages were freed by eviction.
    fn evicted(&self, _tokens: u64, _took: Duration) {}
    /// Host pages were copied to the device.
    fn loaded_back(&self, _tokens: u64, _bytes: u64, _took: Duration) {}
    /// Device pages were copied to the host.
    fn backed_up(&self, _tokens: u64, _bytes: u64, _took: Duration) {}
    /// A batch came from storage.
    fn storage_read(&self, _backend: &str, _pages: u64, _bytes: u64, _took: Duration) {}
    /// A batch went to storage.
    fn storage_written(&self, _backend: &str, _pages: u64, _bytes: u64, _took: Duration) {}
}

/// Nobody listens.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoEvents;

impl CacheEvents for NoEvents {}
