//! Processes that are killed while they write.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use kvdock_plugin_api::PageStatus;
use serde_json::json;

use super::super::common::*;

const DIR: &str = "KVDOCK_UMBP_KILLED_DIR";
const FROM: &str = "KVDOCK_UMBP_KILLED_FROM";

/// Every other writer waits for the disk; a kill must not make a difference to either.
fn config(dir: &std::path::Path, from: u64) -> String {
    let durability = if from.is_multiple_of(16) { "strict" } else { "relaxed" };
    let more = json!({"role": "leader", "ssd_copy_async": false, "ssd_capacity_bytes": 512 << 20, "ssd_durability_mode": durability});
    settings(dir, more)
}

/// The process that is killed; by itself it does nothing.
#[test]
fn killed_writer() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let from: u64 = std::env::var(FROM).unwrap().parse().unwrap();
    let bench = Bench::new(&config(dir.as_ref(), from), pool(8, 20_000));
    for round in 0..100_000 {
        let part = numbers(from + round * 8..from + round * 8 + 8);
        bench.store(&part);
        println!("stored {}", from + round * 8 + 8);
        // All kills together stay far below the capacity.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn soak_what_was_stored_is_found_after_a_kill_and_no_byte_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let kills = if kvdock_tests::soak::factor() > 1 { 50 } else { 5 };
    let mut random = fastrand::Rng::with_seed(6);
    let mut stored = 0;
    for kill in 0..kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "local::kills::killed_writer", "--nocapture"])
            .env(DIR, dir.path())
            .env(FROM, stored.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first =
            lines.by_ref().map_while(Result::ok).find_map(|line| line.strip_prefix("stored ").map(str::to_owned));
        let began: u64 = first.expect("the writer writes").parse().unwrap();
        std::thread::sleep(Duration::from_millis(random.u64(0..60)));
        child.kill().unwrap();
        child.wait().unwrap();
        let later = lines.map_while(Result::ok).filter_map(|line| line.strip_prefix("stored ")?.parse::<u64>().ok());
        let acknowledged = later.fold(began, u64::max);
        let bench = Bench::new(&config(dir.path(), stored), pool(8, 20_000));
        // `which` compares the bytes of all that are there.
        assert_eq!(bench.count(&numbers(0..acknowledged)), acknowledged as usize, "kill {kill}\n{}", bench.logs());
        let rest: Vec<PageStatus> = (acknowledged..acknowledged + 16).map(|number| bench.status(number)).collect();
        assert!(rest.iter().all(|status| matches!(status, PageStatus::Ok | PageStatus::Missing | PageStatus::Corrupt)));
        bench.which(&numbers(acknowledged..acknowledged + 16));
        bench.store.close().unwrap();
        stored = acknowledged;
    }
    assert!(stored > 0);
}
