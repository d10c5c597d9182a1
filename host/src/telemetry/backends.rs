//! Figures of the storage backends: where they are in their lives, and what the guards around them have seen.
//!
//! Two instances may bear one name, such as one that drains beside its replacement. Their figures are added up, and the name is in
//! each state that one of them is in, so that no series comes twice.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::write::Writer;
use crate::plugin::BackendState;
use crate::plugin::admin::{BackendStatus, StorageStatus};

pub(super) fn write(out: &mut Writer<'_>, status: &StorageStatus) -> fmt::Result {
    states(out, status)?;
    sums(out, &status.backends)?;
    ranks(out, &status.backends)?;
    guards(out, &status.backends)
}

fn states(out: &mut Writer<'_>, status: &StorageStatus) -> fmt::Result {
    let mut by_name: BTreeMap<(&str, &str), BTreeSet<BackendState>> = BTreeMap::new();
    for backend in &status.backends {
        by_name.entry((&backend.name, &backend.plugin)).or_default().insert(backend.state);
    }
    let mut labelled = Vec::new();
    for ((name, plugin), states) in &by_name {
        for state in BackendState::ALL {
            let labels = [("backend", *name), ("plugin", *plugin), ("state", state.as_str())];
            labelled.push((labels, f64::from(u8::from(states.contains(&state)))));
        }
    }
    let series: Vec<_> = labelled.iter().map(|(labels, value)| (labels.as_slice(), *value)).collect();
    out.gauges("kvdock:storage_backend_state", "1 for each state that a backend of this name is in, else 0", &series)?;
    let labelled: Vec<_> = status
        .transitions
        .iter()
        .map(|(name, state, count)| ([("backend", name.as_str()), ("state", state.as_str())], *count))
        .collect();
    let series: Vec<_> = labelled.iter().map(|(labels, count)| (labels.as_slice(), *count)).collect();
    out.counters("kvdock:storage_backend_transitions", "How often a backend of this name went to a state", &series)
}

fn sums(out: &mut Writer<'_>, backends: &[BackendStatus]) -> fmt::Result {
    let mut by_name: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for backend in backends {
        let (in_flight, quarantined) = by_name.entry(&backend.name).or_default();
        *in_flight += backend.in_flight;
        *quarantined += backend.quarantined_pages;
    }
    let labels: Vec<_> = by_name.keys().map(|name| [("backend", *name)]).collect();
    let figures = |pick: fn(&(u64, u64)) -> u64| -> Vec<_> {
        labels.iter().zip(by_name.values()).map(|(labels, sums)| (labels.as_slice(), pick(sums) as f64)).collect()
    };
    out.gauges("kvdock:storage_in_flight", "Operations in flight", &figures(|sums| sums.0))?;
    out.gauges("kvdock:storage_quarantined_pages", "Host pages held by late calls", &figures(|sums| sums.1))
}

/// What failed on single ones of several ranks.
fn ranks(out: &mut Writer<'_>, backends: &[BackendStatus]) -> fmt::Result {
    let mut by_rank: BTreeMap<(&str, String), (u64, u64)> = BTreeMap::new();
    for backend in backends {
        for (number, rank) in backend.ranks.iter().enumerate() {
            let (calls, pages) = by_rank.entry((&backend.name, number.to_string())).or_default();
            *calls += rank.failed_calls;
            *pages += rank.lost_pages;
        }
    }
    let labels: Vec<_> = by_rank.keys().map(|(name, rank)| [("backend", *name), ("rank", rank.as_str())]).collect();
    let figures = |pick: fn(&(u64, u64)) -> u64| -> Vec<_> {
        labels.iter().zip(by_rank.values()).map(|(labels, counts)| (labels.as_slice(), pick(counts))).collect()
    };
    let calls = figures(|counts| counts.0);
    out.counters("kvdock:storage_rank_failed_calls", "Calls that failed on this rank, and so on all", &calls)?;
    let pages = figures(|counts| counts.1);
    out.counters("kvdock:storage_rank_lost_pages", "Pages that came or went on another rank and not on this", &pages)
}

/// What the guards around the backends in use have measured; a name is in use once at most.
fn guards(out: &mut Writer<'_>, backends: &[BackendStatus]) -> fmt::Result {
    let tokens = |backend: &BackendStatus| backend.guards.as_ref()?.break_even?.tokens;
    let labelled: Vec<_> = backends
        .iter()
        .filter_map(|backend| Some(([("backend", backend.name.as_str())], tokens(backend)? as f64)))
        .collect();
    let series: Vec<_> = labelled.iter().map(|(labels, tokens)| (labels.as_slice(), *tokens)).collect();
    out.gauges("kvdock:storage_break_even_tokens", "Fewest tokens that are loaded faster than computed", &series)
}
