//! The face through which the cache talks to one attached storage backend.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

pub use kvdock_plugin_api::{CacheMode, ErrorKind, PageStatus};

pub use super::policies::PolicyChange;

/// SHA-256 digest of a page's hash chain (see `cache::hash`).
pub type PageKey = [u8; 32];

/// Pools whose pages go under one number, and which are moved as one: a page of a group is a page of each of its pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PoolGroup {
    /// Pages of all tokens: the anchor, and what shares its numbers.
    Full,
    /// Pages of sliding windows.
    Window,
    /// Recurrent states: a page is the state after its last token.
    State,
}

impl PoolGroup {
    /// All of them.
    pub const ALL: [PoolGroup; 3] = [PoolGroup::Full, PoolGroup::Window, PoolGroup::State];

    /// Name for messages.
    pub fn as_str(self) -> &'static str {
        match self {
            PoolGroup::Full => "full",
            PoolGroup::Window => "window",
            PoolGroup::State => "state",
        }
    }
}

/// What a prefix needs of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolHit {
    /// All of its pages.
    AllPages,
    /// Its last pages, so many.
    TrailingPages(u32),
}

/// Leading pages of the keys of an `exists`, group by group, that the host has itself: the store need not have them.
pub type Held = [u32; PoolGroup::ALL.len()];

/// Deadline and cancel flag of one call.
#[derive(Debug, Clone)]
pub struct CallOptions {
    /// When the call is late.
    pub deadline: Instant,
    /// Set to a value other than 0 to ask the backend to give up.
    pub cancel: Arc<AtomicU32>,
}

impl CallOptions {
    /// A call that may take `timeout`, not cancelled.
    pub fn within(timeout: Duration) -> Self {
        CallOptions { deadline: Instant::now() + timeout, cancel: Arc::default() }
    }

    /// Asks the backend to give up. It still has to return before its pages are free.
    pub fn cancel(&self) {
        self.cancel.store(1, Ordering::Release);
    }

    /// Whether the call was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Acquire) != 0
    }
}

/// Where the keys of a call stand in their chain.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChainInfo<'a> {
    /// Pages of the sequence before the first key of the call.
    pub position: u64,
    /// Keys of those pages, from the start of the sequence, or empty when they are not passed.
    pub prefix_keys: &'a [PageKey],
    /// Session the request names, or empty.
    pub session_id: &'a str,
}

/// Pages of one group in a load, which follow one another in their sequence.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadLane<'a> {
    /// Pages of the sequence before the first of them.
    pub from: usize,
    /// The pages that are filled.
    pub pages: &'a [u32],
}

/// Pages of one request that come layer by layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerLoad<'a> {
    /// Number of the request, the same as in its lookup.
    pub request: u64,
    /// Pages of the sequence before the load.
    pub start: usize,
    /// Keys of the sequence, from its start to the last page of the load.
    pub keys: &'a [PageKey],
    /// What is filled, by group.
    pub lanes: [LoadLane<'a>; PoolGroup::ALL.len()],
}

impl<'a> LayerLoad<'a> {
    /// Keys of the sequence before the load.
    pub fn prefix(&self) -> &'a [PageKey] {
        self.keys.get(..self.start).unwrap_or_default()
    }

    /// Keys of the pages of a group.
    pub fn keys_of(&self, group: PoolGroup) -> &'a [PageKey] {
        let lane = &self.lanes[group as usize];
        self.keys.get(lane.from..).and_then(|rest| rest.get(..lane.pages.len())).unwrap_or_default()
    }
}

/// The prefix lengths, in pages, that a store can restore in full. Length 0 always can. Beside them, which single pages are there, also
/// behind one that is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restorable {
    lengths: Vec<bool>,
    /// For each group one entry a page; empty where the store said nothing of single pages.
    present: [Vec<bool>; PoolGroup::ALL.len()],
}

impl Restorable {
    /// The empty answer over a span of `pages`: only length 0.
    pub fn none(pages: usize) -> Self {
        Restorable::from_mask((0..=pages).map(|length| length == 0).collect())
    }

    /// Every length from 0 to `hit`, of a span of `pages`.
    pub fn up_to(hit: usize, pages: usize) -> Self {
        Restorable::from_mask((0..=pages).map(|length| length <= hit).collect())
    }

    /// `lengths[n]` says whether the first `n` pages can be restored. Entry 0 is made true.
    pub fn from_mask(mut lengths: Vec<bool>) -> Self {
        if lengths.is_empty() {
            lengths.push(true);
        }
        lengths[0] = true;
        Restorable { lengths, present: Default::default() }
    }

    /// Adds which single pages of all tokens the store has.
    pub fn with_present(self, present: Vec<bool>) -> Self {
        self.with_present_of(PoolGroup::Full, present)
    }

    /// Adds which single pages of a group the store has.
    pub fn with_present_of(mut self, group: PoolGroup, present: Vec<bool>) -> Self {
        self.present[group as usize] = present;
        self
    }

    /// The greatest length that can be restored.
    pub fn longest(&self) -> usize {
        self.lengths.iter().rposition(|&ok| ok).unwrap_or(0)
    }

    /// The greatest length of at most `limit` pages that can be restored.
    pub fn longest_within(&self, limit: usize) -> usize {
        let end = self.lengths.len().min(limit.saturating_add(1));
        self.lengths[..end].iter().rposition(|&ok| ok).unwrap_or(0)
    }

    /// Whether the first `pages` pages can be restored.
    pub fn contains(&self, pages: usize) -> bool {
        self.lengths.get(pages).copied().unwrap_or(false)
    }

    /// Whether page `page` of the span can be read: it is in a prefix that can be restored, or the store named it.
    pub fn has_page(&self, page: usize) -> bool {
        page < self.longest() || self.names(PoolGroup::Full, page)
    }

    /// Whether the store named page `page` of a group as one that it has.
    pub fn names(&self, group: PoolGroup, page: usize) -> bool {
        self.present[group as usize].get(page).copied().unwrap_or(false)
    }

    /// The lengths that both can restore; what several pools or ranks agree on.
    pub fn intersect(&self, other: &Restorable) -> Restorable {
        let lengths: Vec<bool> = self.lengths.iter().zip(&other.lengths).map(|(a, b)| *a && *b).collect();
        let pages = lengths.len() - 1;
        let present = (0..pages).map(|page| self.has_page(page) && other.has_page(page)).collect();
        let both = |group| (0..pages).map(|page| self.names(group, page) && other.names(group, page)).collect();
        Restorable::from_mask(lengths)
            .with_present(present)
            .with_present_of(PoolGroup::Window, both(PoolGroup::Window))
            .with_present_of(PoolGroup::State, both(PoolGroup::State))
    }
}

/// Why a call to a backend failed as a whole. Pages have statuses of their own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("storage backend {backend}: {kind}: {message}")]
pub struct BackendError {
    /// Name of the backend.
    pub backend: String,
    /// Kind of error.
    pub kind: ErrorKind,
    /// Whether the same call may succeed later.
    pub retryable: bool,
    /// For a person.
    pub message: String,
    /// True when the call has not returned: the backend may still touch the pages it was given.
    /// They belong to the call until [`StorageBackend::reclaim`] hands them back.
    pub pages_in_use: bool,
}

/// What a backend says of itself, for the host to plan by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackendLimits {
    /// Pages a call that suit it best.
    pub preferred_batch: usize,
    /// Calls at a time that suit it best.
    pub concurrency: usize,
    /// Whether `batch_remove` works.
    pub remove: bool,
    /// Whether what it stores outlives the process.
    pub durable: bool,
}

/// How the host treats one backend: the keys of `storage.<name>` that are the host's and not the plugin's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendSettings {
    /// Name of the write policy towards it; none for the cache's.
    pub write_policy: Option<String>,
    /// Most time for one call, its retries included.
    pub timeout: Duration,
    /// Time that calls under way get to return before they are cancelled, when the backend leaves.
    pub drain_timeout: Duration,
    /// Pages that were read from a backend further down are stored in this one too.
    pub promote: bool,
    /// Pages are stored with the host's seal and checked by it. Not so where they are named as another engine names them: its objects have none.
    pub sealed: bool,
    /// How often a call is made again after an error that says that this can help.
    pub retries: u32,
    /// Calls at a time at most; none for as many as the plugin wants.
    pub concurrency: Option<usize>,
    /// Bytes a second at most that are read; none for no limit.
    pub read_bandwidth: Option<u64>,
    /// Bytes a second at most that are written; none for no limit.
    pub write_bandwidth: Option<u64>,
}

/// `BACKEND_KEYS` in the configuration declares the same defaults; a test holds the two together.
impl Default for BackendSettings {
    fn default() -> Self {
        BackendSettings {
            write_policy: None,
            timeout: Duration::from_secs(5),
            drain_timeout: Duration::from_secs(5),
            promote: false,
            sealed: true,
            retries: 2,
            concurrency: None,
            read_bandwidth: None,
            write_bandwidth: None,
        }
    }
}

/// Where a backend goes in the list of those in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In the place of the one of this name, in one step; at the end when there is none.
    Of(String),
    /// At this position; those from there on move down.
    At(usize),
}

/// Whether the circuit breaker lets calls through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BreakerState {
    /// All of them.
    #[default]
    Closed,
    /// One at a time, to find out whether the backend works again.
    HalfOpen,
    /// None: the backend rests.
    Open,
}

impl BreakerState {
    /// All of them.
    pub const ALL: [BreakerState; 3] = [BreakerState::Closed, BreakerState::HalfOpen, BreakerState::Open];

    /// Name in status replies and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            BreakerState::Closed => "closed",
            BreakerState::HalfOpen => "half_open",
            BreakerState::Open => "open",
        }
    }
}

/// One way of a backend, as the guards see it. Counts begin with the attach.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WayReport {
    /// What the circuit breaker does now.
    pub breaker: BreakerState,
    /// Why it is left alone now; none while it is used.
    pub resting: Option<String>,
    /// When the breaker took its state; none while it never opened.
    pub since: Option<SystemTime>,
    /// Calls that failed in a row, each with all its retries.
    pub failures: u32,
    /// Calls that were made, retries not counted.
    pub calls: u64,
    /// Of these, calls that failed.
    pub failed: u64,
    /// Calls that were not made because it rests or left.
    pub skipped: u64,
    /// Calls that were made again.
    pub retried: u64,
    /// Calls that waited until another one of the backend had ended.
    pub queued: u64,
    /// Calls that were given up because the bandwidth limit or the calls before them left no time.
    pub crowded_out: u64,
}

/// Whether reading from a backend is worth it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BreakEven {
    /// Measured bytes a second from the backend into host pages.
    pub load_bytes_per_second: f64,
    /// Measured seconds that a read takes whatever its length.
    pub load_latency: f64,
    /// Measured tokens a second of prefill.
    pub prefill_tokens_per_second: f64,
    /// Fewest tokens that are loaded faster than computed; none when computing always wins.
    pub tokens: Option<u64>,
}

/// What the guards around a backend have seen.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GuardReport {
    /// Exists and get.
    pub reads: WayReport,
    /// Set, remove and flush.
    pub writes: WayReport,
    /// Measured break-even; none before both sides were measured.
    pub break_even: Option<BreakEven>,
}

/// Figures of a backend's store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackendStats {
    /// Pages stored.
    pub pages: u64,
    /// Bytes used.
    pub bytes_used: u64,
    /// Bytes that may be used; 0 when unbounded or unknown.
    pub bytes_total: u64,
    /// Calls that failed since the backend was opened.
    pub failures: u64,
}

/// One attached backend instance. All calls may block; they are made from storage threads only,
/// and concurrently. A call about a group names all of its pools at once: a page counts as it does in the pool in which it is worst.
///
/// When a call returns anything but an error with `pages_in_use`, the backend touches none of the
/// pages again.
pub trait StorageBackend: Send + Sync {
    /// Name under which it is attached.
    fn name(&self) -> &str;
    /// Differs between any two instances attached in the life of the process.
    fn generation(&self) -> u64;
    /// What suits it.
    fn limits(&self) -> BackendLimits;
    /// How the host treats it.
    fn settings(&self) -> &BackendSettings;
    /// Which prefixes of the chain `keys` it can restore, over all pools, beside what is `held`.
    fn batch_exists(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &Held,
        chain: &ChainInfo<'_>,
    ) -> Result<Restorable, BackendError>;
    /// Reads page `keys[i]` into page `pages[i]` of the group's host pool. `status` has one entry a key.
    fn batch_get(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError>;
    /// Stores page `pages[i]` of the group's host pool under `keys[i]`. A page that is stored already is a success.
    fn batch_set(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError>;
    /// Removes pages, so that a corrupt one can be written anew.
    fn batch_remove(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError>;
    /// Whether it has the linker face, by which pages come layer by layer.
    fn has_linker(&self) -> bool {
        false
    }
    /// Whether pages go straight between it and the device: those of its linker calls are pages of the device, not of the host pools.
    fn is_direct(&self) -> bool {
        false
    }
    /// As `batch_exists`, by the linker face, for the load of `request`.
    fn lookup(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &Held,
        chain: &ChainInfo<'_>,
        request: u64,
    ) -> Result<Restorable, BackendError> {
        let _ = (options, keys, held, chain, request);
        Err(self.lacks_linker())
    }
    /// Loads pages as one batch, layer by layer. Word `l` of `words` becomes 1 when layer `l` of every page is settled: its bytes are there and
    /// final, or will not come. `watch` is called again and again meanwhile, and no more once the call has returned. `status` has one entry a
    /// page, in the order of the loads and in each of the groups; a page counts only by it and by its seal.
    fn load_layers(
        &self,
        options: &CallOptions,
        loads: &[LayerLoad<'_>],
        words: &Arc<[AtomicU32]>,
        watch: &mut dyn FnMut(),
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        let _ = (options, loads, words, watch, status);
        Err(self.lacks_linker())
    }
    /// Stores pages by the linker face: all of them, or none.
    fn offload(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        let _ = (options, group, keys, pages, chain, status);
        Err(self.lacks_linker())
    }
    /// The error of a backend without the linker face.
    fn lacks_linker(&self) -> BackendError {
        BackendError {
            backend: self.name().to_owned(),
            kind: ErrorKind::Unsupported,
            retryable: false,
            message: "it has no linker face".to_owned(),
            pages_in_use: false,
        }
    }
    /// Makes what was stored durable as far as the backend promises it.
    fn flush(&self, options: &CallOptions) -> Result<(), BackendError>;
    /// Removes everything of this namespace.
    fn clear(&self, options: &CallOptions) -> Result<(), BackendError>;
    /// Figures of the store.
    fn stats(&self) -> Result<BackendStats, BackendError>;
    /// Pages of late calls about a group that have returned since the last call of this function: they are free again.
    fn reclaim(&self, group: PoolGroup) -> Vec<u32>;
    /// Pages that late calls still hold.
    fn quarantined(&self) -> usize;
}

/// Where the cache learns what a host pool looks like to a plugin and the plugin layer learns what to
/// register: everything about one named pool that crosses the boundary.
#[derive(Debug, Clone)]
pub struct HostPoolDescription {
    /// Name of the pool; the anchor is `kv`.
    pub name: String,
    /// Whose page numbers it goes by.
    pub group: PoolGroup,
    /// What a prefix needs of it.
    pub hit: PoolHit,
    /// It owns page numbers and no bytes.
    pub logical: bool,
    /// SGLang's name of the layout.
    pub layout: String,
    /// `f16`, `bf16` or `f32`.
    pub dtype: kvdock_plugin_api::Dtype,
    /// Pages in the pool.
    pub pages: u32,
    /// Tokens a page; 0 where a page stands for all tokens before it.
    pub page_tokens: u32,
    /// Layers of the model; 0 for a logical pool.
    pub layers: u32,
    /// Address of the mapping; valid until the process ends.
    pub base: usize,
    /// Bytes of the mapping.
    pub bytes: u64,
    /// Whether it is pinned for a CUDA GPU.
    pub pinned: bool,
    /// Descriptor of the memfd behind it, valid until the process ends.
    pub fd: i32,
    /// Memory of a device that pieces of pages lie in; none of a pool in host memory. The mapping is region 0, these are the regions after it.
    pub device: Vec<DeviceRegion>,
    /// The pieces of a page: byte offset of page 0 in its region, bytes from page to page, bytes. The seal is the last one, and lies in the mapping.
    pub segments: Vec<HostPoolSegment>,
    /// Where the bytes of each layer and component of a page lie.
    pub components: Vec<HostPoolComponent>,
}

/// A range of the memory of a CUDA GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRegion {
    /// Address of the first byte on the device.
    pub base: u64,
    /// Bytes.
    pub bytes: u64,
    /// UUID of the device.
    pub uuid: [u8; 16],
}

/// The pools of a device themselves, for backends that take its memory.
#[derive(Clone)]
pub struct DevicePools {
    /// What a backend has to know to register them, the anchor first. A page is a page of the device's.
    pub descriptions: Arc<[HostPoolDescription]>,
    /// As long as a clone of this lives, the memory is there.
    pub keep: Arc<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for DevicePools {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DevicePools").field("descriptions", &self.descriptions).finish_non_exhaustive()
    }
}

/// One piece of every page of a host pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPoolSegment {
    /// Which region it lies in: 0 is the mapping.
    pub region: u32,
    /// Byte offset in the region of this piece of page 0.
    pub offset: u64,
    /// Bytes from a page's piece to the next page's.
    pub stride: u64,
    /// Bytes of the piece.
    pub len: u64,
}

/// What a component of a page holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaneKind {
    /// Keys.
    K,
    /// Values.
    V,
    /// A recurrent state.
    State,
    /// What only the model can read.
    Other,
}

/// The bytes of one layer and component within a page: `run_count` runs of `run_len` bytes, `run_stride` apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPoolComponent {
    /// Layer, from 0.
    pub layer: u32,
    /// What it holds.
    pub kind: PlaneKind,
    /// Index into the segments.
    pub segment: u32,
    /// Byte offset of the first run in the segment.
    pub offset: u64,
    /// Bytes of a run.
    pub run_len: u64,
    /// Bytes from run to run.
    pub run_stride: u64,
    /// Number of runs.
    pub run_count: u64,
}

/// The cache as whoever attaches backends sees it.
pub trait BackendSink: Send + Sync {
    /// The pools that a backend must register, the anchor first. None of them when there is no host tier.
    fn host_pools(&self) -> Vec<HostPoolDescription>;
    /// Which face of backends the cache uses.
    fn cache_mode(&self) -> CacheMode {
        CacheMode::Hierarchical
    }
    /// The pools of every rank that a backend must register, with an instance for each rank. None when there is no host tier.
    fn rank_pools(&self) -> Vec<Vec<HostPoolDescription>> {
        Some(self.host_pools()).filter(|pools| !pools.is_empty()).into_iter().collect()
    }
    /// The device's pools themselves, for a backend that takes its memory; none where pages go by way of the host.
    fn device_pools(&self) -> Option<DevicePools> {
        None
    }
    /// Puts a backend to use, in the same step in which the one whose place it takes leaves.
    fn attached(&self, backend: Arc<dyn StorageBackend>, place: Place);
    /// Stops using a backend: no new call is made into it. Calls that run are left to return. False if there is none of this name.
    fn detached(&self, name: &str) -> bool;
    /// Tells that the store of this backend was emptied: nothing is believed to be stored there any more.
    fn emptied(&self, name: &str);
    /// What the guards around a backend have seen; none if there is none of this name.
    fn guards(&self, name: &str) -> Option<GuardReport>;
    /// Names of the prefetch and the write policy in use.
    fn policies(&self) -> (String, String);
    /// Whether these policies could be set.
    ///
    /// # Errors
    /// Says why not.
    fn check_policies(&self, change: &PolicyChange) -> Result<(), String>;
    /// Sets policies that `check_policies` let pass.
    fn set_policies(&self, change: &PolicyChange);
}

#[cfg(test)]
mod link_tests {
    use super::*;

    fn lengths(pages: usize, restorable: &[usize]) -> Restorable {
        Restorable::from_mask((0..=pages).map(|length| restorable.contains(&length)).collect())
    }

    /// The longest length that both have; never the smaller of the two longest, which neither may have.
    #[test]
    fn l03_l04_ranks_agree_on_lengths_that_both_can_restore() {
        assert_eq!(lengths(4, &[2, 4]).intersect(&lengths(4, &[2])).longest(), 2);
        assert_eq!(lengths(6, &[1, 4, 6]).intersect(&lengths(6, &[1, 5])).longest(), 1);
        assert_eq!(lengths(4, &[4]).intersect(&lengths(4, &[3])).longest(), 0);
    }
}
