//! The cases that engines test their linker to this store with, against a real master.
//!
//! | case | test, or why there is none |
//! | --- | --- |
//! | M01 | `m01_layers_of_an_unpacked_page_are_ranges_of_two_objects` |
//! | M02 | `m02_lookup_answers_the_lengths_that_all_pools_can_serve` |
//! | M03 | `m03_loads_and_offloads_are_counted`; there is no garbage collector to freeze |
//! | M04 | `m04_an_offload_returns_before_its_pages_may_be_read` |
//! | M05 | `m05_completions_wait_in_order_until_they_are_popped`: ranks agree in the host on how many, a plugin answers for its own |
//! | M06 | `m06_pools_of_compressed_layers_travel_together` |
//! | M07 | `m07_an_indexer_shares_the_page_indices_of_its_pool` |
//! | M08 | `m08_a_pool_that_can_not_be_served_is_refused_by_name` |
//! | M09 | `m09_a_window_is_loaded_without_its_anchor`; slots are translated by the host, which passes pages |
//! | M10 | `m10_a_window_is_filled_when_its_load_has_finished_and_let_alone_when_it_is_aborted`; mapping it to its sequence, and freeing it, is the host's |
//! | M11 | `m11_what_vanished_after_the_lookup_fails_alone`, `m11_an_object_of_another_length_is_corrupt`, `m11_an_owner_that_is_gone_fails_its_pages_alone`. There a bad page fails the batch; here it fails by itself |
//! | M12 | `m12_a_rank_that_does_not_write_reports_success_without_storing` |
//! | M13 | `m13_suffixes_name_the_ranks` |
//! | M14 | `m14_a_request_is_queued_once_and_cancelled_before_its_start` |
//! | M15 | `m15_after_a_reset_completions_belong_to_what_came_after_it` |
//! | M16 | `m16_pools_in_one_allocation_are_served`; over TCP memory is registered nowhere, so there is no code to fail with: a pool that can't be served is M08 |
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;
#[path = "common/described.rs"]
mod described;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::services::{Master, Mode, Official};
use common::*;
use kvdock_plugin_api::mock::{
    Instance, MockHost, MockLinker, MockPool, Options, Part, PendingLoad, PoolSpec, Query, identity, table_of,
};
use kvdock_plugin_api::v0_1::Component;
use kvdock_plugin_api::{
    CacheMode, Completed, ComponentKind, ErrorKind, Identity, MemoryKind, PageStatus, PoolRole, ReadyKind,
};
use kvdock_plugin_mooncake::kvdock_plugin_entry;
use kvdock_plugin_mooncake::names::Names;
use kvdock_plugin_mooncake::wire::rpc;

const NOW: (u32, u64) = (ReadyKind::Now as u32, 0);

fn component(layer: u32, kind: ComponentKind, segment: u32, offset: u64, len: u64) -> Component {
    Component { layer, kind: kind.raw(), segment, reserved: 0, offset, run_len: len, run_stride: len, run_count: 1 }
}

fn spec(id: u32, name: &str, segments: &[u64], components: Vec<Component>) -> PoolSpec {
    PoolSpec { components, layers: 3, ..PoolSpec::bytes(id, name, 16, segments) }
}

/// An identity under which names are another engine's.
fn foreign(model: &str) -> Identity {
    let namespace_json = serde_json::json!({ "model": model, "key_scheme": "sglang" }).to_string();
    Identity { namespace_json, ..identity(model) }
}

fn open(master: &Master, identity: &Identity, pools: &[&MockPool]) -> (MockHost, Instance) {
    let host = MockHost::new();
    let config = master.config(Mode::Peer, 64 << 20);
    let store = host.attach(table_of(kvdock_plugin_entry).unwrap(), &config, identity, pools);
    (host, store.unwrap())
}

fn pages(from: u32, count: usize) -> Vec<u32> {
    (from..from + count as u32).collect()
}

fn pop(linker: &MockLinker<'_>) -> Completed {
    let mut popped = None;
    wait_for("a completed offload", || {
        popped = linker.pop().unwrap();
        popped.is_some()
    });
    popped.unwrap()
}

/// Offloads pages `numbers` of pools, each filled with the pattern of its number.
fn offload(linker: &MockLinker<'_>, operation: u64, parts: &[(&MockPool, &[u64])]) {
    let parts: Vec<Part> = parts
        .iter()
        .map(|(pool, numbers)| {
            numbers.iter().enumerate().for_each(|(page, number)| pool.fill(page as u32, *number));
            Part::new(pool, &keys(numbers), &pages(0, numbers.len()))
        })
        .collect();
    let pending = linker.offload(&Options::default(), operation, &parts, &[NOW]).unwrap();
    assert_eq!(pop(linker), Completed { operation, result: Ok(()) });
    assert!(pending.statuses().iter().flatten().all(|status| *status == PageStatus::Ok));
}

fn queue(linker: &MockLinker<'_>, request: u64, parts: &[Part]) -> PendingLoad {
    linker.load(&Options { request, ..Options::default() }, parts).unwrap()
}

/// Loads parts and waits; every layer is settled then.
fn load(linker: &MockLinker<'_>, request: u64, parts: &[Part]) -> Vec<Vec<PageStatus>> {
    let pending = queue(linker, request, parts);
    let words = linker.start(&Options::default(), request, 3).unwrap();
    linker.finish(&Options::default(), request).unwrap();
    assert!(words.iter().all(|word| word.load(Ordering::Acquire) == 1), "every layer is settled");
    pending.statuses()
}

fn all_ok(statuses: &[Vec<PageStatus>]) -> bool {
    statuses.iter().flatten().all(|status| *status == PageStatus::Ok)
}

/// Pages of a pool go blank.
fn blank(pool: &MockPool, from: u32, count: usize) {
    pages(from, count).iter().for_each(|page| pool.write(*page, &vec![0xee; pool.page_bytes()]));
}

#[test]
fn m01_layers_of_an_unpacked_page_are_ranges_of_two_objects() {
    let (k, v) = (ComponentKind::K, ComponentKind::V);
    let unpacked = || {
        let parts = vec![
            component(0, k, 0, 0, 6),
            component(2, k, 0, 6, 10),
            component(0, v, 1, 0, 14),
            component(2, v, 1, 14, 22),
        ];
        MockPool::new(spec(0, "kv", &[16, 36], parts))
    };
    let master = Master::start(&[]);
    for identity in [identity("m01"), foreign("m01")] {
        let pool = unpacked();
        let (_host, store) = open(&master, &identity, &[&pool]);
        let linker = store.linker().unwrap();
        let numbers = [1, 2];
        offload(&linker, 1, &[(&pool, &numbers)]);
        let wanted: Vec<Vec<u8>> = numbers.iter().map(|number| pool.pattern(*number)).collect();
        let part = |layers| Part { layers, ..Part::new(&pool, &keys(&numbers), &pages(4, 2)) };
        blank(&pool, 4, 2);
        assert!(all_ok(&load(&linker, 1, &[part(Some((1, 1)))])), "layer 1 has nothing");
        assert!((4..6).all(|page| pool.read(page).iter().all(|byte| *byte == 0xee)));
        assert!(all_ok(&load(&linker, 2, &[part(Some((2, 1)))])));
        for (page, wanted) in (4..6).zip(&wanted) {
            let mut expected = vec![0xee; 52];
            expected[6..16].copy_from_slice(&wanted[6..16]);
            expected[30..52].copy_from_slice(&wanted[30..52]);
            assert_eq!(pool.read(page), expected, "10 bytes at 6 of the keys, 22 at 14 of the values");
        }
        assert!(all_ok(&load(&linker, 3, &[part(None)])));
        assert!((4..6).zip(&wanted).all(|(page, wanted)| pool.read(page) == *wanted));
        if identity.namespace_json.contains("sglang") {
            let sizes: Vec<u64> = ["k", "v"]
                .iter()
                .map(|last| {
                    let name = format!("m01_{}_0_{last}", hex(&keys(&[1])[0]));
                    let found = master.call::<rpc::GetReplicaList>(&(&name, "default")).unwrap();
                    match &found.list[0].place {
                        kvdock_plugin_mooncake::wire::types::Place::Memory(memory) => memory.buffer.size,
                        other => panic!("{other:?}"),
                    }
                })
                .collect();
            assert_eq!(sizes, [16, 36]);
        }
    }
}

fn hex(key: &[u8; 32]) -> String {
    key.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn m02_lookup_answers_the_lengths_that_all_pools_can_serve() {
    let master = Master::start(&[]);
    let kv = MockPool::new(spec(0, "kv", &[64], Vec::new()));
    let state = MockPool::new(spec(1, "mamba", &[48], Vec::new()).trailing(1));
    let (_host, store) = open(&master, &identity("m02"), &[&kv, &state]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&state, &[2, 4]), (&kv, &[1, 2, 3, 4])]);
    let queries = [Query::of(&kv), Query::of(&state)];
    let found = linker.lookup(&Options::default(), &keys(&[1, 2, 3, 4]), &queries).unwrap();
    let lengths: Vec<usize> = (1..=4).filter(|length| found.restorable[*length]).collect();
    assert_eq!(lengths, [2, 4]);
}

#[test]
fn m03_loads_and_offloads_are_counted() {
    let master = Master::start(&[]);
    let kv = pool(8, 256);
    let (_host, store) = open(&master, &identity("m03"), &[&kv]);
    let linker = store.linker().unwrap();
    let before = store.stats().unwrap();
    assert_eq!((before.get_mean_ns, before.set_mean_ns), (0, 0));
    offload(&linker, 1, &[(&kv, &[1, 2])]);
    assert!(all_ok(&load(&linker, 1, &[Part::new(&kv, &keys(&[1, 2]), &pages(4, 2))])));
    let after = store.stats().unwrap();
    assert!(after.get_mean_ns > 0 && after.set_mean_ns > 0 && after.failures == 0, "{after:?}");
}

#[test]
fn m04_an_offload_returns_before_its_pages_may_be_read() {
    let master = Master::start(&[]);
    let kv = pool(8, 256);
    let (_host, store) = open(&master, &identity("m04"), &[&kv]);
    let linker = store.linker().unwrap();
    static FLAGS: [AtomicU32; 2] = [AtomicU32::new(0), AtomicU32::new(0)];
    let ready = FLAGS.each_ref().map(|flag| (ReadyKind::HostFlag.raw(), flag.as_ptr() as u64));
    linker.offload(&Options::default(), 7, &[Part::new(&kv, &keys(&[1]), &[0])], &ready).unwrap();
    for flag in &FLAGS {
        std::thread::sleep(Duration::from_millis(30));
        assert!(linker.pop().unwrap().is_none() && master.keys().is_empty(), "nothing is stored before both came");
        kv.fill(0, 1);
        flag.store(1, Ordering::Release);
    }
    assert_eq!(pop(&linker), Completed { operation: 7, result: Ok(()) });
    assert!(all_ok(&load(&linker, 1, &[Part::new(&kv, &keys(&[1]), &[4])])) && kv.holds(4, 1));
}

#[test]
fn m05_completions_wait_in_order_until_they_are_popped() {
    let master = Master::start(&[]);
    let (pools, model) = ([pool(8, 4096), pool(8, 4096)], identity("model"));
    let ranks = pools.each_ref().map(|pool| open(&master, &model, &[pool]));
    let linkers = ranks.each_ref().map(|(_, store)| store.linker().unwrap());
    for (linker, pool) in linkers.iter().zip(&pools) {
        for operation in 1..=4u64 {
            pool.fill(operation as u32, operation);
            let part = Part::new(pool, &keys(&[operation]), &[operation as u32]);
            linker.offload(&Options::default(), operation, &[part], &[NOW]).unwrap();
        }
    }
    // As many as the rank has that is behind; what the other has beyond that stays with it.
    for round in [1..=2u64, 3..=4] {
        for operation in round {
            for linker in &linkers {
                assert_eq!(pop(linker), Completed { operation, result: Ok(()) });
            }
        }
    }
    assert!(linkers.iter().all(|linker| linker.pop().unwrap().is_none()));
}

#[test]
fn m06_pools_of_compressed_layers_travel_together() {
    let master = Master::start(&[]);
    let other = ComponentKind::Other;
    // Layers 0 and 2 are compressed by 4, layer 1 by 128; the anchor owns page indices alone.
    let anchor = MockPool::new(PoolSpec::logical(16));
    let two = |len: u64| vec![component(0, other, 0, 0, len), component(2, other, 0, len, len)];
    let c4 = MockPool::new(spec(2, "deepseek_v4_c4", &[10], two(5)));
    let side = [
        MockPool::new(
            spec(1, "swa", &[9], (0..3).map(|layer| component(layer, other, 0, u64::from(layer) * 3, 3)).collect())
                .trailing(2),
        ),
        c4.clone(),
        MockPool::new(spec(3, "deepseek_v4_c4_indexer", &[6], two(3))),
        MockPool::new(spec(4, "deepseek_v4_c128", &[7], vec![component(1, other, 0, 0, 7)])),
        MockPool::new(spec(5, "deepseek_v4_c4_state", &[8], two(4)).trailing(2)),
        MockPool::new(spec(6, "deepseek_v4_c4_indexer_state", &[4], two(2)).trailing(2)),
    ];
    let pools: Vec<&MockPool> = std::iter::once(&anchor).chain(&side).collect();
    let (_host, store) = open(&master, &identity("m06"), &pools);
    let linker = store.linker().unwrap();
    let numbers = [1, 2];
    let parts: Vec<(&MockPool, &[u64])> = side.iter().chain([&anchor]).map(|pool| (pool, &numbers[..])).collect();
    let parts: Vec<Part> = parts
        .iter()
        .map(|(pool, numbers)| {
            if pool.page_bytes() > 0 {
                numbers.iter().zip(0..).for_each(|(number, page)| pool.fill(page, *number));
            }
            Part::new(pool, &keys(numbers), &pages(0, 2))
        })
        .collect();
    linker.offload(&Options::default(), 1, &parts, &[NOW]).unwrap();
    assert_eq!(pop(&linker), Completed { operation: 1, result: Ok(()) });
    assert_eq!(master.keys().len(), 7 * 2, "an object a page and pool, the marker of the anchor among them");
    let queries: Vec<Query> = pools.iter().map(|pool| Query::of(pool)).collect();
    assert_eq!(linker.lookup(&Options::default(), &keys(&numbers), &queries).unwrap().longest(), 2);
    blank(&c4, 4, 2);
    let one = |layer| Part { layers: Some((layer, 1)), ..Part::new(&c4, &keys(&numbers), &pages(4, 2)) };
    assert!(all_ok(&load(&linker, 1, &[one(1)])) && c4.read(4) == [0xee; 10], "layer 1 has no part in it");
    assert!(all_ok(&load(&linker, 2, &[one(2)])));
    let (seen, stored) = (c4.read(4), c4.pattern(1));
    assert!(seen[..5] == [0xee; 5] && seen[5..] == stored[5..], "layer 2 is 5 bytes at 5");
    let parts: Vec<Part> = side.iter().map(|pool| Part::new(pool, &keys(&numbers), &pages(8, 2))).collect();
    assert!(all_ok(&load(&linker, 3, &parts)));
    assert!(side.iter().all(|pool| pool.holds(8, 1) && pool.holds(9, 2)));
}

#[test]
fn m07_an_indexer_shares_the_page_indices_of_its_pool() {
    let master = Master::start(&[]);
    let kv = MockPool::new(spec(0, "kv", &[96], Vec::new()));
    let indexer = MockPool::new(PoolSpec { indices_from_pool: Some(0), ..spec(1, "indexer", &[24], Vec::new()) });
    let (_host, store) = open(&master, &identity("m07"), &[&kv, &indexer]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&indexer, &[1, 2, 3]), (&kv, &[1, 2, 3])]);
    let parts = [&indexer, &kv].map(|pool| Part::new(pool, &keys(&[1, 2, 3]), &pages(8, 3)));
    assert!(all_ok(&load(&linker, 1, &parts)));
    assert!([&indexer, &kv].iter().all(|pool| pool.holds(8, 1) && pool.holds(10, 3)));
    let queries = [Query::of(&kv), Query::of(&indexer)];
    store.remove(&Options::default(), &[Part::new(&indexer, &keys(&[2]), &[])]);
    let found = linker.lookup(&Options::default(), &keys(&[1, 2, 3]), &queries).unwrap();
    assert_eq!(found.longest(), 1, "without its indexer a page is none");
}

#[test]
fn m08_a_pool_that_can_not_be_served_is_refused_by_name() {
    let master = Master::start(&[]);
    let (_host, store) = open(&master, &identity("m08"), &[]);
    let device = PoolSpec { memory_kind: MemoryKind::Cuda.raw(), ..spec(0, "kv", &[64], Vec::new()) };
    let error = store.register(&MockPool::new(device)).unwrap_err();
    assert!(error.kind == ErrorKind::Unsupported && error.message.contains("kv"), "{error}");
    let (_host, store) = open(&master, &foreign("m08"), &[]);
    let unknown = MockPool::new(spec(1, "auxiliary_swa", &[64], Vec::new()));
    let error = store.register_side(&[&unknown]).unwrap_err();
    assert!(error.message.contains("auxiliary_swa") && error.message.contains("sglang"), "{error}");
}

#[test]
fn m09_a_window_is_loaded_without_its_anchor() {
    let master = Master::start(&[]);
    let kv = pool(16, 256);
    let window = MockPool::new(spec(1, "swa", &[40], Vec::new()).trailing(2));
    let (_host, store) = open(&master, &identity("m09"), &[&kv, &window]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&window, &[3, 4]), (&kv, &[1, 2, 3, 4])]);
    assert!(all_ok(&load(&linker, 1, &[Part::new(&window, &keys(&[3, 4]), &pages(10, 2))])));
    assert!(window.holds(10, 3) && window.holds(11, 4));
}

#[test]
fn m10_a_window_is_filled_when_its_load_has_finished_and_let_alone_when_it_is_aborted() {
    let master = Master::start(&[]);
    let kv = pool(16, 256);
    let window = MockPool::new(spec(1, "swa", &[40], Vec::new()).trailing(2));
    let (_host, store) = open(&master, &identity("m10"), &[&kv, &window]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&window, &[3, 4]), (&kv, &[1, 2, 3, 4])]);
    let part = |from| [Part::new(&window, &keys(&[3, 4]), &pages(from, 2))];
    blank(&window, 8, 4);
    // One request is aborted before the step that would load it, another one is loaded by it.
    queue(&linker, 5, &part(8));
    linker.cancel(5).unwrap();
    assert!(all_ok(&load(&linker, 6, &part(10))));
    assert!(window.holds(10, 3) && window.holds(11, 4), "the window holds the end of the prefix");
    let untouched = |page| window.read(page).iter().all(|byte| *byte == 0xee);
    assert!(untouched(8) && untouched(9), "pages of an aborted request may belong to somebody else");
}

#[test]
fn m11_what_vanished_after_the_lookup_fails_alone() {
    let master = Master::start(&[]);
    let kv = pool(16, 256);
    let (_host, store) = open(&master, &identity("m11"), &[&kv]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&kv, &[1, 2, 3])]);
    let found = linker.lookup(&Options::default(), &keys(&[1, 2, 3]), &[Query::of(&kv)]).unwrap();
    assert_eq!(found.longest(), 3);
    assert!(store.remove(&Options::default(), &[Part::new(&kv, &keys(&[2]), &[])]).all_ok());
    let statuses = load(&linker, 1, &[Part::new(&kv, &keys(&[1, 2, 3]), &pages(8, 3))]);
    assert_eq!(statuses, [[PageStatus::Ok, PageStatus::Missing, PageStatus::Ok]]);
    assert!(kv.holds(8, 1) && kv.holds(10, 3));
}

#[test]
fn m11_an_object_of_another_length_is_corrupt() {
    let master = Master::start(&[]);
    let kv = pool(16, 256);
    let (_host, store) = open(&master, &identity("short"), &[&kv]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&kv, &[1, 2])]);
    let name = master.keys().into_iter().find(|name| name.ends_with(&hex(&keys(&[1])[0]))).unwrap();
    assert!(store.remove(&Options::default(), &[Part::new(&kv, &keys(&[1]), &[])]).all_ok());
    let mut official = Official::start(&master, Mode::Peer, 16 << 20);
    assert_eq!(official.put(&name, &[7; 255]), 0);
    let statuses = load(&linker, 1, &[Part::new(&kv, &keys(&[1, 2]), &pages(8, 2))]);
    assert_eq!(statuses, [[PageStatus::Corrupt, PageStatus::Ok]]);
}

#[test]
fn m11_an_owner_that_is_gone_fails_its_pages_alone() {
    let master = Master::start(&["--client_ttl=60"]);
    let kv = pool(16, 4096);
    let mut official = Official::start(&master, Mode::Peer, 64 << 20);
    let host = MockHost::new();
    let config = master.config(Mode::Peer, 0);
    let store = host.attach(table_of(kvdock_plugin_entry).unwrap(), &config, &identity("gone"), &[&kv]).unwrap();
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&kv, &[1, 2])]);
    official.kill();
    let statuses = load(&linker, 1, &[Part::new(&kv, &keys(&[1, 2]), &pages(8, 2))]);
    assert_eq!(statuses, [[PageStatus::Failed, PageStatus::Failed]]);
    let found = linker.lookup(&Options::default(), &keys(&[1, 2]), &[Query::of(&kv)]).unwrap();
    assert_eq!(found.longest(), 0, "what could not be read counts as missing for a while");
}

#[test]
fn m12_a_rank_that_does_not_write_reports_success_without_storing() {
    let master = Master::start(&[]);
    let kv = pool(16, 256);
    let reader = Identity { replicated: true, writer: false, tp: (1, 2), ..identity("m12") };
    let (_host, store) = open(&master, &reader, &[&kv]);
    let linker = store.linker().unwrap();
    for operation in 1..=3 {
        linker.offload(&Options::default(), operation, &[Part::new(&kv, &keys(&[operation]), &[0])], &[NOW]).unwrap();
    }
    for operation in 1..=3 {
        assert_eq!(pop(&linker), Completed { operation, result: Ok(()) });
    }
    assert!(master.keys().is_empty(), "{:?}", master.keys());
    // The rank that writes them has the same names.
    let (_host, writer) = open(&master, &Identity { writer: true, ..reader }, &[&kv]);
    offload(&writer.linker().unwrap(), 1, &[(&kv, &[1])]);
    assert!(all_ok(&load(&linker, 1, &[Part::new(&kv, &keys(&[1]), &[8])])) && kv.holds(8, 1));
}

#[test]
fn m13_suffixes_name_the_ranks() {
    let name = |identity: Identity, spec: PoolSpec, mode| {
        let pool = described::described(&spec, false);
        let names = Names::of("", &identity, mode).unwrap();
        let objects = names.objects(&pool).unwrap();
        objects.iter().map(|object| names.object(&object.label, &[0xab; 32])).collect::<Vec<_>>()
    };
    let key = "ab".repeat(32);
    let plain = || spec(0, "kv", &[64], Vec::new());
    let replicated = Identity { replicated: true, tp: (1, 2), ..foreign("a/b") };
    assert_eq!(name(replicated, plain(), CacheMode::Linker), [format!("a-b_{key}_cp0_pp0_k")]);
    let sharded = || Identity { tp: (1, 2), ..foreign("a/b") };
    assert_eq!(name(sharded(), plain(), CacheMode::Linker), [format!("a-b_{key}_tp1_cp0_pp0_k")]);
    let side = PoolSpec { role: PoolRole::Side, ..spec(1, "swa", &[64], Vec::new()) };
    assert_eq!(name(sharded(), side, CacheMode::Linker), [format!("a-b_{key}_tp1_cp0_pp0_swa")]);
}

#[test]
fn m14_a_request_is_queued_once_and_cancelled_before_its_start() {
    let master = Master::start(&[]);
    let kv = pool(16, 256);
    let (_host, store) = open(&master, &identity("m14"), &[&kv]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(&kv, &[1])]);
    let part = || [Part::new(&kv, &keys(&[1]), &[8])];
    queue(&linker, 5, &part());
    let again = linker.load(&Options { request: 5, ..Options::default() }, &part()).unwrap_err();
    assert!(again.message.contains('5'), "{again}");
    linker.cancel(5).unwrap();
    blank(&kv, 8, 1);
    linker.start(&Options::default(), 1, 3).unwrap();
    linker.finish(&Options::default(), 1).unwrap();
    assert!(kv.read(8).iter().all(|byte| *byte == 0xee), "a cancelled load writes nothing");
    queue(&linker, 5, &part());
    linker.start(&Options::default(), 2, 3).unwrap();
    assert_eq!(linker.cancel(5).unwrap_err().kind, ErrorKind::NotFound);
    linker.finish(&Options::default(), 2).unwrap();
    assert!(kv.holds(8, 1));
}

#[test]
fn m15_after_a_reset_completions_belong_to_what_came_after_it() {
    let master = Master::start(&[]);
    let kv = pool(16, 256);
    let (_host, store) = open(&master, &identity("m15"), &[&kv]);
    let linker = store.linker().unwrap();
    for operation in 1..=4 {
        linker.offload(&Options::default(), operation, &[Part::new(&kv, &keys(&[operation]), &[0])], &[NOW]).unwrap();
    }
    linker.reset(&Options::default()).unwrap();
    assert_eq!(linker.completed(), 0);
    offload(&linker, 9, &[(&kv, &[20, 21])]);
    assert!(linker.pop().unwrap().is_none());
    assert!(all_ok(&load(&linker, 1, &[Part::new(&kv, &keys(&[20, 21]), &pages(8, 2))])) && kv.holds(9, 21));
}

#[test]
fn m16_pools_in_one_allocation_are_served() {
    let master = Master::start(&[]);
    let pools = MockPool::in_one_region(&[spec(0, "kv", &[64, 32], Vec::new()), spec(1, "swa", &[40], Vec::new())]);
    let [kv, window] = pools.as_slice() else { panic!("two pools") };
    let (_host, store) = open(&master, &identity("m16"), &[kv, window]);
    let linker = store.linker().unwrap();
    offload(&linker, 1, &[(window, &[1, 2]), (kv, &[1, 2])]);
    let parts = [window, kv].map(|pool| Part::new(pool, &keys(&[1, 2]), &pages(8, 2)));
    assert!(all_ok(&load(&linker, 1, &parts)));
    assert!([window, kv].iter().all(|pool| pool.holds(8, 1) && pool.holds(9, 2)));
}
