//! Two processes move bytes through the stand-in for libibverbs, and meet what can go wrong.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::{LEN, Side, pattern, transport, within};
use kvdock_rdma::{Config, Operation, Outcome, Stop};
use kvdock_verbs_stand_in::{faults, harness};

fn with_stand_in(name: &str, variables: &[(&str, &str)], body: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    harness::with_stand_in(name, folder.path(), variables, body);
}

/// The other process; not a test of its own.
#[test]
#[ignore = "started by the other tests"]
fn peer_process() {
    common::serve();
}

#[test]
fn bytes_are_written_and_read() {
    with_stand_in("bytes_are_written_and_read", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        for (at, len) in [(0, 1), (4093, 70_000), (1 << 20, 3 << 20), (LEN - 5, 5), (7, 64)] {
            let data = pattern(at as u64, len);
            assert_eq!(side.write(at, &data), Outcome::Moved, "{at} {len}");
            assert_eq!(side.peer.get(at, len), data, "{at} {len}");
            let more = pattern(at as u64 + 99, len);
            side.peer.put(at, &more);
            assert_eq!(side.read(at, len), (Outcome::Moved, more), "{at} {len}");
        }
    });
}

#[test]
fn many_requests_are_under_way_and_pieces_are_gathered_and_scattered() {
    with_stand_in("many_requests_are_under_way_and_pieces_are_gathered_and_scattered", &[], |folder| {
        // Small requests, queues and completion queue: all of them fill up.
        let config = Config { slice: 4096, depth: 8, completions: 12, ..Config::default() };
        let mut side = Side::new(folder, config);
        let data = pattern(5, 4 << 20);
        let lens = [1, 31, 4096, 5, 6, 7, 8, 9, 10_000, 65_537];
        let mut jobs = Vec::new();
        let mut at = 0;
        side.memory.as_mut_slice()[..data.len()].copy_from_slice(&data);
        let base = side.memory.as_mut_ptr();
        while at + 80_000 < data.len() {
            let mut pieces = Vec::new();
            let first = at;
            for len in lens {
                pieces.push(libc::iovec { iov_base: base.wrapping_add(at).cast(), iov_len: len });
                at += len;
            }
            jobs.push((first, at - first, pieces));
        }
        assert!(jobs.len() > 50);
        for operation in [Operation::Write, Operation::Read] {
            if operation == Operation::Read {
                side.memory.as_mut_slice().fill(0);
            }
            let outcomes = side.transfer(operation, &jobs, Duration::from_secs(60));
            assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Moved), "{outcomes:?}");
        }
        assert_eq!(side.memory.as_mut_slice()[..at], data[..at]);
        assert_eq!(side.peer.get(0, at), data[..at]);
    });
}

#[test]
fn ranges_that_the_peer_does_not_have_are_rejected() {
    with_stand_in("ranges_that_the_peer_does_not_have_are_rejected", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        let rejected = |outcome: Outcome| assert!(matches!(outcome, Outcome::Rejected(_)), "{outcome:?}");
        rejected(side.read(LEN - 4, 8).0);
        rejected(side.read(usize::MAX / 2, 8).0);
        // It tells of more than it has: its device refuses, and the connection has to be made anew.
        side.tell_of_more();
        rejected(side.read(LEN, 4096).0);
        side.peer.put(0, &pattern(1, 100));
        assert_eq!(side.read(0, 100), (Outcome::Moved, pattern(1, 100)));
    });
}

#[test]
fn memory_that_is_not_registered_moves_only_inline() {
    with_stand_in("memory_that_is_not_registered_moves_only_inline", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        let mut marker = [b'1'; 100];
        let job = |len: usize, base: *mut u8| (10, len, vec![libc::iovec { iov_base: base.cast(), iov_len: len }]);
        let base = marker.as_mut_ptr();
        let outcome = side.transfer(Operation::Write, &[job(64, base)], Duration::from_secs(30));
        assert_eq!(outcome, [Outcome::Moved]);
        assert_eq!(side.peer.get(10, 64), [b'1'; 64]);
        for (operation, len) in [(Operation::Write, 65), (Operation::Read, 1)] {
            let outcome = side.transfer(operation, &[job(len, base)], Duration::from_secs(30));
            assert!(matches!(&outcome[..], [Outcome::Unable(why)] if why.contains("not registered")), "{outcome:?}");
        }
    });
}

#[test]
fn a_request_that_fails_is_made_again_over_a_new_connection() {
    with_stand_in("a_request_that_fails_is_made_again_over_a_new_connection", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        let data = pattern(3, 1 << 20);
        assert_eq!(side.write(0, &data), Outcome::Moved);
        let before = side.asked();
        // Retries exceeded, remote operation error, fatal error.
        for status in [12, 11, 19] {
            std::fs::write(faults::file(folder, std::process::id()), format!("complete {status}")).unwrap();
            let data = pattern(status, 1 << 20);
            assert_eq!(side.write(0, &data), Outcome::Moved, "{status}");
            assert_eq!(side.peer.get(0, data.len()), data);
        }
        assert!(side.asked() > before, "no connection was made anew");
    });
}

#[test]
fn a_peer_that_is_killed_fails_soon_and_its_next_incarnation_is_reached() {
    with_stand_in("a_peer_that_is_killed_fails_soon_and_its_next_incarnation_is_reached", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        let data = pattern(3, 2 << 20);
        assert_eq!(side.write(0, &data), Outcome::Moved);
        side.peer.kill();
        let outcome = side.write(0, &data);
        assert!(matches!(&outcome, Outcome::Failed(_)), "{outcome:?}");
        side.peer_again(folder);
        // It is left alone for a moment after it failed.
        within(30, || side.write(0, &data) == Outcome::Moved);
        assert_eq!(side.peer.get(0, data.len()), data);
    });
}

#[test]
fn a_peer_that_stands_still_costs_the_time_of_the_call_and_no_more() {
    with_stand_in("a_peer_that_stands_still_costs_the_time_of_the_call_and_no_more", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        let data = pattern(3, 1 << 20);
        assert_eq!(side.write(0, &data), Outcome::Moved);
        side.peer.stand_still();
        let jobs = side.whole(0, data.len());
        let outcome = side.transfer(Operation::Write, &jobs, Duration::from_millis(300));
        assert_eq!(outcome, [Outcome::Stopped { stop: Stop::TimedOut, in_doubt: true }]);
        side.peer.go_on();
        within(30, || side.write(0, &data) == Outcome::Moved);
    });
}

#[test]
fn a_call_that_stops_leaves_nothing_under_way_even_where_nothing_is_flushed() {
    with_stand_in("a_call_that_stops_leaves_nothing_under_way_even_where_nothing_is_flushed", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        let fault = faults::file(folder, std::process::id());
        for kind in ["silent", "unflushed"] {
            side.peer.put(0, &pattern(7, 1 << 20));
            assert_eq!(side.read(0, 1 << 20).0, Outcome::Moved);
            std::fs::write(&fault, kind).unwrap();
            let jobs = side.whole(0, 1 << 20);
            let outcome = side.transfer(Operation::Read, &jobs, Duration::from_millis(200));
            assert_eq!(outcome, [Outcome::Stopped { stop: Stop::TimedOut, in_doubt: false }], "{kind}");
            side.memory.as_mut_slice().fill(0xee);
            std::fs::remove_file(&fault).unwrap();
            std::thread::sleep(Duration::from_millis(200));
            assert!(side.memory.as_mut_slice().iter().all(|byte| *byte == 0xee), "{kind}: bytes came after the end");
        }
        within(30, || side.read(0, 100) == (Outcome::Moved, pattern(7, 1 << 20)[..100].to_vec()));
    });
}

/// How many times longer than usual.
fn soak() -> u64 {
    std::env::var("KVDOCK_SOAK").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// One thread's share of a soak: writes and reads with short and long times in its own part of the memory, against a model.
fn mingle(side: &Side, part: usize, until: Instant) -> usize {
    const PART: usize = 1 << 20;
    let mut random = fastrand::Rng::with_seed(part as u64);
    let base = side.memory.as_mut_ptr().wrapping_add(part * PART);
    // SAFETY: this thread alone uses its part, and looks when nothing is under way.
    let here = unsafe { std::slice::from_raw_parts_mut(base, PART) };
    let mut model = vec![None; PART];
    let mut moved = 0;
    while Instant::now() < until {
        let (at, len) = (random.usize(..PART - 1), random.usize(1..400_000));
        let len = len.min(PART - at);
        let time =
            if random.u8(..3) == 0 { Duration::from_micros(random.u64(1..20_000)) } else { Duration::from_secs(30) };
        let job = || (part * PART + at, len, vec![libc::iovec { iov_base: base.cast(), iov_len: len }]);
        if random.bool() {
            random.fill(&mut here[..len]);
            let outcome = side.transfer(Operation::Write, &[job()], time).remove(0);
            let good = outcome == Outcome::Moved;
            for (place, byte) in model[at..].iter_mut().zip(&here[..len]) {
                *place = good.then_some(*byte);
            }
            moved += usize::from(good);
        } else {
            here[..len].fill(0);
            if side.transfer(Operation::Read, &[job()], time).remove(0) == Outcome::Moved {
                let right = |(known, byte): (&Option<u8>, &u8)| known.is_none_or(|known| known == *byte);
                assert!(model[at..at + len].iter().zip(&here[..len]).all(right), "part {part}: wrong bytes");
                moved += 1;
            }
        }
        // What was given up must not be touched any more.
        here.fill(0x5a);
        std::thread::sleep(Duration::from_micros(random.u64(..3000)));
        assert!(here.iter().all(|byte| *byte == 0x5a), "part {part}: bytes came after the end");
    }
    moved
}

#[test]
fn soak_calls_that_stop_and_connections_that_fail_bring_no_wrong_byte() {
    with_stand_in("soak_calls_that_stop_and_connections_that_fail_bring_no_wrong_byte", &[], |folder| {
        let side = Side::new(folder, Config { depth: 16, completions: 24, ..Config::default() });
        let until = Instant::now() + Duration::from_secs(4 * soak());
        let fault = faults::file(folder, std::process::id());
        std::thread::scope(|scope| {
            let side = &side;
            let threads: Vec<_> = (0..4).map(|part| scope.spawn(move || mingle(side, part, until))).collect();
            let kinds = ["complete 12", "silent", "complete 5", "unflushed", "queue", "complete 11", "connect"];
            for kind in kinds.iter().cycle().take_while(|_| Instant::now() < until) {
                std::thread::sleep(Duration::from_millis(150));
                std::fs::write(&fault, kind).unwrap();
                std::thread::sleep(Duration::from_millis(50));
                // One that happens once may be gone already.
                let _ = std::fs::remove_file(&fault);
            }
            for thread in threads {
                assert!(thread.join().unwrap() > 5, "hardly anything went through");
            }
        });
    });
}

#[test]
fn i3299_a_connection_that_fails_again_and_again_is_left_alone() {
    with_stand_in("i3299_a_connection_that_fails_again_and_again_is_left_alone", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        // Each connection is made well, and breaks with the first request.
        let fault = faults::file(folder, std::process::id());
        std::fs::write(&fault, "always 12").unwrap();
        let (mut calls, began) = (0, Instant::now());
        while began.elapsed() < Duration::from_secs(1) {
            let outcome = side.write(0, &[1; 100]);
            assert!(matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
            calls += 1;
        }
        // Two questions for each of the connections, of which the first is made anew at once: 1, 2 after 250 ms, 3 after 500 ms more, ...
        let rounds = 2 + (began.elapsed().as_millis() / 250) as usize;
        assert!(side.asked() <= 2 * rounds, "{} questions in {calls} calls", side.asked());
        std::fs::remove_file(&fault).unwrap();
        within(30, || side.write(0, &[1; 100]) == Outcome::Moved);
    });
}

#[test]
fn both_sides_may_ask_for_a_connection_at_once() {
    with_stand_in("both_sides_may_ask_for_a_connection_at_once", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        for turn in 0..10u64 {
            // Whatever was there before is gone on both sides.
            side.forget();
            side.peer.say("forget");
            let data = pattern(turn, 4096);
            side.peer.say_later("read_from_us");
            let outcome = side.write(0, &data);
            let theirs = side.peer.answer();
            assert_eq!((outcome, theirs.as_str()), (Outcome::Moved, "Moved"), "turn {turn}");
        }
    });
}

#[test]
fn a_connection_goes_both_ways() {
    with_stand_in("a_connection_goes_both_ways", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        assert_eq!(side.write(0, &pattern(1, 4096)), Outcome::Moved);
        let (asked, answered) = (side.asked(), side.answered());
        side.peer.say_later("read_from_us");
        assert_eq!(side.peer.answer(), "Moved");
        assert_eq!((side.asked(), side.answered()), (asked, answered), "the peer made a connection of its own");
    });
}

#[test]
fn registration_that_is_refused_is_an_error_with_the_reason() {
    with_stand_in("registration_that_is_refused_is_an_error_with_the_reason", &[], |folder| {
        let transport = transport(Config::default(), "a:1");
        std::fs::write(faults::file(folder, std::process::id()), "registration").unwrap();
        let mut memory = vec![0u8; 8192];
        // SAFETY: the memory outlives the attempt.
        let error = unsafe { transport.register(memory.as_mut_ptr(), 8192, 1 << 44, false) }.unwrap_err().to_string();
        assert!(error.contains("8192 bytes") && error.contains("stand0") && error.contains("ulimit -l"), "{error}");
        assert_eq!(transport.registered(), 0);
    });
}

#[test]
fn memory_is_registered_once_an_allocation() {
    with_stand_in("memory_is_registered_once_an_allocation", &[], |_| {
        let transport = transport(Config::default(), "a:1");
        let mut memory = vec![0u8; 1 << 20];
        let base = memory.as_mut_ptr();
        // SAFETY: the memory outlives the registrations.
        let register =
            |at: usize, len| unsafe { transport.register(base.wrapping_add(at), len, base as u64 + at as u64, false) };
        let whole = register(0, 1 << 20).unwrap();
        let (part, twin) = (register(4096, 8192).unwrap(), register(0, 1 << 20).unwrap());
        assert_eq!(transport.registered(), 1);
        assert_eq!(part.pieces()[0].lkeys, whole.pieces()[0].lkeys);
        drop((whole, twin));
        assert_eq!(transport.registered(), 1, "a part is still used");
        drop(part);
        assert_eq!(transport.registered(), 0);
    });
}

#[test]
fn memory_beyond_the_largest_region_is_registered_in_parts() {
    let variables = [("KVDOCK_STAND_IN_MAX_MR", "1048576")];
    with_stand_in("memory_beyond_the_largest_region_is_registered_in_parts", &variables, |folder| {
        let mut side = Side::new(folder, Config::default());
        assert_eq!(side.remote.buffers.len(), LEN >> 20);
        // Over three parts there and here.
        let data = pattern(8, (2 << 20) + 4096);
        assert_eq!(side.write((1 << 20) - 2048, &data), Outcome::Moved);
        assert_eq!(side.peer.get((1 << 20) - 2048, data.len()), data);
    });
}

#[test]
fn devices_are_chosen_by_name_and_all_are_used() {
    let variables = [("KVDOCK_STAND_IN_DEVICES", "stand0,stand1,stand2")];
    with_stand_in("devices_are_chosen_by_name_and_all_are_used", &variables, |folder| {
        let named = Config { devices: vec!["stand2".to_owned()], ..Config::default() };
        let one = transport(named, "a:1").devices();
        assert_eq!(one.iter().map(|device| device.name.as_str()).collect::<Vec<_>>(), ["stand2"]);
        assert_eq!(one[0].gid, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 3], "routable, RoCE version 2");
        let missing = Config { devices: vec!["stand0".to_owned(), "mlx5_9".to_owned()], ..Config::default() };
        let error = kvdock_rdma::Transport::open(missing, "a:1").unwrap_err().to_string();
        assert!(error.contains("mlx5_9") && error.contains("stand0, stand1, stand2"), "{error}");
        let wrong = Config { gid_index: Some(9), ..Config::default() };
        let error = kvdock_rdma::Transport::open(wrong, "a:1").unwrap_err().to_string();
        assert!(error.contains("no GID at place 9"), "{error}");
        let side = Side::new(folder, Config::default());
        let jobs: Vec<_> = (0..12).flat_map(|at| side.whole(at << 16, 1 << 16)).collect();
        let outcomes = side.transfer(Operation::Write, &jobs, Duration::from_secs(30));
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Moved), "{outcomes:?}");
        assert_eq!(side.asked_devices(), ["stand0", "stand1", "stand2"]);
    });
}

#[test]
fn a_port_that_goes_down_is_not_used_until_it_is_up() {
    with_stand_in("a_port_that_goes_down_is_not_used_until_it_is_up", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        assert_eq!(side.write(0, &[1; 100]), Outcome::Moved);
        let fault = faults::file(folder, std::process::id());
        std::fs::write(&fault, "event 10").unwrap();
        within(30, || matches!(side.write(0, &[1; 100]), Outcome::Unable(_)));
        std::fs::write(&fault, "event 9").unwrap();
        within(30, || side.write(0, &[1; 100]) == Outcome::Moved);
    });
}

#[test]
fn queue_pairs_that_can_not_be_made_or_connected_are_told_of() {
    with_stand_in("queue_pairs_that_can_not_be_made_or_connected_are_told_of", &[], |folder| {
        let mut side = Side::new(folder, Config::default());
        let fault = faults::file(folder, std::process::id());
        for (kind, says) in [("queue", "no queue pair"), ("connect", "GID")] {
            std::fs::write(&fault, kind).unwrap();
            within(30, || matches!(side.write(0, &[1; 100]), Outcome::Failed(why) if why.contains(says)));
        }
        std::fs::remove_file(&fault).unwrap();
        within(30, || side.write(0, &[1; 100]) == Outcome::Moved);
        // The other side says why it can't.
        side.forget();
        std::fs::write(faults::file(folder, side.peer.process()), "connect").unwrap();
        within(30, || matches!(side.write(0, &[1; 100]), Outcome::Failed(why) if why.contains("refuses")));
    });
}

#[test]
fn questions_that_make_no_sense_are_refused() {
    with_stand_in("questions_that_make_no_sense_are_refused", &[], |_| {
        use kvdock_rdma::Description;
        let transport = transport(Config::default(), "a:1");
        let good = Description {
            local_nic_path: "b:2@stand0".to_owned(),
            peer_nic_path: "a:1@stand0".to_owned(),
            local_gid: "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:01".to_owned(),
            qp_num: vec![300, 301],
            ready_ack: Some(false),
            ..Description::default()
        };
        let answer = transport.answer(&good);
        assert_eq!((answer.reply_msg.as_str(), answer.qp_num.len()), ("", 2));
        assert_eq!(answer.local_nic_path, good.peer_nic_path);
        assert_eq!(transport.answer(&good).qp_num, answer.qp_num, "asked again");
        let ready = Description { ready_ack: Some(true), ..good.clone() };
        assert_eq!(
            (transport.answer(&ready).reply_msg, transport.answer(&ready).ready_ack),
            (String::new(), Some(true))
        );
        let other = Description { qp_num: vec![302, 303], ..good.clone() };
        assert_ne!(transport.answer(&other).qp_num, answer.qp_num, "another incarnation");
        let change = |change: &dyn Fn(&mut Description)| {
            let mut bad = Description { qp_num: vec![400, 401], ..good.clone() };
            change(&mut bad);
            let answer = transport.answer(&bad);
            assert!(!answer.reply_msg.is_empty() && answer.qp_num.is_empty(), "{bad:?}");
        };
        change(&|bad| bad.peer_nic_path = "c:1@stand0".to_owned());
        change(&|bad| bad.peer_nic_path = "a:1@stand7".to_owned());
        change(&|bad| bad.peer_nic_path = "a:1".to_owned());
        change(&|bad| bad.local_nic_path = String::new());
        change(&|bad| bad.qp_num = vec![400]);
        change(&|bad| bad.qp_num = Vec::new());
        change(&|bad| bad.qp_num = vec![1 << 24, 5]);
        change(&|bad| bad.local_gid = "fe80::1".to_owned());
        change(&|bad| bad.local_gid = "20:01:00:00:00:00:00:00:00:00:00:00:00:00:00:09".to_owned());
        change(&|bad| bad.ready_ack = Some(true));
    });
}

#[test]
fn without_a_device_the_error_says_so() {
    // Where the real library is, it finds none on machines of tests; where it is not, the error says what is missing.
    let error = match kvdock_rdma::Transport::open(Config::default(), "a:1") {
        // A machine with RDMA.
        Ok(_) => return,
        Err(error) => error.to_string(),
    };
    assert!(error.contains("no RDMA device") || error.contains("libibverbs.so.1 can't be loaded"), "{error}");
}
