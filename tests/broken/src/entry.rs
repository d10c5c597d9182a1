//! Note and entry of the plugin. Written out, and not by `export_plugin!`, so that a fault may lie below the safe traits.

use std::ffi::c_void;

use kvdock_plugin_api::note::{NoteBytes, NoteSource};
use kvdock_plugin_api::v0_1::ABI_VERSION;

use crate::fault::{self, Fault};
use crate::raw;
use crate::{CAPABILITIES, CHECK_CONFIG, CONFIG_SCHEMA};

const SOURCE: NoteSource = NoteSource {
    name: "broken",
    version: env!("CARGO_PKG_VERSION"),
    license: env!("CARGO_PKG_LICENSE"),
    description: env!("CARGO_PKG_DESCRIPTION"),
    panic_abort: cfg!(panic = "abort"),
    capabilities: CAPABILITIES,
    config_schema: CONFIG_SCHEMA,
    check_config: CHECK_CONFIG,
};

#[used]
#[unsafe(link_section = ".note.kvdock")]
static NOTE: NoteBytes<{ SOURCE.note_len() }> = NoteBytes(SOURCE.note());

/// Entry point of the plugin: the table of an ABI version, or null.
#[unsafe(no_mangle)]
pub extern "C" fn kvdock_plugin_entry(abi_version: u32) -> *const c_void {
    if abi_version != ABI_VERSION && !fault::is(Fault::EntryAnyVersion) {
        return std::ptr::null();
    }
    let table = if fault::is(Fault::TableSize) { &raw const raw::SHORT_TABLE } else { &raw const raw::TABLE };
    table.cast()
}
