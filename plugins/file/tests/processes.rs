//! Several processes on one directory, and processes that are killed.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use kvdock_plugin_api::ClearScope;
use kvdock_plugin_api::mock::Options;

const ROLE: &str = "KVDOCK_TEST_ROLE";
const DIR: &str = "KVDOCK_TEST_DIR";

/// Starts this test binary again in a role.
fn child(role: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "in_a_role", "--nocapture", "--test-threads", "1"])
        .env(ROLE, role)
        .env(DIR, dir)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// What a child does; without a role this is no test.
#[test]
fn in_a_role() {
    let (Ok(role), Ok(dir)) = (std::env::var(ROLE), std::env::var(DIR)) else { return };
    let dir = PathBuf::from(dir);
    let (role, number) = role.split_once(':').unwrap();
    let number: u64 = number.parse().unwrap();
    let pool = if number.is_multiple_of(2) { large_pool(16) } else { small_pool(16) };
    match role {
        // Stores its own pages and those that all store, reads what the others store.
        "worker" => {
            let bench = Bench::at(&dir, pool, "");
            for round in 0..12 {
                let own: Vec<u64> = (0..8).map(|n| 1000 * (number + 1) + round * 8 + n).collect();
                let common: Vec<u64> = (0..8).map(|n| round * 8 + n).collect();
                assert!(bench.set(&own).all_ok() && bench.set(&common).all_ok());
                assert!(bench.has_all(&own) && bench.has_all(&common));
            }
            bench.store.close().unwrap();
        }
        // Stores and removes until it is killed.
        "victim" => {
            let bench = Bench::at(&dir, pool, "");
            for round in 0.. {
                let numbers: Vec<u64> = (0..16).map(|n| number * 1_000_000 + round * 16 + n).collect();
                assert!(bench.set(&numbers).result.is_ok());
                if round % 5 == 4 {
                    bench.remove(&numbers[..4]);
                }
            }
        }
        _ => panic!("no role {role}"),
    }
}

#[test]
fn processes_share_a_directory() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("store");
    let children: Vec<Child> = (0..4).map(|number| child(&format!("worker:{number}"), &dir)).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    for number in 0..4u64 {
        let bench = Bench::at(&dir, if number.is_multiple_of(2) { large_pool(16) } else { small_pool(16) }, "");
        for round in 0..12 {
            let own: Vec<u64> = (0..8).map(|n| 1000 * (number + 1) + round * 8 + n).collect();
            let common: Vec<u64> = (0..8).map(|n| round * 8 + n).collect();
            assert!(bench.has_all(&own) && bench.has_all(&common));
        }
    }
    assert_eq!(leftovers(&dir), Vec::<PathBuf>::new());
}

#[test]
fn what_a_peer_adds_is_seen_at_once_and_what_it_removes_soon() {
    for pool in [large_pool(8), small_pool(8)] {
        let one = Bench::new(pool, "");
        let two = one.peer("");
        for number in 0..20 {
            assert!(one.set(&[number]).all_ok());
            assert_eq!(two.prefix(&[number]), 1, "page {number}");
            assert!(two.has_all(&[number]));
        }
        assert!(two.set(&[100, 101]).all_ok() && one.has_all(&[100, 101]));
        assert!(one.remove(&[3, 4]).all_ok());
        assert_eq!(two.which(&[2, 3, 4, 5]), [true, false, false, true], "a read is never of a removed page");
        assert!(one.remove(&[7]).all_ok());
        wait_for("the belief to follow", || two.prefix(&[7]) == 0);
        assert!(two.set(&[3]).all_ok() && one.has_all(&[3]));
        // A page that the other one believes in but is gone is stored again.
        assert!(one.remove(&[9]).all_ok() && two.set(&[9]).all_ok());
        assert!(one.has_all(&[9]) && two.has_all(&[9]));
        one.store.clear(&Options::default(), ClearScope::Namespace).unwrap();
        assert!(two.which(&[0, 1, 2, 100]).iter().all(|there| !there));
        assert!(two.set(&[0, 1]).all_ok() && one.has_all(&[0, 1]) && two.has_all(&[0, 1]));
    }
}

#[test]
fn i29969_a_reader_never_sees_half_a_page() {
    for pool in [large_pool(8), small_pool(8)] {
        let writer = Bench::new(pool, r#""durability":"none""#);
        let reader = writer.peer("");
        let last = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for batch in 0..60u64 {
                    last.store(batch, Ordering::Release);
                    assert!(writer.set(&(0..8).map(|n| batch * 8 + n).collect::<Vec<_>>()).all_ok());
                }
                last.store(u64::MAX, Ordering::Release);
            });
            let mut seen = 0;
            loop {
                let batch = last.load(Ordering::Acquire);
                let numbers: Vec<u64> = (0..8).map(|n| batch.min(59) * 8 + n).collect();
                // Each page is there whole, or not at all.
                seen += reader.which(&numbers).into_iter().filter(|there| *there).count();
                if batch == u64::MAX {
                    break;
                }
            }
            assert!(seen >= 8);
        });
        assert_eq!(reader.host.metric("file_corrupt_pages"), None);
    }
}

#[test]
fn two_copies_of_a_small_page_become_one_and_go_together() {
    let one = Bench::new(small_pool(8), "");
    let two = one.peer("");
    // Stored by both before either can see the other's: as in two processes at the same moment.
    for number in 0..40 {
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(one.set(&[number]).all_ok()));
            scope.spawn(|| assert!(two.set(&[number]).all_ok()));
        });
    }
    let numbers: Vec<u64> = (0..8).collect();
    assert!(one.has_all(&numbers) && two.has_all(&numbers));
    std::thread::sleep(Duration::from_secs(7));
    assert!(one.has_all(&numbers) && two.has_all(&numbers), "one copy stays");
    assert!(one.remove(&numbers).all_ok());
    assert!(two.which(&numbers).iter().all(|there| !there));
    two.store.close().unwrap();
    let one = one.reopen("");
    assert!(one.which(&numbers).iter().all(|there| !there), "no copy comes back");
    assert_eq!(one.which(&[8, 9, 10]), [true; 3]);
}

#[test]
fn temporary_files_of_the_living_stay_and_those_of_the_dead_go() {
    let bench = Bench::new(large_pool(4), "");
    assert!(bench.set(&[1]).all_ok());
    // Its own first look takes whoever is dead by then, and what they left by then.
    wait_for("the first look", || bench.host.logs().iter().any(|line| line.message.contains("pages found")));
    let folder = bench.file_of(1).parent().unwrap().to_owned();
    let owners = bench.dir.join("owners");
    let living = std::fs::read_dir(&owners).unwrap().flatten().next().unwrap().file_name().into_string().unwrap();
    std::fs::write(owners.join("00000000deadbeef"), "").unwrap();
    let of = |owner: &str| folder.join(format!(".{owner}-77.tmp"));
    for owner in [living.as_str(), "00000000deadbeef", "00000000feedfeed"] {
        std::fs::write(of(owner), "half a page").unwrap();
    }
    let old = folder.join(".00000000feedfeed-78.tmp");
    let file = std::fs::File::create(&old).unwrap();
    file.set_modified(std::time::SystemTime::now() - Duration::from_secs(7200)).unwrap();
    let peer = bench.peer("");
    wait_for("the dead one's file goes", || !of("00000000deadbeef").exists() && !old.exists());
    wait_for("its lock file goes", || !owners.join("00000000deadbeef").exists());
    assert!(of(&living).exists(), "a living process's file stays");
    assert!(of("00000000feedfeed").exists(), "so does a young one of a host whose locks are not seen here");
    peer.store.close().unwrap();
    bench.store.close().unwrap();
    assert_eq!(std::fs::read_dir(owners).unwrap().count(), 0, "lock files go with their owners");
}

#[test]
fn killed_writers_leave_nothing_bad() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("store");
    let mut random = 0x9e37_79b9u64;
    for round in 0..3 * soak() {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let began = Instant::now();
        let numbers = [2 * round, 2 * round + 1];
        let mut children = numbers.map(|number| child(&format!("victim:{number}"), &dir));
        wait_for("pages of both", || {
            let there = files(&dir);
            there.iter().any(|path| is_page(path))
                && there.iter().any(|path| path.extension().is_some_and(|e| e == "pack"))
        });
        std::thread::sleep(Duration::from_millis(100 + (random >> 40) % 700));
        children.iter_mut().for_each(|child| child.kill().unwrap());
        assert!(children.iter_mut().all(|child| !child.wait().unwrap().success()));
        let mut stored = 0;
        for number in numbers {
            let bench = Bench::at(&dir, if number.is_multiple_of(2) { large_pool(16) } else { small_pool(16) }, "");
            wait_for("the first look", || bench.host.logs().iter().any(|line| line.message.contains("pages found")));
            assert_eq!(leftovers(&dir), Vec::<PathBuf>::new(), "no leftover after the first look");
            for batch in 0.. {
                let numbers: Vec<u64> = (0..16).map(|n| number * 1_000_000 + batch * 16 + n).collect();
                let there = bench.which(&numbers).into_iter().filter(|there| *there).count();
                stored += there;
                if there == 0 {
                    break;
                }
            }
            assert_eq!(bench.host.metric("file_corrupt_pages"), None, "no page fails its check");
            bench.store.close().unwrap();
        }
        assert!(stored > 0);
        eprintln!("round {round}: {stored} pages, {:?}", began.elapsed());
    }
    assert_eq!(std::fs::read_dir(dir.join("owners")).unwrap().count(), 0);
}
