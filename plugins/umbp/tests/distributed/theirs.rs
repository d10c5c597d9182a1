//! Beside nodes of the published programs.

use kvdock_plugin_api::mock::{MockPool, PoolSpec};
use kvdock_plugin_api::v0_1::Component;
use kvdock_plugin_api::{ComponentKind, PageStatus};
use kvdock_plugin_umbp::standalone::client::Client;
use kvdock_plugin_umbp::wire::master::{
    BatchLookupRequest, BatchLookupResponse, BatchRouteGetRequest, BatchRouteGetResponse,
};
use kvdock_plugin_umbp::wire::peer::{
    AbortSlotRequest, AllocateSlotRequest, AllocateSlotResponse, BatchAllocateSlotsRequest, BatchAllocateSlotsResponse,
    BatchCommitSlotsRequest, BatchResolveKeysRequest, BatchResolveKeysResponse, BatchSuccessResponse,
    CommitSlotRequest, EvictKeyRequest, EvictKeyResponse, GetPeerInfoRequest, GetPeerInfoResponse, ResolveKeyRequest,
    ResolveKeyResponse, SuccessResponse, tier,
};
use kvdock_plugin_umbp::wire::standalone::{BatchBoolResponse, BatchKeysRequest};
use serde_json::json;

use super::super::common::*;
use super::master::Raw;
use super::shares::flush;
use kvdock_tests::umbp::{Master, TheirNode};

/// Where a node of ours is called, as the master tells it to others.
fn address_of(master: &Master, key: &str) -> String {
    let request = BatchRouteGetRequest {
        node_id: "test".to_owned(),
        keys: vec![key.to_owned()],
        exclude_nodes: vec!["theirs".to_owned()],
    };
    let answer: BatchRouteGetResponse = Raw::to(&master.address()).call("/umbp.UMBPMaster/BatchRouteGet", request);
    answer.nodes[0].peer_address.clone()
}

/// What a node answers to a sequence of calls about places and keys.
fn answers(node: &Raw) -> Vec<String> {
    let mut said = Vec::new();
    let slot =
        |key: &str, size: u64, tier: i32| AllocateSlotRequest { size, tier, key: key.to_owned(), ..Default::default() };
    let allocate =
        |slot: AllocateSlotRequest| -> AllocateSlotResponse { node.call("/umbp.UMBPPeer/AllocateSlot", slot) };
    for (what, wrong) in
        [("nothing", slot("w", 0, tier::DRAM)), ("no tier", slot("w", 8, 0)), ("another tier", slot("w", 8, tier::HBM))]
    {
        said.push(format!("{what}: {}", allocate(wrong).outcome));
    }
    let first = allocate(slot("k", 5000, tier::DRAM));
    said.push(format!("place: {} {} {} {}", first.outcome, first.pages.len(), first.page_size, first.pending_ttl_ms));
    said.push(format!("again: {}", allocate(slot("k", 5000, tier::DRAM)).outcome));
    let resolve = |key: &str| -> ResolveKeyResponse {
        node.call("/umbp.UMBPPeer/ResolveKey", ResolveKeyRequest { key: key.to_owned() })
    };
    said.push(format!("pending: {}", resolve("k").found));
    let commit = |slot_id, key: &str| -> SuccessResponse {
        node.call("/umbp.UMBPPeer/CommitSlot", CommitSlotRequest { slot_id, key: key.to_owned() })
    };
    said.push(format!("other name: {}", commit(first.slot_id, "other").success));
    said.push(format!("commit: {}", commit(first.slot_id, "k").success));
    said.push(format!("twice: {}", commit(first.slot_id, "k").success));
    said.push(format!("there: {}", allocate(slot("k", 5000, tier::DRAM)).outcome));
    let abort: SuccessResponse = node.call("/umbp.UMBPPeer/AbortSlot", AbortSlotRequest { slot_id: 12_345 });
    said.push(format!("abort: {}", abort.success));
    let huge = allocate(slot("huge", 1 << 40, tier::DRAM));
    said.push(format!("huge: {}", huge.outcome));
    let entries = vec![slot("b1", 100, tier::DRAM), slot("k", 1, tier::DRAM), slot("b2", 4097, tier::DRAM)];
    let all: BatchAllocateSlotsResponse =
        node.call("/umbp.UMBPPeer/BatchAllocateSlots", BatchAllocateSlotsRequest { entries });
    said.push(format!("batch: {:?}", all.entries.iter().map(|one| (one.outcome, one.pages.len())).collect::<Vec<_>>()));
    let entries = [("b1", 0), ("k", 1), ("b2", 2)]
        .map(|(key, at)| CommitSlotRequest { slot_id: all.entries[at].slot_id, key: key.to_owned() });
    let done: BatchSuccessResponse =
        node.call("/umbp.UMBPPeer/BatchCommitSlots", BatchCommitSlotsRequest { entries: entries.to_vec() });
    said.push(format!("batch commit: {:?}", done.success));
    let keys = ["b1", "none", "b2"].map(str::to_owned).to_vec();
    let request = BatchResolveKeysRequest { keys, omit_descs: true, lease_ms: 0 };
    let all: BatchResolveKeysResponse = node.call("/umbp.UMBPPeer/BatchResolveKeys", request);
    said.push(format!(
        "batch resolve: {:?} {:?} {:?} {:?} {} {:?}",
        all.found,
        all.tier,
        all.size,
        all.page_count,
        all.page_index.len(),
        all.resolve_status
    ));
    let evict = |key: &str| -> u64 {
        let request = EvictKeyRequest { keys: vec![key.to_owned()], remove: false };
        let answer: EvictKeyResponse = node.call("/umbp.UMBPPeer/EvictKey", request);
        answer.evicted.iter().map(|entry| entry.bytes_freed).sum()
    };
    said.push(format!("evict: {} {} {}", evict("k"), evict("k"), evict("none")));
    said
}

#[test]
fn a_node_of_ours_answers_as_a_published_one() {
    let master = Master::start(&[("UMBP_EVICTION_CHECK_INTERVAL_SEC", "3600")]);
    let theirs = TheirNode::start(&master, "theirs");
    let ours = Bench::new(&master.config(json!({})), pool(4, 9_000));
    ours.store(&[1]);
    flush(&ours);
    let raw = Raw::to(&format!("127.0.0.1:{}", theirs.port.number));
    let info: GetPeerInfoResponse = raw.call("/umbp.UMBPPeer/GetPeerInfo", GetPeerInfoRequest {});
    assert_eq!((info.page_size, info.kvdock), (4096, None));
    let expected = answers(&raw);
    let address = ours.logs().split(" at ").nth(1).unwrap().split(',').next().unwrap().to_owned();
    let raw = Raw::to(&address);
    let info: GetPeerInfoResponse = raw.call("/umbp.UMBPPeer/GetPeerInfo", GetPeerInfoRequest {});
    assert_eq!(info.page_size, 4096);
    assert!(info.engine_desc.is_empty() && info.buffer_descs.is_empty());
    assert_eq!(info.kvdock.unwrap().version, 1);
    assert_eq!(answers(&raw), expected);
    // What was stored past the plugin is told to the master as well.
    flush(&ours);
    assert_eq!(address_of(&master, "b2"), address);
}

#[test]
fn published_nodes_see_our_pages_and_theirs_are_no_hits_for_us() {
    let master = Master::start(&[]);
    let theirs = TheirNode::start(&master, "theirs");
    // In names that both know: K and V of a page are an object each.
    let part = |segment: u32, kind: ComponentKind| Component {
        layer: 0,
        kind: kind.raw(),
        segment,
        reserved: 0,
        offset: 0,
        run_len: 4_500,
        run_stride: 4_500,
        run_count: 1,
    };
    let components = vec![part(0, ComponentKind::K), part(1, ComponentKind::V)];
    let spec = PoolSpec { components, ..PoolSpec::bytes(0, "kv", 8, &[4_500, 4_500]) };
    let ours = Bench::new(&master.config(json!({"names": "sglang"})), MockPool::new(spec));
    ours.store(&numbers(0..8));
    flush(&ours);
    let all: Vec<String> = keys(&numbers(0..20))
        .iter()
        .map(|key| key.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "_0_k")
        .collect();
    // Past the plugin: pages that only they have.
    let raw = Raw::to(&format!("127.0.0.1:{}", theirs.port.number));
    for name in all[10..14].iter().flat_map(|key| [key.clone(), key.replace("_k", "_v")]) {
        let slot = AllocateSlotRequest { size: 4_500, tier: tier::DRAM, key: name.clone(), ..Default::default() };
        let place: AllocateSlotResponse = raw.call("/umbp.UMBPPeer/AllocateSlot", slot);
        let commit = CommitSlotRequest { slot_id: place.slot_id, key: name };
        let done: SuccessResponse = raw.call("/umbp.UMBPPeer/CommitSlot", commit);
        assert!(done.success);
    }
    let known = |name: &str| -> bool {
        let request = BatchLookupRequest { node_id: "test".to_owned(), keys: vec![name.to_owned()] };
        let answer: BatchLookupResponse = Raw::to(&master.address()).call("/umbp.UMBPMaster/BatchLookup", request);
        answer.found == [true]
    };
    wait_for("the master knows them", || known(&all[13].replace("_k", "_v")));
    assert_eq!(ours.status(10), PageStatus::Missing);
    assert!(ours.logs().contains("none of kvdock"), "{}", ours.logs());
    // From then on they are no hits at all.
    assert_eq!(ours.prefix(&numbers(10..14)), 0);
    // And they see ours.
    let path = theirs.server.address();
    let client = Client::new(path.strip_prefix("unix://").unwrap(), 64 << 20).unwrap();
    let request = BatchKeysRequest { keys: all[..10].to_vec() };
    let there: BatchBoolResponse =
        client.call("BatchExists", request, Some(std::time::Duration::from_secs(30))).unwrap();
    assert_eq!(there.ok, [true, true, true, true, true, true, true, true, false, false]);
}

#[test]
fn pages_that_the_master_sends_to_a_published_node_are_stored_here() {
    let variables = [("UMBP_ROUTE_PUT_NODE_AFFINITY", "none"), ("UMBP_ROUTE_PUT_SELECT_ALGO", "random")];
    let master = Master::start(&variables);
    let _theirs = TheirNode::start(&master, "theirs");
    let ours = Bench::new(&master.config(json!({})), pool(40, 9_000));
    ours.store(&numbers(0..40));
    assert_eq!(ours.count(&numbers(0..40)), 40);
    assert_eq!(ours.store.stats().unwrap().pages, 40);
}
