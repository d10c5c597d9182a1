//! Loading a batch: one call into the backend, whose layers are taken in while it runs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::run::{LoadRun, Origin, Verdict};
use super::transit::{Passage, verdict};
use crate::cache::controller::{CallInfo, CancelSet, Event, Shared, fault_result, heal};
use crate::cache::stats::{StorageOp, StorageResult};
use crate::cache::types::MissReason;
use crate::cache::unified::Component;
use crate::plugin::backend::{BackendError, ChainInfo, ErrorKind, LayerLoad, PageKey, PageStatus};

/// How long a page is treated as missing after the store failed to deliver it.
const SHUN_FAILED: Duration = Duration::from_secs(5);

/// Loads from one backend that start together.
#[derive(Debug)]
pub(crate) struct LoadBatch {
    /// Where from.
    pub origin: Origin,
    /// The loads.
    pub runs: Vec<Arc<LoadRun>>,
    /// By which it is called off, when nobody wants any of them any more.
    pub operation: Arc<CancelSet>,
}

/// Ends the loads of a batch whatever becomes of it.
struct Ends<'a> {
    shared: &'a Shared,
    runs: &'a [Arc<LoadRun>],
}

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        for run in self.runs {
            run.end(Verdict { good: 0, reason: Some(MissReason::BackendFailed) });
            self.shared.send(Event::LoadOver(run.id));
        }
    }
}

/// Runs a batch to its end.
pub(crate) fn load(shared: &Shared, batch: &LoadBatch) {
    let _ends = Ends { shared, runs: &batch.runs };
    let wanted: Vec<Arc<LoadRun>> = batch.runs.iter().filter(|run| run.begin()).cloned().collect();
    if wanted.is_empty() {
        return;
    }
    let attached = &batch.origin.attached;
    let pages: usize = wanted.iter().map(|run| run.pages()).sum();
    let page_bytes = shared.host.page_bytes();
    let info = CallInfo {
        op: StorageOp::Get,
        pages,
        bytes: page_bytes * pages as u64,
        operation: &batch.operation,
        within: None,
    };
    let mut passage = Passage::new(shared, &wanted);
    let mut status = vec![PageStatus::Unset; pages];
    let mut results: Vec<Vec<StorageResult>> = Vec::new();
    let mut answered = false;
    let began = Instant::now();
    let called = attached.call(&info, |backend, options| {
        let loads: Vec<LayerLoad<'_>> = wanted.iter().map(|run| layers_of(run)).collect();
        let words = Arc::clone(&passage.words);
        let called = backend.load_layers(options, &loads, &words, &mut || passage.look(), &mut status);
        if called.as_ref().is_err_and(|error| error.pages_in_use) {
            // The call may still write: nobody gets these pages before it returns.
            let held: Vec<u32> = wanted.iter().flat_map(|run| &run.transit).copied().collect();
            shared.host.retain(&held);
            attached.hold(Component::Full, &held, &shared.host);
        } else {
            // What was settled at the very end.
            passage.look();
        }
        answered = called.is_ok();
        // A load that failed is computed, not tried again: its request waits.
        let called = called.map_err(|error| BackendError { retryable: false, ..error });
        let fault = called.as_ref().err().map(fault_of);
        results = judge(&passage, &status, fault);
        called.and_then(|()| any_good(attached, &results))
    });
    if results.is_empty() {
        // The backend was not called.
        let fault = called.as_ref().err().map_or(StorageResult::Failed, fault_result);
        results = wanted.iter().map(|run| vec![fault; run.pages()]).collect();
    }
    let moved = results.iter().flatten().filter(|&&result| result == StorageResult::Ok).count() as u64;
    attached.moved_by_read(moved * page_bytes, (pages as u64 - moved) * page_bytes);
    if moved > 0 {
        batch.operation.serve();
        shared.counters.prefetched_tokens.fetch_add(moved * shared.page_size as u64, Ordering::Relaxed);
        shared.events.storage_read(attached.name(), moved, moved * page_bytes, began.elapsed());
    }
    for (run, results) in wanted.iter().zip(&results) {
        // First, so that a corrupt page has left the store before the one that is computed in its place is offered.
        settle(shared, &batch.origin, run.own_keys(), results, answered);
        run.end(verdict(results));
    }
}

fn layers_of(run: &LoadRun) -> LayerLoad<'_> {
    let (prefix, keys) = run.keys.split_at(run.start.min(run.keys.len()));
    let chain = ChainInfo { position: prefix.len() as u64, prefix_keys: prefix, session_id: "" };
    LayerLoad { request: run.request, keys, pages: &run.transit, chain }
}

fn judge(passage: &Passage<'_>, status: &[PageStatus], fault: Option<StorageResult>) -> Vec<Vec<StorageResult>> {
    let mut at = 0;
    let mut results = Vec::with_capacity(passage.runs.len());
    for (index, run) in passage.runs.iter().enumerate() {
        let of_page = |page: usize| {
            let status = status.get(at + page).copied().unwrap_or(PageStatus::Unset);
            passage.result(index, page, status, fault)
        };
        results.push((0..run.pages()).map(of_page).collect());
        at += run.pages();
    }
    results
}

fn fault_of(error: &BackendError) -> StorageResult {
    match error.kind {
        ErrorKind::TimedOut | ErrorKind::Cancelled => StorageResult::Late,
        ErrorKind::Corrupt => StorageResult::Corrupt,
        ErrorKind::NotFound => StorageResult::Missing,
        _ => StorageResult::Failed,
    }
}

/// A call that answers well and brings no page right has failed, as far as the circuit breaker is concerned.
fn any_good(attached: &crate::cache::controller::Attached, results: &[Vec<StorageResult>]) -> Result<(), BackendError> {
    let bad = |result: &StorageResult| !matches!(result, StorageResult::Ok | StorageResult::Missing);
    if results.iter().flatten().all(bad) {
        return Err(attached.error(ErrorKind::Internal, "no page of a load came right"));
    }
    Ok(())
}

/// What is known of the store after a load.
fn settle(shared: &Shared, origin: &Origin, keys: &[PageKey], results: &[StorageResult], answered: bool) {
    let attached = &origin.attached;
    for result in StorageResult::ALL {
        attached.figures.add(StorageOp::Get, result, results.iter().filter(|&&other| other == result).count() as u64);
    }
    let of = |wanted: StorageResult| {
        keys.iter().zip(results).filter(move |(_, result)| **result == wanted).map(|(key, _)| *key)
    };
    attached.acknowledge(Component::Full, of(StorageResult::Ok), origin.emptied);
    if answered {
        let until = Instant::now() + SHUN_FAILED;
        attached.with_belief(Component::Full, |belief| {
            let bad = keys.iter().zip(results).filter(|(_, result)| **result != StorageResult::Ok);
            bad.for_each(|(key, _)| belief.shun(key, Some(until)));
        });
    }
    let corrupt: Vec<PageKey> = of(StorageResult::Corrupt).collect();
    if !corrupt.is_empty() {
        heal(shared, attached, Component::Full, &corrupt);
    }
}
