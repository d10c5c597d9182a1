//! Rules of sets and gets.

use super::bench::Bench;
use super::store::{STATUSES, Store};
use super::{Check, Rule, ensure, fail, fail_rule};
use crate::PageStatus;
use crate::mock::{MockPool, Options, Part, PoolSpec, key};
use crate::v0_1::PageKey;

/// A page that is said to be read was read whole.
pub(crate) const SHORT_READ: &str = "data.short_read";

pub(super) const RULES: &[Rule] = &[
    Rule::new("data.empty_batch", "6", "a batch without pages succeeds", &[empty_batch]),
    Rule::new("data.one_page", "6", "a page that was stored comes back, byte for byte", &[one_page]),
    Rule::new(
        STATUSES,
        "7.3",
        "each page gets a status of its own, and nothing beside the statuses is written",
        &[statuses],
    ),
    Rule::new(SHORT_READ, "7.3", "a page that is said to be read was filled whole", &[short_read]),
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

/// Reads pages into `at`: those with a seed must come back with its bytes, the others must be missing and left alone.
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
            None if *status == PageStatus::Missing => {
                ensure(pool.holds(*at, BEFORE), "a missing page leaves its place alone", || {
                    format!("place {at} has changed")
                })?;
            }
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
