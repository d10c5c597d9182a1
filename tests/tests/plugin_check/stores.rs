//! The plugins of stores pass against the real services.

use std::path::Path;

use kvdock_tests::mooncake::{Master, Mode};
use kvdock_tests::{paths, umbp};
use serde_json::{Value, json};

use super::must_pass;

/// Runs every rule, and sees to it that those ran that nothing is worth much without.
fn passes(plugin: &Path, config: &Value) -> String {
    let printed = must_pass(plugin, &["--config", &config.to_string()]);
    for rule in ["load.maps", "life.close", "data.one_page", "data.many_pages", "threads.mixed"] {
        let line = |kept: &str| kept.strip_prefix("ok ").is_some_and(|rest| rest.trim_start().starts_with(rule));
        assert!(printed.lines().any(line), "{rule}: {printed}");
    }
    printed
}

/// The configuration of an instance, with names of its own for each rule: all rules run in one store.
fn apart(config: &str, more: &Value) -> Value {
    let mut config: Value = serde_json::from_str(config).unwrap();
    config["extra_backend_tag"] = "{scratch}".into();
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

#[test]
fn the_mooncake_plugin_passes_with_handshakes_between_peers() {
    let master = Master::start(&["--default_kv_lease_ttl=5000"]);
    let more = json!({"prefer_own_segment": true});
    passes(&paths::mooncake_plugin(), &apart(&master.config(Mode::Peer, 256 << 20), &more));
}

/// Rules failed now and then, whose pages lay in the memory of others that had ended.
#[test]
fn the_mooncake_plugin_passes_with_a_metadata_server_and_a_configuration_that_says_nothing_of_segments() {
    let master = Master::start(&["--default_kv_lease_ttl=5000"]);
    let printed = passes(&paths::mooncake_plugin(), &apart(&master.config(Mode::Http, 256 << 20), &json!({})));
    assert!(printed.contains("--config has no prefer_own_segment: it is true"), "{printed}");
}

#[test]
fn the_umbp_plugin_passes_alone() {
    must_pass(&paths::umbp_plugin(), &[]);
    let small = json!({"dram_capacity_bytes": "1MiB", "ssd_durability_mode": "relaxed"});
    passes(&paths::umbp_plugin(), &small);
}

#[test]
fn the_umbp_plugin_passes_with_a_server_of_the_node() {
    let server = umbp::Server::start(512 << 20);
    passes(&paths::umbp_plugin(), &apart(&server.config(), &json!({})));
}

#[test]
fn the_umbp_plugin_passes_as_a_node_of_a_master() {
    let master = umbp::Master::start(&[]);
    // Without segments: the check opens two instances at a time with one configuration, and a node has a folder of segments to itself.
    let more = json!({"dram_capacity_bytes": 256 << 20, "ssd_enabled": false});
    passes(&paths::umbp_plugin(), &apart(&master.config(json!({})), &more));
}
