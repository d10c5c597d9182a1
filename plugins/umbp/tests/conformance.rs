//! The rules of the boundary.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use kvdock_plugin_api::conformance::Suite;
use kvdock_plugin_umbp::{KVDOCK_NOTE_SOURCE, kvdock_plugin_entry};
use serde_json::{Value, json};

fn local(more: Value) {
    let mut config: Value = serde_json::from_str(KVDOCK_NOTE_SOURCE.check_config).unwrap();
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE).config(config).run().assert_passed();
}

#[test]
fn every_rule_is_kept_by_memory_and_disk() {
    local(json!({}));
}

#[test]
fn every_rule_is_kept_by_a_leader_that_writes_at_once() {
    local(json!({"role": "leader", "ssd_copy_async": false, "ssd_durability_mode": "relaxed"}));
}

#[test]
fn every_rule_is_kept_by_memory_alone() {
    local(json!({"ssd_enabled": false}));
}

#[test]
fn every_rule_is_kept_by_a_disk_behind_little_memory() {
    local(json!({"dram_capacity_bytes": "1MiB", "ssd_durability_mode": "relaxed"}));
}
