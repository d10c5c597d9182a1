//! Where pages are put, how long they stay, and whose they are: copies, pins, tenants.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use common::services::{Calls, Master, Mode};
use common::*;
use kvdock_plugin_api::PageStatus;
use kvdock_plugin_api::mock::Options;
use kvdock_plugin_api::{ClearScope, ErrorKind};
use kvdock_plugin_mooncake::wire::rpc;
use serde_json::{Value, json};

/// Settings of a member that lends so much, and what `more` says.
fn config(master: &Master, segment: u64, more: &[(&str, Value)]) -> String {
    let mut config: Value = serde_json::from_str(&master.config(Mode::Peer, segment)).unwrap();
    for (key, value) in more {
        config[*key] = value.clone();
    }
    config.to_string()
}

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

fn stored(bench: &Bench, wanted: &[u64]) -> Vec<u64> {
    let set = bench.set(wanted);
    let ok = |(status, number): (&PageStatus, &u64)| (*status == PageStatus::Ok).then_some(*number);
    set.statuses[0].iter().zip(wanted).filter_map(ok).collect()
}

#[test]
fn a_page_with_two_copies_outlives_the_member_that_has_one_of_them() {
    let master = Master::start(&["--default_kv_lease_ttl=10000"]);
    let lenders = [(), ()].map(|()| Bench::new(&config(&master, 32 << 20, &[]), pool(1, 4096)));
    let bench = Bench::new(&config(&master, 0, &[("replica_num", 2.into())]), pool(16, 65_536));
    let all = numbers(0..16);
    assert!(bench.set(&all).all_ok(), "{}", bench.logs());
    assert!(bench.has_all(&all));
    for key in master.keys() {
        let replicas = master.call::<rpc::GetReplicaList>(&(key.as_str(), "default")).unwrap();
        assert_eq!(replicas.list.len(), 2, "{key}");
    }
    let [first, second] = lenders;
    first.store.close().unwrap();
    assert!(bench.has_all(&all), "{}", bench.logs());
    second.store.close().unwrap();
    wait_for("with the last copy they are gone", || bench.prefix(&all) == 0);
}

#[test]
fn pages_with_a_hard_pin_stay_under_pressure_and_go_when_they_are_removed() {
    let master = Master::start(&["--default_kv_lease_ttl=200", "--eviction_high_watermark_ratio=0.8"]);
    let _lender = Bench::new(&config(&master, 16 << 20, &[]), pool(1, 4096));
    let bytes = 512 << 10;
    let pinned = Bench::new(&config(&master, 0, &[("hard_pin", true.into())]), pool(16, bytes));
    let plain = Bench::of_model(&config(&master, 0, &[]), "other", pool(16, bytes));
    let kept = numbers(0..12);
    assert_eq!(stored(&pinned, &kept), kept, "{}", pinned.logs());
    // Eight times what there is room for.
    for round in 0..16u64 {
        plain.set(&numbers(round * 16..round * 16 + 16));
        assert_eq!(pinned.prefix(&kept), 12, "round {round}\n{}", pinned.logs());
    }
    // A store that is full of them takes nothing more, and says so.
    let mut more = kept.clone();
    let full = loop {
        let set = pinned.set(&[100 + more.len() as u64]);
        if set.result.is_err() {
            break set;
        }
        more.push(100 + more.len() as u64);
        assert!(more.len() <= 32, "there is no room for more");
    };
    assert!(more.len() > 12, "what has no pin makes room for what has one");
    assert_eq!(full.statuses[0], [PageStatus::Refused]);
    assert_eq!(full.result.unwrap_err().kind, ErrorKind::NoSpace);
    for part in more.chunks(16) {
        // Within a lease, which is short here.
        wait_for("they hold what was stored", || pinned.has_all(part));
        assert!(pinned.remove(part).all_ok());
    }
    wait_for("there is room again", || pinned.set(&[300]).all_ok());
}

#[test]
fn pages_with_a_soft_pin_go_after_those_without() {
    let flags = ["--default_kv_lease_ttl=1", "--eviction_high_watermark_ratio=0.9", "--eviction_ratio=0.1"];
    let master = Master::start(&flags);
    let _lender = Bench::new(&config(&master, 16 << 20, &[]), pool(1, 4096));
    let bytes = 128 << 10;
    let more = [("soft_pin", true.into()), ("soft_pin_ttl", 3600.into())];
    let pinned = Bench::new(&config(&master, 0, &more), pool(32, bytes));
    let plain = Bench::of_model(&config(&master, 0, &[]), "other", pool(32, bytes));
    // A fourth of the store, and the first to have come.
    let kept = numbers(0..32);
    assert_eq!(stored(&pinned, &kept), kept, "{}", pinned.logs());
    let mut was_full = false;
    for round in 0..16u64 {
        plain.set(&numbers(round * 32..round * 32 + 32));
        // Asking for pages makes them stay, so it is others that go.
        was_full |= (0..=round).any(|round| plain.prefix(&numbers(round * 32..round * 32 + 32)) < 32);
        assert_eq!(pinned.prefix(&kept), 32, "round {round}\n{}", pinned.logs());
    }
    assert!(was_full, "nothing had to go");
}

#[test]
fn tenants_of_one_master_find_and_clear_none_of_one_anothers_pages() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("tenants.json");
    let tenants = ["default", "one", "two"].map(|name| json!({"name": name, "quota": 32 << 20}));
    std::fs::write(&policy, json!({"version": 1, "tenants": tenants}).to_string()).unwrap();
    let policy = format!("--tenant_quota_connector_uri={}", policy.display());
    let master = Master::start(&["--enable_multi_tenants=true", &policy]);
    let _lender = Bench::new(&config(&master, 64 << 20, &[]), pool(1, 4096));
    let tenant = |name: &str| Bench::new(&config(&master, 0, &[("tenant_id", name.into())]), pool(8, 9_000));
    let (one, two) = (tenant("one"), tenant("two"));
    assert!(one.set(&[1, 2, 3]).all_ok(), "{}", one.logs());
    assert_eq!((one.prefix(&[1, 2, 3]), two.prefix(&[1, 2, 3])), (3, 0));
    // The same key, other bytes, each to its own.
    assert!(two.set(&[3]).all_ok());
    two.store.clear(&Options::default(), ClearScope::Namespace).unwrap();
    assert_eq!(two.which(&[1, 2, 3]), [false; 3]);
    assert!(one.has_all(&[1, 2, 3]));
    assert!(one.remove(&[2]).all_ok());
    assert_eq!(one.which(&[1, 2, 3]), [true, false, true]);
}
