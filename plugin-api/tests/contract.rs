//! The contract of the boundary, through the C table, with a backend in memory.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::kvdock_plugin_entry;
use kvdock_plugin_api::mock::*;
use kvdock_plugin_api::v0_1::PageKey;
use kvdock_plugin_api::*;

fn open(config: &str, pools: &[&MockPool]) -> (MockHost, Instance) {
    let host = MockHost::new();
    let store = host.attach(table_of(kvdock_plugin_entry).unwrap(), config, &identity("model"), pools).unwrap();
    (host, store)
}

fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<PageKey> {
    numbers.into_iter().map(key).collect()
}

fn pool(id: u32, name: &str) -> PoolSpec {
    PoolSpec::bytes(id, name, 16, &[640, 384]).with_seal(96)
}

#[test]
fn what_is_unknown_or_unfit_is_refused_in_words() {
    let host = MockHost::new();
    let store = host.open(table_of(kvdock_plugin_entry).unwrap(), "{}", &identity("m")).unwrap();
    let refused = |spec: PoolSpec, word: &str| {
        let pool = MockPool::new(spec);
        let error = if pool.id() == 0 { store.register(&pool) } else { store.register_side(&[&pool]) }.unwrap_err();
        assert!(
            error.message.contains(word) && error.message.contains(&format!("pool {}", pool.id())),
            "{word}: {error}"
        );
    };
    refused(PoolSpec { hit_policy: 77, ..pool(0, "kv") }, "hit policy 77");
    refused(PoolSpec { memory_kind: 99, ..pool(0, "kv") }, "memory kind 99");
    refused(PoolSpec { memory_kind: MemoryKind::Cuda.raw(), ..pool(0, "kv") }, "device memory");
    refused(PoolSpec { logical: true, ..pool(0, "kv") }, "logical");
    refused(PoolSpec::bytes(0, "kv", 4, &[]), "declared logical");
    refused(PoolSpec { role: PoolRole::Side, ..pool(0, "kv") }, "role");
    refused(PoolSpec { role: PoolRole::Anchor, ..pool(1, "kv") }, "role");
    refused(PoolSpec { indices_from_pool: Some(9), ..pool(1, "idx") }, "pool 9");
    let anchor = MockPool::new(pool(0, "kv"));
    store.register(&anchor).unwrap();
    refused(pool(0, "kv"), "already");
    // Side pools are taken all or none.
    let good = MockPool::new(pool(1, "swa"));
    let bad = MockPool::new(PoolSpec { hit_policy: 0, ..pool(2, "idx") });
    assert!(store.register_side(&[&good, &bad]).is_err());
    let outcome = store.set(&Options::default(), &[Part::new(&good, &keys([1]), &[0])]);
    assert_eq!(outcome.result.unwrap_err().kind, ErrorKind::NotFound);
    let mut query = Query::of(&anchor);
    query.raw.hit_policy = 8;
    let error = store.exists(&Options::default(), &keys([1]), &[query]).unwrap_err();
    assert!(error.kind == ErrorKind::Unsupported && error.message.contains("hit policy 8"), "{error}");
    assert!(kvdock_plugin_entry(0x7fff_0001).is_null(), "a version that is not known has no table");
}

#[test]
fn a_transfer_that_names_an_unregistered_pool_is_an_error_and_no_silent_skip() {
    let (anchor, other) = (MockPool::new(pool(0, "kv")), MockPool::new(pool(5, "swa")));
    let (_, store) = open("{}", &[&anchor]);
    let parts = [Part::new(&other, &keys([1]), &[0]), Part::new(&anchor, &keys([1]), &[0])];
    for outcome in [
        store.set(&Options::default(), &parts),
        store.get(&Options::default(), &parts),
        store.remove(&Options::default(), &parts),
    ] {
        let error = outcome.result.unwrap_err();
        assert!(error.kind == ErrorKind::NotFound && error.message.contains("pool 5"), "{error}");
    }
    assert_eq!(store.stats().unwrap().pages, 0, "nothing of the call was done");
    assert!(store.exists(&Options::default(), &keys([1]), &[Query::of(&other)]).is_err());
    assert_eq!(store.unregister(&[5]).unwrap_err().kind, ErrorKind::NotFound);
    // A page that the pool does not have, keys without pages, layers without the capability.
    let outside = store.get(&Options::default(), &[Part::new(&anchor, &keys([1]), &[16])]);
    assert!(outside.result.unwrap_err().message.contains("page 16"));
    let none = Part { pages: Vec::new(), ..Part::new(&anchor, &keys([1, 2]), &[0, 1]) };
    assert!(store.get(&Options::default(), std::slice::from_ref(&none)).result.is_err());
    assert!(store.remove(&Options::default(), &[none]).result.is_ok(), "a remove needs no pages");
    let layers = Part { layers: Some((0, 1)), ..Part::new(&anchor, &keys([1]), &[0]) };
    assert_eq!(store.get(&Options::default(), &[layers]).result.unwrap_err().kind, ErrorKind::Unsupported);
}

#[test]
fn a_panic_becomes_an_error_that_says_so() {
    let anchor = MockPool::new(pool(0, "kv"));
    let (_, store) = open(r#"{"panic_in_exists":"planted: é"}"#, &[&anchor]);
    let error = store.exists(&Options::default(), &keys([1]), &[Query::of(&anchor)]).unwrap_err();
    assert!(error.panicked && error.kind == ErrorKind::Internal && !error.retryable);
    assert!(error.message.contains("planted: é"), "{error}");
    store.close().unwrap();
}

#[test]
fn a_long_error_text_is_cut_at_a_character() {
    for pad in 0..4 {
        let text = format!("{}{}", "x".repeat(pad), "☃é".repeat(300));
        let config = serde_json::json!({ "fail_stats": text }).to_string();
        let (_, store) = open(&config, &[]);
        let error = store.stats().unwrap_err();
        assert!(error.kind == ErrorKind::Unavailable && error.retryable && !error.panicked);
        assert!(text.starts_with(&error.message) && error.message.len() > 500 && error.message.len() <= 512, "{pad}");
    }
}

#[test]
fn pages_of_every_layout_go_in_and_out() {
    let shape = KvShape { pages: 4, page_tokens: 4, layers: 3, heads: 2, head_dim: 8, dtype: Dtype::Bf16 };
    for layout in ["layer_first", "page_first", "page_first_direct", "page_head"] {
        let anchor = MockPool::new(PoolSpec::kv(0, "kv", layout, shape).with_seal(64));
        assert_eq!(anchor.page_bytes(), 2 * 3 * 4 * 2 * 8 * 2 + 64);
        let swa = MockPool::new(PoolSpec::kv(1, "swa", layout, shape));
        let (_, store) = open("{}", &[&anchor, &swa]);
        (0..4).for_each(|page| {
            anchor.fill(page, u64::from(page));
            swa.fill(page, 10 + u64::from(page));
        });
        // The same key twice in one call, and a page stored already, are fine.
        let parts =
            [Part::new(&swa, &keys([2, 3, 3]), &[2, 3, 3]), Part::new(&anchor, &keys([0, 1, 2, 3]), &[0, 1, 2, 3])];
        assert!(store.set(&Options::default(), &parts).all_ok() && store.set(&Options::default(), &parts).all_ok());
        assert_eq!(store.stats().unwrap().pages, 6);
        (0..4).for_each(|page| {
            anchor.wipe(page);
            swa.wipe(page);
        });
        // In another order, into other places.
        let parts = [Part::new(&anchor, &keys([3, 2, 1, 0]), &[0, 1, 2, 3]), Part::new(&swa, &keys([9, 3]), &[0, 1])];
        let got = store.get(&Options::default(), &parts);
        assert_eq!(got.statuses[1], [PageStatus::Missing, PageStatus::Ok]);
        assert!((0..4).all(|page| anchor.holds(page, 3 - u64::from(page))) && swa.holds(1, 13), "{layout}");
        assert!(store.remove(&Options::default(), &[Part::new(&anchor, &keys([0, 1]), &[0, 1])]).all_ok());
        assert_eq!(store.stats().unwrap().pages, 4);
        store.clear(&Options::default(), ClearScope::Namespace).unwrap();
        assert_eq!(store.stats().unwrap().pages, 0);
    }
}

#[test]
fn a_logical_anchor_keeps_markers() {
    let anchor = MockPool::new(PoolSpec::logical(8));
    let side = MockPool::new(pool(1, "c4"));
    let (_, store) = open("{}", &[&anchor, &side]);
    let queries = [Query::of(&anchor), Query::of(&side)];
    side.fill(0, 7);
    assert!(
        store
            .set(&Options::default(), &[Part::new(&side, &keys([1]), &[0]), Part::new(&anchor, &keys([1]), &[0])])
            .all_ok()
    );
    assert!(store.set(&Options::default(), &[Part::new(&anchor, &keys([2]), &[1])]).all_ok(), "a marker alone");
    let found = store.exists(&Options::default(), &keys([1, 2, 3]), &queries).unwrap();
    assert_eq!(found.longest(), 1);
    assert_eq!(found.present[0], [PageStatus::Ok, PageStatus::Ok, PageStatus::Missing]);
    assert!(store.get(&Options::default(), &[Part::new(&anchor, &keys([1, 2]), &[0, 1])]).all_ok());
    assert_eq!(store.stats().unwrap().bytes_used, side.page_bytes() as u64);
}

/// Whether the first `length` pages can be restored: the definition, page by page.
fn can_restore(length: usize, pools: &[(PoolSpec, Vec<bool>)]) -> bool {
    pools.iter().all(|(spec, there)| match HitPolicy::from_raw(spec.hit_policy) {
        HitPolicy::AllPages => there[..length].iter().all(|there| *there),
        HitPolicy::TrailingPages => {
            there[length.saturating_sub(spec.trailing_pages as usize)..length].iter().all(|there| *there)
        }
        HitPolicy::BlockGroups | HitPolicy::Unknown => true,
    })
}

#[test]
fn restorable_lengths_follow_the_hit_policies() {
    let mut state = 12345u64;
    let mut chance = |of: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % of
    };
    let mut lengths_seen = 0;
    for round in 0..120 {
        let specs = [pool(0, "kv"), pool(1, "swa").trailing(1 + chance(3) as u32), pool(2, "c4").block_groups(4, 2)];
        let pools: Vec<MockPool> = specs.iter().cloned().map(MockPool::new).collect();
        let stop = round % 2 == 0;
        let (_, store) = open(&format!(r#"{{"stop_at_gap":{stop}}}"#), &pools.iter().collect::<Vec<_>>());
        let count = chance(9) as usize;
        let chain = keys(0..count as u64);
        let mut model = Vec::new();
        for (spec, pool) in specs.iter().zip(&pools) {
            let there: Vec<bool> = (0..count).map(|_| chance(5) > 0).collect();
            let stored: Vec<PageKey> =
                chain.iter().zip(&there).filter(|(_, there)| **there).map(|(key, _)| *key).collect();
            let pages: Vec<u32> = (0..stored.len() as u32).collect();
            assert!(store.set(&Options::default(), &[Part::new(pool, &stored, &pages)]).all_ok());
            model.push((spec.clone(), there));
        }
        let queries: Vec<Query> = pools.iter().map(Query::of).collect();
        let found = store.exists(&Options::default(), &chain, &queries).unwrap();
        let expected: Vec<bool> = (0..=count).map(|length| can_restore(length, &model)).collect();
        assert_eq!(found.restorable, expected, "round {round}: {model:?}");
        lengths_seen += expected.iter().filter(|can| **can).count();
        if let Some(linker) = store.linker() {
            assert_eq!(linker.lookup(&Options::default(), &chain, &queries).unwrap(), found);
        }
    }
    assert!(lengths_seen > 240, "the rounds are not all trivial");
}

#[test]
fn empty_batches_are_fine() {
    let anchor = MockPool::new(pool(0, "kv"));
    let (_, store) = open("{}", &[&anchor]);
    for parts in [vec![], vec![Part::new(&anchor, &[], &[])]] {
        for outcome in [
            store.get(&Options::default(), &parts),
            store.set(&Options::default(), &parts),
            store.remove(&Options::default(), &parts),
        ] {
            assert!(outcome.all_ok());
        }
    }
    assert_eq!(store.exists(&Options::default(), &[], &[Query::of(&anchor)]).unwrap().restorable, [true]);
    assert_eq!(store.exists(&Options::default(), &keys([1]), &[]).unwrap().longest(), 1, "no pool needs anything");
    store.register_side(&[]).unwrap();
    store.unregister(&[]).unwrap();
}

#[test]
fn cancelling_and_deadlines_end_a_call_between_pages() {
    let anchor = MockPool::new(pool(0, "kv"));
    let (host, store) = open(r#"{"page_ms":20}"#, &[&anchor]);
    let part = [Part::new(&anchor, &keys(0..16), &(0..16).collect::<Vec<_>>())];
    let flag = AtomicU32::new(0);
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(60));
            flag.store(1, Ordering::Release);
        });
        store.set(&Options { cancel: Some(&flag), ..Options::default() }, &part)
    });
    assert_eq!(outcome.result.unwrap_err().kind, ErrorKind::Cancelled);
    let done = outcome.statuses[0].iter().filter(|status| **status == PageStatus::Ok).count();
    assert!((1..16).contains(&done), "{done} pages were done");
    assert!(outcome.statuses[0][done..].iter().all(|status| *status == PageStatus::Unset));
    let late = Options { deadline: Some(Duration::from_millis(50)), ..Options::default() };
    let error = store.set(&late, &part).result.unwrap_err();
    assert!(error.kind == ErrorKind::TimedOut && error.retryable);
    assert_eq!(store.health().unwrap().state, HealthState::Degraded);
    assert_eq!(host.health_events(), [(HealthState::Degraded, "every page takes a while".to_owned())]);
    assert_eq!(host.metric("memory_slow"), Some(1.0));
}

#[test]
fn the_linker_loads_offloads_and_cancels() {
    let (anchor, swa) = (MockPool::new(pool(0, "kv")), MockPool::new(pool(1, "swa")));
    let (host, store) = open("{}", &[&anchor, &swa]);
    let linker = store.linker().expect("this backend has a linker face");
    (0..4).for_each(|page| anchor.fill(page, u64::from(page)));
    swa.fill(0, 40);
    let parts = [Part::new(&swa, &keys([3]), &[0]), Part::new(&anchor, &keys(0..4), &[0, 1, 2, 3])];
    let now = [(ReadyKind::Now.raw(), 0)];
    let stored = linker.offload(&Options::default(), 7, &parts, &now).unwrap();
    linker.offload(&Options::default(), 8, &parts[1..], &now).unwrap();
    let error = linker.offload(&Options::default(), 9, &parts, &[(88, 0)]).unwrap_err();
    assert!(error.kind == ErrorKind::Unsupported && error.message.contains("88"), "{error}");
    while (linker.completed(), host.offloads_completed()) != (2, 2) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(linker.pop().unwrap(), Some(Completed { operation: 7, result: Ok(()) }));
    assert!(stored.statuses().iter().flatten().all(|status| *status == PageStatus::Ok));
    assert_eq!(linker.pop().unwrap().map(|done| done.operation), Some(8));
    assert_eq!(linker.pop().unwrap(), None);

    let request = |request| Options { request, ..Options::default() };
    let first = linker.load(&request(1), &[Part::new(&anchor, &keys([0, 9]), &[8, 9])]).unwrap();
    linker.load(&request(2), &[Part::new(&anchor, &keys([1]), &[10])]).unwrap();
    let second = linker.load(&request(3), &[Part::new(&swa, &keys([3]), &[5])]).unwrap();
    linker.cancel(2).unwrap();
    assert_eq!(linker.cancel(2).unwrap_err().kind, ErrorKind::NotFound);
    let words = linker.start(&Options::default(), 100, 3).unwrap();
    assert_eq!(linker.cancel(1).unwrap_err().kind, ErrorKind::NotFound, "it has started");
    linker.finish(&Options::default(), 100).unwrap();
    assert!(words.iter().all(|word| word.load(Ordering::Acquire) == 1));
    assert_eq!(first.statuses(), [[PageStatus::Ok, PageStatus::Missing]]);
    assert_eq!(second.statuses(), [[PageStatus::Ok]]);
    assert!(anchor.holds(8, 0) && swa.holds(5, 40) && anchor.read(10).iter().all(|byte| *byte == 0));
    assert_eq!(linker.finish(&Options::default(), 100).unwrap_err().kind, ErrorKind::NotFound);
    linker.load(&request(4), &[Part::new(&anchor, &keys([0]), &[8])]).unwrap();
    linker.offload(&Options::default(), 10, &parts, &now).unwrap();
    linker.reset(&Options::default()).unwrap();
    assert_eq!(linker.completed(), 0);
    assert!(linker.cancel(4).is_err());
    store.close().unwrap();
}

#[test]
fn data_calls_run_at_the_same_time() {
    let anchor = MockPool::new(PoolSpec::bytes(0, "kv", 64, &[4096]));
    let (_, store) = open("{}", &[&anchor]);
    (0..64).for_each(|page| anchor.fill(page, u64::from(page)));
    std::thread::scope(|scope| {
        for thread in 0..8u32 {
            let (store, anchor) = (&store, &anchor);
            scope.spawn(move || {
                let pages: Vec<u32> = (8 * thread..8 * thread + 8).collect();
                let part = [Part::new(anchor, &keys(pages.iter().map(|page| u64::from(*page))), &pages)];
                for _ in 0..20 {
                    assert!(store.set(&Options::default(), &part).all_ok());
                    pages.iter().for_each(|page| anchor.wipe(*page));
                    assert!(store.get(&Options::default(), &part).all_ok());
                    assert!(pages.iter().all(|page| anchor.holds(*page, u64::from(*page))));
                }
            });
        }
    });
}
