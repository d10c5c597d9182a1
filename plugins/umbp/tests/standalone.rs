//! Against the real server of a node.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::*;
use kvdock_plugin_api::conformance::Suite;
use kvdock_plugin_api::mock::{MockPool, Options, Part, PoolSpec, identity};
use kvdock_plugin_api::v0_1::{CallContext, Component};
use kvdock_plugin_api::{Call, ComponentKind, ErrorKind, HealthState, PageStatus, monotonic_ns};
use kvdock_plugin_umbp::standalone::client::Client;
use kvdock_plugin_umbp::wire::standalone::{
    BatchBoolResponse, BatchKeysRequest, BatchRangeDataRequest, BoolResponse, DataRequest, Empty, PingResponse,
    RegisterMemoryRequest,
};
use kvdock_plugin_umbp::{KVDOCK_NOTE_SOURCE, kvdock_plugin_entry};
use kvdock_tests::umbp::{Official, Server};
use serde_json::json;
use sha2::{Digest, Sha256};

const TIME: Option<Duration> = Some(Duration::from_secs(30));

fn raw(server: &Server) -> Client {
    let path = server.address();
    Client::new(path.strip_prefix("unix://").unwrap(), 64 << 20).unwrap()
}

#[test]
fn every_rule_of_the_boundary_is_kept() {
    let server = Server::start(512 << 20);
    // Rules run in one store, so each has names of its own.
    let config = json!({"standalone_address": server.address(), "extra_backend_tag": "{scratch}"});
    Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE).config(config).run().assert_passed();
}

#[test]
fn pages_are_stored_found_and_read_by_several_workers() {
    let server = Server::start(64 << 20);
    let ping: PingResponse = raw(&server).call("Ping", Empty {}, TIME).unwrap();
    assert!(ping.ready && ping.supports_ranged_io);
    let all = numbers(0..32);
    let first = Bench::new(&server.config(), pool(32, 65536));
    first.store(&all);
    // A page that is there stays, and a key may come twice in a batch.
    assert!(first.set(&[0, 1, 2]).all_ok());
    first.pool.fill(0, 77);
    first.pool.fill(1, 77);
    let twice = first.store.set(&Options::default(), &[first.part(&[77, 77])]);
    assert_eq!(twice.statuses[0], [PageStatus::Ok; 2]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (server, all) = (&server, &all);
            scope.spawn(move || {
                let worker = Bench::new(&server.config(), pool(32, 65536));
                assert_eq!(worker.prefix(all), 32);
                assert_eq!(worker.count(all), 32);
                assert_eq!(worker.status(1000), PageStatus::Missing);
            });
        }
    });
    // Other models do not find them.
    assert_eq!(Bench::of(&server.config(), &identity("other"), pool(32, 65536)).prefix(&all), 0);
    // One that leaves takes nothing with it.
    assert_eq!(first.count(&all), 32);
}

#[test]
fn a_server_that_is_started_again_is_given_the_memory_again() {
    let mut server = Server::start(64 << 20);
    let bench = Bench::new(&server.config(), pool(8, 65536));
    bench.store(&numbers(0..8));
    server.kill();
    assert!(bench.get(&[1]).result.is_err());
    assert!(bench.set(&[1]).result.is_err());
    assert_eq!(bench.store.health().unwrap().state, HealthState::Failed);
    server.start_again();
    assert_eq!(bench.host.metric("kvdock_contents_lost"), None);
    wait_for("the server is used again", || bench.set(&[1]).all_ok());
    assert_eq!(bench.host.metric("kvdock_contents_lost"), Some(1.0), "the host would believe in them for ever");
    assert_eq!(bench.count(&numbers(0..8)), 1);
    bench.store(&numbers(0..8));
    assert_eq!(bench.count(&numbers(0..8)), 8);
    assert_eq!(bench.store.health().unwrap().state, HealthState::Ok);
}

#[test]
fn a_full_server_makes_room_and_a_page_larger_than_it_is_refused() {
    let server = Server::start(4 << 20);
    let bench = Bench::new(&server.config(), pool(64, 65536));
    for part in numbers(0..256).chunks(16) {
        bench.set(part).result.unwrap();
    }
    assert!(bench.count(&numbers(240..256)) > 0);
    let large = Bench::new(&server.config(), pool(1, 8 << 20));
    assert_eq!(large.set(&[1]).statuses[0], [PageStatus::Refused]);
}

#[test]
fn ranges_that_do_not_tile_are_refused_and_an_unknown_client_is_told() {
    let server = Server::start(64 << 20);
    let client = raw(&server);
    let register = RegisterMemoryRequest {
        client_id: "nobody".to_owned(),
        worker_base: 4096,
        size: 4096,
        ..RegisterMemoryRequest::default()
    };
    let answer: BoolResponse = client.call("RegisterMemory", register, TIME).unwrap();
    assert!(!answer.ok && answer.error.contains("fd handoff"), "{answer:?}");
    let put = DataRequest { key: "a".to_owned(), client_id: "nobody".to_owned(), size: 8, ..DataRequest::default() };
    let answer: BoolResponse = client.call("Put", put, TIME).unwrap();
    assert!(!answer.ok && answer.error.contains("unregistered"), "{answer:?}");

    // Memory of a client, handed over as the backend does it.
    let memory = rustix::fs::memfd_create("kvdock-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 1 << 16).unwrap();
    let (_, socket) = kvdock_plugin_umbp::standalone::paths(&server.address()).unwrap();
    let fd = std::os::fd::AsFd::as_fd(&memory);
    kvdock_plugin_umbp::standalone::handoff::hand(&socket, "ranges", fd, 0x10000, 1 << 16, TIME.unwrap()).unwrap();
    let ranged = |key: &str, ranges: &[(u64, u64)], object: Option<u64>| -> BatchRangeDataRequest {
        BatchRangeDataRequest {
            keys: vec![key.to_owned()],
            client_id: "ranges".to_owned(),
            range_counts: vec![ranges.len() as u32],
            shm_offsets: ranges.iter().map(|(offset, _)| *offset).collect(),
            region_bases: ranges.iter().map(|_| 0x10000).collect(),
            sizes: ranges.iter().map(|(_, len)| *len).collect(),
            object_offsets: ranges.iter().map(|(offset, _)| *offset).collect(),
            object_sizes: object.into_iter().collect(),
            ..BatchRangeDataRequest::default()
        }
    };
    let call = |method, request| -> Vec<bool> {
        let answer: BatchBoolResponse = client.call(method, request, TIME).unwrap();
        answer.ok
    };
    for (name, ranges, good) in [
        ("gap", &[(0, 8), (16, 8)][..], false),
        ("overlap", &[(0, 16), (8, 16)], false),
        ("beyond", &[(0, 32)], false),
        ("empty", &[(0, 24), (24, 0)], false),
        ("out of order", &[(8, 16), (0, 8)], true),
    ] {
        assert_eq!(call("BatchPutRanges", ranged(name, ranges, Some(24))), [good], "{name}");
    }
    assert_eq!(call("BatchGetRanges", ranged("out of order", &[(4, 20)], None)), [true]);
    assert_eq!(call("BatchGetRanges", ranged("out of order", &[(4, 21)], None)), [false]);
    assert_eq!(call("BatchGetRanges", ranged("out of order", &[], None)), [false]);
    let keys = ["gap", "out of order"].map(str::to_owned).to_vec();
    let there: BatchBoolResponse = client.call("BatchExists", BatchKeysRequest { keys }, TIME).unwrap();
    assert_eq!(there.ok, [false, true]);
}

/// A worker of another program may clear the server. The published one takes no puts after that; nothing is said to be stored there that is not.
#[test]
fn h01_what_others_clear_is_missed_and_no_put_is_said_to_be_stored_that_is_not() {
    let mut server = Server::start(64 << 20);
    let bench = Bench::new(&server.config(), pool(8, 65536));
    bench.store(&numbers(0..8));
    assert_eq!(bench.count(&numbers(0..8)), 8);
    let cleared: BoolResponse = raw(&server).call("Clear", Empty {}, TIME).unwrap();
    assert!(cleared.ok, "{cleared:?}");
    assert_eq!((bench.prefix(&numbers(0..8)), bench.count(&numbers(0..8))), (0, 0));
    let set = bench.set(&numbers(0..8));
    let stored: Vec<bool> = set.statuses[0].iter().map(|status| *status == PageStatus::Ok).collect();
    assert_eq!(bench.which(&numbers(0..8)), stored, "{set:?}");
    // A new one takes them.
    server.kill();
    server.start_again();
    wait_for("pages are taken", || bench.set(&numbers(0..8)).all_ok());
    assert_eq!(bench.count(&numbers(0..8)), 8);
}

#[test]
fn h11_reports_without_a_master_are_no_error() {
    let server = Server::start(64 << 20);
    let config = json!({"standalone_address": server.address(), "node_id": "worker", "node_address": "127.0.0.1",
        "extra_backend_tag": "{scratch}"});
    let suite = Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE).config(config);
    suite.only("status.").run().assert_passed();
    // Who has no name at a master is not asked.
    let bench = Bench::new(&server.config(), pool(4, 8192));
    assert!(!bench.store.capabilities().unwrap().held_pages);
}

#[test]
fn h15_a_server_that_stands_still_keeps_no_question_waiting_for_ever() {
    let server = Server::start(64 << 20);
    let bench = Bench::new(&server.config(), pool(4, 8192));
    bench.store(&[1]);
    server.stand_still();
    let options = Options { deadline: Some(Duration::from_millis(500)), ..Options::default() };
    let query = kvdock_plugin_api::mock::Query::of(&bench.pool);
    let error = bench.store.exists(&options, &keys(&[1]), &[query]).map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::TimedOut);
    server.go_on();
    wait_for("it answers again", || bench.count(&[1]) == 1);
}

/// The plugin waited as long as the host does, whose own error names neither the server nor what to do.
#[test]
fn a_server_that_is_missing_is_named_before_the_host_gives_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("none.grpc.sock");
    let client = Client::new(path.to_str().unwrap(), 1 << 20).unwrap();
    let context = CallContext { deadline_ns: monotonic_ns() + 2_000_000_000, cancel: std::ptr::null(), trace_id: 0 };
    // SAFETY: there is no cancel flag.
    let call = unsafe { Call::from_raw(&context) };
    let error = client.wait(Duration::from_secs(30), &call).map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    let start = format!("`umbp_standalone_server unix://{}`", path.display());
    assert!(error.message.contains(&start), "{}", error.message);
    let waited = error.message.split(" within ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    assert!(waited.parse::<u64>().unwrap() < 2_000, "{}", error.message);
}

#[test]
fn no_server_is_an_error_that_names_the_setting() {
    let dir = tempfile::tempdir().unwrap();
    let address = format!("unix://{}", dir.path().join("none.grpc.sock").display());
    let config = json!({"standalone_address": address, "standalone_startup_timeout_ms": 300}).to_string();
    let pool = pool(4, 8192);
    let error = try_attach(&config, &identity("model"), &[&pool]).1.map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(
        error.message.contains("standalone_address") && error.message.contains("none.grpc.sock"),
        "{}",
        error.message
    );
}

fn generated(seed: u64, size: usize) -> Vec<u8> {
    let mut value = Vec::new();
    for block in 0u64.. {
        if value.len() >= size {
            break;
        }
        value.extend(Sha256::digest([seed.to_le_bytes(), block.to_le_bytes()].concat()));
    }
    value.truncate(size);
    value
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn objects_of_the_official_client_are_read_to_the_byte_and_ours_by_it() {
    let server = Server::start(64 << 20);
    let Some(mut official) = Official::start(&server) else {
        eprintln!("skipped: there is no CPython 3.12, for which the official client is made");
        return;
    };
    // In the names of SGLang: K and V of a page are an object each.
    let part = |segment: u32, kind: ComponentKind| Component {
        layer: 0,
        kind: kind.raw(),
        segment,
        reserved: 0,
        offset: 0,
        run_len: 10_000,
        run_stride: 10_000,
        run_count: 1,
    };
    let components = vec![part(0, ComponentKind::K), part(1, ComponentKind::V)];
    let spec = PoolSpec { components, ..PoolSpec::bytes(0, "kv", 4, &[10_000, 10_000]) };
    let config = json!({"standalone_address": server.address(), "names": "sglang"}).to_string();
    let bench = Bench::new(&config, MockPool::new(spec));
    let (theirs, ours) = ([7; 32], [9; 32]);
    for (seed, suffix) in [(1, "k"), (2, "v")] {
        let key = format!("{}_0_{suffix}", hex(&theirs));
        let answer = official.ask(&json!({"op": "put", "key": key, "size": 10_000, "seed": seed})).unwrap();
        assert_eq!(answer["stored"], json!(true), "{answer}");
    }
    bench.pool.wipe(0);
    assert!(bench.store.get(&Options::default(), &[Part::new(&bench.pool, &[theirs], &[0])]).all_ok());
    assert!(bench.pool.read(0) == [generated(1, 10_000), generated(2, 10_000)].concat());
    bench.pool.fill(1, 5);
    assert!(bench.store.set(&Options::default(), &[Part::new(&bench.pool, &[ours], &[1])]).all_ok());
    for (half, suffix) in bench.pool.read(1).chunks(10_000).zip(["k", "v"]) {
        let key = format!("{}_0_{suffix}", hex(&ours));
        let answer = official.ask(&json!({"op": "get", "key": key, "size": 10_000})).unwrap();
        assert_eq!(
            (&answer["found"], &answer["sha256"]),
            (&json!(true), &json!(hex(&Sha256::digest(half)))),
            "{answer}"
        );
    }
}
