//! A trial version 0.2 of the boundary, and a plugin that speaks 0.1 and 0.2.
//!
//! It shows that a version can come after 0.1 without touching it. kvdock itself does not know this version: the tests bring a host that does.

mod plugin;
pub mod v0_2;

pub use plugin::kvdock_plugin_entry;
