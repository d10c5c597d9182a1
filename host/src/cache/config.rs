//! Settings of the cache, and the policies' names.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::layout::HostLayout;
use super::types::CacheError;
pub use super::unified::Policy as EvictionPolicy;

/// When pages go from device to host and on to storage; the most eager first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum WritePolicy {
    /// As soon as a page is in the tree.
    #[default]
    WriteThrough,
    /// When it is used a second time.
    WriteThroughSelective,
    /// When it has to leave the device.
    WriteBack,
}

/// How long a queued request waits for storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PrefetchPolicy {
    /// It takes what is there at the first look.
    BestEffort,
    /// Until all is there; bounded by the backend's deadline.
    WaitComplete,
    /// Until all is there or the time that its length allows has passed.
    #[default]
    Timeout,
}

/// Whether a hit in storage is loaded where computing it takes less time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BreakEvenMode {
    /// Hits are always loaded.
    #[default]
    Off,
    /// A hit is loaded where the measured speeds of its backend and of prefill say that loading is faster.
    Auto,
}

/// Implements `FromStr`, `Display` and `as_str` over a closed list of names.
macro_rules! named {
    ($type:ident, $key:literal, $($variant:ident => $name:literal),+ $(,)?) => {
        impl $type {
            /// The name used in the configuration.
            pub fn as_str(self) -> &'static str {
                match self { $($type::$variant => $name),+ }
            }
        }
        impl FromStr for $type {
            type Err = CacheError;
            fn from_str(text: &str) -> Result<Self, CacheError> {
                match text {
                    $($name => Ok($type::$variant),)+
                    other => Err(CacheError::Config {
                        key: $key,
                        problem: format!("{other:?} is none of {}", [$($name),+].join(", ")),
                    }),
                }
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

named!(WritePolicy, "cache.write_policy",
    WriteThrough => "write_through",
    WriteThroughSelective => "write_through_selective",
    WriteBack => "write_back");
named!(PrefetchPolicy, "cache.prefetch_policy",
    BestEffort => "best_effort",
    WaitComplete => "wait_complete",
    Timeout => "timeout");
named!(BreakEvenMode, "storage.break_even", Off => "off", Auto => "auto");
named!(EvictionPolicy, "cache.eviction",
    Lru => "lru",
    Lfu => "lfu",
    Slru => "slru",
    Fifo => "fifo",
    Priority => "priority");
named!(HostLayout, "cache.host_layout",
    LayerFirst => "layer_first",
    PageFirst => "page_first",
    PageFirstDirect => "page_first_direct",
    PageHead => "page_head");

/// Everything the cache has to know at the start. Page size and the size of the device tier come
/// from the device pool.
#[derive(Debug, Clone)]
pub struct CacheConfig {
    /// Pages in the host pool; 0 turns host and storage tiers off.
    pub host_pages: u32,
    /// Linker mode: there is no host tier, `host_pages` are transit pages, and backends are used by their linker face.
    pub linked: bool,
    /// Order of the bytes in the host pool.
    pub host_layout: HostLayout,
    /// When pages are written down the tiers.
    pub write_policy: WritePolicy,
    /// How long requests wait for storage.
    pub prefetch_policy: PrefetchPolicy,
    /// Fewest missing tokens for which storage is asked; at least a page.
    pub prefetch_threshold: usize,
    /// Constant part of the `timeout` policy.
    pub prefetch_timeout_base: Duration,
    /// Part of the `timeout` policy for each 1,024 missing tokens.
    pub prefetch_timeout_per_ki_token: Duration,
    /// Part of the host pool that running prefetches may fill before no new one starts.
    pub prefetch_occupancy: f64,
    /// Whether hits are loaded where computing is faster.
    pub break_even: BreakEvenMode,
    /// Host tokens below which a load to the device is not worth its while.
    pub load_back_threshold: usize,
    /// Which page leaves first, on device and host.
    pub eviction: EvictionPolicy,
    /// Digest of everything that decides the bytes of a page: weights, dtype, layout, page size,
    /// rank geometry, numerics. Stands in each page's seal.
    pub identity: [u8; 32],
    /// The identities of the tensor-parallel ranks after the first, whose pages carry seals of their own. None: all have the first one's.
    pub further_identities: Vec<[u8; 32]>,
    /// Threads that read from storage.
    pub prefetch_workers: usize,
    /// Threads that write to storage.
    pub backup_workers: usize,
    /// Threads that copy between device and host.
    pub copy_workers: usize,
    /// Times a page that could not be stored is tried again.
    pub backup_retries: u32,
}

impl Default for CacheConfig {
    fn default() -> Self {
        CacheConfig {
            host_pages: 0,
            linked: false,
            host_layout: HostLayout::PageFirst,
            write_policy: WritePolicy::WriteThrough,
            prefetch_policy: PrefetchPolicy::Timeout,
            prefetch_threshold: 256,
            prefetch_timeout_base: Duration::from_secs(1),
            prefetch_timeout_per_ki_token: Duration::from_millis(250),
            prefetch_occupancy: 0.5,
            break_even: BreakEvenMode::Off,
            load_back_threshold: 10,
            eviction: EvictionPolicy::Lru,
            identity: [0; 32],
            further_identities: Vec::new(),
            prefetch_workers: 4,
            backup_workers: 2,
            copy_workers: 2,
            backup_retries: 3,
        }
    }
}

/// Settings that may change while requests run; what is `None` stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PolicyUpdate {
    /// When pages are written down the tiers, for pages used or inserted from now on.
    pub write_policy: Option<WritePolicy>,
    /// How long requests wait for storage.
    pub prefetch_policy: Option<PrefetchPolicy>,
    /// Fewest missing tokens for which storage is asked.
    pub prefetch_threshold: Option<usize>,
    /// Constant part of the `timeout` policy.
    pub prefetch_timeout_base: Option<Duration>,
    /// Part of the `timeout` policy for each 1,024 missing tokens.
    pub prefetch_timeout_per_ki_token: Option<Duration>,
    /// Whether hits are loaded where computing is faster.
    pub break_even: Option<BreakEvenMode>,
}

impl CacheConfig {
    /// Takes over what `update` names.
    pub(super) fn apply(&mut self, update: PolicyUpdate) {
        self.write_policy = update.write_policy.unwrap_or(self.write_policy);
        self.prefetch_policy = update.prefetch_policy.unwrap_or(self.prefetch_policy);
        self.prefetch_threshold = update.prefetch_threshold.unwrap_or(self.prefetch_threshold);
        self.prefetch_timeout_base = update.prefetch_timeout_base.unwrap_or(self.prefetch_timeout_base);
        self.prefetch_timeout_per_ki_token =
            update.prefetch_timeout_per_ki_token.unwrap_or(self.prefetch_timeout_per_ki_token);
        self.break_even = update.break_even.unwrap_or(self.break_even);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_a_wrong_one_lists_the_right_ones() {
        for name in ["write_through", "write_through_selective", "write_back"] {
            assert_eq!(name.parse::<WritePolicy>().unwrap().as_str(), name);
        }
        for name in ["best_effort", "wait_complete", "timeout"] {
            assert_eq!(name.parse::<PrefetchPolicy>().unwrap().to_string(), name);
        }
        for name in ["layer_first", "page_first", "page_first_direct", "page_head"] {
            assert_eq!(name.parse::<HostLayout>().unwrap().as_str(), name);
        }
        assert_eq!(("auto".parse::<BreakEvenMode>().unwrap().as_str(), BreakEvenMode::Off.as_str()), ("auto", "off"));
        let error = "mru".parse::<EvictionPolicy>().unwrap_err();
        assert_eq!(error.to_string(), "cache.eviction: \"mru\" is none of lru, lfu, slru, fifo, priority");
    }
}
