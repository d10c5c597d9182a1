//! Nodes that move pages by RDMA, through the stand-in for libibverbs.

use std::path::Path;
use std::time::Duration;

use kvdock_plugin_api::PageStatus;
use kvdock_plugin_api::mock::{Options, identity};
use kvdock_verbs_stand_in::{faults, harness};
use rustix::process::{Signal, kill_process};
use serde_json::json;

use super::super::common::*;
use super::anew::ELSEWHERE;
use super::other::{self, PAGE};
use super::shares::flush;
use kvdock_tests::umbp::{Master, Port};

fn with_stand_in(name: &str, body: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    harness::with_stand_in(&format!("distributed::rdma::{name}"), folder.path(), &[], body);
}

fn config(master: &Master) -> String {
    master.config(json!({"data_plane": "rdma", "cache_remote_fetches": false}))
}

#[test]
fn two_nodes_share_pages_by_rdma() {
    with_stand_in("two_nodes_share_pages_by_rdma", |_| {
        let master =
            Master::start(&[("UMBP_ROUTE_PUT_NODE_AFFINITY", "none"), ("UMBP_ROUTE_PUT_SELECT_ALGO", "random")]);
        let mut other = other::start(&config(&master));
        let bench = Bench::new(&config(&master), pool(64, PAGE));
        // Into the memory of either, and out of it.
        bench.store(&numbers(0..50));
        flush(&bench);
        let held = bench.store.stats().unwrap().pages;
        assert!((5..45).contains(&held), "{held}");
        other.set(&numbers(100..140));
        // Each tells the master of what the other has stored with it, in its own time.
        wait_for("the other node reads all", || other.has_all(&numbers(0..50)) && other.has_all(&numbers(100..140)));
        wait_for("and so does this one", || {
            bench.count(&numbers(0..50)) == 50 && bench.count(&numbers(100..140)) == 40
        });
        assert!(!bench.logs().contains("TCP"), "{}", bench.logs());
        // Pages of a few bytes as well.
        let small = Bench::of(&config(&master), &identity("small"), pool(64, 41));
        small.store(&numbers(0..60));
        wait_for("the master knows of all", || small.count(&numbers(0..60)) == 60);
    });
}

#[test]
fn what_rdma_does_not_bring_comes_over_tcp() {
    with_stand_in("what_rdma_does_not_bring_comes_over_tcp", |folder| {
        let master = Master::start(&[]);
        let mut other = other::start(&config(&master));
        let bench = Bench::new(&config(&master), pool(20, PAGE));
        other.set(&numbers(0..20));
        assert_eq!(bench.count(&numbers(0..20)), 20);
        // One request that fails is made again; a device on which all fail is not what reads depend on.
        let file = faults::file(folder, std::process::id());
        std::fs::write(&file, "complete 12").unwrap();
        assert_eq!(bench.count(&numbers(0..20)), 20, "{}", bench.logs());
        std::fs::write(&file, "always 12").unwrap();
        assert_eq!(bench.count(&numbers(0..20)), 20, "{}", bench.logs());
        assert!(bench.logs().contains("bytes go over TCP"), "{}", bench.logs());
        std::fs::remove_file(&file).unwrap();
        assert_eq!(bench.count(&numbers(0..20)), 20);
    });
}

#[test]
fn pages_in_segments_come_by_rdma_where_memory_has_room_and_else_over_tcp() {
    with_stand_in("pages_in_segments_come_by_rdma_where_memory_has_room_and_else_over_tcp", |_| {
        let master = Master::start(&[("UMBP_EVICTION_CHECK_INTERVAL_SEC", "3600")]);
        for promotes in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let with_segments = json!({
                "data_plane": "rdma", "dram_capacity_bytes": 4 << 20, "ssd_storage_dir": dir.path(),
                "ssd_capacity_bytes": 256 << 20, "ssd_durability_mode": "relaxed", "auto_promote_on_read": promotes,
            });
            let mut other = other::start(&master.config(with_segments));
            let bench = Bench::of(&config(&master), &identity("model"), pool(20, PAGE));
            let first = u64::from(promotes) * 100;
            let all = numbers(first..first + 40);
            other.set(&all);
            for _ in 0..2 {
                assert_eq!(bench.count(&all), 40, "{}", bench.logs());
            }
            assert!(!bench.logs().contains("RDMA failed"), "{}", bench.logs());
        }
    });
}

#[test]
fn a_node_over_tcp_and_one_with_rdma_share_pages() {
    with_stand_in("a_node_over_tcp_and_one_with_rdma_share_pages", |_| {
        let master = Master::start(&[]);
        let mut other = other::start(&master.config(json!({"data_plane": "auto"})));
        let bench = Bench::new(&master.config(json!({})), pool(20, PAGE));
        other.set(&numbers(0..20));
        assert_eq!(bench.count(&numbers(0..20)), 20, "{}", bench.logs());
        bench.store(&numbers(100..120));
        flush(&bench);
        assert!(other.has_all(&numbers(100..120)));
    });
}

/// Its memory has other addresses and keys then, and its queue pairs are others.
#[test]
fn a_node_that_comes_again_under_its_name_at_its_ports_is_reached_by_rdma_at_once() {
    with_stand_in("a_node_that_comes_again_under_its_name_at_its_ports_is_reached_by_rdma_at_once", |_| {
        let (master, ports) = (Master::start(&ELSEWHERE), [Port::take(), Port::take()]);
        let settled = master.config(json!({
            "data_plane": "rdma", "cache_remote_fetches": false, "node_id": "keeper",
            "peer_service_port": ports[0].number, "io_engine_port": ports[1].number,
        }));
        let small = json!({"data_plane": "rdma", "cache_remote_fetches": false, "dram_capacity_bytes": 1 << 20});
        let bench = Bench::new(&master.config(small), pool(20, PAGE));
        for turn in 0..3u64 {
            let node = Bench::new(&settled, pool(20, PAGE));
            let all = numbers(turn * 100..turn * 100 + 20);
            bench.store(&all);
            assert_eq!(bench.store.stats().unwrap().pages, 0, "turn {turn}: they went to the other node");
            flush(&node);
            assert_eq!(bench.count(&all), 20, "turn {turn}\n{}", bench.logs());
            node.store.close().unwrap();
        }
        assert!(!bench.logs().contains("TCP"), "{}", bench.logs());
    });
}

#[test]
fn a_node_that_dies_or_stands_still_in_the_middle_of_rdma_brings_no_wrong_byte() {
    with_stand_in("a_node_that_dies_or_stands_still_in_the_middle_of_rdma_brings_no_wrong_byte", |_| {
        let master = Master::start(&[]);
        let bench = Bench::new(&config(&master), pool(40, PAGE));
        for (turn, signal) in [Signal::STOP, Signal::KILL].into_iter().enumerate() {
            let mut other = other::start(&config(&master));
            let all: Vec<u64> = (turn as u64 * 100..turn as u64 * 100 + 40).collect();
            other.set(&all);
            let process = other.pid();
            let later = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                kill_process(process, signal).unwrap();
            });
            let options = Options { deadline: Some(Duration::from_secs(2)), ..Options::default() };
            wait_for("reads fail", || {
                (0..40).for_each(|page| bench.pool.wipe(page));
                let got = bench.store.get(&options, &[bench.part(&all)]);
                for (page, status) in got.statuses[0].iter().enumerate() {
                    assert!(*status != PageStatus::Ok || bench.pool.holds(page as u32, all[page]), "page {page}");
                }
                !got.all_ok()
            });
            later.join().unwrap();
        }
        bench.store(&numbers(500..510));
        assert_eq!(bench.count(&numbers(500..510)), 10);
    });
}

#[test]
fn memory_or_a_device_that_is_not_to_be_had_is_an_error_that_names_the_key() {
    with_stand_in("memory_or_a_device_that_is_not_to_be_had_is_an_error_that_names_the_key", |folder| {
        let master = Master::start(&[]);
        let pool = pool(4, 9_000);
        let missing = master.config(json!({"data_plane": "rdma", "rdma_devices": "mlx5_7"}));
        let error = try_attach(&missing, &identity("model"), &[&pool]).1.map(|_| ()).unwrap_err();
        assert!(error.message.contains("data_plane") && error.message.contains("mlx5_7"), "{error}");
        let file = faults::file(folder, std::process::id());
        std::fs::write(&file, "registration").unwrap();
        let error = try_attach(&config(&master), &identity("model"), &[&pool]).1.map(|_| ()).unwrap_err();
        assert!(error.message.contains("data_plane") && error.message.contains("67108864 bytes"), "{error}");
        std::fs::remove_file(file).unwrap();
    });
}

#[test]
fn without_rdma_on_this_machine_the_error_says_what_is_missing() {
    let master = Master::start(&[]);
    let pool = pool(4, 9_000);
    // A machine with RDMA has nothing to refuse.
    if let Err(error) = try_attach(&config(&master), &identity("model"), &[&pool]).1 {
        assert!(error.message.contains("data_plane") && error.message.contains("RDMA"), "{error}");
        assert!(error.message.contains("data_plane = \"tcp\""), "{error}");
    }
}
