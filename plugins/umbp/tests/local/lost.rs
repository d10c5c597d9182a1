//! Segments that somebody else removes, replaces or cuts while the process runs.

use std::path::Path;

use kvdock_plugin_api::mock::Options;
use kvdock_plugin_api::{ClearScope, HealthState, PageStatus};
use serde_json::json;

use super::super::common::*;

/// Every page is written to the disk at once, and memory holds none that was only read.
fn config(dir: &Path) -> String {
    settings(dir, json!({"role": "leader", "ssd_copy_async": false, "auto_promote_on_read": false}))
}

/// A store whose pages 0 to 15 lie on the disk alone.
fn on_disk(dir: &Path) -> Bench {
    let bench = Bench::new(&config(dir), pool(16, 8192));
    bench.store(&numbers(0..16));
    bench.store.close().unwrap();
    Bench::new(&config(dir), pool(16, 8192))
}

fn used(bench: &Bench) -> u64 {
    bench.store.stats().unwrap().bytes_used
}

/// Files of a folder that this process holds though they have no name any more.
fn held_without_a_name(dir: &Path) -> usize {
    let (dir, open) = (dir.canonicalize().unwrap(), std::fs::read_dir("/proc/self/fd").unwrap());
    let links = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    links.filter(|link| link.starts_with(&dir) && link.to_string_lossy().ends_with(" (deleted)")).count()
}

#[test]
fn pages_of_removed_segments_are_missed_and_their_room_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let bench = on_disk(dir.path());
    assert_eq!(used(&bench), 16 * 12288);
    segments(dir.path()).iter().for_each(|path| std::fs::remove_file(path).unwrap());
    // Until it is noticed they may still be read; what is read is right in any case.
    for status in bench.get(&numbers(0..16)).statuses[0].iter() {
        assert!(matches!(status, PageStatus::Ok | PageStatus::Missing), "{status}");
    }
    bench.which(&numbers(0..16));
    wait_for("it is noticed", || used(&bench) == 0);
    assert_eq!(bench.count(&numbers(0..16)), 0);
    assert_eq!(bench.prefix(&numbers(0..16)), 0);
    wait_for("the kernel has the room again", || held_without_a_name(dir.path()) == 0);
    assert!(bench.logs().contains("removed or replaced by somebody else: 16 objects are gone"), "{}", bench.logs());
    assert!(bench.host.metric("kvdock_contents_lost").is_some(), "the host would believe in them for ever");
    // New pages, also the same ones, are kept as ever.
    bench.store(&numbers(8..24));
    assert_eq!(bench.store.health().unwrap().state, HealthState::Ok);
    bench.store.close().unwrap();
    assert_eq!(Bench::new(&config(dir.path()), pool(16, 8192)).count(&numbers(0..24)), 16);
}

#[test]
fn nothing_is_written_to_a_segment_that_is_not_there_any_more() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(&config(dir.path()), pool(16, 8192));
    for round in 0..8 {
        bench.store(&numbers(round * 8..round * 8 + 8));
        // It is the one that is written to.
        let last = segments(dir.path()).pop().unwrap();
        match round % 4 {
            0 => std::fs::remove_file(last).unwrap(),
            1 => std::fs::rename(&last, dir.path().join(format!("kept-{round}"))).unwrap(),
            2 => {
                // Something else has its name.
                std::fs::remove_file(&last).unwrap();
                std::fs::write(&last, b"of somebody else").unwrap();
            }
            _ => std::fs::File::options().write(true).open(last).unwrap().set_len(0).unwrap(),
        }
    }
    bench.store(&numbers(64..72));
    // Memory still has all of them, and writes again what the disk has lost and it knows of.
    assert_eq!(bench.count(&numbers(0..72)), 72);
    bench.store.close().unwrap();
    let bench = Bench::new(&config(dir.path()), pool(16, 8192));
    let there = bench.which(&numbers(0..72));
    for (number, there) in (0..).zip(&there) {
        // Files that were cut took the pages of their round with them.
        assert!(*there || matches!(number / 8, 3 | 7), "page {number} is lost");
    }
    assert!(there[64..].iter().all(|there| *there));
}

#[test]
fn a_file_that_took_the_place_of_a_segment_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let bench = on_disk(dir.path());
    let path = segments(dir.path()).remove(0);
    std::fs::rename(&path, dir.path().join("kept")).unwrap();
    std::fs::write(&path, b"of somebody else").unwrap();
    wait_for("it is noticed", || used(&bench) == 0);
    bench.store.clear(&Options::default(), ClearScope::Everything).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"of somebody else");
}

#[test]
fn a_folder_that_is_removed_is_made_again_and_locked() {
    let above = tempfile::tempdir().unwrap();
    let dir = above.path().join("segments");
    let bench = on_disk(&dir);
    std::fs::remove_dir_all(&dir).unwrap();
    wait_for("it is noticed", || used(&bench) == 0);
    bench.store(&numbers(20..28));
    assert!(dir.join(".kvdock-umbp-lock").exists());
    bench.store.close().unwrap();
    assert_eq!(Bench::new(&config(&dir), pool(16, 8192)).count(&numbers(0..28)), 8);
}

#[test]
fn a_folder_that_another_process_has_taken_meanwhile_is_not_written() {
    let above = tempfile::tempdir().unwrap();
    let dir = above.path().join("segments");
    let bench = on_disk(&dir);
    std::fs::remove_dir_all(&dir).unwrap();
    std::fs::create_dir(&dir).unwrap();
    let other = std::fs::File::create(dir.join(".kvdock-umbp-lock")).unwrap();
    rustix::fs::flock(&other, rustix::fs::FlockOperation::LockExclusive).unwrap();
    wait_for("it is noticed", || used(&bench) == 0);
    assert_eq!(bench.set(&[20]).statuses[0], [PageStatus::Failed]);
    assert!(segments(&dir).is_empty());
    let health = bench.store.health().unwrap();
    assert!(health.state == HealthState::Degraded && health.reason.contains("another process"), "{}", health.reason);
    drop(other);
    bench.store(&[20]);
    assert_eq!(bench.store.health().unwrap().state, HealthState::Ok);
}

#[test]
fn a_follower_lets_go_of_what_its_leader_has_removed() {
    let dir = tempfile::tempdir().unwrap();
    let leader = Bench::new(&config(dir.path()), pool(16, 8192));
    leader.store(&numbers(0..16));
    let more = json!({"role": "follower", "auto_promote_on_read": false});
    let follower = Bench::new(&settings(dir.path(), more), pool(16, 8192));
    assert_eq!(follower.count(&numbers(0..16)), 16);
    leader.store.clear(&Options::default(), ClearScope::Everything).unwrap();
    assert_eq!(disk_bytes(dir.path()), 0);
    // It looks when it misses something.
    wait_for("the follower has noticed", || follower.status(99) == PageStatus::Missing && follower.prefix(&[0]) == 0);
    assert_eq!(held_without_a_name(dir.path()), 0);
    leader.store(&[3, 4]);
    wait_for("the follower finds new ones", || follower.prefix(&[3, 4]) == 2);
    assert_eq!(follower.count(&numbers(0..16)), 2);
}
