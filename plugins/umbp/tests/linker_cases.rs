//! The cases that engines test their linker to this store with, in memory and segment files of this process.
//!
//! | case | test, or why there is none |
//! | --- | --- |
//! | U01 | `u01_ranges_of_an_object_tile_it` |
//! | U02 | `u02_pages_that_pools_share_are_read_once_they_are_ready`: the host passes numbers of pages, so none are copied from a device, and there is nothing to warn of |
//! | U03 | `u03_layers_in_another_order_and_layers_without_objects_complete` |
//! | U04 | `u04_pools_of_a_batch_have_page_counts_of_their_own` |
//! | U05 | `u05_lookup_stops_at_a_partial_page_and_trailing_pools_may_be_sparse` |
//! | U06 | `u06_a_side_pool_is_loaded_and_offloaded_alone` |
//! | U07 | `u07_calls_are_cut_at_objects_by_what_they_really_have`, beside the code that cuts |
//! | U08 | `u08_ragged_groups_of_layers_give_the_same_bytes` |
//! | U09 | `u09_offloads_complete_in_order_and_coalesced_ones_share_a_verdict` |
//! | U10 | `u10_what_failed_names_pool_and_layers` |
//! | U11 | `u11_a_split_load_is_refused` |
//! | U12 | `u12_a_reset_ends_what_runs_and_forgets_what_completed` |
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::*;
use kvdock_plugin_api::mock::{MockHost, MockLinker, MockPool, Options, Part, PoolSpec, Query, identity, key};
use kvdock_plugin_api::v0_1::Component;
use kvdock_plugin_api::{Completed, ComponentKind, ErrorKind, PageStatus, ReadyKind};
use serde_json::json;

const NOW: (u32, u64) = (ReadyKind::Now as u32, 0);

fn component(layer: u32, segment: u32, offset: u64, len: u64) -> Component {
    let kind = ComponentKind::Kv.raw();
    Component { layer, kind, segment, reserved: 0, offset, run_len: len, run_stride: len, run_count: 1 }
}

/// A pool of 16 pages whose segment 0 has a part for each of these layers, in this order, 1,000 bytes each.
fn layered(id: u32, name: &str, layers: &[u32]) -> MockPool {
    let parts = layers.iter().enumerate().map(|(i, layer)| component(*layer, 0, i as u64 * 1000, 1000)).collect();
    MockPool::new(PoolSpec {
        components: parts,
        layers: 3,
        ..PoolSpec::bytes(id, name, 16, &[layers.len() as u64 * 1000])
    })
}

fn attach(
    more: serde_json::Value,
    pools: &[&MockPool],
) -> (tempfile::TempDir, MockHost, kvdock_plugin_api::mock::Instance) {
    let dir = tempfile::tempdir().unwrap();
    let (host, store) = try_attach(&settings(dir.path(), more), &identity("linked"), pools);
    (dir, host, store.unwrap())
}

fn part(pool: &MockPool, numbers: &[u64], from: u32) -> Part {
    let pages: Vec<u32> = (from..from + numbers.len() as u32).collect();
    Part::new(pool, &keys(numbers), &pages)
}

fn pop(linker: &MockLinker<'_>) -> Completed {
    let mut popped = None;
    wait_for("a completed offload", || {
        popped = linker.pop().unwrap();
        popped.is_some()
    });
    popped.unwrap()
}

/// Offloads pages, each filled with the pattern of its number.
fn offload(linker: &MockLinker<'_>, operation: u64, parts: &[(&MockPool, &[u64])]) {
    let parts: Vec<Part> = parts
        .iter()
        .map(|(pool, numbers)| {
            numbers.iter().enumerate().for_each(|(page, number)| pool.fill(page as u32, *number));
            part(pool, numbers, 0)
        })
        .collect();
    linker.offload(&Options::default(), operation, &parts, &[NOW]).unwrap();
    assert_eq!(pop(linker), Completed { operation, result: Ok(()) });
}

/// Loads parts; every layer is settled when it returns.
fn load(linker: &MockLinker<'_>, request: u64, parts: &[Part]) -> Vec<Vec<PageStatus>> {
    let pending = linker.load(&Options { request, ..Options::default() }, parts).unwrap();
    let words = linker.start(&Options::default(), request, 3).unwrap();
    linker.finish(&Options::default(), request).unwrap();
    assert!(words.iter().all(|word| word.load(Ordering::Acquire) == 1), "every layer is settled");
    pending.statuses()
}

fn all_ok(statuses: &[Vec<PageStatus>]) -> bool {
    statuses.iter().flatten().all(|status| *status == PageStatus::Ok)
}

#[test]
fn u01_ranges_of_an_object_tile_it() {
    // Bytes of no layer lie between and behind those of layers.
    let parts = vec![component(0, 0, 0, 1000), component(1, 0, 1500, 500), component(2, 1, 100, 800)];
    let spec = PoolSpec { components: parts, layers: 3, ..PoolSpec::bytes(0, "kv", 16, &[2500, 1000]) }.with_seal(32);
    let pool = MockPool::new(spec);
    for group in [1, 2, 8] {
        let (_dir, _host, store) = attach(json!({"layer_group": group}), &[&pool]);
        let linker = store.linker().unwrap();
        offload(&linker, 1, &[(&pool, &[5, 6, 7])]);
        (8..11).for_each(|page| pool.wipe(page));
        assert!(all_ok(&load(&linker, 1, &[part(&pool, &[5, 6, 7], 8)])));
        assert!((0..3).all(|i| pool.holds(8 + i, 5 + u64::from(i))), "groups of {group} layers");
    }
}

#[test]
fn u02_pages_that_pools_share_are_read_once_they_are_ready() {
    let (kv, swa) = (layered(0, "kv", &[0, 1, 2]), layered(1, "swa", &[1]));
    let (_dir, _host, store) = attach(json!({}), &[&kv, &swa]);
    let linker = store.linker().unwrap();
    // One list of pages for both pools; what is in them when they are handed over is not what is to be stored.
    let both = |from| [part(&kv, &[1, 2, 3], from), part(&swa, &[1, 2, 3], from)];
    (0..3).for_each(|page| [&kv, &swa].iter().for_each(|pool| pool.fill(page, 70)));
    let flag: &'static AtomicU32 = Box::leak(Box::new(AtomicU32::new(0)));
    let wait = (ReadyKind::HostFlag as u32, std::ptr::from_ref(flag) as u64);
    linker.offload(&Options::default(), 1, &both(0), &[wait]).unwrap();
    assert_eq!(linker.pop().unwrap(), None);
    (0..3).for_each(|page| [&kv, &swa].iter().for_each(|pool| pool.fill(page, 1 + u64::from(page))));
    flag.store(1, Ordering::Release);
    assert_eq!(pop(&linker), Completed { operation: 1, result: Ok(()) });
    (8..11).for_each(|page| [&kv, &swa].iter().for_each(|pool| pool.wipe(page)));
    assert!(all_ok(&load(&linker, 1, &both(8))));
    for page in 0..3 {
        let number = 1 + u64::from(page);
        assert!(kv.holds(8 + page, number) && swa.holds(8 + page, number), "page {number}");
    }
}

#[test]
fn u03_layers_in_another_order_and_layers_without_objects_complete() {
    let pool = layered(0, "kv", &[2, 0]);
    let (_dir, _host, store) = attach(json!({"layer_group": 1}), &[&pool]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&pool, &[1, 2])]);
    let wanted = pool.pattern(1);
    pool.write(8, &[0xee; 2000]);
    let only = |layer| Part { layers: Some((layer, 1)), ..part(&pool, &[1], 8) };
    assert!(all_ok(&load(&linker, 1, &[only(1)])));
    assert!(pool.read(8).iter().all(|byte| *byte == 0xee), "layer 1 has nothing");
    assert!(all_ok(&load(&linker, 2, &[only(2)])));
    assert!(pool.read(8)[..1000] == wanted[..1000] && pool.read(8)[1000..].iter().all(|byte| *byte == 0xee));
    assert!(all_ok(&load(&linker, 3, &[only(0)])));
    assert!(pool.holds(8, 1));
    // Of a page that is not there, a layer without objects is missing too.
    assert_eq!(load(&linker, 4, &[Part { layers: Some((1, 1)), ..part(&pool, &[99], 8) }]), [[PageStatus::Missing]]);
}

#[test]
fn u04_pools_of_a_batch_have_page_counts_of_their_own() {
    let (kv, swa) = (layered(0, "kv", &[0, 1, 2]), layered(1, "swa", &[1]));
    let (_dir, _host, store) = attach(json!({}), &[&kv, &swa]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&swa, &[4]), (&kv, &[1, 2, 3, 4])]);
    (8..12).for_each(|page| kv.wipe(page));
    swa.wipe(8);
    assert!(all_ok(&load(&linker, 1, &[part(&kv, &[1, 2, 3, 4], 8), part(&swa, &[4], 8)])));
    assert!((0..4).all(|i| kv.holds(8 + i, 1 + u64::from(i))) && swa.holds(8, 4));
}

#[test]
fn u05_lookup_stops_at_a_partial_page_and_trailing_pools_may_be_sparse() {
    let kv = layered(0, "kv", &[0, 1, 2]);
    let swa = MockPool::new(layered(1, "swa", &[1]).spec().clone().trailing(1));
    let (_dir, _host, store) = attach(json!({}), &[&kv, &swa]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&kv, &[1, 2, 3, 4])]);
    offload(&linker, 2, &[(&swa, &[1, 2, 4])]);
    let found =
        linker.lookup(&Options::default(), &keys(&[1, 2, 3, 4, 5]), &[Query::of(&kv), Query::of(&swa)]).unwrap();
    assert_eq!(found.restorable, [true, true, true, false, true, false]);
    assert_eq!(found.longest(), 4);
    // One page of the anchor is gone: nothing behind it can be restored.
    store.remove(&Options::default(), &[part(&kv, &[2], 0)]).result.unwrap();
    let found = linker.lookup(&Options::default(), &keys(&[1, 2, 3, 4]), &[Query::of(&kv), Query::of(&swa)]).unwrap();
    assert_eq!(found.longest(), 1);
}

#[test]
fn u06_a_side_pool_is_loaded_and_offloaded_alone() {
    let (kv, swa) = (layered(0, "kv", &[0, 1, 2]), layered(1, "swa", &[1]));
    let (_dir, _host, store) = attach(json!({}), &[&kv, &swa]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&swa, &[1, 2])]);
    swa.wipe(8);
    assert!(all_ok(&load(&linker, 1, &[part(&swa, &[2], 8)])));
    assert!(swa.holds(8, 2));
    assert_eq!(load(&linker, 2, &[part(&kv, &[2], 8)]), [[PageStatus::Missing]]);
}

#[test]
fn u08_ragged_groups_of_layers_give_the_same_bytes() {
    let pool = layered(0, "kv", &[0, 1, 2]);
    let (_dir, _host, store) = attach(json!({"layer_group": 2}), &[&pool]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&pool, &[1])]);
    pool.wipe(8);
    let pending = linker.load(&Options { request: 1, ..Options::default() }, &[part(&pool, &[1], 8)]).unwrap();
    let words = linker.start(&Options::default(), 1, 3).unwrap();
    wait_for("the first group", || words[0].load(Ordering::Acquire) == 1);
    // They are settled one after the other, once the bytes of all of them are there.
    wait_for("its second layer", || words[1].load(Ordering::Acquire) == 1);
    assert!(pool.read(8)[..2000] == pool.pattern(1)[..2000]);
    linker.finish(&Options::default(), 1).unwrap();
    assert!(all_ok(&pending.statuses()) && pool.holds(8, 1));
}

#[test]
fn u09_offloads_complete_in_order_and_coalesced_ones_share_a_verdict() {
    for (coalesce, verdicts) in [(1, [true, false, true]), (1024, [false, false, false])] {
        // 16 pages of memory and no disk: what does not fit is refused.
        let more = json!({"ssd_enabled": false, "dram_capacity_bytes": 16 * 4096, "dram_high_watermark": 1.0,
            "offload_coalesce_pages": coalesce});
        let (kv, large) = (layered(0, "kv", &[0, 1, 2]), MockPool::new(PoolSpec::bytes(1, "large", 1, &[17 * 4096])));
        let (_dir, _host, store) = attach(more, &[&kv, &large]);
        let linker = store.linker().unwrap();
        // The first one waits for its pages, so that the others queue up behind it; its deadline keeps them from being joined with it.
        let flag: &'static AtomicU32 = Box::leak(Box::new(AtomicU32::new(0)));
        let wait = (ReadyKind::HostFlag as u32, std::ptr::from_ref(flag) as u64);
        let alone = Options { deadline: Some(Duration::from_secs(600)), ..Options::default() };
        linker.offload(&alone, 9, &[part(&kv, &[9], 0)], &[wait]).unwrap();
        linker.offload(&Options::default(), 1, &[part(&kv, &[1], 0)], &[NOW]).unwrap();
        linker.offload(&Options::default(), 2, &[part(&large, &[2], 0)], &[NOW]).unwrap();
        linker.offload(&Options::default(), 3, &[part(&kv, &[3], 0)], &[NOW]).unwrap();
        flag.store(1, Ordering::Release);
        assert_eq!(pop(&linker), Completed { operation: 9, result: Ok(()) });
        let popped: Vec<Completed> = (0..3).map(|_| pop(&linker)).collect();
        assert_eq!(popped.iter().map(|one| one.operation).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(popped.iter().map(|one| one.result.is_ok()).collect::<Vec<_>>(), verdicts);
        let failed = popped.iter().find_map(|one| one.result.clone().err()).unwrap();
        assert_eq!(failed.kind, ErrorKind::NoSpace);
        // All of an operation is there, or nothing.
        let there =
            |number| linker.lookup(&Options::default(), &[key(number)], &[Query::of(&kv)]).unwrap().longest() == 1;
        assert_eq!([there(1), there(3)], [verdicts[0], verdicts[2]]);
    }
}

#[test]
fn an_offload_whose_turn_does_not_come_ends_by_its_deadline() {
    let pool = layered(0, "kv", &[0, 1, 2]);
    let (_dir, _host, store) = attach(json!({}), &[&pool]);
    let linker = store.linker().unwrap();
    // The one before it waits for its pages, and goes on doing so.
    let flag: &'static AtomicU32 = Box::leak(Box::new(AtomicU32::new(0)));
    let wait = (ReadyKind::HostFlag as u32, std::ptr::from_ref(flag) as u64);
    linker.offload(&Options::default(), 1, &[part(&pool, &[1], 0)], &[wait]).unwrap();
    let short = Options { deadline: Some(Duration::from_millis(200)), ..Options::default() };
    linker.offload(&short, 2, &[part(&pool, &[2], 1)], &[NOW]).unwrap();
    linker.offload(&Options::default(), 3, &[part(&pool, &[3], 2)], &[NOW]).unwrap();
    let ended = pop(&linker);
    assert_eq!((ended.operation, ended.result.unwrap_err().kind), (2, ErrorKind::TimedOut));
    flag.store(1, Ordering::Release);
    assert_eq!([pop(&linker), pop(&linker)].map(|one| (one.operation, one.result)), [(1, Ok(())), (3, Ok(()))]);
    let there =
        |number| linker.lookup(&Options::default(), &[key(number)], &[Query::of(&pool)]).unwrap().longest() == 1;
    assert_eq!([there(1), there(2), there(3)], [true, false, true]);
}

#[test]
fn a_follower_says_that_it_stores_nothing_and_not_that_there_is_no_room() {
    let pool = layered(0, "kv", &[0, 1, 2]);
    let dir = tempfile::tempdir().unwrap();
    let with = |role: &str| {
        let more = json!({"role": role, "ssd_copy_async": false});
        let (host, store) = try_attach(&settings(dir.path(), more), &identity("linked"), &[&pool]);
        (host, store.unwrap())
    };
    let (_first, leader) = with("leader");
    offload(&leader.linker().unwrap(), 1, &[(&pool, &[1])]);
    let (host, follower) = with("follower");
    let linker = follower.linker().unwrap();
    linker.offload(&Options::default(), 2, &[part(&pool, &[2], 1)], &[NOW]).unwrap();
    assert_eq!(pop(&linker).result.unwrap_err().kind, ErrorKind::Unsupported);
    let logs: String = host.logs().iter().map(|line| format!("{}\n", line.message)).collect();
    assert!(logs.contains("offload 2:") && logs.contains("its leader stores them"), "{logs}");
    // What its leader has is stored.
    linker.offload(&Options::default(), 3, &[part(&pool, &[1], 0)], &[NOW]).unwrap();
    assert_eq!(pop(&linker), Completed { operation: 3, result: Ok(()) });
}

#[test]
fn u10_what_failed_names_pool_and_layers() {
    let large = MockPool::new(PoolSpec::bytes(0, "large", 1, &[2 << 20]));
    let (_dir, host, store) = attach(json!({"ssd_enabled": false}), &[&large]);
    let linker = store.linker().unwrap();
    linker.offload(&Options::default(), 1, &[part(&large, &[2], 0)], &[NOW]).unwrap();
    assert!(pop(&linker).result.is_err());
    load(&linker, 1, &[part(&large, &[2], 0)]);
    let logs: String = host.logs().iter().map(|line| format!("{}\n", line.message)).collect();
    assert!(logs.contains("offload 1: pool 0 (large): the store has no room: 0 of 1 objects"), "{logs}");
    assert!(logs.contains("load 1: layers 0 to 2: a page of pool 0 (large) is missing"), "{logs}");
}

#[test]
fn u11_a_split_load_is_refused() {
    let pool = layered(0, "kv", &[0]);
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = try_attach(&settings(dir.path(), json!({"load_split": true})), &identity("linked"), &[&pool]);
    let error = store.map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidConfig);
    assert!(error.message.contains("load_split"), "{}", error.message);
    // Nothing is left behind: the directory can be used.
    assert!(try_attach(&settings(dir.path(), json!({})), &identity("linked"), &[&pool]).1.is_ok());
}

#[test]
fn u12_a_reset_ends_what_runs_and_forgets_what_completed() {
    let pool = layered(0, "kv", &[0, 1, 2]);
    let (_dir, _host, store) = attach(json!({}), &[&pool]);
    let linker = store.linker().unwrap();
    linker.offload(&Options::default(), 1, &[part(&pool, &[1], 0)], &[NOW]).unwrap();
    wait_for("the first offload", || linker.completed() == 1);
    let flag: &'static AtomicU32 = Box::leak(Box::new(AtomicU32::new(0)));
    let wait = (ReadyKind::HostFlag as u32, std::ptr::from_ref(flag) as u64);
    linker.offload(&Options::default(), 2, &[part(&pool, &[2], 1)], &[wait]).unwrap();
    linker.offload(&Options::default(), 3, &[part(&pool, &[3], 2)], &[NOW]).unwrap();
    linker.reset(&Options::default()).unwrap();
    assert_eq!(linker.completed(), 0);
    assert_eq!(linker.pop().unwrap(), None);
    flag.store(1, Ordering::Release);
    offload(&linker, 4, &[(&pool, &[4])]);
    let there =
        |number| linker.lookup(&Options::default(), &[key(number)], &[Query::of(&pool)]).unwrap().longest() == 1;
    assert_eq!([there(1), there(2), there(3), there(4)], [true, false, false, true]);
}
