//! What the master is told: rules of the boundary, bundles, pages of the worker's own, figures.

use std::ffi::c_void;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use kvdock_plugin_api::conformance::Suite;
use kvdock_plugin_api::mock::{MockHost, identity, key};
use kvdock_plugin_api::v0_1::{BackendTable, CallContext, ErrorOut, HeldPages, OpenArgs, PageKey, Status};
use kvdock_plugin_api::{HeldChange, HeldTier, mock};
use kvdock_plugin_umbp::distributed::MEETING_PLACE;
use kvdock_plugin_umbp::distributed::limit::Limit;
use kvdock_plugin_umbp::distributed::rpc::Rpc;
use kvdock_plugin_umbp::wire::master::{
    ExternalKvHitCountsRequest, ExternalKvHitCountsResponse, MatchExternalKvRequest, MatchExternalKvResponse,
};
use kvdock_plugin_umbp::{KVDOCK_NOTE_SOURCE, kvdock_plugin_entry};
use serde_json::{Value, json};

use super::super::common::*;
use super::shares::{flush, found};
use kvdock_tests::umbp::Master;

/// Calls past the plugin.
pub struct Raw {
    rpc: Rpc,
    _runtime: tokio::runtime::Runtime,
}

impl Raw {
    pub fn to(address: &str) -> Raw {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        Raw { rpc: Rpc::new(runtime.handle(), "raw", address).unwrap(), _runtime: runtime }
    }

    pub fn call<Q: prost::Message + Clone + 'static, A: prost::Message + Default + 'static>(
        &self,
        path: &'static str,
        request: Q,
    ) -> A {
        // A connection to a master that was started again is a new one.
        let began = Instant::now();
        loop {
            match self.rpc.call(path, request.clone(), &Limit::within(Duration::from_secs(60))) {
                Ok(answer) => return answer,
                Err(error) => assert!(began.elapsed() < Duration::from_secs(60), "{error:?}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn every_rule_of_the_boundary_is_kept() {
    let master = Master::start(&[]);
    // Rules run in one cluster, so each has names of its own.
    let more = json!({"dram_capacity_bytes": 256 << 20, "extra_backend_tag": "{scratch}"});
    let config: Value = serde_json::from_str(&master.config(more)).unwrap();
    Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE).config(config).run().assert_passed();
}

#[test]
fn many_events_go_in_bundles_and_all_arrive() {
    let mut master = Master::start(&[]);
    let bounds =
        json!({"heartbeat_events_per_bundle": 3, "heartbeat_max_bundles_per_rpc": 2, "auto_flush_event_threshold": 5});
    let first = Bench::new(&master.config(bounds), pool(50, 4_096));
    let second = Bench::new(&master.config(json!({"cache_remote_fetches": false})), pool(50, 4_096));
    let all = numbers(0..200);
    first.store(&all);
    // Over the threshold, so without a flush.
    wait_for("the master is told", || second.prefix(&all[..195]) == 195);
    flush(&first);
    assert_eq!(second.prefix(&all), 200);
    // What goes is told in order with what comes.
    for _ in 0..5 {
        first.remove(&all[..20]);
        first.store(&all[..20]);
    }
    first.remove(&all[20..25]);
    flush(&first);
    assert_eq!(second.prefix(&all), 20);
    assert_eq!(second.count(&all), 195);
    master.kill();
    master.start_again();
    wait_for("a new master knows the same", || {
        found(&second, &all) == Some(20) && found(&second, &all[25..]) == Some(175)
    });
}

/// The instance that was opened last in this thread's test.
static OPENED: Mutex<Option<(std::thread::ThreadId, usize)>> = Mutex::new(None);

unsafe extern "C" fn open(args: *const OpenArgs, this: *mut *mut c_void, error: *mut ErrorOut) -> Status {
    let table = mock::table_of(kvdock_plugin_entry).unwrap();
    // SAFETY: passed on to the caller.
    let status = unsafe { (table.open)(args, this, error) };
    // SAFETY: the caller's place, which `open` has written.
    *OPENED.lock().unwrap() = Some((std::thread::current().id(), unsafe { *this } as usize));
    status
}

/// Says which pages the worker holds itself; the mock host has no call for it.
fn report(this: usize, tier: HeldTier, change: HeldChange, keys: &[PageKey]) {
    let table = mock::table_of(kvdock_plugin_entry).unwrap();
    let context = CallContext { deadline_ns: 0, cancel: std::ptr::null(), trace_id: 0 };
    let args = HeldPages {
        context,
        tier: tier.raw(),
        change: change.raw(),
        keys: keys.as_ptr(),
        key_count: keys.len() as u64,
    };
    // SAFETY: the instance is open, and the arguments live through the call.
    let status = unsafe { (table.report_held_pages)(this as *mut c_void, &raw const args, std::ptr::null_mut()) };
    assert_eq!(status, 0);
}

fn hex(key: &PageKey) -> String {
    key.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Tiers at which a node holds a page, as the master says.
fn tiers(raw: &Raw, number: u64, count_as_hit: bool) -> Vec<(String, Vec<i32>)> {
    let request = MatchExternalKvRequest { hashes: vec![hex(&key(number))], count_as_hit };
    let answer: MatchExternalKvResponse = raw.call("/umbp.UMBPMaster/MatchExternalKv", request);
    let mut found: Vec<(String, Vec<i32>)> = answer
        .matches
        .into_iter()
        .map(|one| (one.node_id, one.hashes_by_tier.iter().map(|tier| tier.tier).collect()))
        .collect();
    found.iter_mut().for_each(|(_, tiers)| tiers.sort_unstable());
    found.sort();
    found
}

#[test]
fn pages_that_workers_hold_themselves_are_matched_also_by_a_new_master() {
    let mut master = Master::start(&[]);
    let table = BackendTable { open, ..*mock::table_of(kvdock_plugin_entry).unwrap() };
    let table: &'static BackendTable = Box::leak(Box::new(table));
    let (host, pool) = (MockHost::new(), pool(4, 9_000));
    let attach = |id: &str| {
        let config = master.config(json!({"node_id": id}));
        let store = host.attach(table, &config, &identity("model"), &[&pool]).unwrap();
        let (thread, this) = OPENED.lock().unwrap().take().unwrap();
        assert_eq!(thread, std::thread::current().id());
        assert!(store.capabilities().unwrap().held_pages);
        (store, this)
    };
    let ((one, a), (_two, b)) = (attach("a"), attach("b"));
    let raw = Raw::to(&master.address());
    let all: Vec<PageKey> = (0..4).map(key).collect();
    report(a, HeldTier::Device, HeldChange::Added, &all);
    report(a, HeldTier::Host, HeldChange::Added, &all[..1]);
    report(b, HeldTier::Host, HeldChange::Added, &all[1..3]);
    let of = |id: &str, tiers: &[i32]| (id.to_owned(), tiers.to_vec());
    assert_eq!(tiers(&raw, 0, true), [of("a", &[1, 2])]);
    assert_eq!(tiers(&raw, 1, true), [of("a", &[1]), of("b", &[2])]);
    report(a, HeldTier::Device, HeldChange::Removed, &all[1..2]);
    assert_eq!(tiers(&raw, 1, true), [of("b", &[2])]);
    let request = ExternalKvHitCountsRequest { hashes: all.iter().map(hex).collect() };
    let counts: ExternalKvHitCountsResponse = raw.call("/umbp.UMBPMaster/GetExternalKvHitCounts", request);
    let counts: Vec<u64> = counts.entries.iter().map(|entry| entry.hit_count_total).collect();
    assert_eq!(counts.iter().sum::<u64>(), 3, "{counts:?}");
    report(a, HeldTier::Host, HeldChange::Cleared, &[]);
    assert_eq!(tiers(&raw, 0, false), [of("a", &[1])]);
    // A new master is told all of it again.
    master.kill();
    master.start_again();
    wait_for("all is matched again", || {
        tiers(&raw, 0, false) == [of("a", &[1])] && tiers(&raw, 1, false) == [of("b", &[2])]
    });
    assert_eq!(tiers(&raw, 3, false), [of("a", &[1])]);
    let meeting = || {
        let request = MatchExternalKvRequest { hashes: vec![MEETING_PLACE.to_owned()], count_as_hit: false };
        let answer: MatchExternalKvResponse = raw.call("/umbp.UMBPMaster/MatchExternalKv", request);
        answer.matches.len()
    };
    wait_for("the nodes find one another", || meeting() == 2);
    one.close().unwrap();
    assert_eq!((meeting(), tiers(&raw, 0, false)), (1, Vec::new()));
}

#[test]
fn the_master_shows_the_figures_of_nodes() {
    let master = Master::start(&[]);
    let config = |id: &str| {
        master.config(json!({"node_id": id, "node_tags": ["sgl_role=prefill"], "metrics_report_interval_ms": 50}))
    };
    let (first, second) = (Bench::new(&config("a"), pool(8, 10_000)), Bench::new(&config("b"), pool(8, 10_000)));
    first.store(&numbers(0..8));
    flush(&first);
    assert_eq!(second.count(&numbers(0..8)), 8);
    let line = |text: &str, name: &str, labels: &[&str]| -> Option<f64> {
        let fits =
            |line: &&str| line.starts_with(&format!("{name}{{")) && labels.iter().all(|label| line.contains(label));
        text.lines().find(fits)?.rsplit(' ').next()?.parse().ok()
    };
    let a = r#"node="a""#;
    let b = r#"node="b""#;
    let mut text = String::new();
    wait_for("all figures are there", || {
        text = master.metrics();
        line(&text, "mori_umbp_client_kv_live_count", &[a]) == Some(8.0)
            && line(&text, "mori_umbp_client_outbound_put_bytes_total", &[a, r#"traffic="local""#])
                .is_some_and(|bytes| bytes >= 80_000.0)
            && line(&text, "mori_umbp_client_inbound_get_bytes_total", &[a]).is_some_and(|bytes| bytes >= 80_000.0)
            && line(&text, "mori_umbp_client_outbound_get_bytes_total", &[b, r#"traffic="remote""#])
                .is_some_and(|bytes| bytes >= 80_000.0)
            && line(&text, "mori_umbp_master_client_rpc_latency_seconds_count", &[b, r#"rpc="BatchRouteGet""#])
                .is_some_and(|count| count >= 1.0)
    });
    assert!(text.contains("prefill"), "{text}");
}
