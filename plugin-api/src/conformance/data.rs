//! Rules of sets and gets.

use super::bench::Bench;
use super::store::{STATUSES, Store, succeeds};
use super::{Check, Rule, Stop, ensure, fail, fail_rule};
use crate::mock::{KvShape, MockPool, Options, Part, PoolSpec, Query, key};
use crate::v0_1::PageKey;
use crate::{Capability, Dtype, PageStatus};

/// A page that is said to be read was read whole.
pub(crate) const SHORT_READ: &str = "data.short_read";

/// The least that a store does.
pub(super) const ONE_PAGE: &str = "data.one_page";

pub(super) const RULES: &[Rule] = &[
    Rule::new("data.empty_batch", "6", "a batch without pages succeeds", &[empty_batch]),
    Rule::new(ONE_PAGE, "6", "a page that was stored comes back, byte for byte", &[one_page]),
    Rule::new("data.many_pages", "6", "10,000 pages in one call are stored, found and read", &[many_pages]),
    Rule::new(
        STATUSES,
        "7.3",
        "each page gets a status of its own, and nothing beside the statuses is written",
        &[statuses],
    ),
    Rule::new(SHORT_READ, "7.3", "a page that is said to be read was filled whole", &[short_read]),
    Rule::new(
        "data.partial",
        "6",
        "present and missing pages of a batch each get the status that is right",
        &[partial],
    ),
    Rule::new(
        "data.duplicate_keys",
        "6",
        "a key may come twice in a batch, and both get the status",
        &[duplicate_keys],
    ),
    Rule::new("data.set_twice", "6", "a page that is stored already is a success, and its bytes stay", &[set_twice]),
    Rule::new(
        "data.other_length",
        "7.3",
        "bytes of another length than the pool's page are never given out",
        &[other_length],
    ),
    Rule::new(
        "data.chain",
        "6",
        "what is stored is found whatever position, prefix and session a call names",
        &[chain],
    ),
    Rule::new(
        "data.ranges",
        "6",
        "a range of layers reads the components of those layers and the seal, and nothing else",
        &[ranges],
    )
    .needs(&[Capability::Ranges]),
    Rule::new("data.ranges_refused", "6", "who does not offer ranges of layers refuses them", &[ranges_refused]),
];

/// Seed of what lies in a page before it is read: no page is stored with it.
const BEFORE: u64 = 0xb4_0000;

/// A plain pool: two pieces and a seal.
pub(crate) fn plain_pool(pages: u64) -> MockPool {
    MockPool::new(PoolSpec::bytes(0, "kv", pages, &[384, 640]).with_seal(64))
}

pub(crate) fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<PageKey> {
    numbers.into_iter().map(key).collect()
}

/// Stores pages: page `at` of the pool, filled from `seed`, under the key of `number`. Every set must be `Ok`.
pub(crate) fn put(store: &Store, pool: &MockPool, pages: &[(u64, u32, u64)]) -> Check {
    pages.iter().for_each(|(_, at, seed)| pool.fill(*at, *seed));
    let part =
        Part::new(pool, &keys(pages.iter().map(|page| page.0)), &pages.iter().map(|page| page.1).collect::<Vec<_>>());
    let outcome = store.set(&Options::default(), &[part])?;
    if !outcome.all_ok() {
        let seen = format!("{:?}, statuses {:?}", outcome.result, brief(&outcome.statuses));
        return fail("batch_set stores pages (the check configuration has room for them)", seen);
    }
    Ok(())
}

/// Reads pages into `at`: those with a seed must come back with its bytes, the others must be missing.
pub(crate) fn expect(store: &Store, pool: &MockPool, pages: &[(u64, u32, Option<u64>)]) -> Check {
    expect_with(store, &Options::default(), pool, pages)
}

/// As [`expect`], with options of the call.
pub(crate) fn expect_with(
    store: &Store,
    options: &Options<'_>,
    pool: &MockPool,
    pages: &[(u64, u32, Option<u64>)],
) -> Check {
    pages.iter().for_each(|(_, at, _)| pool.fill(*at, BEFORE));
    let at: Vec<u32> = pages.iter().map(|page| page.1).collect();
    let outcome = store.get(options, &[Part::new(pool, &keys(pages.iter().map(|page| page.0)), &at)])?;
    if let Err(error) = &outcome.result {
        return fail("batch_get succeeds", error.to_string());
    }
    for ((number, at, seed), status) in pages.iter().zip(&outcome.statuses[0]) {
        match seed {
            Some(seed) if *status == PageStatus::Ok => holds(pool, *at, *seed)?,
            Some(_) => return fail(format!("page {number}, which is stored, is read"), format!("status {status}")),
            None if *status == PageStatus::Missing => {}
            None => return fail(format!("page {number}, which is not stored, is missing"), format!("status {status}")),
        }
    }
    Ok(())
}

/// Checks the bytes of a page that was filled with [`BEFORE`] and then read. Bytes that were left as they were are a short read.
pub(crate) fn holds(pool: &MockPool, at: u32, seed: u64) -> Check {
    let (now, right, before) = (pool.read(at), pool.pattern(seed), pool.pattern(BEFORE));
    let wrong: Vec<usize> = (0..now.len()).filter(|byte| now[*byte] != right[*byte]).collect();
    let Some(first) = wrong.first() else { return Ok(()) };
    let (count, len) = (wrong.len(), now.len());
    if wrong.iter().all(|byte| now[*byte] == before[*byte]) {
        let seen = format!("{count} of {len} bytes were left as they were, the first is byte {first}");
        return fail_rule(SHORT_READ, "a page with the status ok is filled whole", seen);
    }
    fail("the bytes that were stored come back", format!("{count} of {len} bytes differ, the first is byte {first}"))
}

/// Statuses, of which there may be many.
pub(crate) fn brief(statuses: &[Vec<PageStatus>]) -> String {
    let mut counts: Vec<(PageStatus, usize)> = Vec::new();
    for status in statuses.iter().flatten() {
        match counts.iter_mut().find(|(seen, _)| seen == status) {
            Some((_, count)) => *count += 1,
            None => counts.push((*status, 1)),
        }
    }
    counts.iter().map(|(status, count)| format!("{count} {status}")).collect::<Vec<_>>().join(", ")
}

fn empty_batch(bench: &Bench) -> Check {
    let pool = plain_pool(4);
    let store = bench.attach(&[&pool])?;
    let options = Options::default();
    for parts in [vec![], vec![Part::new(&pool, &[], &[])]] {
        for (name, outcome) in
            [("batch_get", store.get(&options, &parts)?), ("batch_set", store.set(&options, &parts)?)]
        {
            if let Err(error) = outcome.result {
                return fail(format!("{name} of no pages in {} parts succeeds", parts.len()), error.to_string());
            }
        }
    }
    store.close()
}

fn one_page(bench: &Bench) -> Check {
    let pool = plain_pool(4);
    let store = bench.attach(&[&pool])?;
    put(&store, &pool, &[(1, 2, 42)])?;
    expect(&store, &pool, &[(1, 3, Some(42))])?;
    expect(&store, &pool, &[(1, 2, Some(42))])?;
    store.close()
}

/// Statuses are checked at every call; here present and missing pages are mixed over two pools.
fn statuses(bench: &Bench) -> Check {
    let pool = plain_pool(16);
    let side = MockPool::new(PoolSpec::bytes(1, "side", 16, &[128]));
    let store = bench.attach(&[&pool, &side])?;
    put(&store, &pool, &[(1, 0, 1), (3, 1, 3), (8, 2, 8)])?;
    put(&store, &side, &[(2, 0, 2), (3, 1, 3)])?;
    let parts = [
        Part::new(&side, &keys(1..9), &(0..8).collect::<Vec<_>>()),
        Part::new(&pool, &keys(1..9), &(0..8).collect::<Vec<_>>()),
    ];
    store.get(&Options::default(), &parts)?;
    store.set(&Options::default(), &parts)?;
    store.close()
}

fn short_read(bench: &Bench) -> Check {
    // Also a page that is no multiple of anything.
    let pool = MockPool::new(PoolSpec::bytes(0, "kv", 8, &[1021, 4099, 13]).with_seal(77));
    let store = bench.attach(&[&pool])?;
    put(&store, &pool, &[(1, 0, 11), (2, 1, 12), (3, 2, 13)])?;
    expect(&store, &pool, &[(1, 3, Some(11)), (2, 4, Some(12)), (3, 5, Some(13))])?;
    store.close()
}

fn many_pages(bench: &Bench) -> Check {
    const COUNT: u32 = 10_000;
    let pool = MockPool::new(PoolSpec::bytes(0, "kv", u64::from(COUNT), &[96, 64]).with_seal(32));
    let store = bench.attach(&[&pool])?;
    let pages: Vec<_> = (0..COUNT).map(|page| (u64::from(page), page, 1000 + u64::from(page))).collect();
    put(&store, &pool, &pages)?;
    let chain = keys(0..u64::from(COUNT) + 1);
    let found = succeeds("batch_exists", store.exists(&Options::default(), &chain, &[Query::of(&pool)])?)?;
    ensure(found.longest() == COUNT as usize, format!("a prefix of {COUNT} pages"), || found.longest().to_string())?;
    let back: Vec<_> = pages.iter().map(|(number, at, seed)| (*number, COUNT - 1 - at, Some(*seed))).collect();
    expect(&store, &pool, &back)?;
    store.close()
}

fn partial(bench: &Bench) -> Check {
    let (pool, side) = (plain_pool(32), MockPool::new(PoolSpec::bytes(1, "side", 32, &[128])));
    let store = bench.attach(&[&pool, &side])?;
    // Every third page is there, and every fifth of the side pool.
    let stored = |every: u64| (0..30u64).filter(move |number| number.is_multiple_of(every));
    for (pool, every) in [(&pool, 3), (&side, 5)] {
        put(&store, pool, &stored(every).map(|number| (number, number as u32, number)).collect::<Vec<_>>())?;
        let wanted = |number: u64| (number, 31 - number as u32, number.is_multiple_of(every).then_some(number));
        expect(&store, pool, &(0..30).map(wanted).collect::<Vec<_>>())?;
    }
    // Both pools in one call.
    let places: Vec<u32> = (0..30).collect();
    let parts = [Part::new(&side, &keys(0..30), &places), Part::new(&pool, &keys(0..30), &places)];
    let got = store.get(&Options::default(), &parts)?;
    for (statuses, every) in got.statuses.iter().zip([5, 3]) {
        let right = |number: usize| if number.is_multiple_of(every) { PageStatus::Ok } else { PageStatus::Missing };
        let expected: Vec<PageStatus> = (0..30).map(right).collect();
        ensure(*statuses == expected, format!("every {every}th page is ok, the others are missing"), || {
            format!("{:?}, statuses {statuses:?}", got.result)
        })?;
    }
    store.close()
}

fn duplicate_keys(bench: &Bench) -> Check {
    let pool = plain_pool(16);
    let store = bench.attach(&[&pool])?;
    // Equal keys stand for equal bytes.
    put(&store, &pool, &[(1, 0, 11), (2, 1, 12), (1, 2, 11), (1, 3, 11)])?;
    expect(
        &store,
        &pool,
        &[(1, 4, Some(11)), (1, 5, Some(11)), (7, 6, None), (2, 7, Some(12)), (7, 8, None), (2, 9, Some(12))],
    )?;
    store.close()
}

fn set_twice(bench: &Bench) -> Check {
    let pool = plain_pool(16);
    let store = bench.attach(&[&pool])?;
    put(&store, &pool, &[(1, 0, 11), (2, 1, 12)])?;
    // Not what a host does with equal keys, but it shows which bytes stay.
    put(&store, &pool, &[(2, 2, 92), (3, 3, 13), (1, 4, 91)])?;
    expect(&store, &pool, &[(1, 5, Some(11)), (2, 6, Some(12)), (3, 7, Some(13))])?;
    store.close()
}

fn other_length(bench: &Bench) -> Check {
    let anchor = plain_pool(8);
    let short = MockPool::new(PoolSpec::bytes(1, "side", 8, &[256]));
    let store = bench.attach(&[&anchor, &short])?;
    put(&store, &short, &[(1, 0, 11)])?;
    succeeds("unregister", store.unregister(&[1])?)?;
    for len in [255, 512] {
        let long = MockPool::new(PoolSpec::bytes(2, "side", 8, &[len]));
        match store.register_side(&[&long])? {
            // It may also refuse to take the name with other pages.
            Err(_) => continue,
            Ok(()) => other_length_is_none(&store, &long)?,
        }
        succeeds("unregister", store.unregister(&[2])?)?;
    }
    store.close()
}

fn other_length_is_none(store: &Store, pool: &MockPool) -> Check {
    let got = store.get(&Options::default(), &[Part::new(pool, &keys([1]), &[0])])?;
    let status = got.statuses[0][0];
    ensure(status != PageStatus::Ok, "256 stored bytes are corrupt or missing for a pool with other pages", || {
        format!("status {status} for a page of {} bytes", pool.page_bytes())
    })
}

fn chain(bench: &Bench) -> Check {
    let pool = plain_pool(16);
    let store = bench.attach(&[&pool])?;
    let chain = keys(0..8);
    (0..4).for_each(|page| pool.fill(page, 40 + u64::from(page)));
    let part = [Part::new(&pool, &chain[4..], &[0, 1, 2, 3])];
    let options = Options { position: 4, prefix_keys: &chain[..4], session_id: "a session", ..Options::default() };
    let set = store.set(&options, &part)?;
    ensure(set.all_ok(), "a set with a prefix and a session stores its pages", || format!("{set:?}"))?;
    let others = [
        Options::default(),
        Options { position: 4, ..Options::default() },
        Options { position: 4, prefix_keys: &chain[..4], session_id: "another", ..Options::default() },
    ];
    for options in others {
        expect_with(
            &store,
            &options,
            &pool,
            &[(4, 8, Some(40)), (5, 9, Some(41)), (6, 10, Some(42)), (7, 11, Some(43))],
        )?;
        let found = succeeds("batch_exists", store.exists(&options, &chain[4..], &[Query::of(&pool)])?)?;
        ensure(found.longest() == 4, "the four pages are found", || format!("{found:?}"))?;
    }
    store.close()
}

const SHAPE: KvShape = KvShape { pages: 8, page_tokens: 4, layers: 4, heads: 2, head_dim: 8, dtype: Dtype::F16 };

fn ranges(bench: &Bench) -> Check {
    for layout in ["layer_first", "page_first", "page_first_direct", "page_head"] {
        let spec = PoolSpec { name: layout.to_owned(), ..PoolSpec::kv(0, "kv", layout, SHAPE).with_seal(64) };
        let pool = MockPool::new(spec);
        let store = bench.attach(&[&pool])?;
        put(&store, &pool, &[(1, 0, 61)])?;
        for (first, count) in [(0, 1), (1, 2), (3, 1), (0, 4)] {
            pool.fill(1, BEFORE);
            let part = Part { layers: Some((first, count)), ..Part::new(&pool, &keys([1]), &[1]) };
            let got = store.get(&Options::default(), &[part])?;
            ensure(got.all_ok(), format!("layers {first} to {} are read", first + count - 1), || format!("{got:?}"))?;
            range_is_right(&pool, first..first + count)?;
        }
        store.close()?;
    }
    Ok(())
}

/// Checks a page that was filled with [`BEFORE`], and of which some layers were read then.
fn range_is_right(pool: &MockPool, layers: std::ops::Range<u32>) -> Check {
    let (now, right, before) = (pool.read(1), pool.pattern(61), pool.pattern(BEFORE));
    let spec = pool.spec();
    let mut asked = vec![false; now.len()];
    let starts: Vec<u64> = spec.segments.iter().scan(0, |at, len| Some(std::mem::replace(at, *at + len))).collect();
    for part in spec.components.iter().filter(|part| layers.contains(&part.layer)) {
        for run in 0..part.run_count {
            let at = (starts[part.segment as usize] + part.offset + run * part.run_stride) as usize;
            asked[at..at + part.run_len as usize].fill(true);
        }
    }
    let seal = spec.segments.last().copied().unwrap_or_default() as usize;
    let len = now.len();
    asked[len - seal..].fill(true);
    let wrong = (0..len).find(|at| now[*at] != if asked[*at] { right[*at] } else { before[*at] });
    let Some(at) = wrong else { return Ok(()) };
    let what = if asked[at] { "is filled" } else { "is left alone" };
    fail(format!("{}: layers {layers:?}: byte {at} of the page {what}", spec.layout), format!("{:#x}", now[at]))
}

fn ranges_refused(bench: &Bench) -> Check {
    let pool = MockPool::new(PoolSpec::kv(0, "kv", "layer_first", SHAPE));
    let store = bench.attach(&[&pool])?;
    if store.capabilities.ranges {
        return Err(Stop::Skip("it offers ranges".to_owned()));
    }
    put(&store, &pool, &[(1, 0, 1)])?;
    let part = Part { layers: Some((1, 2)), ..Part::new(&pool, &keys([1]), &[1]) };
    let got = store.get(&Options::default(), &[part])?;
    ensure(got.result.is_err(), "a batch_get with a range of layers is an error", || format!("{got:?}"))?;
    store.close()
}
