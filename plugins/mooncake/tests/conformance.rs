//! The rules of the boundary, against a real master.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use common::services::{Master, Mode};
use kvdock_plugin_api::conformance::Suite;
use kvdock_plugin_mooncake::{KVDOCK_NOTE_SOURCE, kvdock_plugin_entry};

#[test]
fn every_rule_of_the_boundary_is_kept() {
    let master = Master::start(&["--default_kv_lease_ttl=5000"]);
    for mode in [Mode::Peer, Mode::Http] {
        let mut config: serde_json::Value = serde_json::from_str(&master.config(mode, 256 << 20)).unwrap();
        config["extra_backend_tag"] = format!("{{scratch}}-{mode:?}").into();
        // Where pages lie in another instance's segment they go with it.
        config["prefer_own_segment"] = true.into();
        Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE).config(config).run().assert_passed();
    }
}
