//! The tables of functions, one of the plugin and one of the host.

use std::ffi::c_void;

use super::{
    BatchArgs, Bytes, CallContext, CapabilitiesOut, ErrorOut, ExistsArgs, HealthOut, HeldPages, LinkerTable, OpenArgs,
    PoolDesc, Stats,
};
use crate::describe::abi_struct;

/// 0 is success; anything else is the [`crate::ErrorKind`] that also stands in the [`ErrorOut`].
pub type Status = u32;

/// The entry symbol of a plugin: `kvdock_plugin_entry`. It takes a version number and answers the address of
/// that version's [`BackendTable`], or null. It has no other effect.
pub type EntryFn = extern "C" fn(u32) -> *const c_void;

/// Name of the entry symbol.
pub const ENTRY_SYMBOL: &str = "kvdock_plugin_entry";

abi_struct! {
    /// What the host offers to a plugin. The functions may be called from any thread, do not block, never call back,
    /// and stay valid for the life of the process. The first argument is `host_context` of [`OpenArgs`].
    pub struct HostTable {
        /// Bytes of this table.
        pub size: u64,
        /// Version of this table.
        pub abi_version: u32,
        /// Reserved, 0.
        pub reserved: u32,
        /// Writes a log line: level (a [`crate::LogLevel`]), target, message.
        pub log: unsafe extern "C" fn(*mut c_void, u32, Bytes, Bytes),
        /// Reports a metric: kind (a [`crate::MetricKind`]), name, labels as a JSON object or empty, value.
        pub metric: unsafe extern "C" fn(*mut c_void, u32, Bytes, Bytes, f64),
        /// Tells a change of health: state (a [`crate::HealthState`]), reason.
        pub health_changed: unsafe extern "C" fn(*mut c_void, u32, Bytes),
        /// Tells that an offload has completed, so that the host need not poll.
        pub offload_completed: unsafe extern "C" fn(*mut c_void),
        /// Tells that layers of a batch of loads were settled, so that the host need not poll the words.
        pub layers_settled: unsafe extern "C" fn(*mut c_void, u64),
    }
}

abi_struct! {
    /// The functions of a plugin. `*mut c_void` is the instance that `open` made.
    ///
    /// Order of calls: `open`, `capabilities`, `register_mem_pool_host`, `register_v2_side_pools` (any number of times, later again),
    /// `pools_ready` (once; may refuse), traffic, `close`. When a step fails, the host calls `close`, unless `open` itself failed.
    /// Later registrations and the calls from `clear` to `report_held_pages` may run beside data calls.
    pub struct BackendTable {
        /// Bytes of this table.
        pub size: u64,
        /// Version of this table.
        pub abi_version: u32,
        /// Reserved, 0.
        pub reserved: u32,
        /// Makes an instance. When it fails, nothing is left behind.
        pub open: unsafe extern "C" fn(*const OpenArgs, *mut *mut c_void, *mut ErrorOut) -> Status,
        /// What this instance can do. Called once, after `open`.
        pub capabilities: unsafe extern "C" fn(*mut c_void, *mut CapabilitiesOut, *mut ErrorOut) -> Status,
        /// Registers the anchor pool.
        pub register_mem_pool_host: unsafe extern "C" fn(*mut c_void, *const CallContext, *const PoolDesc, *mut ErrorOut) -> Status,
        /// Registers side pools; all or none.
        pub register_v2_side_pools: unsafe extern "C" fn(*mut c_void, *const CallContext, *const PoolDesc, u64, *mut ErrorOut) -> Status,
        /// Takes registered pools back, by number, when no call names them any more.
        pub unregister: unsafe extern "C" fn(*mut c_void, *const CallContext, *const u32, u64, *mut ErrorOut) -> Status,
        /// All pools known so far are registered; the plugin may refuse them.
        pub pools_ready: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status,
        /// Which prefixes can be restored.
        pub batch_exists: unsafe extern "C" fn(*mut c_void, *const ExistsArgs, *mut ErrorOut) -> Status,
        /// Reads pages.
        pub batch_get: unsafe extern "C" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> Status,
        /// Stores pages. A page that is stored already is a success.
        pub batch_set: unsafe extern "C" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> Status,
        /// Removes pages. `pages` of the transfers may be null. A page that is not there is a success.
        pub batch_remove: unsafe extern "C" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> Status,
        /// Removes everything of a [`crate::ClearScope`].
        pub clear: unsafe extern "C" fn(*mut c_void, *const CallContext, u32, *mut ErrorOut) -> Status,
        /// Figures of the store.
        pub stats: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut Stats, *mut ErrorOut) -> Status,
        /// How the backend feels.
        pub health: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut HealthOut, *mut ErrorOut) -> Status,
        /// Makes what was stored as durable as the backend promises.
        pub flush: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status,
        /// Tells which pages the worker holds itself, if the instance has the capability `held_pages`.
        pub report_held_pages: unsafe extern "C" fn(*mut c_void, *const HeldPages, *mut ErrorOut) -> Status,
        /// Stops the plugin's threads and frees the instance. With any status the instance is gone.
        pub close: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status,
        /// The linker face, or null.
        pub linker: *const LinkerTable,
    }
}

// SAFETY: the table holds function addresses and the address of another constant table; nothing in it changes.
unsafe impl Sync for BackendTable {}
// SAFETY: as for `Sync`; a table owns nothing.
unsafe impl Send for BackendTable {}
