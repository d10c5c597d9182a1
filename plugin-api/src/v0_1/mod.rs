//! Version 0.1 of the boundary: frozen.
//!
//! Nothing in this module changes once 0.1 is released: a later version is a module beside it. The types are
//! plain C structs. A pointer with a length of 0 may be null. Text is UTF-8 without a trailing zero.
//! Unless a field says otherwise, what a struct points at lives until the call returns.
//!
//! # The rules a plugin keeps
//!
//! * When a call returns, with any status, nothing that works for the plugin (thread, device, DMA engine,
//!   other process) touches the memory of that call again.
//! * Destination pages of calls in flight are disjoint, and the host neither reads nor writes them; it does not write source pages.
//! * Data calls run concurrently, also with one key in two calls. Which linker calls do is said at [`LinkerTable`].
//! * `close` is called once, after every other call has returned. It stops the plugin's threads before it returns.
//! * No call unwinds. The export macro turns a panic into an error.

mod args;
mod linker;
mod memory;
mod table;

pub use args::*;
pub use linker::*;
pub use memory::*;
pub use table::*;

use crate::describe::{Enumeration, Type, describe_all, described_len};

/// Version of this module's table: major in the upper, minor in the lower 16 bits.
pub const ABI_VERSION: u32 = 1;

/// Version of this module's table as notes and messages spell it.
pub const ABI_VERSION_TEXT: &str = "0.1";

/// Every type of this version.
pub const TYPES: &[Type] = &[
    PAGE_KEY,
    STATUS,
    Bytes::DESCRIPTION,
    ErrorOut::DESCRIPTION,
    CallContext::DESCRIPTION,
    Identity::DESCRIPTION,
    CapabilitiesOut::DESCRIPTION,
    OpenArgs::DESCRIPTION,
    HostTable::DESCRIPTION,
    Region::DESCRIPTION,
    Segment::DESCRIPTION,
    Component::DESCRIPTION,
    PoolDesc::DESCRIPTION,
    PoolQuery::DESCRIPTION,
    ExistsArgs::DESCRIPTION,
    PoolTransfer::DESCRIPTION,
    BatchArgs::DESCRIPTION,
    HeldPages::DESCRIPTION,
    Stats::DESCRIPTION,
    HealthOut::DESCRIPTION,
    BackendTable::DESCRIPTION,
    LoadArgs::DESCRIPTION,
    StartArgs::DESCRIPTION,
    FinishArgs::DESCRIPTION,
    ReadyHandle::DESCRIPTION,
    OffloadArgs::DESCRIPTION,
    OffloadDone::DESCRIPTION,
    LinkerTable::DESCRIPTION,
];

const PAGE_KEY: Type = Type {
    name: "PageKey",
    size: size_of::<PageKey>(),
    align: align_of::<PageKey>(),
    fields: &[],
    doc: &["SHA-256 digest that names a page: the hash chain over the tokens up to its end."],
};

const STATUS: Type = Type {
    name: "Status",
    size: size_of::<Status>(),
    align: align_of::<Status>(),
    fields: &[],
    doc: &["0 is success; anything else is the `ErrorKind` that also stands in the `ErrorOut`."],
};

/// Every enumeration of this version. They are no part of the digest: what a side does with a number it does not know is said at each of
/// them, so a number may be added to a version, but none changes or goes.
pub const ENUMERATIONS: &[Enumeration] = &[
    crate::ErrorKind::DESCRIPTION,
    crate::PageStatus::DESCRIPTION,
    crate::Dtype::DESCRIPTION,
    crate::MemoryKind::DESCRIPTION,
    crate::HitPolicy::DESCRIPTION,
    crate::PoolRole::DESCRIPTION,
    crate::ComponentKind::DESCRIPTION,
    crate::ClearScope::DESCRIPTION,
    crate::HealthState::DESCRIPTION,
    crate::LogLevel::DESCRIPTION,
    crate::MetricKind::DESCRIPTION,
    crate::ReadyKind::DESCRIPTION,
    crate::CacheMode::DESCRIPTION,
    crate::Capability::DESCRIPTION,
    crate::HeldTier::DESCRIPTION,
    crate::HeldChange::DESCRIPTION,
];

const TYPES_LEN: usize = described_len(TYPES);
const TYPES_BYTES: [u8; TYPES_LEN] = describe_all(TYPES);

/// The description of every type of this version, one line a type.
pub const TYPES_TEXT: &str = match std::str::from_utf8(&TYPES_BYTES) {
    Ok(text) => text,
    Err(_) => panic!("descriptions are text"),
};

/// SHA-256 of [`TYPES_TEXT`].
pub const TYPES_DIGEST: [u8; 32] = sha2_const_stable::Sha256::new().update(&TYPES_BYTES).finalize();
