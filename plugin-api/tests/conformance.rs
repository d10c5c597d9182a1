//! The suite, run against the backend of the contract tests.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{KVDOCK_NOTE_SOURCE, kvdock_plugin_entry};
use kvdock_plugin_api::conformance::Suite;

#[test]
fn a_right_plugin_keeps_every_rule() {
    let report = Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE).run();
    println!("{report}");
    report.assert_passed();
}
