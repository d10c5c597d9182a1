//! What goes into the cache and what comes out of it.

use std::fmt;
use std::time::Instant;

use super::hash::namespace_seed;
use super::linker::Arriving;
use crate::plugin::backend::PageKey;

/// Names a request inside the cache. The engine chooses the numbers; no two live requests share one.
pub type RequestId = u64;

/// What separates requests of equal tokens. Prefixes are shared only between equal namespaces,
/// in every tier: tree, host pool and storage keys.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct CacheNamespace {
    /// Adapter or other context that changes what the model computes.
    pub extra_key: Option<String>,
    /// Tenant. An empty salt is the same as none.
    pub cache_salt: Option<String>,
}

impl CacheNamespace {
    /// A namespace with an empty salt turned into none.
    pub fn new(extra_key: Option<String>, cache_salt: Option<String>) -> Self {
        CacheNamespace { extra_key, cache_salt: cache_salt.filter(|salt| !salt.is_empty()) }
    }

    /// The start of the hash chain of this namespace; none for the common one.
    pub fn seed(&self) -> Option<PageKey> {
        let salt = self.cache_salt.as_deref().filter(|salt| !salt.is_empty());
        namespace_seed(self.extra_key.as_deref(), salt)
    }
}

/// What [`begin`](super::CacheManager::begin) found out at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    /// Tokens of the prompt that are on the device or being brought there.
    pub device_tokens: usize,
    /// Further tokens that are in the host pool.
    pub host_tokens: usize,
    /// Whether storage is being asked for more; [`poll`](super::CacheManager::poll) tells when to go on.
    pub prefetching: bool,
}

/// Whether a request still waits for storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefetch {
    /// Nothing to wait for: acquire.
    Ready,
    /// Still fetching. Poll again when the waker fires, and at `until` at the latest.
    Waiting {
        /// When the prefetch policy gives up, whatever storage does.
        until: Instant,
    },
}

/// Answer of [`acquire`](super::CacheManager::acquire).
#[derive(Debug)]
pub enum Acquire {
    /// The prefix is in the request's hands.
    Granted(Grant),
    /// Host pages are on their way to the device. Acquire again when the waker fires.
    Loading,
    /// The device pool has no room for the prefix while others hold their pages. Nothing was taken.
    NoSpace,
}

/// The reusable prefix of a request, locked for it until finish, abort or preempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Device page table of the prefix, from position 0. The pages belong to the cache.
    pub pages: Vec<u32>,
    /// Its window table, where the model has windows, as in [`PageTables`].
    pub windows: Vec<u32>,
    /// Tokens of the prefix: `pages.len()` whole pages.
    pub tokens: usize,
    /// Of these, tokens found in device pages.
    pub from_device: usize,
    /// Of these, tokens loaded from host pages.
    pub from_host: usize,
    /// Of these, tokens that storage delivered for this request, or that still come.
    pub from_storage: usize,
    /// The last of the pages still come from storage, layer by layer.
    pub arriving: Option<Arriving>,
    /// Why the rest of the prompt that could have been reused was not; in order of position.
    pub why: Vec<Miss>,
    /// Slot of the recurrent state behind the prefix, where the model has such: to be copied before anything else is asked of the cache.
    pub state: Option<u32>,
    /// Tokens after which a recurrent state would have made a longer hit: worth to be saved on the way.
    pub branch: Option<usize>,
}

/// The page tables of a request, from position 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageTables {
    /// Pages of all tokens.
    pub pages: Vec<u32>,
    /// Pages of windows, one for each page of all tokens; empty for a model without windows. Those that no later token sees stand as
    /// [`NO_SLOT`](super::unified::NO_SLOT).
    pub windows: Vec<u32>,
}

impl From<Vec<u32>> for PageTables {
    /// Of a model without windows.
    fn from(pages: Vec<u32>) -> Self {
        PageTables { pages, windows: Vec::new() }
    }
}

/// A part of a prompt that could have been reused and was not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Miss {
    /// First token.
    pub start: usize,
    /// One past the last token; a multiple of the page size.
    pub end: usize,
    /// The reason.
    pub reason: MissReason,
}

/// Why a prefix was no hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MissReason {
    /// No tier has it, and storage was asked or there is none.
    NotStored,
    /// It was here and had to make room.
    Evicted,
    /// The missing part, or what storage has of it, is under the prefetch threshold.
    TooShort,
    /// Storage did not answer or deliver in the time of the prefetch policy.
    BackendSlow,
    /// Storage said it has the page, and failed to deliver it.
    BackendFailed,
    /// A page came back with the wrong bytes.
    Corrupt,
    /// The same tokens are cached under another `cache_salt` or `extra_key`.
    NamespaceDiffers,
    /// No storage backend is attached.
    StorageOff,
    /// The host pool has no room for more prefetches, or none at all.
    HostFull,
    /// Storage has it or may have it, and computing it is faster than loading it.
    NotWorthIt,
}

impl MissReason {
    /// Stable short name, for logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            MissReason::NotStored => "not stored",
            MissReason::Evicted => "evicted",
            MissReason::TooShort => "too short",
            MissReason::BackendSlow => "backend slow",
            MissReason::BackendFailed => "backend failed",
            MissReason::Corrupt => "corrupt",
            MissReason::NamespaceDiffers => "namespace differs",
            MissReason::StorageOff => "storage off",
            MissReason::HostFull => "host full",
            MissReason::NotWorthIt => "not worth it",
        }
    }
}

impl fmt::Display for MissReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}: {}", self.start, self.end, self.reason)
    }
}

/// Which tiers to empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiers {
    /// Device pages.
    pub device: bool,
    /// Host pages.
    pub host: bool,
}

impl Tiers {
    /// Device and host.
    pub const ALL: Tiers = Tiers { device: true, host: true };
    /// Device only; pages stay on the host where they are backed up.
    pub const DEVICE: Tiers = Tiers { device: true, host: false };
    /// Host only; pages stay on the device.
    pub const HOST: Tiers = Tiers { device: false, host: true };
}

/// What a flush freed and what it had to leave.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Device pages freed.
    pub device_freed: usize,
    /// Cached device pages left: locked by running requests or by copies.
    pub device_kept: usize,
    /// Host pages freed.
    pub host_freed: usize,
    /// Host pages left: locked, or in the hands of storage calls.
    pub host_kept: usize,
}

/// What became of the backups when the time to finish them was over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drained {
    /// Pages that were written while draining.
    pub stored: u64,
    /// Pages that were still not stored.
    pub left: u64,
}

/// Why the cache could not be made, or refused a call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// A setting that cannot be used.
    #[error("{key}: {problem}")]
    Config {
        /// The configuration key.
        key: &'static str,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// The host pool's memory could not be had.
    #[error("cannot map {bytes} bytes for the host pool (cache.host_tokens): {message}")]
    HostMemory {
        /// Bytes asked for.
        bytes: u64,
        /// The system's words.
        message: String,
    },
    /// A worker thread could not be started.
    #[error("cannot start the thread {name}: {message}")]
    Thread {
        /// Name of the thread.
        name: String,
        /// The system's words.
        message: String,
    },
    /// A request that the cache does not know.
    #[error("the cache knows no request {0}")]
    UnknownRequest(RequestId),
    /// A request that holds a grant already asked for another.
    #[error("request {0} holds a grant already")]
    AlreadyGranted(RequestId),
    /// A request that holds no grant was to commit pages.
    #[error("request {0} holds no grant")]
    NotGranted(RequestId),
    /// A page that is not the caller's.
    #[error("request {request}: device page {page} is not its own")]
    ForeignPage {
        /// The request.
        request: RequestId,
        /// The page.
        page: u32,
    },
    /// Pages that do not fit the tokens they are said to hold.
    #[error("request {request}: {tokens} tokens need {needed} pages, {found} were given")]
    PageTable {
        /// The request.
        request: RequestId,
        /// Tokens named.
        tokens: usize,
        /// Pages they need.
        needed: usize,
        /// Pages given.
        found: usize,
    },
}

/// What else a request says about its reuse.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReuseHints {
    /// Conversation the request belongs to; handed to storage backends.
    pub session_id: Option<String>,
    /// Tokens from here on are computed even if they are cached (prompt log-probabilities).
    pub reuse_limit: Option<usize>,
    /// With `cache.eviction = "priority"` what this request inserts or passes through stays longer than what has less.
    pub priority: i32,
}
