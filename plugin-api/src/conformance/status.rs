//! Rules of `stats`, `health`, `flush` and `report_held_pages`.

use super::bench::Bench;
use super::data::{expect, keys, plain_pool, put};
use super::store::succeeds;
use super::{Check, Rule, ensure};
use crate::mock::Options;
use crate::v0_1::Stats;
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
    fits(&empty, &stats)?;
    store.close()
}

/// Whether what is known after ten pages were stored fits what was known before, where every call succeeded.
fn fits(before: &Stats, after: &Stats) -> Check {
    // A figure that the backend does not know is 0.
    ensure(after.pages == 0 || after.pages >= 10, "at least the 10 pages that were stored", || format!("{after:?}"))?;
    let bounded = after.bytes_total == 0 || after.bytes_used <= after.bytes_total;
    ensure(bounded, "no more bytes used than there are", || format!("{after:?}"))?;
    // Where several share a store, the memory that one of them brought may leave it meanwhile, with all that was there.
    let smaller = after.bytes_total < before.bytes_total;
    let grown = after.bytes_used == 0 || after.bytes_used >= before.bytes_used;
    ensure(grown || smaller, "no fewer bytes used than before", || format!("{before:?}, then {after:?}"))?;
    let failures = after.failures;
    ensure(failures == 0, "no failures when every call succeeded", || failures.to_string())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(pages: u64, bytes_used: u64, bytes_total: u64) -> Stats {
        Stats { pages, bytes_used, bytes_total, failures: 0, get_mean_ns: 0, set_mean_ns: 0 }
    }

    #[test]
    fn what_left_with_the_memory_of_another_was_counted_against_a_store() {
        let before = stats(65, 369_632, 512 << 20);
        assert!(fits(&before, &stats(62, 10_880, 256 << 20)).is_ok());
        assert!(fits(&before, &stats(62, 10_880, 512 << 20)).is_err(), "nothing left");
        assert!(fits(&before, &stats(75, 380_000, 512 << 20)).is_ok());
        assert!(fits(&before, &stats(9, 380_000, 512 << 20)).is_err(), "the ten pages are missing");
        assert!(fits(&before, &stats(75, 257 << 20, 256 << 20)).is_err(), "more than there is");
        assert!(fits(&stats(0, 0, 0), &stats(0, 0, 0)).is_ok(), "nothing is known");
        assert!(fits(&before, &Stats { failures: 1, ..stats(75, 380_000, 512 << 20) }).is_err());
    }
}
