//! Masters and nodes that go away.

use std::time::{Duration, Instant};

use kvdock_plugin_api::mock::{Options, Query, identity};
use kvdock_plugin_api::{ErrorKind, HealthState, PageStatus, ReadyKind};
use kvdock_tests::process::stand_still;
use rustix::process::{Signal, kill_process};
use serde_json::json;

use super::super::common::*;
use super::other::{self, PAGE};
use super::shares::flush;
use kvdock_tests::umbp::{Master, Port};

#[test]
fn a_master_that_is_started_again_is_told_everything_again() {
    let mut master = Master::start(&[]);
    let first = Bench::new(&master.config(json!({})), pool(16, 9_000));
    let second = Bench::new(&master.config(json!({"cache_remote_fetches": false})), pool(16, 9_000));
    first.store(&numbers(0..16));
    flush(&first);
    assert_eq!(second.count(&numbers(0..16)), 16);
    master.kill();
    // What a node has it still reads, and it takes more.
    assert_eq!(first.count(&numbers(0..16)), 16);
    first.store(&numbers(100..116));
    assert_eq!(first.count(&numbers(100..116)), 16);
    assert_eq!(first.prefix(&numbers(100..116)), 16);
    // What others have is out of reach, and that is said.
    assert!(second.get(&[1]).result.is_err());
    let query = Query::of(&second.pool);
    assert!(second.store.exists(&Options::default(), &keys(&[1]), &[query]).is_err());
    assert_eq!(second.store.health().unwrap().state, HealthState::Degraded);
    assert!(first.store.flush(&Options::default()).is_err());
    master.start_again();
    let all: Vec<u64> = (0..16).chain(100..116).collect();
    wait_for("the second node finds all that the first has", || all.chunks(16).all(|part| second.get(part).all_ok()));
    wait_for("all is well", || second.store.health().unwrap().state == HealthState::Ok);
    assert_eq!(second.count(&all), 32);
}

#[test]
fn a_node_that_is_killed_is_forgotten_and_its_pages_are_misses() {
    let variables = [("UMBP_HEARTBEAT_TTL_SEC", "2"), ("UMBP_REAPER_INTERVAL_SEC", "1")];
    let mut master = Master::start(&variables);
    let mut other = other::start(&master.config(json!({})));
    let bench = Bench::new(&master.config(json!({"cache_remote_fetches": false})), pool(8, PAGE));
    other.set(&numbers(0..8));
    wait_for("its pages are read", || bench.count(&numbers(0..8)) == 8);
    other.kill();
    // Nothing hangs, nothing is wrong.
    assert_eq!(bench.count(&numbers(0..8)), 0);
    wait_for("the master forgets it", || bench.prefix(&numbers(0..8)) == 0);
    wait_for("word of what is lost", || bench.host.metric("kvdock_contents_lost").is_some());
    // What it had can be stored again.
    bench.store(&numbers(0..8));
    assert_eq!(bench.count(&numbers(0..8)), 8);
    drop(other);
    master.kill();
}

#[test]
fn a_node_that_stood_still_so_long_that_it_was_forgotten_joins_again() {
    let variables = [("UMBP_HEARTBEAT_TTL_SEC", "1"), ("UMBP_REAPER_INTERVAL_SEC", "1")];
    let master = Master::start(&variables);
    let mut other = other::start(&master.config(json!({})));
    let bench = Bench::new(&master.config(json!({"cache_remote_fetches": false})), pool(8, PAGE));
    other.set(&numbers(0..8));
    wait_for("its pages are found", || bench.prefix(&numbers(0..8)) == 8);
    let process = other.pid();
    stand_still(process);
    wait_for("the master forgets it", || bench.prefix(&numbers(0..8)) == 0);
    kill_process(process, Signal::CONT).unwrap();
    wait_for("its pages are found again", || bench.prefix(&numbers(0..8)) == 8);
    wait_for("and read", || bench.count(&numbers(0..8)) == 8);
}

#[test]
fn a_node_that_dies_or_stands_still_in_the_middle_of_reads_brings_no_wrong_byte() {
    let master = Master::start(&[]);
    let bench = Bench::new(&master.config(json!({"cache_remote_fetches": false})), pool(40, PAGE));
    for (turn, signal) in [Signal::STOP, Signal::KILL].into_iter().enumerate() {
        let mut other = other::start(&master.config(json!({})));
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
    // The instance goes on.
    bench.store(&numbers(500..510));
    assert_eq!(bench.count(&numbers(500..510)), 10);
}

#[test]
fn a_master_that_stands_still_keeps_no_question_waiting_for_ever() {
    let master = Master::start(&[]);
    let bench = Bench::new(&master.config(json!({})), pool(4, 9_000));
    bench.store(&[1]);
    master.stand_still();
    let options = Options { deadline: Some(Duration::from_millis(500)), ..Options::default() };
    let query = Query::of(&bench.pool);
    // It may know by then that the master does not answer.
    let error = bench.store.exists(&options, &keys(&[2]), &[query]).map(|_| ()).unwrap_err();
    assert!(matches!(error.kind, ErrorKind::TimedOut | ErrorKind::Unavailable), "{error}");
    assert_eq!(bench.status(1), PageStatus::Ok, "what is here needs no master");
    master.signal(Signal::CONT);
    wait_for("it answers again", || bench.status(2) == PageStatus::Missing);
}

/// Offloads had no deadline of their own, so that each took as long as the longest question to the master; the host took them all for hanging.
#[test]
fn offloads_end_by_their_deadline_while_the_master_stands_still() {
    let master = Master::start(&[]);
    let bench = Bench::new(&master.config(json!({})), pool(4, 9_000));
    let linker = bench.store.linker().unwrap();
    let now = (ReadyKind::Now as u32, 0);
    let ended = |operation: u64, options: &Options| {
        bench.pool.fill(0, operation);
        linker.offload(options, operation, &[bench.part(&[operation])], &[now]).unwrap();
        let mut popped = None;
        wait_for("the end of the offload", || {
            popped = linker.pop().unwrap();
            popped.is_some()
        });
        popped.unwrap().result
    };
    ended(1, &Options::default()).unwrap();
    master.stand_still();
    let began = Instant::now();
    let short = Options { deadline: Some(Duration::from_millis(500)), ..Options::default() };
    let error = ended(2, &short).unwrap_err();
    assert!(matches!(error.kind, ErrorKind::TimedOut | ErrorKind::Unavailable), "{error}");
    // Half of what it took before.
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    master.signal(Signal::CONT);
    let mut operation = 2;
    wait_for("offloads are taken again", || {
        operation += 1;
        ended(operation, &Options::default()).is_ok()
    });
    assert_eq!(bench.status(operation), PageStatus::Ok);
}

#[test]
fn a_name_that_is_taken_and_a_master_that_is_not_there_are_errors_that_name_the_key() {
    let master = Master::start(&[]);
    let config = master.config(json!({"node_id": "one"}));
    let first = Bench::new(&config, pool(4, 9_000));
    let other = pool(4, 9_000);
    let error = try_attach(&config, &identity("model"), &[&other]).1.map(|_| ()).unwrap_err();
    assert!(error.message.contains("master_address") && error.message.contains("node_id is \"one\""), "{error}");
    // Who leaves gives its name back.
    first.store.close().unwrap();
    Bench::new(&config, pool(4, 9_000)).store(&[1]);
    let nobody = Port::take();
    let config = json!({"master_address": format!("127.0.0.1:{}", nobody.number), "node_address": "127.0.0.1"});
    let error = try_attach(&config.to_string(), &identity("model"), &[&other]).1.map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(error.message.contains("master_address") && error.message.contains("RegisterClient"), "{error}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    for key in ["peer_service_port", "io_engine_port"] {
        let error = try_attach(&master.config(json!({key: port})), &identity("model"), &[&other]).1.map(|_| ());
        assert!(error.unwrap_err().message.contains(&format!("storage.mock.{key}")), "{key}");
    }
}
