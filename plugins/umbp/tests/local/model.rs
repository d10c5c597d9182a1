//! Random operations beside a model.

use std::collections::BTreeSet;

use kvdock_plugin_api::mock::Options;
use kvdock_plugin_api::{ClearScope, PageStatus};
use serde_json::json;

use super::super::common::*;

/// Pages that there are.
const PAGES: u64 = 200;

fn operations() -> u64 {
    let factor = u64::from(kvdock_tests::soak::factor());
    if factor > 1 { 1_000_000 } else { 6_000 }
}

fn run(more: serde_json::Value, keeps_all: bool, seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let config = settings(dir.path(), more);
    let pages = || pool(16, 6000);
    let mut bench = Bench::new(&config, pages());
    let mut model: BTreeSet<u64> = BTreeSet::new();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut done = 0;
    while done < operations() {
        let batch: Vec<u64> = {
            let wanted: BTreeSet<u64> = (0..random.usize(1..16)).map(|_| random.u64(0..PAGES)).collect();
            wanted.into_iter().collect()
        };
        done += batch.len() as u64;
        match random.u32(0..1000) {
            0..400 => {
                let outcome = bench.set(&batch);
                for (number, status) in batch.iter().zip(&outcome.statuses[0]) {
                    match status {
                        PageStatus::Ok => {
                            model.insert(*number);
                        }
                        PageStatus::Refused if !keeps_all => {}
                        other => panic!("a set gives {other} for {number}\n{}", bench.logs()),
                    }
                }
            }
            400..800 => {
                for (number, there) in batch.iter().zip(bench.which(&batch)) {
                    let known = model.contains(number);
                    assert!(known || !there, "page {number} was never stored, or was removed");
                    assert!(there || !known || !keeps_all, "page {number} is lost\n{}", bench.logs());
                    if known && !there {
                        model.remove(number);
                    }
                }
            }
            800..900 => {
                bench.remove(&batch).result.unwrap();
                model.retain(|number| !batch.contains(number));
            }
            900..970 => {
                let run = batch.iter().take_while(|number| model.contains(number)).count();
                let found = bench.prefix(&batch);
                assert!(found <= run && (found == run || !keeps_all), "{found} pages are found, {run} are there");
            }
            970..990 => bench.store.flush(&Options::default()).unwrap(),
            990..998 => {
                bench.store.close().unwrap();
                bench = Bench::new(&config, pages());
            }
            _ => {
                bench.store.clear(&Options::default(), ClearScope::Namespace).unwrap();
                model.clear();
            }
        }
    }
    let capacity = if keeps_all { 64 << 20 } else { 1 << 20 };
    assert!(disk_bytes(dir.path()) <= capacity, "{} bytes of files", disk_bytes(dir.path()));
}

#[test]
fn soak_two_tiers_keep_what_a_model_keeps() {
    run(json!({"dram_capacity_bytes": 20 * 8192}), true, 1);
    run(json!({"role": "leader"}), true, 2);
}

#[test]
fn soak_tiers_that_are_too_small_lose_pages_and_never_bytes() {
    run(json!({"dram_capacity_bytes": 20 * 8192, "ssd_capacity_bytes": 1 << 20}), false, 3);
    run(
        json!({"dram_capacity_bytes": 20 * 8192, "ssd_capacity_bytes": 1 << 20, "role": "leader", "ssd_copy_async": false}),
        false,
        4,
    );
}
