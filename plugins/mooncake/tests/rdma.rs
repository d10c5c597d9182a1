//! Members of a real cluster that move pages by RDMA, through the stand-in for libibverbs.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::path::Path;
use std::time::Duration;

use common::services::{Calls, Master, Mode, Official};
use common::{Bench, pool, try_attach, wait_for};
use kvdock_plugin_api::PageStatus;
use kvdock_plugin_mooncake::limit::Limit;
use kvdock_plugin_mooncake::metadata::{Descriptor, Metadata};
use kvdock_plugin_mooncake::wire::rpc;
use kvdock_plugin_mooncake::wire::types::Place;
use kvdock_tests::other::{self, Other};
use kvdock_verbs_stand_in::{faults, harness};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

const PAGE: u64 = 300_000;
const MIB: u64 = 1 << 20;

fn with_stand_in(name: &str, body: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    harness::with_stand_in(name, folder.path(), &[], body);
}

fn over_rdma(config: &str) -> String {
    let mut config: Value = serde_json::from_str(config).unwrap();
    config["protocol"] = json!("rdma");
    config.to_string()
}

/// Another member, in a process of its own.
fn start_other(config: &str) -> Other {
    Other::start("member_process", config)
}

/// What the other process does; not a test of its own.
#[test]
#[ignore = "started by the other tests"]
fn member_process() {
    other::serve(
        |config| Bench::new(config, pool(64, PAGE)),
        |bench, what, numbers| match what {
            "set" => json!(stored(bench, numbers)),
            "which" => json!(bench.which(numbers)),
            _ => panic!("{what}"),
        },
    );
}

fn stored(bench: &Bench, numbers: &[u64]) -> Vec<bool> {
    bench.set(numbers).statuses[0].iter().map(|status| *status == PageStatus::Ok).collect()
}

fn set_all(bench: &Bench, numbers: &[u64]) {
    assert_eq!(stored(bench, numbers), vec![true; numbers.len()], "{}", bench.logs());
}

fn range(from: u64, count: u64) -> Vec<u64> {
    (from..from + count).collect()
}

/// What the only peer with objects tells of itself.
fn told_by(places: &[String], mode: Mode, master: &Master) -> Descriptor {
    let [endpoint] = places else { panic!("{places:?}") };
    let metadata = Metadata::parse(&master.metadata(mode)).unwrap();
    metadata.find(endpoint, &Limit::within(Duration::from_secs(20))).unwrap().descriptor
}

/// The endpoints that the replicas of all objects have.
fn places(master: &Master) -> Vec<String> {
    let listed = master.call::<rpc::GetReplicaListByRegex>(&(".*", "default")).unwrap();
    let mut places: Vec<_> = listed
        .0
        .into_iter()
        .flat_map(|(_, replicas)| replicas)
        .filter_map(|replica| match replica.place {
            Place::Memory(memory) => Some(memory.buffer.endpoint),
            _ => None,
        })
        .collect();
    places.sort();
    places.dedup();
    places
}

#[test]
fn two_members_move_pages_by_rdma_in_both_metadata_modes() {
    with_stand_in("two_members_move_pages_by_rdma_in_both_metadata_modes", |_| {
        for mode in [Mode::Peer, Mode::Http] {
            let master = Master::start(&[]);
            let mut lender = start_other(&over_rdma(&master.config(mode, 64 * MIB)));
            let guest = Bench::new(&over_rdma(&master.config(mode, 0)), pool(64, PAGE));
            set_all(&guest, &range(0, 40));
            assert!(lender.has_all(&range(0, 40)), "{mode:?}");
            lender.set(&range(100, 40));
            assert!(guest.has_all(&range(100, 40)), "{mode:?}: {}", guest.logs());
            assert_eq!(guest.prefix(&range(0, 40)), 40);
            let places = places(&master);
            let told = told_by(&places, mode, &master);
            assert!(!told.speaks_tcp() && told.tcp_data_port == 0, "{told:?}");
            assert_eq!((told.devices.len(), told.devices[0].name.as_str()), (1, "stand0"));
            assert_eq!((told.buffers.len(), told.buffers[0].length), (1, 64 * MIB));
        }
    });
}

#[test]
fn both_members_lend_and_markers_and_small_pages_travel_too() {
    with_stand_in("both_members_lend_and_markers_and_small_pages_travel_too", |_| {
        let master = Master::start(&[]);
        let config = over_rdma(&master.config(Mode::Peer, 32 * MIB));
        let mut other = start_other(&config);
        let bench = Bench::new(&config, pool(64, PAGE));
        // The master places pages on either segment.
        set_all(&bench, &range(0, 50));
        other.set(&range(100, 50));
        assert!(other.has_all(&range(0, 50)) && bench.has_all(&range(100, 50)), "{}", bench.logs());
        assert_eq!(places(&master).len(), 2);
        let small = Bench::of_model(&config, "small", pool(64, 9));
        set_all(&small, &range(0, 60));
        assert!(small.has_all(&range(0, 60)));
    });
}

#[test]
fn a_connection_that_fails_is_made_anew_and_no_page_is_lost() {
    with_stand_in("a_connection_that_fails_is_made_anew_and_no_page_is_lost", |folder| {
        let master = Master::start(&[]);
        let _lender = start_other(&over_rdma(&master.config(Mode::Peer, 64 * MIB)));
        let guest = Bench::new(&over_rdma(&master.config(Mode::Peer, 0)), pool(64, PAGE));
        for (turn, status) in [12, 11, 5, 19].into_iter().enumerate() {
            let numbers = range(turn as u64 * 100, 20);
            let plant = || std::fs::write(faults::file(folder, std::process::id()), format!("complete {status}"));
            plant().unwrap();
            set_all(&guest, &numbers);
            plant().unwrap();
            assert!(guest.has_all(&numbers), "{status}: {}", guest.logs());
        }
    });
}

#[test]
fn a_member_that_is_killed_costs_its_pages_and_nothing_else() {
    with_stand_in("a_member_that_is_killed_costs_its_pages_and_nothing_else", |_| {
        let master = Master::start(&["--client_ttl=3"]);
        let config = over_rdma(&master.config(Mode::Peer, 64 * MIB));
        let guest = Bench::new(&over_rdma(&master.config(Mode::Peer, 0)), pool(64, PAGE));
        let mut lender = start_other(&config);
        set_all(&guest, &range(0, 20));
        lender.kill();
        // Nothing is read, nothing hangs, nothing is wrong.
        assert_eq!(guest.which(&range(0, 20)), vec![false; 20]);
        let _next = start_other(&config);
        wait_for("pages are stored with the next member", || stored(&guest, &range(200, 20)) == vec![true; 20]);
        assert!(guest.has_all(&range(200, 20)), "{}", guest.logs());
    });
}

#[test]
fn a_member_that_dies_or_stands_still_in_the_middle_of_reads_brings_no_wrong_byte() {
    with_stand_in("a_member_that_dies_or_stands_still_in_the_middle_of_reads_brings_no_wrong_byte", |_| {
        let master = Master::start(&["--client_ttl=3"]);
        let config = over_rdma(&master.config(Mode::Peer, 64 * MIB));
        let guest = Bench::new(&over_rdma(&master.config(Mode::Peer, 0)), pool(64, PAGE));
        for signal in [Signal::STOP, Signal::KILL] {
            let lender = start_other(&config);
            let first = if signal == Signal::STOP { 0 } else { 1000 };
            wait_for("the new member takes pages", || stored(&guest, &range(first, 40)) == vec![true; 40]);
            let process = lender.pid();
            let later = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                kill_process(process, signal).unwrap();
            });
            // Until the reads fail; each page that comes has its bytes.
            wait_for("reads fail", || guest.which(&range(first, 40)) != vec![true; 40]);
            later.join().unwrap();
        }
    });
}

#[test]
fn the_official_client_and_this_one_share_pages_by_rdma() {
    with_stand_in("the_official_client_and_this_one_share_pages_by_rdma", |_| {
        for mode in [Mode::Peer, Mode::Http] {
            let master = Master::start(&[]);
            let bench = Bench::new(&over_rdma(&master.config(mode, 64 * MIB)), pool(16, PAGE));
            let mut official = Official::start_over(&master, mode, 0, "rdma");
            assert!(official.log().contains("Found 1 HCAs"), "it does not use RDMA\n{}", official.log());
            // Into our segment and out of it.
            let keys: Vec<String> = (0..8).map(|n| format!("o{n}")).collect();
            let data: Vec<Vec<u8>> =
                (0..8u8).map(|n| (0..PAGE).map(|at| (at as u8).wrapping_mul(3) ^ n).collect()).collect();
            assert_eq!(official.batch_put(&keys, &data), vec![0; 8], "{mode:?}\n{}", official.log());
            let (codes, back) = official.batch_get(&keys, PAGE as usize);
            assert_eq!(codes, vec![PAGE as i64; 8]);
            assert!(back == data, "{mode:?}: other bytes");
            // Ours into our own segment, read by the official client.
            set_all(&bench, &range(0, 8));
            let stored: Vec<String> = master.keys().into_iter().filter(|key| key.contains("kvdock/")).collect();
            let (codes, _) = official.batch_get(&stored, PAGE as usize);
            assert_eq!(codes, vec![PAGE as i64; 8], "{mode:?}");
            drop(official);
            drop(bench);
            // The other way round: into the segment of the official client and out of it.
            let master = Master::start(&[]);
            let mut official = Official::start_over(&master, mode, 64 * MIB, "rdma");
            let bench = Bench::new(&over_rdma(&master.config(mode, 0)), pool(16, PAGE));
            set_all(&bench, &range(0, 8));
            assert!(bench.has_all(&range(0, 8)), "{mode:?}: {}", bench.logs());
            let told = told_by(&places(&master), mode, &master);
            assert!(!told.speaks_tcp() && told.over_rdma().is_some(), "{told:?}");
            let stored = master.keys();
            let (codes, _) = official.batch_get(&stored, PAGE as usize);
            assert_eq!(codes, vec![PAGE as i64; 8], "{mode:?}");
        }
    });
}

#[test]
fn memory_that_can_not_be_registered_is_an_error_that_names_it() {
    with_stand_in("memory_that_can_not_be_registered_is_an_error_that_names_it", |folder| {
        let master = Master::start(&[]);
        std::fs::write(faults::file(folder, std::process::id()), "registration").unwrap();
        for (segment, says) in [(64 * MIB, "global_segment_size: 67108864 bytes"), (0, "pool 0 (kv)")] {
            let config = over_rdma(&master.config(Mode::Peer, segment));
            let error = try_attach(&config, "model", &[&pool(4, PAGE)]).1.err().unwrap();
            assert!(error.message.contains(says) && error.message.contains("ulimit -l"), "{error}");
        }
    });
}

#[test]
fn a_device_that_is_not_there_is_an_error_that_names_what_is() {
    with_stand_in("a_device_that_is_not_there_is_an_error_that_names_what_is", |_| {
        let master = Master::start(&[]);
        let mut config: Value = serde_json::from_str(&over_rdma(&master.config(Mode::Peer, 0))).unwrap();
        config["device_name"] = json!("mlx5_7");
        let error = try_attach(&config.to_string(), "model", &[&pool(4, PAGE)]).1.err().unwrap();
        assert!(error.message.contains("device_name: "), "{error}");
        assert!(error.message.contains("mlx5_7") && error.message.contains("stand0"), "{error}");
    });
}

#[test]
fn without_rdma_on_this_machine_the_error_says_what_is_missing() {
    let master = Master::start(&[]);
    let (_, attached) = try_attach(&over_rdma(&master.config(Mode::Peer, 0)), "model", &[&pool(4, PAGE)]);
    // A machine with RDMA has nothing to refuse.
    if let Err(error) = attached {
        assert!(error.message.contains("protocol: "), "{error}");
        assert!(error.message.contains("RDMA") && error.message.contains("protocol = \"tcp\""), "{error}");
    }
}

#[test]
fn a_member_over_tcp_is_told_why_it_does_not_reach_one_over_rdma() {
    with_stand_in("a_member_over_tcp_is_told_why_it_does_not_reach_one_over_rdma", |_| {
        let master = Master::start(&[]);
        let mut lender = start_other(&over_rdma(&master.config(Mode::Peer, 64 * MIB)));
        lender.set(&range(0, 4));
        let guest = Bench::new(&master.config(Mode::Peer, 0), pool(4, PAGE));
        assert_eq!(guest.which(&range(0, 4)), [false; 4]);
        assert!(guest.logs().contains("reached by rdma alone"), "{}", guest.logs());
        // The other way round it goes: who has RDMA has TCP as well.
        drop(lender);
        let master = Master::start(&[]);
        let mut lender = start_other(&master.config(Mode::Peer, 64 * MIB));
        let guest = Bench::new(&over_rdma(&master.config(Mode::Peer, 0)), pool(4, PAGE));
        set_all(&guest, &range(0, 4));
        assert!(lender.has_all(&range(0, 4)) && guest.has_all(&range(0, 4)), "{}", guest.logs());
    });
}
