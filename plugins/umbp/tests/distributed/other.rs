//! A node in a process of its own.

use kvdock_plugin_api::PageStatus;
use kvdock_tests::other::{self, Other};
use serde_json::json;

use super::super::common::*;

/// Bytes of the pages that it stores.
pub const PAGE: u64 = 300_000;

/// Starts one. Before it answers, the master knows what it has stored.
pub fn start(config: &str) -> Other {
    Other::start("distributed::other::node_process", config)
}

/// What the other process does; not a test of its own.
#[test]
#[ignore = "started by the other tests"]
fn node_process() {
    other::serve(
        |config| Bench::new(config, pool(64, PAGE)),
        |bench, what, numbers| match what {
            "set" => {
                let stored: Vec<bool> =
                    bench.set(numbers).statuses[0].iter().map(|status| *status == PageStatus::Ok).collect();
                bench.store.flush(&Default::default()).unwrap();
                json!(stored)
            }
            "which" => json!(bench.which(numbers)),
            _ => panic!("{what}"),
        },
    );
}
