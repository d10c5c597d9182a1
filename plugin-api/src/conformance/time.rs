//! Rules of deadlines and cancel flags.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::bench::Bench;
use super::calls::LATE;
use super::data::{expect, holds, keys, put};
use super::store::Store;
use super::{Check, Rule, ensure, fail_rule};
use crate::mock::{MockPool, Options, Outcome, Part, PoolSpec};
use crate::{ErrorKind, PageStatus};

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "time.deadline",
        "5",
        "a call that runs out of time returns soon, and what it says of its pages is true",
        &[deadline],
    ),
    Rule::new(
        "time.cancel",
        "5",
        "a call whose cancel flag is set returns soon, and what it says of its pages is true",
        &[cancel],
    ),
    Rule::new(
        "time.goes_on",
        "5",
        "calls that ran out of time or were cancelled leave the instance usable",
        &[goes_on],
    ),
];

const PAGES: u32 = 1000;

fn pool() -> MockPool {
    MockPool::new(PoolSpec::bytes(0, "kv", u64::from(2 * PAGES), &[1024, 1024]).with_seal(64))
}

fn part(pool: &MockPool, numbers: std::ops::Range<u64>, first: u32) -> [Part; 1] {
    let count = (numbers.end - numbers.start) as u32;
    [Part::new(pool, &keys(numbers), &(first..first + count).collect::<Vec<_>>())]
}

/// An error of such a call is one of those that fit it.
fn fits(call: &str, outcome: &Outcome, kind: ErrorKind) -> Check {
    let Err(error) = &outcome.result else { return Ok(()) };
    // A store that is slow may have lost its patience on its own.
    let right = [kind, ErrorKind::TimedOut, ErrorKind::Cancelled, ErrorKind::Unavailable].contains(&error.kind);
    ensure(right, format!("{call} that is ended by the host says {kind}"), || error.to_string())
}

/// Pages of a get that say `Ok` hold what was stored, whatever became of the call.
fn true_pages(pool: &MockPool, outcome: &Outcome, seeds: u64, first: u32) -> Check {
    let read = outcome.statuses[0].iter().enumerate().filter(|(_, status)| **status == PageStatus::Ok);
    read.map(|(page, _)| page as u32).try_for_each(|page| holds(pool, first + page, seeds + u64::from(page)))
}

/// Pages of a set that say `Ok` are there, whatever became of the call.
fn true_sets(store: &Store, pool: &MockPool, outcome: &Outcome, numbers: u64, seeds: u64) -> Check {
    let stored = outcome.statuses[0].iter().enumerate().filter(|(_, status)| **status == PageStatus::Ok);
    let stored: Vec<_> =
        stored.map(|(page, _)| (numbers + page as u64, PAGES + page as u32, Some(seeds + page as u64))).collect();
    if stored.is_empty() { Ok(()) } else { expect(store, pool, &stored) }
}

fn fill(pool: &MockPool, seeds: u64) {
    (0..PAGES).for_each(|page| pool.fill(page, seeds + u64::from(page)));
}

fn stored(store: &Store, pool: &MockPool) -> Check {
    let pages: Vec<_> = (0..PAGES).map(|page| (u64::from(page), page, u64::from(page))).collect();
    put(store, pool, &pages)
}

fn deadline(bench: &Bench) -> Check {
    let pool = pool();
    let store = bench.attach(&[&pool])?;
    stored(&store, &pool)?;
    for (turn, micros) in [(1u64, 0), (2, 500), (3, 5000)] {
        let options = Options { deadline: Some(Duration::from_micros(micros)), ..Options::default() };
        let got = store.get(&options, &part(&pool, 0..u64::from(PAGES), PAGES))?;
        fits("batch_get", &got, ErrorKind::TimedOut)?;
        true_pages(&pool, &got, 0, PAGES)?;
        let first = 10_000 * turn;
        fill(&pool, first);
        let set = store.set(&options, &part(&pool, first..first + u64::from(PAGES), 0))?;
        fits("batch_set", &set, ErrorKind::TimedOut)?;
        true_sets(&store, &pool, &set, first, first)?;
    }
    store.close()
}

/// Makes a call, and sets its cancel flag after a while.
fn cancelled(
    store: &Store,
    after: Duration,
    call: impl FnOnce(&Options<'_>) -> Check<Outcome> + Send,
) -> Check<Outcome> {
    let flag = AtomicU32::new(u32::from(after.is_zero()));
    let began = Instant::now();
    let outcome = std::thread::scope(|scope| {
        if !after.is_zero() {
            scope.spawn(|| {
                std::thread::sleep(after);
                flag.store(1, Ordering::Release);
            });
        }
        call(&Options { cancel: Some(&flag), ..Options::default() })
    })?;
    let took = began.elapsed().saturating_sub(after);
    let limit = store.watch.limits.late;
    if took > limit {
        let expected = format!("a call returns at most {limit:?} after its cancel flag was set");
        return fail_rule(LATE, expected, format!("it returned {took:.1?} after it"));
    }
    Ok(outcome)
}

fn cancel(bench: &Bench) -> Check {
    let pool = pool();
    let store = bench.attach(&[&pool])?;
    stored(&store, &pool)?;
    for (turn, micros) in [(1u64, 0), (2, 500), (3, 5000)] {
        let after = Duration::from_micros(micros);
        let got = cancelled(&store, after, |options| store.get(options, &part(&pool, 0..u64::from(PAGES), PAGES)))?;
        fits("batch_get", &got, ErrorKind::Cancelled)?;
        true_pages(&pool, &got, 0, PAGES)?;
        let first = 10_000 * turn;
        fill(&pool, first);
        let set =
            cancelled(&store, after, |options| store.set(options, &part(&pool, first..first + u64::from(PAGES), 0)))?;
        fits("batch_set", &set, ErrorKind::Cancelled)?;
        true_sets(&store, &pool, &set, first, first)?;
    }
    store.close()
}

fn goes_on(bench: &Bench) -> Check {
    let pool = pool();
    let store = bench.attach(&[&pool])?;
    let flag = AtomicU32::new(1);
    let late = Options { deadline: Some(Duration::ZERO), ..Options::default() };
    let stopped = Options { cancel: Some(&flag), ..Options::default() };
    for options in [late, stopped] {
        store.set(&options, &part(&pool, 0..8, 0))?;
        store.get(&options, &part(&pool, 0..8, 8))?;
        let _ = store.exists(&options, &keys(0..8), &[crate::mock::Query::of(&pool)])?;
        let _ = store.flush(&options)?;
    }
    put(&store, &pool, &[(50, 0, 50), (51, 1, 51)])?;
    expect(&store, &pool, &[(50, 2, Some(50)), (51, 3, Some(51))])?;
    store.close()
}
