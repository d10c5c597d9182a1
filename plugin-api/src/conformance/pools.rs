//! Rules of pools of each kind and layout.

use super::bench::Bench;
use super::data::{expect, keys, plain_pool, put};
use super::store::{Store, succeeds};
use super::{Check, Rule, Stop, ensure, fail};
use crate::mock::{KvShape, MockPool, Options, Part, PoolSpec, Query, key};
use crate::v0_1::Component;
use crate::{Capability, ComponentKind, Dtype, MemoryKind, PageStatus, Result};

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "pools.layouts",
        "6",
        "pages of each layout come back, byte for byte, with the host's seal and without",
        &[layouts],
    ),
    Rule::new("pools.parts", "6", "pages of K only, with scales, and of states come back", &[parts]),
    Rule::new("pools.strides", "6", "pages with gaps between them and pieces in several regions come back", &[strides]),
    Rule::new("pools.page_sizes", "6", "pages of any size come back, from one byte on", &[page_sizes]),
    Rule::new(
        "pools.side",
        "6",
        "pages of side pools come back, in one call with the anchor and in a call of their own",
        &[side],
    ),
    Rule::new("pools.later_side", "4", "side pools may be registered later, while calls run", &[later_side]),
    Rule::new("pools.all_or_none", "4", "a call that registers side pools takes all of them or none", &[all_or_none]),
    Rule::new("pools.one_region", "3", "two pools may lie in one region", &[one_region]),
    Rule::new("pools.same_bytes", "3", "two pools may name the same bytes", &[same_bytes]),
    Rule::new("pools.shared_indices", "6", "a pool may share the page indices of another one", &[shared_indices]),
    Rule::new(
        "pools.unregister",
        "4",
        "a pool that was given back is not known any more, and its number may be used again",
        &[unregister],
    ),
    Rule::new(
        "pools.unregistered",
        "6",
        "a call that names a pool which is not registered is an error",
        &[unregistered],
    ),
    Rule::new(
        "pools.unknown_refused",
        "6",
        "an unknown memory kind, hit policy or role is refused",
        &[unknown_refused],
    ),
    Rule::new(
        "pools.logical",
        "6",
        "pages of a logical pool are markers: stored, found and read without bytes",
        &[logical],
    )
    .needs(&[Capability::LogicalPools]),
    Rule::new("pools.logical_refused", "7.5", "who does not take logical pools refuses them", &[logical_refused]),
    Rule::new("pools.device_refused", "7.5", "who does not take device memory refuses it", &[device_refused]),
];

const SHAPE: KvShape = KvShape { pages: 8, page_tokens: 4, layers: 3, heads: 2, head_dim: 8, dtype: Dtype::Bf16 };

/// Stores three pages and reads them back into other places, among them one that is not there.
fn round_trip(store: &Store, pool: &MockPool) -> Check {
    put(store, pool, &[(1, 0, 101), (2, 5, 102), (3, 3, 103)])?;
    expect(store, pool, &[(3, 0, Some(103)), (1, 7, Some(101)), (9, 1, None), (2, 3, Some(102))])
}

fn alone(bench: &Bench, what: &str, spec: PoolSpec) -> Check {
    let pool = MockPool::new(PoolSpec { name: what.to_owned(), ..spec });
    let store = bench.attach(&[&pool])?;
    round_trip(&store, &pool).map_err(|stop| in_words(stop, what))?;
    store.close()
}

/// Says of a finding which case it was.
fn in_words(stop: Stop, case: &str) -> Stop {
    match stop {
        Stop::Fail(finding) => {
            Stop::Fail(super::Finding { expected: format!("{case}: {}", finding.expected), ..finding })
        }
        skip => skip,
    }
}

fn layouts(bench: &Bench) -> Check {
    for layout in ["layer_first", "page_first", "page_first_direct", "page_head"] {
        alone(bench, layout, PoolSpec::kv(0, "kv", layout, SHAPE).with_seal(64))?;
        alone(bench, &format!("{layout}_unsealed"), PoolSpec::kv(0, "kv", layout, SHAPE))?;
    }
    Ok(())
}

fn component(layer: u32, kind: ComponentKind, segment: u32, run_len: u64) -> Component {
    Component { layer, kind: kind.raw(), segment, reserved: 0, offset: 0, run_len, run_stride: 0, run_count: 1 }
}

fn parts(bench: &Bench) -> Check {
    let base = PoolSpec { layers: 1, ..PoolSpec::bytes(0, "kv", 8, &[1536]) };
    let k_only =
        PoolSpec { dtype: Dtype::F16, components: vec![component(0, ComponentKind::K, 0, 1536)], ..base.clone() };
    alone(bench, "k_only", k_only.with_seal(64))?;
    let split = PoolSpec {
        layout: "page_first_kv_split".to_owned(),
        segments: vec![512, 512, 96],
        components: vec![
            component(0, ComponentKind::K, 0, 512),
            component(0, ComponentKind::V, 1, 512),
            component(0, ComponentKind::Scale, 2, 96),
        ],
        ..base.clone()
    };
    alone(bench, "scales", split.with_seal(64))?;
    let state = PoolSpec {
        page_tokens: 0,
        segments: vec![4000, 300, 301],
        components: vec![
            component(0, ComponentKind::TemporalState, 0, 4000),
            component(0, ComponentKind::ConvState, 1, 300),
            component(0, ComponentKind::ConvState, 2, 301),
        ],
        ..base
    };
    alone(bench, "states", state.with_seal(64))
}

fn strides(bench: &Bench) -> Check {
    let base = PoolSpec::bytes(0, "kv", 8, &[256, 512]).with_seal(64);
    alone(bench, "gaps", PoolSpec { gap: 192, ..base.clone() })?;
    alone(bench, "odd_gaps", PoolSpec { gap: 17, ..base.clone() })?;
    alone(bench, "seal_apart", PoolSpec { last_segment_apart: true, ..base })
}

fn page_sizes(bench: &Bench) -> Check {
    for bytes in [1, 511, 4096, 65_537, 1 << 20] {
        alone(bench, &format!("bytes_{bytes}"), PoolSpec::bytes(0, "kv", 8, &[bytes]))?;
    }
    Ok(())
}

fn side_pool(id: u32, name: &str) -> MockPool {
    MockPool::new(PoolSpec::bytes(id, name, 8, &[200]).with_seal(32))
}

fn side(bench: &Bench) -> Check {
    let (anchor, swa, draft) = (plain_pool(8), side_pool(1, "swa"), side_pool(7, "draft"));
    let store = bench.attach(&[&anchor, &swa, &draft])?;
    (0..3).for_each(|page| {
        anchor.fill(page, 10 + u64::from(page));
        swa.fill(page, 20 + u64::from(page));
    });
    let chain = keys(1..4);
    let parts = [Part::new(&swa, &chain[2..], &[2]), Part::new(&anchor, &chain, &[0, 1, 2])];
    let set = store.set(&Options::default(), &parts)?;
    ensure(set.all_ok(), "a set of two pools stores every page", || format!("{set:?}"))?;
    expect(&store, &swa, &[(3, 4, Some(22)), (1, 5, None)])?;
    expect(&store, &anchor, &[(1, 4, Some(10)), (2, 5, Some(11)), (3, 6, Some(12))])?;
    put(&store, &draft, &[(1, 0, 31)])?;
    expect(&store, &draft, &[(1, 6, Some(31)), (3, 7, None)])?;
    store.close()
}

fn later_side(bench: &Bench) -> Check {
    let (anchor, swa) = (plain_pool(16), side_pool(1, "swa"));
    let store = bench.attach(&[&anchor])?;
    std::thread::scope(|scope| {
        let traffic = scope.spawn(|| {
            (0..30u64).try_for_each(|round| {
                put(&store, &anchor, &[(round, 0, round)])?;
                expect(&store, &anchor, &[(round, 1, Some(round))])
            })
        });
        let registered = register_late(&store, &swa);
        traffic.join().unwrap_or_else(|_| fail("calls run on while a side pool is registered", "a thread ended"))?;
        registered
    })?;
    store.close()
}

fn register_late(store: &Store, swa: &MockPool) -> Check {
    succeeds("registering a side pool later", store.register_side(&[swa])?)?;
    put(store, swa, &[(1, 0, 21)])?;
    expect(store, swa, &[(1, 3, Some(21)), (2, 4, None)])
}

/// Whether a call that names the pool is an error.
fn is_unknown(store: &Store, pool: &MockPool) -> Check<bool> {
    let got = store.get(&Options::default(), &[Part::new(pool, &[key(1)], &[0])])?;
    Ok(got.result.is_err())
}

fn all_or_none(bench: &Bench) -> Check {
    let anchor = plain_pool(8);
    let (good, other) = (side_pool(1, "good"), side_pool(2, "other"));
    let bad = MockPool::new(PoolSpec { hit_policy: 77, ..PoolSpec::bytes(3, "bad", 8, &[64]) });
    let store = bench.attach(&[&anchor])?;
    let refused = store.register_side(&[&good, &bad, &other])?;
    ensure(refused.is_err(), "pools with an unknown hit policy among them are refused", || "success".to_owned())?;
    for pool in [&good, &other] {
        let name = &pool.spec().name;
        ensure(
            is_unknown(&store, pool)?,
            format!("pool {name} is not registered when one beside it was refused"),
            || "batch_get takes it".to_owned(),
        )?;
    }
    succeeds("registering the good ones afterwards", store.register_side(&[&good, &other])?)?;
    put(&store, &other, &[(1, 0, 5)])?;
    expect(&store, &other, &[(1, 1, Some(5))])?;
    store.close()
}

fn one_region(bench: &Bench) -> Check {
    let specs = [
        PoolSpec::bytes(0, "kv", 8, &[384, 640]).with_seal(64),
        PoolSpec::bytes(1, "swa", 8, &[200]),
        PoolSpec { gap: 24, ..PoolSpec::bytes(2, "draft", 8, &[100]) },
    ];
    let pools = MockPool::in_one_region(&specs);
    let store = bench.attach(&pools.iter().collect::<Vec<_>>())?;
    let set: Vec<(u64, u32, u64)> = (0..8).map(|page| (u64::from(page), page, 50 + u64::from(page))).collect();
    for (index, pool) in pools.iter().enumerate() {
        let mine: Vec<_> = set.iter().map(|(number, at, seed)| (*number, *at, seed + 100 * index as u64)).collect();
        put(&store, pool, &mine)?;
    }
    for (index, pool) in pools.iter().enumerate() {
        let back: Vec<_> =
            set.iter().map(|(number, at, seed)| (*number, 7 - at, Some(seed + 100 * index as u64))).collect();
        expect(&store, pool, &back)?;
    }
    store.close()
}

fn same_bytes(bench: &Bench) -> Check {
    let anchor = MockPool::new(PoolSpec::bytes(0, "kv", 8, &[384]).with_seal(64));
    let twin = anchor.same_bytes(1, "twin");
    let store = bench.attach(&[&anchor, &twin])?;
    put(&store, &anchor, &[(1, 0, 1)])?;
    put(&store, &twin, &[(2, 0, 2)])?;
    expect(&store, &anchor, &[(1, 3, Some(1)), (2, 4, None)])?;
    expect(&store, &twin, &[(2, 3, Some(2)), (1, 4, None)])?;
    store.close()
}

fn shared_indices(bench: &Bench) -> Check {
    let anchor = plain_pool(8);
    let of = |source: u32| PoolSpec { indices_from_pool: Some(source), ..PoolSpec::bytes(1, "draft", 8, &[200]) };
    let draft = MockPool::new(of(0));
    let store = bench.attach(&[&anchor, &draft])?;
    put(&store, &draft, &[(1, 2, 9)])?;
    expect(&store, &draft, &[(1, 3, Some(9))])?;
    store.close()?;
    let store = bench.open()?;
    succeeds("registering the anchor", store.register(&anchor)?)?;
    let refused = store.register_side(&[&MockPool::new(of(5))])?;
    ensure(refused.is_err(), "a pool that shares the indices of an unregistered one is refused", || {
        "success".to_owned()
    })?;
    store.close()
}

fn unregister(bench: &Bench) -> Check {
    let (anchor, swa) = (plain_pool(8), side_pool(1, "swa"));
    let store = bench.attach(&[&anchor, &swa])?;
    put(&store, &swa, &[(1, 0, 3)])?;
    succeeds("unregister", store.unregister(&[1])?)?;
    ensure(is_unknown(&store, &swa)?, "an unregistered pool is not known any more", || {
        "batch_get takes it".to_owned()
    })?;
    let again = MockPool::new(PoolSpec::bytes(1, "indexer", 8, &[96]));
    succeeds("registering another pool under the number", store.register_side(&[&again])?)?;
    put(&store, &again, &[(2, 0, 4)])?;
    expect(&store, &again, &[(2, 1, Some(4)), (1, 2, None)])?;
    store.close()
}

fn unregistered(bench: &Bench) -> Check {
    let (anchor, stranger) = (plain_pool(8), side_pool(9, "stranger"));
    let store = bench.attach(&[&anchor])?;
    let parts = [Part::new(&stranger, &[key(1)], &[0])];
    let options = Options::default();
    let answers: [(&str, Result<()>); 4] = [
        ("batch_get", store.get(&options, &parts)?.result),
        ("batch_set", store.set(&options, &parts)?.result),
        ("batch_exists", store.exists(&options, &[key(1)], &[Query::of(&stranger)])?.map(|_| ())),
        ("unregister", store.unregister(&[9])?),
    ];
    for (call, answer) in answers {
        ensure(answer.is_err(), format!("{call} of a pool that is not registered is an error"), || {
            "success".to_owned()
        })?;
    }
    store.close()
}

/// Whether an anchor is refused.
fn is_refused(bench: &Bench, spec: PoolSpec) -> Check<bool> {
    let store = bench.open()?;
    let pool = MockPool::new(spec);
    let refused = store.register(&pool)?.is_err();
    store.close()?;
    Ok(refused)
}

fn unknown_refused(bench: &Bench) -> Check {
    let base = PoolSpec::bytes(0, "kv", 8, &[64]);
    let specs = [
        ("memory kind 0", PoolSpec { memory_kind: 0, ..base.clone() }),
        ("memory kind 77", PoolSpec { memory_kind: 77, ..base.clone() }),
        ("hit policy 0", PoolSpec { hit_policy: 0, ..base.clone() }),
        ("hit policy 77", PoolSpec { hit_policy: 77, ..base.clone() }),
        ("a side pool as the anchor", PoolSpec { role: crate::PoolRole::Side, ..base.clone() }),
    ];
    for (what, spec) in specs {
        ensure(is_refused(bench, spec)?, format!("register_mem_pool_host refuses {what}"), || "success".to_owned())?;
    }
    let anchor = MockPool::new(base);
    let side = PoolSpec::bytes(1, "side", 8, &[64]);
    let sides = [
        ("memory kind 77", PoolSpec { memory_kind: 77, ..side.clone() }),
        ("hit policy 77", PoolSpec { hit_policy: 77, ..side.clone() }),
        ("an anchor as a side pool", PoolSpec { role: crate::PoolRole::Anchor, ..side }),
    ];
    let store = bench.attach(&[&anchor])?;
    for (what, spec) in sides {
        let refused = store.register_side(&[&MockPool::new(spec)])?.is_err();
        ensure(refused, format!("register_v2_side_pools refuses {what}"), || "success".to_owned())?;
    }
    store.close()
}

fn logical(bench: &Bench) -> Check {
    let anchor = MockPool::new(PoolSpec::logical(8));
    let c4 = side_pool(1, "c4");
    let store = bench.attach(&[&anchor, &c4])?;
    let options = Options::default();
    c4.fill(0, 7);
    let parts = [Part::new(&c4, &keys([1]), &[0]), Part::new(&anchor, &keys([1, 2]), &[0, 1])];
    let set = store.set(&options, &parts)?;
    ensure(set.all_ok(), "markers are stored", || format!("{set:?}"))?;
    let found = succeeds("batch_exists", store.exists(&options, &keys([1, 2, 3]), &[Query::of(&anchor)])?)?;
    ensure(found.longest() == 2, "the two markers are found, and no third", || format!("{found:?}"))?;
    let got = store.get(&options, &[Part::new(&anchor, &keys([1, 3]), &[4, 5])])?;
    let expected = vec![vec![PageStatus::Ok, PageStatus::Missing]];
    ensure(got.statuses == expected, "a marker that is there is ok, another one is missing", || format!("{got:?}"))?;
    expect(&store, &c4, &[(1, 5, Some(7)), (2, 6, None)])?;
    store.close()
}

fn logical_refused(bench: &Bench) -> Check {
    let store = bench.open()?;
    if store.capabilities.logical_pools {
        return Err(Stop::Skip("it takes logical pools".to_owned()));
    }
    let refused = store.register(&MockPool::new(PoolSpec::logical(8)))?;
    ensure(refused.is_err(), "a logical pool is refused", || "success".to_owned())?;
    store.close()
}

fn device_refused(bench: &Bench) -> Check {
    let store = bench.open()?;
    if store.capabilities.cuda_memory {
        return Err(Stop::Skip("it takes device memory".to_owned()));
    }
    drop(store);
    let spec = PoolSpec { memory_kind: MemoryKind::Cuda.raw(), ..PoolSpec::bytes(0, "kv", 8, &[64]) };
    ensure(is_refused(bench, spec)?, "a pool in device memory is refused", || "success".to_owned())
}
