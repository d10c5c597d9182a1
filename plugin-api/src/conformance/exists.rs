//! Rules of `batch_exists`: which lengths can be restored.

use super::bench::Bench;
use super::data::{keys, plain_pool, put};
use super::store::succeeds;
use super::{Check, Rule, ensure};
use crate::mock::{MockPool, Options, Part, PoolSpec, Query, key};
use crate::v0_1::{ExistsArgs, PoolQuery};
use crate::{HitPolicy, PageStatus};

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "exists.restorable",
        "6",
        "every length is answered as the hit policies of the pools and the pages that the worker holds say",
        &[restorable],
    ),
    Rule::new("exists.agrees_with_get", "6", "what batch_exists says of a page is what batch_get finds", &[agrees]),
    Rule::new("exists.empty", "6", "no keys and no pools are a question too", &[empty]),
    Rule::new(
        "exists.without_statuses",
        "6",
        "an answer page by page is left out where the host has no room for it",
        &[without_statuses],
    ),
    Rule::new("exists.unknown_policy", "6", "a question with an unknown hit policy is an error", &[unknown_policy]),
];

/// Whether the first `length` pages can be restored: the definition, page by page.
fn can_restore(length: usize, pools: &[(PoolQuery, Vec<bool>)]) -> bool {
    pools.iter().all(|(query, stored)| {
        let there = |page: usize| page < query.held_pages as usize || stored[page];
        let needed = match HitPolicy::from_raw(query.hit_policy) {
            HitPolicy::AllPages => 0..length,
            HitPolicy::TrailingPages => length.saturating_sub(query.trailing_pages.max(1) as usize)..length,
            HitPolicy::BlockGroups | HitPolicy::Unknown => return true,
        };
        needed.into_iter().all(there)
    })
}

fn restorable(bench: &Bench) -> Check {
    let specs = |round: u64| {
        [
            PoolSpec::bytes(0, "kv", 16, &[96]).with_seal(32),
            PoolSpec::bytes(1, "swa", 16, &[64]).trailing(1 + (round % 3) as u32),
            PoolSpec::bytes(2, "c4", 16, &[32]).block_groups(4, 2),
        ]
    };
    let pools: Vec<MockPool> = specs(0).into_iter().map(MockPool::new).collect();
    let store = bench.attach(&pools.iter().collect::<Vec<_>>())?;
    let mut state = 4321u64;
    let mut chance = |of: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % of
    };
    for round in 0..120u64 {
        let count = chance(10);
        let chain = keys(100 * round..100 * round + count);
        let mut model = Vec::new();
        for (spec, pool) in specs(round).iter().zip(&pools) {
            let stored: Vec<bool> = (0..count).map(|_| chance(5) > 0).collect();
            let there: Vec<(u64, u32, u64)> = (0..count)
                .filter(|page| stored[*page as usize])
                .map(|page| (100 * round + page, page as u32, page))
                .collect();
            if !there.is_empty() {
                put(&store, pool, &there)?;
            }
            let held_pages = if chance(3) == 0 { chance(count + 1) as u32 } else { 0 };
            let query = Query::of(pool).raw;
            model.push((PoolQuery { trailing_pages: spec.trailing_pages, held_pages, ..query }, stored));
        }
        // Any number of the pools, in any order.
        model.rotate_left(chance(3) as usize);
        model.truncate(1 + chance(3) as usize);
        let queries: Vec<Query> = model.iter().map(|(raw, _)| Query { raw: *raw }).collect();
        let found = succeeds("batch_exists", store.exists(&Options::default(), &chain, &queries)?)?;
        // Length 0 needs nothing, so nobody asks for it.
        let wrong = (1..=count as usize).find(|length| found.restorable[*length] != can_restore(*length, &model));
        if let Some(length) = wrong {
            let right = if can_restore(length, &model) { "can" } else { "can't" };
            let seen = format!("the answer {}", u8::from(found.restorable[length]));
            return super::fail(
                format!("the first {length} pages {right} be restored with {}", in_words(&model)),
                seen,
            );
        }
    }
    store.close()
}

fn in_words(model: &[(PoolQuery, Vec<bool>)]) -> String {
    let pool = |(query, stored): &(PoolQuery, Vec<bool>)| {
        let there: String = stored.iter().map(|there| if *there { '1' } else { '0' }).collect();
        let policy = HitPolicy::from_raw(query.hit_policy);
        let trailing =
            if policy == HitPolicy::TrailingPages { format!(" {}", query.trailing_pages) } else { String::new() };
        format!("pool {} ({policy}{trailing}, {} held, stored {there})", query.pool, query.held_pages)
    };
    model.iter().map(pool).collect::<Vec<_>>().join(", ")
}

fn agrees(bench: &Bench) -> Check {
    let (pool, side) = (plain_pool(32), MockPool::new(PoolSpec::bytes(1, "side", 32, &[100])));
    let store = bench.attach(&[&pool, &side])?;
    put(&store, &pool, &[(0, 0, 0), (1, 1, 1), (3, 2, 3), (7, 3, 7)])?;
    put(&store, &side, &[(1, 0, 1), (2, 1, 2), (7, 2, 7)])?;
    let chain = keys(0..8);
    let found =
        succeeds("batch_exists", store.exists(&Options::default(), &chain, &[Query::of(&pool), Query::of(&side)])?)?;
    for (pool, present) in [&pool, &side].into_iter().zip(&found.present) {
        let got = store.get(&Options::default(), &[Part::new(pool, &chain, &(0..8).collect::<Vec<_>>())])?;
        let statuses = present.iter().zip(&got.statuses[0]).enumerate();
        for (page, (said, read)) in statuses {
            // A page that was not looked at says nothing.
            let agree = *said == PageStatus::Unset || (*said == PageStatus::Ok) == (*read == PageStatus::Ok);
            ensure(agree, format!("page {page} of pool {} is {read}, as batch_get finds", pool.spec().name), || {
                format!("batch_exists says {said}")
            })?;
        }
    }
    store.close()
}

fn empty(bench: &Bench) -> Check {
    let pool = plain_pool(4);
    let store = bench.attach(&[&pool])?;
    put(&store, &pool, &[(1, 0, 1)])?;
    let options = Options::default();
    succeeds("batch_exists without keys", store.exists(&options, &[], &[Query::of(&pool)])?)?;
    succeeds("batch_exists without keys and pools", store.exists(&options, &[], &[])?)?;
    let found = succeeds("batch_exists without pools", store.exists(&options, &keys([1, 2]), &[])?)?;
    ensure(found.longest() == 2, "any length can be restored where no pool needs anything", || format!("{found:?}"))?;
    store.close()
}

fn without_statuses(bench: &Bench) -> Check {
    let pool = plain_pool(4);
    let store = bench.attach(&[&pool])?;
    put(&store, &pool, &[(1, 0, 1), (2, 1, 2)])?;
    let found =
        store.ask("batch_exists", &Options::default(), &keys([1, 2, 3]), &[Query::of(&pool)], |args, error| {
            // SAFETY: the arguments live through this closure.
            let args = ExistsArgs { present: std::ptr::null_mut(), ..unsafe { *args } };
            // SAFETY: everything in `args` lives through the call.
            unsafe { (store.table.batch_exists)(store.this, &raw const args, error) }
        })?;
    let found = succeeds("batch_exists", found)?;
    ensure(found.longest() == 2, "a prefix of two pages", || format!("{found:?}"))?;
    store.close()
}

fn unknown_policy(bench: &Bench) -> Check {
    let pool = plain_pool(4);
    let store = bench.attach(&[&pool])?;
    let query = Query { raw: PoolQuery { hit_policy: 77, ..Query::of(&pool).raw } };
    let answer = store.exists(&Options::default(), &[key(1)], &[query])?;
    ensure(answer.is_err(), "an error for hit policy 77", || "success".to_owned())?;
    store.close()
}
