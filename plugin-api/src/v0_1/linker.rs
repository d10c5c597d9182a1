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
        /// Pages of the sequence before the part of the chain that this load is about.
        pub chain_position: u64,
        /// Keys of those pages, or none.
        pub prefix_keys: *const PageKey,
        /// Number of `prefix_keys`.
        pub prefix_key_count: u64,
    }
}

abi_struct! {
    /// Starts everything that is queued as one batch. With nothing queued every layer is settled at once.
    pub struct StartArgs {
        /// Deadline and cancel flag of the whole load: the flag lives until `finish_layer_wise_loading` of the batch returns.
        pub context: CallContext,
        /// Number of the batch, chosen by the host.
        pub batch: u64,
        /// What to wait for before a page is written: until then earlier users of the slots may still read them. The array is copied by the
        /// call; what the handles name lives until `finish_layer_wise_loading` of the batch returns.
        pub ready: *const ReadyHandle,
        /// Number of handles.
        pub ready_count: u64,
        /// `layer_count` words of the host (`layer_done_counter`). The plugin stores 1 (release) into word `l` when layer `l` of every
        /// queued request is settled: loaded, and its bytes are where every later reader sees them, or failed. Then it calls `layers_settled` of the
        /// host. The words live until `finish_layer_wise_loading` of the batch returns.
        pub layer_done: *mut u32,
        /// Number of layers.
        pub layer_count: u64,
    }
}

abi_struct! {
    /// Waits for a batch. When it returns, with any status, every layer is settled, every status of the batch's transfers is written, and no page
    /// is touched again. At the deadline the plugin ends the load; it does not return before it is quiet.
    pub struct FinishArgs {
        /// Deadline and cancel flag.
        pub context: CallContext,
        /// Number of the batch.
        pub batch: u64,
    }
}

abi_struct! {
    /// Says when pages may be touched.
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
        /// What to wait for before a page is read; all of them. What the handles name lives as long as the operation.
        pub ready: *const ReadyHandle,
        /// Number of handles.
        pub ready_count: u64,
        /// Pages of the sequence before the part of the chain that this operation is about.
        pub chain_position: u64,
        /// Keys of those pages, or none.
        pub prefix_keys: *const PageKey,
        /// Number of `prefix_keys`.
        pub prefix_key_count: u64,
        /// Session that the request names, or empty. Copied by the call.
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
    /// The functions of the linker face. `lookup` counts as a data call and may run beside any other. `finish_layer_wise_loading` and
    /// `cancel_queued_load` may run beside any call but `reset`. The others come from one thread at a time.
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
        /// Pops the oldest completed offload, in the order of their queueing; waits for none: [`crate::ErrorKind::NotFound`] when there is none.
        pub pop_completed_offload: unsafe extern "C" fn(*mut c_void, *mut OffloadDone, *mut ErrorOut) -> Status,
        /// Cancels what is queued, ends what runs, forgets completed offloads. When it returns, nothing of them is touched again.
        pub reset: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status,
    }
}

// SAFETY: the table holds function addresses only; nothing in it changes.
unsafe impl Sync for LinkerTable {}
// SAFETY: as for `Sync`; a table owns nothing.
unsafe impl Send for LinkerTable {}
