//! Quota, free space, age, and what can't be deleted.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::time::Duration;

use common::*;
use kvdock_plugin_api::mock::{MockHost, Options, Part, identity, key};
use kvdock_plugin_api::{ErrorKind, HealthState, PageStatus};

/// `max_bytes` for so many large pages.
fn room_for(pages: u64) -> String {
    format!(r#""max_bytes":{}"#, pages * (LARGE + BLOCK))
}

fn count(there: &[bool]) -> usize {
    there.iter().filter(|there| **there).count()
}

/// A second has to pass until uses can be told apart.
fn tick() {
    std::thread::sleep(Duration::from_millis(1100));
}

#[test]
fn i26670_quota_holds_and_the_page_used_longest_ago_goes_first() {
    let bench = Bench::new(large_pool(20), &room_for(10));
    assert!(bench.set(&[1, 2, 3, 4]).all_ok());
    tick();
    assert!(bench.set(&[5, 6, 7, 8]).all_ok());
    assert!(bench.has_all(&[1, 2]), "a use makes a page young again");
    tick();
    assert!(bench.set(&[9, 10, 11, 12]).all_ok());
    let there = bench.which(&(1..=12).collect::<Vec<_>>());
    assert_eq!(there, [true, true, false, false, true, true, true, true, true, true, true, true]);
    for round in 0..10 {
        assert!(bench.set(&(0..10).map(|n| 100 + round * 10 + n).collect::<Vec<_>>()).all_ok());
        let used: u64 = bench.page_files().iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert!(used <= 10 * (LARGE + BLOCK), "{used}");
        assert!(bench.store.stats().unwrap().bytes_used <= bench.store.stats().unwrap().bytes_total);
    }
    assert!(bench.host.metric("file_evicted_pages").unwrap() > 80.0);
    assert_eq!(bench.store.health().unwrap().state, HealthState::Ok);
}

#[test]
fn order_of_use_outlives_a_restart() {
    let bench = Bench::new(large_pool(20), "");
    assert!(bench.set(&[1, 2, 3, 4]).all_ok());
    tick();
    assert!(bench.has_all(&[1, 2]));
    let bench = bench.reopen(&room_for(4));
    wait_for("the first look", || bench.host.logs().iter().any(|line| line.message.contains("pages found")));
    tick();
    assert!(bench.set(&[5, 6]).all_ok());
    assert_eq!(bench.which(&[1, 2, 3, 4, 5, 6]), [true, true, false, false, true, true]);
}

#[test]
fn a_quota_smaller_than_what_is_there_is_reached_at_the_start() {
    for small in [false, true] {
        let bench = Bench::new(if small { small_pool(64) } else { large_pool(64) }, "");
        let numbers: Vec<u64> = (0..64).collect();
        assert!(bench.set(&numbers).all_ok());
        let max = 20 * (bench.pool.page_bytes() as u64 + BLOCK);
        let bench = bench.reopen(&format!(r#""max_bytes":{max}"#));
        // Before it has looked at all files, the store knows of a part of what it keeps.
        wait_for("the first look", || bench.host.logs().iter().any(|line| line.message.contains("pages found")));
        wait_for("the quota", || bench.store.stats().unwrap().bytes_used <= max);
        let left = count(&bench.which(&numbers));
        assert!((10..=26).contains(&left), "{left} pages are left");
        assert!(bench.set(&[100, 101]).all_ok() && bench.has_all(&[100, 101]));
    }
}

#[test]
fn packs_give_their_room_back() {
    let bench = Bench::new(small_pool(64), r#""max_bytes":"4MiB""#);
    for round in 0..40u64 {
        let numbers: Vec<u64> = (0..64).map(|n| round * 64 + n).collect();
        assert!(bench.set(&numbers).all_ok(), "round {round}");
        assert!(bench.has_all(&numbers[32..]));
    }
    let disk: u64 = files(&bench.dir)
        .iter()
        .map(|path| std::os::unix::fs::MetadataExt::blocks(&fs::metadata(path).unwrap()) * 512)
        .sum();
    assert!(disk < 6 << 20, "{disk} bytes on the disk");
    assert!(bench.remove(&(0..40 * 64).collect::<Vec<_>>()[..64]).result.is_ok());
    let bench = bench.reopen("");
    assert!(bench.store.stats().unwrap().bytes_used < 6 << 20);
}

#[test]
fn a_mostly_dead_pack_is_tidied_and_its_living_pages_stay() {
    let bench = Bench::new(small_pool(64), "");
    let numbers: Vec<u64> = (0..64).collect();
    assert!(bench.set(&numbers).all_ok());
    let packs = |bench: &Bench| -> Vec<_> {
        files(&bench.dir).into_iter().filter(|path| path.extension().is_some_and(|e| e == "pack")).collect()
    };
    let before = packs(&bench);
    let bench = bench.reopen("");
    assert!(bench.has_all(&numbers));
    assert!(bench.remove(&numbers[..60]).all_ok());
    wait_for("the pack is tidied", || packs(&bench).iter().all(|path| !before.contains(path)));
    assert_eq!(count(&bench.which(&numbers)), 4);
    let bench = bench.reopen("");
    assert_eq!(bench.which(&numbers[58..]), [false, false, true, true, true, true]);
    let bytes: u64 = packs(&bench).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    assert!(bytes < 16 * bench.pool.page_bytes() as u64, "{bytes}");
}

#[test]
fn i31485_one_undeletable_file_does_not_stop_eviction() {
    let bench = Bench::new(large_pool(20), &room_for(8));
    assert!(bench.set(&[1, 2, 3, 4]).all_ok());
    // A folder with something in it can't be unlinked, whoever asks.
    let stuck = bench.file_of(1);
    fs::remove_file(&stuck).unwrap();
    fs::create_dir(&stuck).unwrap();
    fs::write(stuck.join("x"), "x").unwrap();
    tick();
    for round in 0..5 {
        assert!(bench.set(&(0..6).map(|n| 10 + round * 6 + n).collect::<Vec<_>>()).all_ok(), "round {round}");
    }
    assert!(stuck.exists());
    assert!(bench.has_all(&(34..40).collect::<Vec<_>>()));
    let lines = bench.host.logs().iter().filter(|line| line.message.contains("can't be deleted")).count();
    assert!(lines <= 1, "{lines} lines");
}

#[test]
fn other_models_make_room_too() {
    let bench = Bench::new(large_pool(20), &room_for(10));
    let other = attach(&bench.host, &bench.dir, "", &identity("old"), &[&bench.pool]).unwrap();
    (0..8).for_each(|page| bench.pool.fill(page, u64::from(page)));
    let part = [Part::new(&bench.pool, &keys(&(0..8).collect::<Vec<_>>()), &(0..8).collect::<Vec<_>>())];
    assert!(other.set(&Options::default(), &part).all_ok());
    other.close().unwrap();
    tick();
    let bench = bench.reopen(&room_for(10));
    wait_for("the first look", || bench.host.logs().iter().any(|line| line.message.contains("pages found")));
    assert!(bench.set(&[100, 101, 102, 103, 104]).all_ok());
    assert!(bench.has_all(&[100, 101, 102, 103, 104]));
    assert!(bench.page_files().len() <= 10, "{}", bench.page_files().len());
}

#[test]
fn a_page_larger_than_the_quota_is_refused() {
    let (scratch, pool) = (tempfile::tempdir().unwrap(), large_pool(4));
    let attached = attach(&MockHost::new(), scratch.path(), r#""max_bytes":"100KiB""#, &identity("model"), &[&pool]);
    let error = attached.map(drop).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidConfig);
    assert!(error.message.starts_with("max_bytes = 102400: a page of pool kv has "), "{error}");
    // Of a batch larger than the quota as much is stored as fits.
    let bench = Bench::new(large_pool(4), &room_for(3));
    let set = bench.set(&[1, 2, 3, 4]);
    assert_eq!(set.statuses[0], [PageStatus::Ok, PageStatus::Ok, PageStatus::Ok, PageStatus::Refused]);
}

#[test]
fn unused_pages_expire() {
    for pool in [large_pool(8), small_pool(8)] {
        let bench = Bench::new(pool, r#""ttl":3"#);
        assert!(bench.set(&[1, 2, 3]).all_ok());
        for _ in 0..5 {
            tick();
            assert!(bench.has_all(&[1]), "use keeps a page");
        }
        assert_eq!(bench.prefix(&[2]), 0);
        assert_eq!(bench.which(&[1, 2, 3]), [true, false, false]);
        wait_for("expired pages go", || bench.store.stats().unwrap().pages == 1);
        assert!(bench.set(&[2]).all_ok() && bench.has_all(&[1, 2]));
    }
}

#[test]
fn free_space_is_kept() {
    let scratch = tempfile::tempdir().unwrap();
    let host = MockHost::new();
    let pool = large_pool(2);
    let config = format!(r#"{{"dir":{:?},"min_free_bytes":"1000TiB"}}"#, scratch.path().join("s").to_str().unwrap());
    let store = attach(&host, scratch.path(), &config, &identity("m"), &[&pool]).unwrap();
    let set = store.set(&Options::default(), &[Part::new(&pool, &[key(1)], &[0])]);
    assert_eq!(set.statuses[0], [PageStatus::Refused]);
    let error = set.result.unwrap_err();
    assert!(error.kind == ErrorKind::NoSpace && error.retryable && error.message.contains("min_free_bytes"), "{error}");
    let health = store.health().unwrap();
    assert!(health.state == HealthState::Degraded && health.reason.contains("min_free_bytes"), "{health:?}");
}
