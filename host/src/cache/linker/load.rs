//! Loading a batch: one call into the backend, whose layers are taken in while it runs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::run::{LoadRun, Origin, Verdict};
use super::transit::Passage;
use crate::cache::controller::{Attached, CallInfo, CancelSet, Event, Shared, fault_result, heal};
use crate::cache::pool::HostPool;
use crate::cache::stats::{StorageOp, StorageResult};
use crate::cache::types::MissReason;
use crate::cache::unified::{Component, PerComponent};
use crate::plugin::backend::{BackendError, ErrorKind, LayerLoad, LoadLane, PageKey, PageStatus, PoolGroup};

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
    let is_direct = attached.is_direct();
    // Whoever writes into the device's pages by himself knows nothing of what the device was told to compute with them before.
    if is_direct && !wanted.iter().all(|run| passed(shared, run)) {
        return;
    }
    let pages: usize = wanted.iter().map(|run| run.span.moved()).sum();
    let of_run = |run: &LoadRun| bytes_of(shared, &run.span.device.0.each_ref().map(Vec::len));
    let bytes: u64 = wanted.iter().map(|run| of_run(run)).sum();
    let info = CallInfo { op: StorageOp::Get, pages, bytes, operation: &batch.operation, within: None };
    let mut passage = Passage::new(shared, &wanted);
    let mut status = vec![PageStatus::Unset; pages];
    let mut results: Vec<PerComponent<Vec<StorageResult>>> = Vec::new();
    let mut answered = false;
    let began = Instant::now();
    let called = attached.call(&info, |backend, options| {
        let loads: Vec<LayerLoad<'_>> = wanted.iter().map(|run| layers_of(run, is_direct)).collect();
        let words = Arc::clone(&passage.words);
        let called = backend.load_layers(options, &loads, &words, &mut || passage.look(), &mut status);
        if called.as_ref().is_err_and(|error| error.pages_in_use) {
            // The call may still write: nobody gets these pages before it returns.
            for (component, host) in shared.hosts() {
                let of = |run: &Arc<LoadRun>| run.span.moved_by(component, is_direct).to_vec();
                let held: Vec<u32> = wanted.iter().flat_map(of).collect();
                match shared.direct_of(attached, component) {
                    Some(direct) => {
                        direct.held().hold(&held);
                        attached.hold(component, &held, direct.held().as_ref());
                    }
                    None => {
                        host.retain(&held);
                        attached.hold(component, &held, host);
                    }
                }
            }
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
        let all = |slots: &Vec<u32>| vec![fault; slots.len()];
        results = wanted.iter().map(|run| PerComponent(run.span.device.0.each_ref().map(all))).collect();
    }
    let good = |component: Component| -> usize {
        let of_component = results.iter().flat_map(|results| &results[component]);
        of_component.filter(|&&result| result == StorageResult::Ok).count()
    };
    let came = Component::ALL.map(good);
    let (moved, moved_bytes) = (came.iter().sum::<usize>() as u64, bytes_of(shared, &came));
    attached.moved_by_read(moved_bytes, bytes - moved_bytes);
    if moved > 0 {
        batch.operation.serve();
        let tokens = came[Component::Full as usize] * shared.page_size;
        shared.counters.prefetched_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        shared.events.storage_read(attached.name(), moved, moved_bytes, began.elapsed());
    }
    for (run, results) in wanted.iter().zip(&results) {
        // First, so that a corrupt page has left the store before the one that is computed in its place is offered.
        for component in Component::ALL {
            let place = (&batch.origin, component, run.span.keys_of(component));
            settle(shared, place, &results[component], answered);
        }
        run.end(run.span.verdict(results));
    }
}

/// Bytes of so many pages, by component.
fn bytes_of(shared: &Shared, pages: &[usize; 3]) -> u64 {
    let bytes = |component| shared.host_of(component).map_or(0, HostPool::page_bytes);
    Component::ALL.into_iter().zip(pages).map(|(component, &pages)| bytes(component) * pages as u64).sum()
}

/// Waits until what the device was told to compute before it got the load's slots has run. False if that failed: then the slots are not touched.
fn passed(shared: &Shared, run: &LoadRun) -> bool {
    Component::ALL.into_iter().filter_map(|component| Some((component, shared.pools(component)?.0))).all(
        |(component, device)| {
            let passed = device.pass(&run.moments[component]);
            passed.inspect_err(|error| tracing::error!(%error, "nothing can be loaded to the device")).is_ok()
        },
    )
}

fn layers_of(run: &LoadRun, is_direct: bool) -> LayerLoad<'_> {
    let lanes = PoolGroup::ALL.map(|group| {
        let component = Component::ALL[group as usize];
        LoadLane { from: run.span.from(component), pages: run.span.moved_by(component, is_direct) }
    });
    LayerLoad { request: run.request, start: run.span.start, keys: &run.span.keys, lanes }
}

fn judge(
    passage: &Passage<'_>,
    status: &[PageStatus],
    fault: Option<StorageResult>,
) -> Vec<PerComponent<Vec<StorageResult>>> {
    let mut status = status.iter().copied();
    let mut results = Vec::with_capacity(passage.runs.len());
    for (index, run) in passage.runs.iter().enumerate() {
        results.push(PerComponent(Component::ALL.map(|component| {
            let pages = 0..run.span.device[component].len();
            let of_page =
                |page| passage.result((index, component, page), status.next().unwrap_or(PageStatus::Unset), fault);
            pages.map(of_page).collect()
        })));
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
fn any_good(attached: &Attached, results: &[PerComponent<Vec<StorageResult>>]) -> Result<(), BackendError> {
    let bad = |result: &StorageResult| !matches!(result, StorageResult::Ok | StorageResult::Missing);
    if results.iter().flat_map(|results| &results.0).flatten().all(bad) {
        return Err(attached.error(ErrorKind::Internal, "no page of a load came right"));
    }
    Ok(())
}

/// What is known of the store, as far as a component's pages with these keys go, after a load.
fn settle(
    shared: &Shared,
    (origin, component, keys): (&Origin, Component, &[PageKey]),
    results: &[StorageResult],
    answered: bool,
) {
    let attached = &origin.attached;
    for result in StorageResult::ALL {
        attached.figures.add(StorageOp::Get, result, results.iter().filter(|&&other| other == result).count() as u64);
    }
    let of = |wanted: StorageResult| {
        keys.iter().zip(results).filter(move |(_, result)| **result == wanted).map(|(key, _)| *key)
    };
    attached.acknowledge(component, of(StorageResult::Ok), origin.emptied);
    if answered {
        let until = Instant::now() + SHUN_FAILED;
        attached.with_belief(component, |belief| {
            let bad = keys.iter().zip(results).filter(|(_, result)| **result != StorageResult::Ok);
            bad.for_each(|(key, _)| belief.shun(key, Some(until)));
        });
    }
    let corrupt: Vec<PageKey> = of(StorageResult::Corrupt).collect();
    if !corrupt.is_empty() {
        heal(shared, attached, component, &corrupt);
    }
}
