//! Nodes that end and come again: under the same name or another one, at the same address, where others remember who was there before.

use std::path::Path;
use std::time::Duration;

use kvdock_plugin_api::mock::Options;
use kvdock_plugin_api::{ClearScope, PageStatus};
use kvdock_plugin_umbp::distributed::limit::Limit;
use kvdock_plugin_umbp::distributed::rpc::Rpc;
use kvdock_plugin_umbp::wire::peer::{EvictKeyRequest, EvictKeyResponse, GetPeerInfoRequest, GetPeerInfoResponse};
use serde_json::json;
use tonic::Code;

use super::super::common::*;
use super::shares::flush;
use kvdock_tests::umbp::{Master, Port};

/// Bytes of a page.
const PAGE: u64 = 9_000;

/// What of a node stays as it was when it comes again.
#[derive(Debug, Clone, Copy)]
struct Stays {
    name: bool,
    bytes: bool,
}

/// Settings of a node with segments, at a port of its own.
fn settled(master: &Master, dir: &Path, ports: &[Port; 2], stays: Stays) -> String {
    let mut more = json!({
        "peer_service_port": ports[0].number, "ssd_storage_dir": dir, "ssd_capacity_bytes": 64 << 20,
        "ssd_durability_mode": "relaxed",
    });
    if stays.name {
        more["node_id"] = json!("keeper");
    }
    if stays.bytes {
        more["io_engine_port"] = json!(ports[1].number);
    }
    master.config(more)
}

/// One that looks, keeps nothing, and has so little memory that the master sends its pages to the other node.
fn looker(master: &Master) -> Bench {
    let config = json!({"cache_remote_fetches": false, "dram_capacity_bytes": 1 << 20});
    Bench::new(&master.config(config), pool(40, PAGE))
}

/// Routes puts to the node with the most room, so that those of a small node go elsewhere.
pub const ELSEWHERE: [(&str, &str); 3] = [
    ("UMBP_ROUTE_PUT_NODE_AFFINITY", "none"),
    ("UMBP_ROUTE_PUT_SELECT_ALGO", "most_available"),
    ("UMBP_EVICTION_CHECK_INTERVAL_SEC", "3600"),
];

fn comes_again(stays: Stays) {
    let (master, dir) = (Master::start(&ELSEWHERE), tempfile::tempdir().unwrap());
    let ports = [Port::take(), Port::take()];
    let looking = looker(&master);
    let mut stored: Vec<u64> = Vec::new();
    for turn in 0..4u64 {
        let node = Bench::new(&settled(&master, dir.path(), &ports, stays), pool(40, PAGE));
        flush(&node);
        // All of it, at the first question, of what this incarnation has of those before it.
        assert_eq!(looking.count(&stored), stored.len(), "{stays:?}, turn {turn}\n{}", looking.logs());
        // Into its memory, also at the first question of a turn.
        let new = numbers(turn * 100..turn * 100 + 20);
        looking.store(&new);
        assert_eq!(looking.store.stats().unwrap().pages, 0, "{stays:?}, turn {turn}: they went to the other node");
        stored.extend(&new);
        flush(&node);
        assert_eq!(looking.count(&stored), stored.len(), "{stays:?}, turn {turn}\n{}", looking.logs());
        assert_eq!(node.count(&stored), stored.len());
        if turn == 2 {
            assert!(looking.remove(&[0, 205]).all_ok());
            stored.retain(|number| ![0, 205].contains(number));
        }
        node.store.close().unwrap();
    }
    // And one whose first question of a turn is to clear.
    let node = Bench::new(&settled(&master, dir.path(), &ports, stays), pool(40, PAGE));
    flush(&node);
    looking.store.clear(&Options::default(), ClearScope::Namespace).unwrap();
    assert_eq!((looking.count(&stored), node.count(&stored)), (0, 0));
}

#[test]
fn a_node_that_comes_again_under_its_name_at_its_ports_is_read_and_filled_at_once() {
    comes_again(Stays { name: true, bytes: true });
}

#[test]
fn a_node_that_comes_again_under_its_name_and_serves_bytes_elsewhere_is_read_and_filled_at_once() {
    comes_again(Stays { name: true, bytes: false });
}

#[test]
fn another_node_at_an_address_that_is_known_is_read_and_filled_at_once() {
    comes_again(Stays { name: false, bytes: true });
    comes_again(Stays { name: false, bytes: false });
}

#[test]
fn a_node_of_a_settled_name_that_was_started_anew_is_told_to_the_host() {
    // With heartbeats so rare that nobody misses it.
    let rare = [ELSEWHERE.as_slice(), &[("UMBP_HEARTBEAT_INTERVAL_DIVISOR", "1")]].concat();
    let (master, dir) = (Master::start(&rare), tempfile::tempdir().unwrap());
    let ports = [Port::take(), Port::take()];
    let looking = looker(&master);
    let stays = Stays { name: true, bytes: true };
    let node = Bench::new(&settled(&master, dir.path(), &ports, stays), pool(40, PAGE));
    looking.store(&numbers(0..8));
    node.store.close().unwrap();
    let again = Bench::new(&settled(&master, dir.path(), &ports, stays), pool(40, PAGE));
    flush(&again);
    // By the first call that concerns it.
    looking.store(&numbers(100..108));
    assert!(looking.logs().contains("node keeper at") && looking.logs().contains("anew"), "{}", looking.logs());
    assert!(looking.host.metric("kvdock_contents_lost").is_some());
}

#[test]
fn no_node_does_what_another_incarnation_was_asked() {
    let master = Master::start(&[]);
    let node = Bench::new(&master.config(json!({})), pool(4, PAGE));
    node.store(&[1]);
    let address = node.logs().split(" at ").nth(1).unwrap().split(',').next().unwrap().to_owned();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let rpc = Rpc::new(runtime.handle(), "node", &address).unwrap();
    let limit = || Limit::within(Duration::from_secs(60));
    let info: GetPeerInfoResponse = rpc.call("/umbp.UMBPPeer/GetPeerInfo", GetPeerInfoRequest {}, &limit()).unwrap();
    let instance = info.kvdock.unwrap().instance;
    let evict = |instance| {
        let request = EvictKeyRequest { keys: vec!["nothing".to_owned()], remove: true };
        rpc.call_one::<_, EvictKeyResponse>(Some(instance), "/umbp.UMBPPeer/EvictKey", request, &limit())
    };
    let failed = evict(instance ^ 1).unwrap_err();
    assert!(failed.code == Some(Code::Aborted) && failed.is_for_another(), "{failed:?}");
    assert_eq!(evict(instance).unwrap().evicted.len(), 1);
    assert_eq!(node.status(1), PageStatus::Ok);
}
