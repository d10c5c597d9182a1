//! Rules of calls from many threads.

use std::sync::Barrier;

use super::bench::Bench;
use super::data::{holds, keys, plain_pool};
use super::store::{Store, succeeds};
use super::{Check, Rule, ensure, fail};
use crate::PageStatus;
use crate::mock::{MockPool, Options, Part, Query};

pub(super) const RULES: &[Rule] = &[
    Rule::new("threads.one_key", "5", "many threads may set and get one key at the same time", &[one_key]),
    Rule::new(
        "threads.mixed",
        "5",
        "calls of all kinds from many threads leave every answer right, and a page is seen whole or not at all",
        &[mixed],
    ),
];

/// Calls at a time: as many as the instance takes, within reason.
fn threads(store: &Store) -> u32 {
    store.capabilities.concurrency.clamp(1, 8)
}

/// Runs `body` on threads of its own, each with a number; the first that ends the rule does so for all.
fn run_on(count: u32, body: impl Fn(u32) -> Check + Sync) -> Check {
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..count)
            .map(|thread| {
                scope.spawn({
                    let body = &body;
                    move || body(thread)
                })
            })
            .collect();
        let ended: Vec<Check> = started
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| fail("every thread ends", "one panicked")))
            .collect();
        ended.into_iter().collect()
    })
}

fn set_one(store: &Store, pool: &MockPool, number: u64, at: u32) -> Check {
    pool.fill(at, number);
    let set = store.set(&Options::default(), &[Part::new(pool, &keys([number]), &[at])])?;
    ensure(set.all_ok(), format!("page {number} is stored"), || format!("{set:?}"))
}

/// Reads a page: whether it is there. What is there must be right.
fn get_one(store: &Store, pool: &MockPool, number: u64, at: u32) -> Check<bool> {
    pool.fill(at, 0xb4_0000);
    let got = store.get(&Options::default(), &[Part::new(pool, &keys([number]), &[at])])?;
    if let Err(error) = &got.result {
        return fail("batch_get succeeds", error.to_string());
    }
    match got.statuses[0][0] {
        PageStatus::Ok => holds(pool, at, number).map(|()| true),
        PageStatus::Missing => Ok(false),
        other => fail(format!("page {number} is ok or missing"), format!("status {other}")),
    }
}

fn one_key(bench: &Bench) -> Check {
    let pool = plain_pool(32);
    let store = bench.attach(&[&pool])?;
    let count = threads(&store);
    let together = Barrier::new(count as usize);
    // A thread that ends early must not leave the others at the barrier, so each goes through all rounds.
    run_on(count, |thread| {
        let mut result = Ok(());
        for round in 0..40 {
            together.wait();
            if result.is_ok() {
                result = one_round(&store, &pool, thread, 1000 + round);
            }
        }
        result
    })?;
    store.close()
}

/// All threads with one key: some read first, and all have it once they have set it.
fn one_round(store: &Store, pool: &MockPool, thread: u32, number: u64) -> Check {
    if thread % 2 == 1 {
        get_one(store, pool, number, 2 * thread + 1)?;
    }
    set_one(store, pool, number, 2 * thread)?;
    let there = get_one(store, pool, number, 2 * thread + 1)?;
    ensure(there, "a page that was stored is there for the thread that stored it", || "it is missing".to_owned())
}

fn mixed(bench: &Bench) -> Check {
    let pool = plain_pool(64);
    let store = bench.attach(&[&pool])?;
    let removes = store.capabilities.remove;
    run_on(threads(&store), |thread| {
        let mut state = 77 + u64::from(thread);
        let mut chance = |of: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % of
        };
        for _ in 0..150 {
            let number = chance(24);
            let at = 2 * thread;
            match chance(8) {
                0..3 => set_one(&store, &pool, number, at)?,
                3..6 => get_one(&store, &pool, number, at + 1).map(|_| ())?,
                6 => {
                    let query = [Query::of(&pool)];
                    succeeds("batch_exists", store.exists(&Options::default(), &keys(0..24), &query)?).map(|_| ())?;
                }
                _ if removes => {
                    let removed = store.remove(&Options::default(), &[Part::new(&pool, &keys([number]), &[at])])?;
                    succeeds("batch_remove", removed.result)?;
                }
                _ => {
                    succeeds("stats", store.stats(&Options::default())?).map(|_| ())?;
                }
            }
        }
        Ok(())
    })?;
    store.close()
}
