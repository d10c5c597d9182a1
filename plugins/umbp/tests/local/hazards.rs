//! What other implementations get wrong: the numbers are those of the hazards in the reference.
//!
//! | hazard | test |
//! | --- | --- |
//! | H1 puts fail after a clear | `h01_puts_work_after_a_clear`; `h01_a_clear_reaches_every_node_and_puts_after_it_work` (distributed) |
//! | H2 segments are asked for and not served | `h02_segments_that_are_on_are_served_and_a_folder_that_can_not_be_used_is_an_error` |
//! | H3 roles are ignored | `h03_a_follower_says_of_nothing_that_it_is_stored_which_is_not` |
//! | H4 what is on disk is lost by a start | `h04_what_was_stored_is_served_after_a_restart`; `h04_a_node_that_is_started_again_has_what_its_segments_hold` (distributed) |
//! | H5 segments are never reclaimed | `h05_files_stay_within_the_capacity` |
//! | H6 puts fail silently where a staging area is full | `h06_batches_and_values_larger_than_memory_are_stored`, `a_disk_that_can_not_be_written_is_no_silent_success` |
//! | H7 a value larger than a segment | `h07_a_value_larger_than_a_segment_has_one_to_itself` |
//! | H8 a torn record hides later ones | `h08_a_torn_record_hides_nothing_that_comes_later` |
//! | H9 memory of the process in padding | `h09_padding_is_zero` |
//! | H10 a key twice in a batch | `h10_a_key_that_comes_twice_is_stored_both_times` |
//! | H11 reports without a master fail | `h11_reports_without_a_master_are_no_error` (standalone) |
//! | H12 evicted pages are lost without a master | `h12_what_leaves_memory_is_on_disk_without_a_master`; `h12_pages_that_the_master_evicts_go_to_segments` (distributed) |
//! | H13 writers overlap | `h13_writers_at_the_same_time_do_not_overlap` |
//! | H14 a follower lists the directory at each miss | `h14_misses_of_a_follower_do_not_list_the_directory_each_time` |
//! | H15 calls without a deadline | `h15_a_server_that_stands_still_keeps_no_question_waiting_for_ever` (standalone), `a_master_that_stands_still_keeps_no_question_waiting_for_ever` (distributed) |

use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use kvdock_plugin_api::mock::{Options, identity};
use kvdock_plugin_api::{ClearScope, HealthState, PageStatus};
use kvdock_plugin_umbp::segment::record::{self, HEADER, Header};
use rustix::fs::inotify;
use serde_json::json;

use super::super::common::*;

#[test]
fn h01_puts_work_after_a_clear() {
    let dir = tempfile::tempdir().unwrap();
    for ssd in [true, false] {
        let bench = Bench::new(&settings(dir.path(), json!({"ssd_enabled": ssd})), pool(32, 4096));
        bench.store(&numbers(0..20));
        bench.store.clear(&Options::default(), ClearScope::Namespace).unwrap();
        assert_eq!(bench.count(&numbers(0..20)), 0);
        bench.store(&numbers(10..40));
        assert_eq!(bench.count(&numbers(0..40)), 30);
        if ssd {
            bench.store.flush(&Options::default()).unwrap();
            bench.store.clear(&Options::default(), ClearScope::Everything).unwrap();
            assert_eq!(disk_bytes(dir.path()), 0);
            bench.store(&numbers(0..10));
            assert_eq!(bench.count(&numbers(0..10)), 10);
        }
    }
}

#[test]
fn h02_segments_that_are_on_are_served_and_a_folder_that_can_not_be_used_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    // More than memory takes. Nothing says that there are segments: that is the default.
    let all = numbers(0..300);
    let bench = Bench::new(&settings(dir.path(), json!({})), pool(50, 8192));
    bench.store(&all);
    assert!(disk_bytes(dir.path()) >= 8192 * 300 - (1 << 20), "{} bytes of files", disk_bytes(dir.path()));
    assert_eq!(bench.count(&all), all.len());
    bench.store.close().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "no folder").unwrap();
    let pages = pool(50, 8192);
    for more in [json!({}), json!({"ssd_enabled": true})] {
        let (_host, store) = try_attach(&settings(&file, more), &identity("model"), &[&pages]);
        let error = store.expect_err("there can be no segments");
        assert!(error.message.contains("ssd_storage_dir") || error.message.contains("file"), "{error}");
    }
    let (_host, store) = try_attach(&settings(&file, json!({"ssd_enabled": false})), &identity("model"), &[&pages]);
    store.expect("memory alone needs no folder");
}

#[test]
fn h03_a_follower_says_of_nothing_that_it_is_stored_which_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let leader = Bench::new(&settings(dir.path(), json!({"role": "leader", "ssd_copy_async": false})), pool(16, 8192));
    let follower = Bench::new(&settings(dir.path(), json!({"role": "follower"})), pool(16, 8192));
    assert_eq!(follower.host.metric("umbp_refused_pages"), Some(0.0));
    assert_eq!(follower.set(&[1]).statuses[0], [PageStatus::Refused]);
    assert_eq!(follower.host.metric("umbp_refused_pages"), Some(1.0));
    assert_eq!(follower.status(1), PageStatus::Missing);
    leader.store(&[1, 2, 3]);
    // It looks at the directory again, though not at every miss.
    wait_for("the follower finds what the leader has stored", || follower.prefix(&[1, 2, 3]) == 3);
    assert_eq!(follower.count(&[1, 2, 3]), 3);
    assert_eq!(follower.set(&[1]).statuses[0], [PageStatus::Ok]);
    assert!(!follower.store.capabilities().unwrap().remove);
    assert!(follower.remove(&[1]).result.is_err());
    assert_eq!(leader.count(&[1, 2, 3]), 3);
}

#[test]
fn h04_what_was_stored_is_served_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let config = settings(dir.path(), json!({}));
    let all = numbers(0..600);
    let bench = Bench::new(&config, pool(64, 8192));
    bench.store(&all);
    bench.store.close().unwrap();
    let bench = Bench::new(&config, pool(64, 8192));
    assert_eq!(bench.prefix(&all), 600);
    assert_eq!(bench.count(&all), 600);
    let removed = bench.remove(&[0, 5]);
    removed.result.unwrap();
    bench.store.close().unwrap();
    let bench = Bench::new(&config, pool(64, 8192));
    assert_eq!(bench.count(&all), 598);
    assert_eq!(bench.status(5), PageStatus::Missing);
}

#[test]
fn h05_files_stay_within_the_capacity() {
    let dir = tempfile::tempdir().unwrap();
    let more = json!({"ssd_capacity_bytes": 8 << 20, "role": "leader", "ssd_copy_async": false});
    let config = settings(dir.path(), more);
    let bench = Bench::new(&config, pool(32, 16384));
    for round in 0..40 {
        let part = numbers(round * 64..round * 64 + 64);
        part.chunks(32).for_each(|part| drop(bench.set(part)));
        // Every other page goes, so that segments are neither full nor empty.
        let gone: Vec<u64> = part.iter().copied().filter(|number| number % 2 == 0).collect();
        bench.remove(&gone).result.unwrap();
        assert!(disk_bytes(dir.path()) <= 8 << 20, "round {round}: {} bytes", disk_bytes(dir.path()));
    }
    assert!(bench.count(&numbers(2496..2560)) >= 32);
    bench.store.close().unwrap();
    let bench = Bench::new(&config, pool(32, 16384));
    assert_eq!(bench.count(&numbers(0..2560).into_iter().filter(|number| number % 2 == 0).collect::<Vec<_>>()), 0);
}

#[test]
fn h06_batches_and_values_larger_than_memory_are_stored() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(&settings(dir.path(), json!({})), pool(100, 65536));
    bench.store(&numbers(0..100));
    assert_eq!(bench.count(&numbers(0..100)), 100);
    let large = Bench::of(&settings(dir.path(), json!({})), &identity("large"), pool(2, 2 << 20));
    large.store(&[1, 2]);
    assert_eq!(large.count(&[1, 2]), 2);
}

#[test]
fn h07_a_value_larger_than_a_segment_has_one_to_itself() {
    let dir = tempfile::tempdir().unwrap();
    let config = settings(dir.path(), json!({"ssd_segment_size_bytes": 65536}));
    let bench = Bench::new(&config, pool(2, 300_000));
    bench.store(&[1, 2]);
    bench.store.close().unwrap();
    assert!(segments(dir.path()).iter().all(|path| path.metadata().unwrap().len() >= 300_000));
    assert_eq!(Bench::new(&config, pool(2, 300_000)).count(&[1, 2]), 2);
}

#[test]
fn h08_a_torn_record_hides_nothing_that_comes_later() {
    let dir = tempfile::tempdir().unwrap();
    let config = settings(dir.path(), json!({}));
    let bench = Bench::new(&config, pool(16, 8192));
    bench.store(&numbers(0..16));
    bench.store.close().unwrap();
    let last = segments(dir.path()).pop().unwrap();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&last).unwrap();
    let len = file.metadata().unwrap().len();
    // A header whose value never came.
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0).unwrap();
    header[12..16].copy_from_slice(&(1u32 << 30).to_le_bytes());
    header[24..].copy_from_slice(&1_000u64.to_le_bytes());
    file.write_all_at(&header, len).unwrap();
    let bench = Bench::new(&config, pool(16, 8192));
    assert!(bench.logs().contains("the file is cut there"), "{}", bench.logs());
    assert_eq!(last.metadata().unwrap().len(), len);
    bench.store(&numbers(16..32));
    bench.store.close().unwrap();
    assert_eq!(Bench::new(&config, pool(16, 8192)).count(&numbers(0..32)), 32);
    // Damage in the middle costs the record that has it.
    file.write_all_at(&[0xff], 1).unwrap();
    let bench = Bench::new(&config, pool(16, 8192));
    assert_eq!(bench.count(&numbers(0..32)), 31);
    assert!(bench.logs().contains("is damaged"), "{}", bench.logs());
}

#[test]
fn h09_padding_is_zero() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(&settings(dir.path(), json!({})), pool(16, 5000));
    bench.store(&numbers(0..16));
    bench.store.close().unwrap();
    let mut records = 0;
    for path in segments(dir.path()) {
        let bytes = std::fs::read(path).unwrap();
        let mut rest = bytes.as_slice();
        while let Some(head) = rest.first_chunk() {
            let header = Header::decode(head).unwrap();
            let (one, more) = rest.split_at(header.record_len() as usize);
            let key_end = HEADER + header.key_len as usize;
            let value_at = header.value_at() as usize;
            assert!(one[key_end..value_at].iter().all(|byte| *byte == 0));
            assert!(one[value_at + header.value_len as usize..].iter().all(|byte| *byte == 0));
            assert!(record::open(one, &one[HEADER..key_end]).is_ok());
            records += 1;
            rest = more;
        }
    }
    assert_eq!(records, 16);
}

#[test]
fn h10_a_key_that_comes_twice_is_stored_both_times() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(&settings(dir.path(), json!({})), pool(4, 8192));
    bench.pool.fill(0, 7);
    bench.pool.fill(1, 7);
    let outcome = bench.store.set(&Options::default(), &[bench.part(&[7, 7])]);
    assert_eq!(outcome.statuses[0], [PageStatus::Ok; 2]);
}

#[test]
fn h12_what_leaves_memory_is_on_disk_without_a_master() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(&settings(dir.path(), json!({"dram_capacity_bytes": 8 << 16})), pool(40, 65536));
    bench.store(&numbers(0..200));
    assert_eq!(bench.count(&numbers(0..200)), 200);
    assert!(disk_bytes(dir.path()) > 100 * 65536);
}

#[test]
fn h13_writers_at_the_same_time_do_not_overlap() {
    let dir = tempfile::tempdir().unwrap();
    let more = json!({"role": "leader", "ssd_copy_async": false});
    let config = settings(dir.path(), more);
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let config = &config;
            scope.spawn(move || {
                let bench = Bench::new(config, pool(8, 9000));
                for part in numbers(writer * 100..writer * 100 + 100).chunks(8) {
                    bench.store(part);
                }
                bench.store.close().unwrap();
            });
        }
    });
    assert_eq!(Bench::new(&config, pool(50, 9000)).count(&numbers(0..400)), 400);
}

#[test]
fn h14_misses_of_a_follower_do_not_list_the_directory_each_time() {
    let dir = tempfile::tempdir().unwrap();
    let leader = Bench::new(&settings(dir.path(), json!({"role": "leader", "ssd_copy_async": false})), pool(16, 8192));
    leader.store(&numbers(0..16));
    leader.store.close().unwrap();
    let follower = Bench::new(&settings(dir.path(), json!({"role": "follower"})), pool(16, 8192));
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).unwrap();
    // What is closed is watched too, for the kernel tells of two equal events in a row once.
    inotify::add_watch(&watch, dir.path(), inotify::WatchFlags::OPEN | inotify::WatchFlags::CLOSE).unwrap();
    let began = Instant::now();
    (1000..6000).for_each(|number| assert_eq!(follower.status(number), PageStatus::Missing));
    let most = began.elapsed().as_millis() / 100 + 1;
    let mut room = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(&watch, &mut room);
    let mut looks = 0;
    while let Ok(event) = events.next() {
        let of_the_directory = event.file_name().is_none() && event.events().contains(inotify::ReadFlags::OPEN);
        looks += u128::from(of_the_directory);
    }
    assert!((1..=most).contains(&looks), "{looks} looks for 5000 misses in {:?}", began.elapsed());
    // What is there is found all the same.
    assert_eq!(follower.count(&numbers(0..16)), 16);
}

#[test]
fn a_disk_that_can_not_be_written_is_no_silent_success() {
    let dir = tempfile::tempdir().unwrap();
    let more = json!({"role": "leader", "ssd_copy_async": false});
    let bench = Bench::new(&settings(dir.path(), more), pool(8, 8192));
    // The first segment can't be made while something has its name.
    let obstacle = dir.path().join("segment_0.log");
    std::fs::create_dir(&obstacle).unwrap();
    let outcome = bench.set(&[1, 2]);
    assert_eq!(outcome.statuses[0], [PageStatus::Failed; 2]);
    // Nor is it one when it is tried again, although memory has the pages.
    assert_eq!(bench.set(&[1, 2]).statuses[0], [PageStatus::Failed; 2]);
    let health = bench.store.health().unwrap();
    assert_eq!(health.state, HealthState::Degraded);
    assert!(health.reason.contains("segment"), "{}", health.reason);
    std::fs::remove_dir(&obstacle).unwrap();
    bench.store(&[1, 2, 3]);
    assert_eq!(bench.store.health().unwrap().state, HealthState::Ok);
}
