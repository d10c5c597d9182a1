//! The linker face: pages go straight between device pools and the store, layer by layer.

use std::ffi::c_void;

use super::{Bytes, CallContext, ErrorOut, ExistsArgs, PageKey, PoolTransfer, Status};
use crate::describe::abi_struct;

abi_struct! {
    /// Queues the load of a request. The array of transfers is copied by the call; what the transfers name (keys, page indices,
    /// statuses, and the pages) and `prefix_keys` live, and belong to the load, until `finish_layer_wise_loading` of its batch,
    /// `cancel_queued_load` or `reset` returns.
    pub struct LoadArgs {
        /// Number of the request.
        pub request: u64,
        /// The pools' parts.
        pub transfers: *const PoolTransfer,
        /// Number of parts.
        pub transfer_count: u64,
        /// Pages of the sequence before the first key of the anchor.
        pub chain_position: u64,
        /// Keys of those pages, or none.
        pub prefix_keys: *const PageKey,
        /// Number of `prefix_keys`.
        pub prefix_key_count: u64,
    }
}

abi_struct! {
    /// Starts everything that is queued as one batch.
    pub struct StartArgs {
        /// Deadline and cancel flag of the whole load.
        pub context: CallContext,
        /// Number of the batch, chosen by the host.
        pub batch: u64,
        /// `layer_count` words of the host (`layer_done_counter`). The plugin stores 1 (release) into word `l` when layer `l` of every
        /// queued request is settled, loaded or failed. They live until `finish_layer_wise_loading` of the batch returns.
        pub layer_done: *mut u32,
        /// Number of layers.
        pub layer_count: u64,
    }
}

abi_struct! {
    /// Waits for a batch. When it returns, every status of the batch's transfers is written and no page is touched again.
    pub struct FinishArgs {
        /// Deadline and cancel flag.
        pub context: CallContext,
        /// Number of the batch.
        pub batch: u64,
    }
}

abi_struct! {
    /// Says when source pages may be read.
    pub struct ReadyHandle {
        /// A [`crate::ReadyKind`]. An unknown kind is refused.
        pub kind: u32,
        /// Reserved, 0.
        pub reserved: u32,
        /// What the kind says.
        pub handle: u64,
    }
}

abi_struct! {
    /// Queues the store of pages of several pools: all become visible or none. The arrays of transfers and handles are copied by the
    /// call; what the transfers name (keys, page indices, statuses, and the pages) and `prefix_keys` live, and belong to the
    /// operation, until it is popped or `reset` returns.
    pub struct OffloadArgs {
        /// Number of the operation, chosen by the host.
        pub operation: u64,
        /// Deadline, in nanoseconds of CLOCK_MONOTONIC; 0 for never.
        pub deadline_ns: u64,
        /// The pools' parts.
        pub transfers: *const PoolTransfer,
        /// Number of parts.
        pub transfer_count: u64,
        /// What to wait for before a page is read.
        pub ready: *const ReadyHandle,
        /// Number of handles.
        pub ready_count: u64,
        /// Pages of the sequence before the first key of the anchor.
        pub chain_position: u64,
        /// Keys of those pages, or none.
        pub prefix_keys: *const PageKey,
        /// Number of `prefix_keys`.
        pub prefix_key_count: u64,
        /// Session that the request names, or empty.
        pub session_id: Bytes,
    }
}

abi_struct! {
    /// A completed offload.
    pub struct OffloadDone {
        /// Number of the operation.
        pub operation: u64,
        /// 0 when everything was stored, else a [`crate::ErrorKind`].
        pub status: u32,
        /// 1: the same operation may succeed later.
        pub retryable: u32,
    }
}

abi_struct! {
    /// The functions of the linker face. Called from one thread at a time, except `cancel_queued_load`.
    pub struct LinkerTable {
        /// Bytes of this table.
        pub size: u64,
        /// Version of this table.
        pub abi_version: u32,
        /// Reserved, 0.
        pub reserved: u32,
        /// Which prefixes can be restored into the device pools.
        pub lookup: unsafe extern "C" fn(*mut c_void, *const ExistsArgs, *mut ErrorOut) -> Status,
        /// Queues a load. Whether it refuses depends on the transfers alone.
        pub load: unsafe extern "C" fn(*mut c_void, *const LoadArgs, *mut ErrorOut) -> Status,
        /// Starts what is queued. Does not wait.
        pub start_layer_wise_loading: unsafe extern "C" fn(*mut c_void, *const StartArgs, *mut ErrorOut) -> Status,
        /// Waits for the end of a batch.
        pub finish_layer_wise_loading: unsafe extern "C" fn(*mut c_void, *const FinishArgs, *mut ErrorOut) -> Status,
        /// Takes a queued load back. Success means that it was queued and has not started.
        pub cancel_queued_load: unsafe extern "C" fn(*mut c_void, u64, *mut ErrorOut) -> Status,
        /// Queues an offload.
        pub offload: unsafe extern "C" fn(*mut c_void, *const OffloadArgs, *mut ErrorOut) -> Status,
        /// How many completed offloads wait to be popped.
        pub num_completed_offloads: unsafe extern "C" fn(*mut c_void) -> u64,
        /// Pops the oldest completed offload, in the order of their queueing; waits for none: `NotFound` when there is none.
        pub pop_completed_offload: unsafe extern "C" fn(*mut c_void, *mut OffloadDone, *mut ErrorOut) -> Status,
        /// Cancels what is queued, ends what runs, forgets completed offloads.
        pub reset: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status,
    }
}

// SAFETY: the table holds function addresses only; nothing in it changes.
unsafe impl Sync for LinkerTable {}
// SAFETY: as for `Sync`; a table owns nothing.
unsafe impl Send for LinkerTable {}
