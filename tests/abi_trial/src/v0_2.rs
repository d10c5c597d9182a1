//! The trial version: what 0.1 has, with one argument, one figure and one function more.
//!
//! A type that did not change is the one of 0.1. A type that did change, or that holds one that did, is a new one: those of 0.1 stay as they are.

use std::ffi::c_void;

use kvdock_plugin_api::describe::{Field, Type, describe_all, described_len, size_of_field};
use kvdock_plugin_api::note::NoteVersion;
use kvdock_plugin_api::v0_1;
pub use kvdock_plugin_api::v0_1::{
    Bytes, CallContext, CapabilitiesOut, ErrorOut, ExistsArgs, HealthOut, HeldPages, LinkerTable, OpenArgs, PageKey,
    PoolDesc, PoolTransfer, Status,
};

/// Version of this module's table.
pub const ABI_VERSION: u32 = 2;
/// The same as notes and messages spell it.
pub const ABI_VERSION_TEXT: &str = "0.2";

/// Defines a struct of the boundary together with its description, as `kvdock_plugin_api` does it for its own.
macro_rules! abi_struct {
    ($(#[doc = $doc:literal])* pub struct $name:ident { $($(#[doc = $fdoc:literal])* pub $field:ident : $ty:ty,)+ }) => {
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub struct $name { $($(#[doc = $fdoc])* pub $field: $ty,)+ }

        impl $name {
            /// Size, alignment and fields of this type.
            pub const DESCRIPTION: Type = Type {
                name: stringify!($name),
                size: size_of::<$name>(),
                align: align_of::<$name>(),
                fields: &[$(Field {
                    name: stringify!($field),
                    offset: std::mem::offset_of!($name, $field),
                    size: size_of_field(|value: &$name| &raw const value.$field),
                    ty: stringify!($ty),
                    doc: &[$($fdoc),*],
                },)+],
                doc: &[$($doc),*],
            };
        }
    };
}

abi_struct! {
    /// A `batch_get`, `batch_set` or `batch_remove`.
    pub struct BatchArgs {
        /// Deadline and cancel flag.
        pub context: CallContext,
        /// The pools' parts.
        pub transfers: *const PoolTransfer,
        /// Number of parts.
        pub transfer_count: u64,
        /// Pages of the sequence before the part of the chain that this call is about.
        pub chain_position: u64,
        /// Keys of those pages from the start of the sequence, or none.
        pub prefix_keys: *const PageKey,
        /// Number of `prefix_keys`.
        pub prefix_key_count: u64,
        /// Session that the request names, or empty.
        pub session_id: Bytes,
        /// New in 0.2: how much the call matters, 0 for as any other.
        pub priority: u32,
        /// Reserved, 0.
        pub reserved: u32,
    }
}

abi_struct! {
    /// Figures of a store.
    pub struct Stats {
        /// Pages stored.
        pub pages: u64,
        /// Bytes used.
        pub bytes_used: u64,
        /// Bytes that may be used; 0 when unbounded or unknown.
        pub bytes_total: u64,
        /// Calls that failed since `open`.
        pub failures: u64,
        /// Mean time of a `batch_get`, in nanoseconds.
        pub get_mean_ns: u64,
        /// Mean time of a `batch_set`, in nanoseconds.
        pub set_mean_ns: u64,
        /// New in 0.2: pages that are pinned; 0 when unknown.
        pub pinned: u64,
    }
}

abi_struct! {
    /// The functions of a plugin.
    pub struct BackendTable {
        /// Bytes of this table.
        pub size: u64,
        /// Version of this table.
        pub abi_version: u32,
        /// Reserved, 0.
        pub reserved: u32,
        /// Makes an instance.
        pub open: unsafe extern "C" fn(*const OpenArgs, *mut *mut c_void, *mut ErrorOut) -> Status,
        /// What this instance can do.
        pub capabilities: unsafe extern "C" fn(*mut c_void, *mut CapabilitiesOut, *mut ErrorOut) -> Status,
        /// Registers the anchor pool.
        pub register_mem_pool_host: unsafe extern "C" fn(*mut c_void, *const CallContext, *const PoolDesc, *mut ErrorOut) -> Status,
        /// Registers side pools.
        pub register_v2_side_pools: unsafe extern "C" fn(*mut c_void, *const CallContext, *const PoolDesc, u64, *mut ErrorOut) -> Status,
        /// Takes registered pools back.
        pub unregister: unsafe extern "C" fn(*mut c_void, *const CallContext, *const u32, u64, *mut ErrorOut) -> Status,
        /// All pools known so far are registered.
        pub pools_ready: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status,
        /// Which prefixes can be restored.
        pub batch_exists: unsafe extern "C" fn(*mut c_void, *const ExistsArgs, *mut ErrorOut) -> Status,
        /// Reads pages.
        pub batch_get: unsafe extern "C" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> Status,
        /// Stores pages.
        pub batch_set: unsafe extern "C" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> Status,
        /// Removes pages.
        pub batch_remove: unsafe extern "C" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> Status,
        /// Removes everything of a scope.
        pub clear: unsafe extern "C" fn(*mut c_void, *const CallContext, u32, *mut ErrorOut) -> Status,
        /// Figures of the store.
        pub stats: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut Stats, *mut ErrorOut) -> Status,
        /// How the backend feels.
        pub health: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut HealthOut, *mut ErrorOut) -> Status,
        /// Makes what was stored durable.
        pub flush: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status,
        /// Tells which pages the worker holds itself.
        pub report_held_pages: unsafe extern "C" fn(*mut c_void, *const HeldPages, *mut ErrorOut) -> Status,
        /// New in 0.2: keeps pages whatever else is dropped. Keys, and their number.
        pub pin: unsafe extern "C" fn(*mut c_void, *const CallContext, *const PageKey, u64, *mut ErrorOut) -> Status,
        /// Ends the instance.
        pub close: unsafe extern "C" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status,
        /// The linker face, or null.
        pub linker: *const LinkerTable,
    }
}

// SAFETY: the table holds function addresses and the address of another constant table; nothing in it changes.
unsafe impl Sync for BackendTable {}
// SAFETY: as for `Sync`; a table owns nothing.
unsafe impl Send for BackendTable {}

const COUNT: usize = v0_1::TYPES.len();

/// The types of 0.1 in their order, with the new forms in the place of the old.
const TYPES: [Type; COUNT] = {
    let mut types = [v0_1::Bytes::DESCRIPTION; COUNT];
    let mut i = 0;
    while i < COUNT {
        let old = v0_1::TYPES[i];
        types[i] = match old.name.as_bytes() {
            b"BatchArgs" => BatchArgs::DESCRIPTION,
            b"Stats" => Stats::DESCRIPTION,
            b"BackendTable" => BackendTable::DESCRIPTION,
            _ => old,
        };
        i += 1;
    }
    types
};

const TYPES_BYTES: [u8; described_len(&TYPES)] = describe_all(&TYPES);

/// The description of every type of this version.
pub const TYPES_TEXT: &str = match std::str::from_utf8(&TYPES_BYTES) {
    Ok(text) => text,
    Err(_) => panic!("descriptions are text"),
};

/// How a note names this version.
pub const VERSION: NoteVersion = NoteVersion {
    text: ABI_VERSION_TEXT,
    number: ABI_VERSION,
    types: TYPES_TEXT,
    types_sha256: sha2_const_stable::Sha256::new().update(&TYPES_BYTES).finalize(),
};
