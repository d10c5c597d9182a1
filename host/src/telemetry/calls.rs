//! What the guards around the backends have counted.

use std::fmt;
use std::sync::Arc;

use super::write::Writer;
use crate::cache::{BackendCounters, CallFigures, StorageOp};
use crate::plugin::backend::BreakerState;

/// Series of these backends.
pub(super) fn write(out: &mut Writer<'_>, backends: &[(String, Arc<BackendCounters>)]) -> fmt::Result {
    let figures: Vec<(&str, StorageOp, CallFigures)> = backends
        .iter()
        .flat_map(|(name, counters)| StorageOp::CALLS.map(|op| (name.as_str(), op, counters.calls(op))))
        .collect();
    let mut labelled = Vec::new();
    for &(name, op, calls) in &figures {
        let outcomes = [
            ("ok", calls.ok),
            ("failed", calls.failed),
            ("cancelled", calls.cancelled),
            ("skipped", calls.skipped),
            ("crowded_out", calls.crowded_out),
        ];
        let labels = |outcome| [("backend", name), ("op", op.as_str()), ("outcome", outcome)];
        labelled.extend(outcomes.map(|(outcome, count)| (labels(outcome), count)));
    }
    let series: Vec<_> = labelled.iter().map(|(labels, n)| (labels.as_slice(), *n)).collect();
    out.counters("kvdock:storage_calls", "Calls by backend, call and outcome, each with its retries", &series)?;
    let labels: Vec<_> =
        figures.iter().map(|(name, op, calls)| ([("backend", *name), ("op", op.as_str())], calls)).collect();
    let counts = |pick: fn(&CallFigures) -> u64| -> Vec<_> {
        labels.iter().map(|(labels, calls)| (labels.as_slice(), pick(calls))).collect()
    };
    let seconds = |pick: fn(&CallFigures) -> u64| -> Vec<_> {
        labels.iter().map(|(labels, calls)| (labels.as_slice(), pick(calls) as f64 / 1e9)).collect()
    };
    out.counters("kvdock:storage_retries", "Calls made again after an error", &counts(|calls| calls.retries))?;
    out.counters("kvdock:storage_bytes", "Bytes of the pages read and stored", &counts(|calls| calls.bytes))?;
    out.counters("kvdock:storage_queued", "Calls that waited for their turn", &counts(|calls| calls.queued))?;
    out.seconds("kvdock:storage_call_seconds", "Time in the backend", &seconds(|calls| calls.nanos))?;
    out.seconds("kvdock:storage_queued_seconds", "Time calls waited for their turn", &seconds(|c| c.queued_nanos))?;
    out.seconds(
        "kvdock:storage_limited_seconds",
        "Time calls waited for the bandwidth limit",
        &seconds(|calls| calls.limited_nanos),
    )?;
    let mut breakers = Vec::new();
    for (name, counters) in backends {
        for (way, now) in ["read", "write"].into_iter().zip(counters.breakers()) {
            for state in BreakerState::ALL {
                let labels = [("backend", name.as_str()), ("way", way), ("state", state.as_str())];
                breakers.push((labels, if state == now { 1.0 } else { 0.0 }));
            }
        }
    }
    let series: Vec<_> = breakers.iter().map(|(labels, value)| (labels.as_slice(), *value)).collect();
    out.gauges("kvdock:storage_breaker", "1 for the state a circuit breaker is in", &series)
}
