//! Peers that die, masters that start anew, stores that are full.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::services::{Master, Mode, Official};
use common::*;
use kvdock_plugin_api::mock::Options;
use kvdock_plugin_api::{ClearScope, ErrorKind, HealthState, PageStatus};

#[test]
fn a_full_store_refuses_pages_in_words_and_has_room_again_later() {
    // Leases and watermark so that nothing is evicted until it is asked for in vain.
    let master = Master::start(&["--default_kv_lease_ttl=500", "--eviction_high_watermark_ratio=1.0"]);
    let bench = Bench::new(&master.config(Mode::Peer, 16 << 20), pool(32, 1 << 20));
    let numbers: Vec<u64> = (0..32).collect();
    let set = bench.set(&numbers);
    let stored = set.statuses[0].iter().filter(|status| **status == PageStatus::Ok).count();
    assert!(stored >= 8, "{set:?}\n{}", bench.logs());
    let keep: Vec<u64> = (0..32).filter(|number| set.statuses[0][*number as usize] == PageStatus::Ok).collect();
    // Under a lease nothing goes, so nothing new comes in.
    let mut full = None;
    for number in 100..140u64 {
        bench.prefix(&keep);
        let one = bench.set(&[number]);
        if one.result.is_err() {
            full = Some(one);
            break;
        }
    }
    let full = full.expect("a store under leases is full at some point");
    let error = full.result.unwrap_err();
    assert_eq!((error.kind, error.retryable), (ErrorKind::NoSpace, true), "{error}");
    assert_eq!(full.statuses[0], [PageStatus::Refused]);
    assert_eq!(bench.store.health().unwrap().state, HealthState::Ok);
    wait_for("room", || bench.set(&[200]).all_ok());
    assert!(bench.has_all(&[200]));
}

#[test]
fn a_page_that_was_there_all_the_time_failed_because_its_lease_ran_out() {
    let master = Master::start(&["--default_kv_lease_ttl=1"]);
    let mut official = Official::start(&master, Mode::Peer, 128 << 20);
    let bench = Bench::new(&master.config(Mode::Peer, 0), pool(2, 32 << 20));
    assert_eq!(bench.host.metric("mooncake_expired_pages"), Some(0.0), "what has not happened is shown too");
    assert!(bench.set(&[1]).all_ok(), "{}", bench.logs());
    let got = bench.get(&[1]);
    // 32 MiB do not come within a millisecond.
    assert!(got.all_ok() && bench.pool.holds(0, 1), "{got:?}\n{}", bench.logs());
    assert_eq!(bench.host.metric("mooncake_expired_pages"), Some(0.0));
    official.kill();
}

#[test]
fn removal_and_clear_touch_the_own_namespace_alone() {
    let master = Master::start(&[]);
    let config = master.config(Mode::Peer, 64 << 20);
    let bench = Bench::of_model(&config, "one", pool(8, 4096));
    let other = Bench::of_model(&config, "two", pool(8, 4096));
    let mut official = Official::start(&master, Mode::Peer, 0);
    assert!(bench.set(&[1, 2, 3]).all_ok() && other.set(&[1, 2]).all_ok());
    assert_eq!(official.put("theirs", b"data"), 0);
    // Under a lease, too.
    assert_eq!(bench.prefix(&[1, 2, 3]), 3);
    let removed = bench.remove(&[2, 9]);
    assert_eq!((removed.result, &removed.statuses[0][..]), (Ok(()), &[PageStatus::Ok, PageStatus::Missing][..]));
    assert_eq!(bench.which(&[1, 2, 3]), [true, false, true]);
    bench.store.clear(&Options::default(), ClearScope::Namespace).unwrap();
    assert_eq!(bench.which(&[1, 2, 3]), [false; 3]);
    assert!(other.has_all(&[1, 2]), "another namespace stays");
    assert_eq!(official.get("theirs"), b"data");
    let everything = bench.store.clear(&Options::default(), ClearScope::Everything).unwrap_err();
    assert_eq!(everything.kind, ErrorKind::Unsupported);
    assert!(bench.set(&[2]).all_ok() && bench.has_all(&[2]));
}

#[test]
fn i1336_a_master_restart_in_the_middle_of_traffic_gives_no_wrong_byte_and_heals() {
    let mut master = Master::start(&[]);
    for mode in [Mode::Peer, Mode::Http] {
        let bench = Bench::of_model(&master.config(mode, 64 << 20), &format!("{mode:?}"), pool(64, 32 << 10));
        let (stop, rounds) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut next = 0u64;
                while !stop.load(Ordering::Acquire) {
                    let numbers: Vec<u64> = (next..next + 16).collect();
                    bench.set(&numbers);
                    // `which` fails on a wrong byte.
                    bench.which(&numbers);
                    next = (next + 7) % 400;
                    rounds.fetch_add(1, Ordering::AcqRel);
                }
            });
            wait_for("traffic", || rounds.load(Ordering::Acquire) > 20);
            master.kill();
            assert!(!master.is_listening());
            wait_for("an account of it", || bench.store.health().unwrap().state == HealthState::Degraded);
            master.start_again();
            wait_for("recovery", || bench.store.health().unwrap().state == HealthState::Ok);
            let seen = rounds.load(Ordering::Acquire);
            wait_for("traffic", || rounds.load(Ordering::Acquire) > seen + 20);
            stop.store(true, Ordering::Release);
        });
        wait_for("pages that stay", || bench.set(&[1, 2, 3]).all_ok() && bench.has_all(&[1, 2, 3]));
        assert_eq!(bench.host.metric("mooncake_degraded"), Some(0.0));
        wait_for("word of what is lost", || bench.host.metric("kvdock_contents_lost").is_some());
        // Peers still find the segment where the metadata server lost it too.
        let mut official = Official::start(&master, mode, 0);
        wait_for("an official object here", || official.put("after", b"restart") == 0);
        assert_eq!(official.get("after"), b"restart");
    }
}

#[test]
fn a_peer_killed_in_the_middle_of_reads_and_writes_fails_pages_and_nothing_else() {
    for mode in [Mode::Peer, Mode::Http] {
        peer_is_killed(mode);
    }
}

fn peer_is_killed(mode: Mode) {
    let master = Master::start(&[]);
    let mut official = Official::start(&master, mode, 512 << 20);
    let bench = Bench::new(&master.config(mode, 0), pool(64, 1 << 20));
    let numbers: Vec<u64> = (0..64).collect();
    assert!(bench.set(&numbers).all_ok(), "{}", bench.logs());
    let (stop, rounds) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                let began = Instant::now();
                bench.which(&numbers);
                bench.set(&[1000 + rounds.fetch_add(1, Ordering::AcqRel) as u64]);
                assert!(began.elapsed() < Duration::from_secs(30), "a dead peer holds nobody up for long");
            }
        });
        wait_for("traffic", || rounds.load(Ordering::Acquire) > 3);
        official.kill();
        let seen = rounds.load(Ordering::Acquire);
        wait_for("traffic", || rounds.load(Ordering::Acquire) > seen + 3);
        stop.store(true, Ordering::Release);
    });
    assert_eq!(bench.which(&numbers), [false; 64]);
    assert_eq!(bench.prefix(&numbers), 0, "what could not be read does not count as stored");
    // Another peer comes; pages are stored there although the master still believes in the dead one.
    let _other = Official::start(&master, mode, 512 << 20);
    wait_for("a new home", || {
        bench.which(&numbers).contains(&false) && bench.set(&numbers).all_ok() && bench.has_all(&numbers)
    });
}

/// Whoever had stored pages in the memory of a peer believed in them for ever when the peer was gone.
#[test]
fn the_host_was_not_told_of_pages_that_went_with_a_peer() {
    let master = Master::start(&["--client_ttl=4"]);
    let mut official = Official::start(&master, Mode::Http, 64 << 20);
    let bench = Bench::new(&master.config(Mode::Http, 0), pool(4, 4096));
    assert!(bench.set(&[1, 2, 3]).all_ok(), "{}", bench.logs());
    let losses = || bench.host.metric("kvdock_contents_lost").unwrap_or_default();
    let lenders = || bench.logs().matches("lends memory to the store").count();
    wait_for("a look at the peer", || lenders() == 1);
    let before = losses();
    official.kill();
    wait_for("word of what is lost", || losses() > before);
    assert_eq!(bench.prefix(&[1, 2, 3]), 0);
    // One that takes its leave does so too.
    let other = Bench::of_model(&master.config(Mode::Http, 64 << 20), "other", pool(4, 4096));
    assert!(bench.set(&[1, 2, 3]).all_ok() && bench.has_all(&[1, 2, 3]), "{}", bench.logs());
    wait_for("a look at the other peer", || lenders() == 2);
    let before = losses();
    other.store.close().unwrap();
    wait_for("word of what is lost", || losses() > before);
}

/// Where official peers are found by asking them, the master does not say that one has left: whoever had stored pages with it believed in them for ever.
#[test]
fn the_host_was_not_told_of_pages_that_went_with_an_official_peer_that_is_found_by_asking() {
    // The master goes on naming the memory of what is gone.
    let master = Master::start(&["--client_ttl=600"]);
    let mut official = Official::start(&master, Mode::Peer, 64 << 20);
    let bench = Bench::new(&master.config(Mode::Peer, 0), pool(4, 4096));
    assert!(bench.set(&[1, 2, 3]).all_ok(), "{}", bench.logs());
    let losses = || bench.host.metric("kvdock_contents_lost").unwrap_or_default();
    // One that does not answer may have them still.
    official.stand_still();
    wait_for("a look at the peer", || bench.logs().contains("does not say whether it has its memory still"));
    official.go_on();
    wait_for("the peer's pages", || bench.has_all(&[1, 2, 3]));
    assert_eq!(losses(), 0.0, "{}", bench.logs());
    official.kill();
    wait_for("word of what is lost", || losses() > 0.0);
    assert!(bench.logs().contains("has ended; the pages in its memory are gone"), "{}", bench.logs());
    // They are stored anew elsewhere, and not taken to be there because the master says so.
    let _other = Official::start(&master, Mode::Peer, 64 << 20);
    wait_for("pages that are stored", || bench.set(&[1, 2, 3]).all_ok());
    assert!(bench.has_all(&[1, 2, 3]), "{}", bench.logs());
    assert_eq!(losses(), 1.0, "it is told once");
}

/// What one member could not read it removed by force from the store, also where all others could.
#[test]
fn pages_of_a_peer_that_did_not_answer_were_removed_for_everybody() {
    let master = Master::start(&["--client_ttl=60"]);
    let official = Official::start(&master, Mode::Peer, 64 << 20);
    let bench = Bench::new(&master.config(Mode::Peer, 0), pool(4, 4096));
    assert!(bench.set(&[1, 2, 3]).all_ok(), "{}", bench.logs());
    let names = master.keys();
    assert_eq!(names.len(), 3);
    official.stand_still();
    let options = Options { deadline: Some(Duration::from_secs(2)), ..Options::default() };
    let got = bench.store.get(&options, &[bench.part(&[1, 2, 3])]);
    assert!(!got.all_ok(), "{got:?}");
    // It is there as far as the master knows, and nothing proves that it is gone.
    assert!(bench.set(&[1, 2, 3]).all_ok(), "{}", bench.logs());
    assert_eq!(master.keys(), names);
    official.go_on();
    wait_for("the peer's pages", || bench.has_all(&[1, 2, 3]));
}

#[test]
fn i2039_a_peer_that_stands_still_costs_one_deadline_and_not_one_each_call() {
    let master = Master::start(&["--client_ttl=60"]);
    let official = Official::start(&master, Mode::Peer, 256 << 20);
    let bench = Bench::new(&master.config(Mode::Peer, 0), pool(8, 1 << 20));
    let numbers: Vec<u64> = (0..8).collect();
    assert!(bench.set(&numbers).all_ok(), "{}", bench.logs());
    official.stand_still();
    let options = Options { deadline: Some(Duration::from_secs(3)), ..Options::default() };
    let got = bench.store.get(&options, &[bench.part(&numbers)]);
    assert_eq!(got.result.unwrap_err().kind, ErrorKind::TimedOut);
    assert_eq!(bench.prefix(&numbers), 0, "its pages do not count as stored for a while");
    // The next call ends at once, because the peer is known to be in trouble, and not because its own time is over.
    let got = bench.store.get(&options, &[bench.part(&numbers)]);
    assert_eq!((got.result, got.statuses[0].clone()), (Ok(()), vec![PageStatus::Failed; 8]));
    official.go_on();
    wait_for("the peer's pages", || bench.has_all(&numbers));
}

#[test]
fn two_instances_share_pages_and_one_goes_on_when_the_other_is_gone() {
    let master = Master::start(&[]);
    for mode in [Mode::Peer, Mode::Http] {
        let model = format!("{mode:?}");
        let one = Bench::of_model(&master.config(mode, 64 << 20), &model, pool(16, 100_000));
        let two = Bench::of_model(&master.config(mode, 0), &model, pool(16, 100_000));
        let numbers: Vec<u64> = (0..16).collect();
        assert!(two.set(&numbers).all_ok(), "{}", two.logs());
        assert!(one.has_all(&numbers) && two.has_all(&numbers));
        let three = Bench::of_model(&master.config(mode, 64 << 20), &model, pool(16, 100_000));
        one.store.close().unwrap();
        assert_eq!(two.prefix(&numbers), 0, "a segment that is taken back takes its pages along");
        wait_for("pages elsewhere", || two.set(&numbers).all_ok());
        assert!(two.has_all(&numbers) && three.has_all(&numbers));
    }
}

#[test]
fn deadlines_and_cancel_flags_are_kept() {
    let master = Master::start(&[]);
    let mut official = Official::start(&master, Mode::Peer, 1 << 30);
    let bench = Bench::new(&master.config(Mode::Peer, 0), pool(8, 64 << 20));
    let numbers: Vec<u64> = (0..8).collect();
    let cancelled = AtomicU32::new(1);
    let options = Options { cancel: Some(&cancelled), ..Options::default() };
    assert_eq!(bench.store.set(&options, &[bench.part(&[1])]).result.unwrap_err().kind, ErrorKind::Cancelled);
    let short = Options { deadline: Some(Duration::from_millis(20)), ..Options::default() };
    let began = Instant::now();
    let late = bench.store.set(&short, &[bench.part(&numbers)]);
    assert_eq!(late.result.unwrap_err().kind, ErrorKind::TimedOut);
    assert!(began.elapsed() < Duration::from_secs(10));
    // What was not ended is not there, and is not in the way of others for ever.
    let none = Options { deadline: Some(Duration::ZERO), ..Options::default() };
    assert_eq!(bench.store.get(&none, &[bench.part(&[1])]).result.unwrap_err().kind, ErrorKind::TimedOut);
    assert!(bench.set(&[100]).all_ok() && bench.has_all(&[100]), "{}", bench.logs());
    official.kill();
}

#[test]
fn under_pressure_old_pages_are_evicted_and_none_has_other_bytes() {
    let master = Master::start(&["--default_kv_lease_ttl=200", "--eviction_high_watermark_ratio=0.8"]);
    let bytes = 512 << 10;
    let bench = Bench::new(&master.config(Mode::Peer, 16 << 20), pool(16, bytes));
    let mut official = Official::start(&master, Mode::Peer, 16 << 20);
    // Eight times what both segments hold, written by both sides.
    let mut stored = 0;
    for round in 0..32u64 {
        let numbers: Vec<u64> = (round * 16..round * 16 + 16).collect();
        let set = bench.set(&numbers);
        stored += set.statuses[0].iter().filter(|status| **status == PageStatus::Ok).count();
        let refused = |status: &PageStatus| matches!(status, PageStatus::Ok | PageStatus::Refused);
        assert!(set.statuses[0].iter().all(refused), "{set:?}\n{}", bench.logs());
        let name = format!("theirs {round}");
        let mine: Vec<u8> = (0..bytes).map(|at| (at * 7 + round) as u8).collect();
        if official.put(&name, &mine) == 0 {
            let found = official.get(&name);
            assert!(found.is_empty() || found == mine, "{name} has other bytes");
        }
    }
    assert!(stored >= 256, "eviction makes room for half of the pages at least: {stored}");
    // `which` fails on wrong bytes.
    let there: usize = (0..32u64)
        .flat_map(|round| bench.which(&(round * 16..round * 16 + 16).collect::<Vec<_>>()))
        .filter(|there| *there)
        .count();
    assert!((1..=64).contains(&there), "64 pages of 512 fit into 32 MiB: {there}");
}
