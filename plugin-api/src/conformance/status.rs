//! Rules of `stats`, `health`, `flush` and `report_held_pages`.

use super::bench::Bench;
use super::data::{expect, keys, plain_pool, put};
use super::store::succeeds;
use super::{Check, Rule, ensure};
use crate::mock::Options;
use crate::{Capability, HealthState};

pub(super) const RULES: &[Rule] = &[
    Rule::new("status.stats", "4", "stats answers, and what it knows fits what was stored", &[stats]),
    Rule::new("status.health", "4", "health answers with a state, and with a reason where all is not well", &[health]),
    Rule::new("status.flush", "4", "flush succeeds, also when there is nothing to do", &[flush]),
    Rule::new("status.held_pages", "6", "reports of the pages that a worker holds are taken", &[held_pages])
        .needs(&[Capability::HeldPages]),
];

fn stats(bench: &Bench) -> Check {
    let pool = plain_pool(16);
    let store = bench.attach(&[&pool])?;
    let empty = succeeds("stats", store.stats(&Options::default())?)?;
    put(&store, &pool, &(0..10).map(|page| (u64::from(page), page, u64::from(page))).collect::<Vec<_>>())?;
    let stats = succeeds("stats", store.stats(&Options::default())?)?;
    // A figure that the backend does not know is 0.
    ensure(stats.pages == 0 || stats.pages >= 10, "at least the 10 pages that were stored", || format!("{stats:?}"))?;
    let bounded = stats.bytes_total == 0 || stats.bytes_used <= stats.bytes_total;
    ensure(bounded, "no more bytes used than there are", || format!("{stats:?}"))?;
    let grown = stats.bytes_used == 0 || stats.bytes_used >= empty.bytes_used;
    ensure(grown, "no fewer bytes used than before", || format!("{empty:?}, then {stats:?}"))?;
    let failures = stats.failures;
    ensure(failures == 0, "no failures when every call succeeded", || failures.to_string())?;
    store.close()
}

fn health(bench: &Bench) -> Check {
    let pool = plain_pool(8);
    let store = bench.attach(&[&pool])?;
    let (state, health) = succeeds("health", store.health(&Options::default())?)?;
    ensure(state.is_some(), "a state that version 0.1 knows", || format!("{health:?}"))?;
    ensure(health.state != HealthState::Failed, "an instance that works", || format!("failed: {}", health.reason))?;
    let says_why = health.state == HealthState::Ok || !health.reason.is_empty();
    ensure(says_why, "a reason where the state is not ok", || "none".to_owned())?;
    store.close()
}

fn flush(bench: &Bench) -> Check {
    let pool = plain_pool(8);
    let store = bench.attach(&[&pool])?;
    succeeds("flush of nothing", store.flush(&Options::default())?)?;
    put(&store, &pool, &[(1, 0, 1)])?;
    succeeds("flush", store.flush(&Options::default())?)?;
    succeeds("flush again", store.flush(&Options::default())?)?;
    expect(&store, &pool, &[(1, 1, Some(1))])?;
    store.close()
}

fn held_pages(bench: &Bench) -> Check {
    let pool = plain_pool(8);
    let store = bench.attach(&[&pool])?;
    succeeds("report_held_pages", store.report_held_pages(&Options::default(), &keys(0..8))?)?;
    succeeds("report_held_pages of nothing", store.report_held_pages(&Options::default(), &[])?)?;
    put(&store, &pool, &[(1, 0, 1)])?;
    expect(&store, &pool, &[(1, 1, Some(1)), (2, 2, None)])?;
    store.close()
}
