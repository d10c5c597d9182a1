//! Several masters, of which one leads: real ones, and a real etcd in which they agree.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::time::{Duration, Instant};

use common::services::{Etcd, Master, Official, Port};
use common::*;
use kvdock_plugin_api::mock::{Instance, MockHost, Options, identity, table_of};
use kvdock_plugin_api::{ErrorKind, HealthState};
use kvdock_plugin_mooncake::kvdock_plugin_entry;
use serde_json::json;

fn config(etcd: &str, segment: u64) -> String {
    json!({
        "master_server_address": format!("etcd://{etcd}"),
        "cluster_id": "leaders",
        "local_hostname": "127.0.0.1",
        "global_segment_size": segment,
    })
    .to_string()
}

fn leads(masters: &[&Master]) -> usize {
    let began = Instant::now();
    loop {
        if let Some(at) = masters.iter().position(|master| master.serves()) {
            return at;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "no master leads");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn i1871_clients_follow_the_leader_that_etcd_names_and_begin_anew_with_one_that_knows_nothing() {
    let mut etcd = Etcd::start();
    let mut first = Master::start_of_several(&etcd, "leaders");
    leads(&[&first]);
    let mut second = Master::start_of_several(&etcd, "leaders");
    // The first endpoint answers nobody: the next one is asked.
    let nobody = Port::take();
    let endpoints = format!("127.0.0.1:{};{}", nobody.number, etcd.endpoint());
    let bench = Bench::new(&config(&endpoints, 64 << 20), pool(20, 50_000));
    let reader = Bench::new(&config(&etcd.endpoint(), 0), pool(20, 50_000));
    let address = format!("etcd://{}", etcd.endpoint());
    let mut official = Official::join(&address, "P2PHANDSHAKE", 64 << 20, &[("MC_STORE_CLUSTER_ID", "leaders")]);
    let numbers: Vec<u64> = (0..20).collect();
    assert!(bench.set(&numbers).all_ok(), "{}", bench.logs());
    assert!(reader.has_all(&numbers), "{}", reader.logs());
    let names = first.keys();
    assert_eq!(official.exists(&names), vec![1; 20], "all of one cluster");

    // Without etcd nobody notices a change of leader, and nothing else is amiss for as long as the leader stays.
    let logs = || bench.logs();
    first.kill();
    wait_for("an account of it", || bench.store.health().unwrap().state == HealthState::Degraded);
    assert!(!bench.set(&[100]).all_ok(), "nobody leads yet");
    leads(&[&second]);
    wait_for("the new leader", || bench.store.health().unwrap().state == HealthState::Ok);
    assert!(logs().contains("leads now"), "{}", logs());
    assert_eq!(bench.prefix(&numbers), 0, "it knows nothing");
    wait_for("room with the new leader", || bench.set(&numbers).all_ok());
    wait_for("the other client", || reader.has_all(&numbers));
    assert_eq!(bench.host.metric("mooncake_degraded"), Some(0.0));

    // etcd goes and comes again; a third master takes over.
    etcd.kill();
    wait_for("an account of it", || logs().contains("would not be noticed"));
    etcd.start_again();
    let third = Master::start_of_several(&etcd, "leaders");
    second.kill();
    leads(&[&third]);
    wait_for("room with the third leader", || bench.set(&numbers).all_ok() && bench.has_all(&numbers));
}

#[test]
fn without_a_leader_the_start_fails_in_words() {
    let etcd = Etcd::start();
    let options = Options { deadline: Some(Duration::from_secs(2)), ..Options::default() };
    let table = table_of(kvdock_plugin_entry).unwrap();
    let host = MockHost::new();
    let store = Instance::open(&host, table, &config(&etcd.endpoint(), 0), &identity("m"), &options);
    let error = store.unwrap_err();
    assert_eq!((error.kind, error.retryable), (ErrorKind::Unavailable, true), "{error}");
    assert!(error.message.contains("no master leads") && error.message.contains("leaders"), "{error}");
}
