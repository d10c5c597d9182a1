//! The example in examples/rust-minimal: its own tests run here, linked in.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

#[path = "../../examples/rust-minimal/src/lib.rs"]
mod example;

#[test]
fn the_example_exports_a_plugin() {
    let table = kvdock_plugin_api::mock::table_of(example::kvdock_plugin_entry).unwrap();
    assert!(table.linker.is_null());
}
