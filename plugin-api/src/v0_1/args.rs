//! What calls take and give.

use std::ffi::c_void;

use super::table::HostTable;
use crate::describe::abi_struct;

/// SHA-256 digest that names a page: the hash chain over the tokens up to its end.
pub type PageKey = [u8; 32];

abi_struct! {
    /// Bytes that the callee may read until the call returns. Text is UTF-8.
    pub struct Bytes {
        /// First byte; may be null when `len` is 0.
        pub ptr: *const u8,
        /// Number of bytes.
        pub len: u64,
    }
}

abi_struct! {
    /// Where a failing call writes why. The host owns the buffer.
    pub struct ErrorOut {
        /// A [`crate::ErrorKind`]; 0 when nothing was written.
        pub kind: u32,
        /// 1: the same call may succeed later.
        pub retryable: u8,
        /// 1: the plugin panicked. The host fails the instance.
        pub panicked: u8,
        /// Reserved, 0.
        pub reserved: [u8; 2],
        /// Buffer for a message for a person, UTF-8.
        pub message: *mut u8,
        /// Bytes the buffer can take.
        pub message_capacity: u64,
        /// Bytes written; a longer message is cut at a character.
        pub message_len: u64,
    }
}

abi_struct! {
    /// Deadline and cancel flag of a call.
    pub struct CallContext {
        /// When the call is late, in nanoseconds of CLOCK_MONOTONIC; 0 for never.
        pub deadline_ns: u64,
        /// A word the host sets to a value other than 0 to ask the call to return. Read it atomically.
        /// May be null.
        pub cancel: *const u32,
        /// Number of the call, for logs.
        pub trace_id: u64,
    }
}

abi_struct! {
    /// Who this worker is. Everything that changes the bytes of a page is bound in the namespace.
    pub struct Identity {
        /// SHA-256 over what the namespace binds: content digest of the weights, KV dtype, layout, page size, rank geometry,
        /// numerics of the kernels. Pages under other namespaces are not ours.
        pub namespace_digest: [u8; 32],
        /// The bound values as a JSON object, for a person and for readable key schemes.
        pub namespace_json: Bytes,
        /// Name of the model as clients use it.
        pub model_name: Bytes,
        /// SHA-256 of the weights.
        pub weights_digest: [u8; 32],
        /// Which kernels write pages: bit-exact reuse holds among equal ids only.
        pub numerics_id: Bytes,
        /// Tokens a page.
        pub page_tokens: u32,
        /// Tensor-parallel rank, among the ranks that share the attention of one request.
        pub tp_rank: u32,
        /// Number of tensor-parallel ranks.
        pub tp_size: u32,
        /// Pipeline stage.
        pub pp_rank: u32,
        /// Number of pipeline stages.
        pub pp_size: u32,
        /// Context-parallel rank.
        pub cp_rank: u32,
        /// Number of context-parallel ranks.
        pub cp_size: u32,
        /// Data-parallel rank. Pages do not depend on it.
        pub dp_rank: u32,
        /// Number of data-parallel ranks.
        pub dp_size: u32,
        /// Decode-context-parallel rank.
        pub dcp_rank: u32,
        /// Number of decode-context-parallel ranks.
        pub dcp_size: u32,
        /// Least common multiple of the tensor-parallel sizes that share pages by split heads; 0 for none.
        pub tp_lcm_size: u32,
        /// 1: every tensor-parallel rank holds the same bytes, and only the writer stores them.
        pub replicated: u32,
        /// 1: this rank stores pages that are replicated.
        pub writer: u32,
    }
}

abi_struct! {
    /// What an instance can do, and what suits it, given its configuration and what it found when it opened. It is never more than the
    /// note of the plugin declares.
    pub struct CapabilitiesOut {
        /// Bits of [`crate::Capability`]. A bit that the host does not know is ignored.
        pub flags: u64,
        /// Alignment of addresses and lengths that avoids a copy, in bytes; 1 for none.
        pub alignment: u32,
        /// Pages a call that suit it best.
        pub preferred_batch: u32,
        /// Data calls at a time that suit it best; the host makes no more.
        pub concurrency: u32,
        /// Reserved, 0.
        pub reserved: u32,
    }
}

abi_struct! {
    /// What `open` takes. Everything it points at lives until `open` returns, but for `host` and `host_context`,
    /// which live as long as the process.
    pub struct OpenArgs {
        /// Deadline and cancel flag of the call.
        pub context: CallContext,
        /// The configuration as a JSON object that fits the schema in the plugin's note.
        pub config_json: Bytes,
        /// Name of this instance in the host's configuration.
        pub instance_name: Bytes,
        /// Who this worker is.
        pub identity: *const Identity,
        /// What the host offers.
        pub host: *const HostTable,
        /// First argument of every function of `host`.
        pub host_context: *mut c_void,
        /// A [`crate::CacheMode`]: which face the host will use.
        pub cache_mode: u32,
        /// Reserved, 0.
        pub reserved: u32,
    }
}

abi_struct! {
    /// A pool that an exists or lookup call asks about.
    pub struct PoolQuery {
        /// Number of the pool.
        pub pool: u32,
        /// A [`crate::HitPolicy`].
        pub hit_policy: u32,
        /// For trailing pages: how many.
        pub trailing_pages: u32,
        /// For block groups: anchor pages of a block.
        pub block_pages: u32,
        /// For block groups: keys of a group.
        pub group_pages: u32,
        /// The first pages of the chain that the worker holds in this pool already: the store need not have them.
        pub held_pages: u32,
    }
}

abi_struct! {
    /// Asks which prefixes of a chain of pages can be restored.
    pub struct ExistsArgs {
        /// Deadline and cancel flag.
        pub context: CallContext,
        /// Keys of the chain, `key_count * 32` bytes.
        pub keys: *const PageKey,
        /// Number of keys.
        pub key_count: u64,
        /// The pools a prefix needs.
        pub pools: *const PoolQuery,
        /// Number of pools.
        pub pool_count: u64,
        /// Pages of the sequence before the first key.
        pub chain_position: u64,
        /// Keys of those pages from the start of the sequence, or none.
        pub prefix_keys: *const PageKey,
        /// Number of `prefix_keys`: `chain_position` or 0.
        pub prefix_key_count: u64,
        /// Number of the request, the same in `lookup`, `load` and `cancel_queued_load`; 0 for none.
        pub request: u64,
        /// Out, `key_count + 1` bytes: 1 at `n` when the first `n` keys can be restored in full, for every pool. The host writes 0 before
        /// the call.
        pub restorable: *mut u8,
        /// Out, `pool_count * key_count` bytes, pool after pool: a [`crate::PageStatus`] for every page that was looked at.
        /// The host writes 0 before the call. May be null.
        pub present: *mut u8,
    }
}

abi_struct! {
    /// Pages of one pool in a batch.
    pub struct PoolTransfer {
        /// Number of the pool.
        pub pool: u32,
        /// First layer of a range. Ranges need the capability `ranges`, and are for reads: a set, a remove or an offload names whole pages.
        /// A range moves the components of its layers, and the seal.
        pub layer_first: u32,
        /// Number of layers; 0 for the whole page.
        pub layer_count: u32,
        /// Pages from the chain position of the call to the first key. On a set, an offload or a load the keys follow one another in the chain,
        /// so that key `i` is page `chain_position + chain_offset + i` of its sequence.
        pub chain_offset: u32,
        /// Keys, one a page.
        pub keys: *const PageKey,
        /// Page indices into the pool, one a key.
        pub pages: *const u32,
        /// Number of keys.
        pub count: u64,
        /// Out: one [`crate::PageStatus`] a key. The host writes 0 before the call.
        pub statuses: *mut u8,
    }
}

abi_struct! {
    /// A `batch_get`, `batch_set` or `batch_remove`.
    pub struct BatchArgs {
        /// Deadline and cancel flag.
        pub context: CallContext,
        /// The pools' parts. On a set, side pools come first and the anchor last.
        pub transfers: *const PoolTransfer,
        /// Number of parts.
        pub transfer_count: u64,
        /// Pages of the sequence before the part of the chain that this call is about.
        pub chain_position: u64,
        /// Keys of those pages from the start of the sequence, or none.
        pub prefix_keys: *const PageKey,
        /// Number of `prefix_keys`: `chain_position` or 0.
        pub prefix_key_count: u64,
        /// Session that the request names, or empty.
        pub session_id: Bytes,
    }
}

abi_struct! {
    /// Pages that the worker itself holds have changed. Advisory: for a store that tells other workers who holds what.
    pub struct HeldPages {
        /// Deadline and cancel flag.
        pub context: CallContext,
        /// A [`crate::HeldTier`].
        pub tier: u32,
        /// A [`crate::HeldChange`].
        pub change: u32,
        /// Keys of the pages.
        pub keys: *const PageKey,
        /// Number of keys.
        pub key_count: u64,
    }
}

abi_struct! {
    /// Figures of a store. A figure that the backend does not know is 0.
    pub struct Stats {
        /// Pages stored.
        pub pages: u64,
        /// Bytes used.
        pub bytes_used: u64,
        /// Bytes that may be used; 0 when unbounded or unknown.
        pub bytes_total: u64,
        /// Calls that failed since `open`.
        pub failures: u64,
        /// Mean time of a `batch_get` since `open`, in nanoseconds; 0 when it is not known.
        pub get_mean_ns: u64,
        /// Mean time of a `batch_set` since `open`, in nanoseconds; 0 when it is not known.
        pub set_mean_ns: u64,
    }
}

abi_struct! {
    /// Answer of `health`.
    pub struct HealthOut {
        /// A [`crate::HealthState`].
        pub state: u32,
        /// Reserved, 0.
        pub reserved: u32,
        /// Buffer for the reason, UTF-8.
        pub reason: *mut u8,
        /// Bytes the buffer can take.
        pub reason_capacity: u64,
        /// Bytes written.
        pub reason_len: u64,
    }
}
