//! Which leaf leaves first.

/// Hits from which on `slru` protects a node.
pub const SLRU_PROTECTED_HITS: u32 = 2;

/// Order in which leaves of full attention leave. In each of them the sort key of a node only grows while the node lives, which is
/// what lets the queue of victims put stale entries right when they come up. Windows and states always leave by last use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// The one not used for the longest time.
    #[default]
    Lru,
    /// The one used least often; of these, the one not used for the longest time.
    Lfu,
    /// First those used less than twice, then the others, each by last use.
    Slru,
    /// The one that came first.
    Fifo,
    /// The one of the lowest priority; of these, the one not used for the longest time.
    Priority,
}

impl Policy {
    /// All policies.
    pub const ALL: [Policy; 5] = [Policy::Lru, Policy::Lfu, Policy::Slru, Policy::Fifo, Policy::Priority];

    /// Place in the order of eviction; the smallest leaves first.
    pub(super) fn rank(self, used: u64, created: u64, hits: u32, priority: i32) -> (i64, u64) {
        match self {
            Policy::Lru => (0, used),
            Policy::Lfu => (hits.into(), used),
            Policy::Slru => (i64::from(hits >= SLRU_PROTECTED_HITS), used),
            Policy::Fifo => (0, created),
            Policy::Priority => (priority.into(), used),
        }
    }
}
