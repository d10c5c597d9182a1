//! Reading the pages of a fetch: seals are checked, corrupt pages removed, and what one backend fails to deliver is asked of the next.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::attached::{Attached, CallFault, CallInfo};
use super::fetch::{Fetch, FetchState, Reads, Source};
use super::guard::cancel::CancelSet;
use super::paged::{PagedCall, PagedOutcome};
use super::prefetch::{finish, reason_of};
use super::{Event, Shared};
use crate::cache::pool::HostPool;
use crate::cache::stats::{StorageOp, StorageResult};
use crate::cache::unified::Component;
use crate::plugin::backend::{ErrorKind, PageKey, PageStatus};

/// How long a page is treated as missing after the store failed to deliver it.
const SHUN_FAILED: Duration = Duration::from_secs(5);

/// How long a corrupt page is treated as missing after the store failed to remove it. It may still be written meanwhile.
const SHUN_UNREMOVED: Duration = Duration::from_secs(10);

/// Pages of a fetch that one call asks for.
#[derive(Debug)]
pub(crate) struct Batch {
    pub fetch: Arc<Fetch>,
    /// Whose pages.
    pub component: Component,
    /// Which of the fetch's sources is asked first.
    pub source: usize,
    pub from: usize,
    pub to: usize,
}

/// A page of the span that did not come.
#[derive(Debug, Clone, Copy)]
struct Absent {
    page: usize,
    /// What the first backend said that was asked for it.
    verdict: StorageResult,
}

/// Where a batch's pages come from and go to.
#[derive(Clone, Copy)]
struct Place<'a> {
    shared: &'a Shared,
    fetch: &'a Fetch,
    component: Component,
    host: &'a HostPool,
}

/// Reads one batch, checks its seals, and keeps what is right.
pub(super) fn read(shared: &Shared, batch: &Batch) {
    let fetch = &batch.fetch;
    let useful = batch.component != Component::Full || batch.from < fetch.first_bad.load(Ordering::Acquire);
    if useful && !fetch.cancel.is_cancelled() {
        read_batch(shared, batch);
    }
    if fetch.batches_left.fetch_sub(1, Ordering::AcqRel) == 1 {
        measure(shared, fetch);
        finish(shared, fetch);
    } else {
        shared.send(Event::FetchProgress(fetch.id));
    }
}

/// Asks the backend of the plan, and for what it does not deliver each of the next ones once.
fn read_batch(shared: &Shared, batch: &Batch) {
    let (fetch, component) = (&batch.fetch, batch.component);
    let Some(host) = shared.host_of(component) else { return };
    let place = Place { shared, fetch, component, host };
    let mut absent = read_run(&place, batch.source, batch.from..batch.to);
    let sources = fetch.state.lock().sources.len();
    for next in batch.source + 1..sources {
        if absent.is_empty() || fetch.cancel.is_cancelled() {
            break;
        }
        let candidates = candidates(&place, next, &absent);
        for run in candidates.chunk_by(|a, b| b - a == 1) {
            let run = run[0]..run[run.len() - 1] + 1;
            if !provide_pages(&place, &run) {
                continue;
            }
            let still = read_run(&place, next, run.clone());
            let came = run.len() - still.len();
            if component == Component::Full {
                shared.counters.fallback_tokens.fetch_add((came * shared.page_size) as u64, Ordering::Relaxed);
            }
            absent.retain(|absent| !run.contains(&absent.page) || still.iter().any(|still| still.page == absent.page));
        }
    }
    for absent in absent {
        fetch.fail(component, absent.page, reason_of(absent.verdict));
    }
}

/// Those absent pages that the source `next` may have.
fn candidates(place: &Place<'_>, next: usize, absent: &[Absent]) -> Vec<usize> {
    let &Place { fetch, component, .. } = place;
    let state = fetch.state.lock();
    let Some(source) = state.sources.get(next) else { return Vec::new() };
    let now = Instant::now();
    let may_have = |page: usize| source.may_have.as_ref().is_none_or(|pages| pages[component].get(page) == Some(&true));
    source.attached.with_belief(component, |belief| {
        let usable = |page: usize| state.keys.get(fetch.start + page).is_some_and(|key| !belief.is_shunned(key, now));
        absent.iter().map(|absent| absent.page).filter(|&page| may_have(page) && usable(page)).collect()
    })
}

/// Host pages in place of those that a late call holds. False if there are none.
fn provide_pages(place: &Place<'_>, run: &Range<usize>) -> bool {
    let mut state = place.fetch.state.lock();
    let lane = &mut state.lanes[place.component];
    let lost: Vec<usize> = run.clone().filter(|&page| lane.page_mut(page).is_some_and(|page| page.is_none())).collect();
    if lost.is_empty() {
        return true;
    }
    let Some(fresh) = place.host.alloc(lost.len()) else { return false };
    for (page, fresh) in lost.into_iter().zip(fresh) {
        match lane.page_mut(page) {
            Some(empty) => *empty = Some(fresh),
            None => drop(place.host.release(&[fresh])),
        }
    }
    true
}

/// Reads pages in a row from one backend. Says which did not come.
fn read_run(place: &Place<'_>, source: usize, run: Range<usize>) -> Vec<Absent> {
    let &Place { fetch, component, host, .. } = place;
    let all = |verdict| run.clone().map(|page| Absent { page, verdict }).collect();
    let (attached, emptied, keys, pages, within) = {
        let state = fetch.state.lock();
        let Some(Source { attached, emptied, .. }) = state.sources.get(source) else {
            return all(StorageResult::Failed);
        };
        let pages: Vec<u32> = run.clone().filter_map(|page| state.lanes[component].page(page)).collect();
        (Arc::clone(attached), *emptied, Arc::clone(&state.keys), pages, fetch.share(&state.sources[source + 1..]))
    };
    if pages.len() != run.len() {
        tracing::error!(pages = pages.len(), keys = run.len(), "a fetch lost pages before they were read");
        return all(StorageResult::Failed);
    }
    let chain = &keys[..fetch.start + run.end];
    let own = &chain[fetch.start + run.start..];
    let mut status = vec![PageStatus::Unset; run.len()];
    let call = PagedCall {
        op: StorageOp::Get,
        linked: false,
        group: component.into(),
        chain,
        pages: &pages,
        page_bytes: host.page_bytes(),
        session: &fetch.order.session,
        operation: &fetch.cancel,
        within,
    };
    let began = Instant::now();
    let outcome = attached.paged(&call, &mut status, |page| {
        if !attached.settings().sealed {
            // Objects of another engine carry no seal: who sets its key scheme believes them.
            return true;
        }
        // SAFETY: the call has returned, and the fetch alone holds the page.
        match unsafe { host.verify(pages[page], &own[page]) } {
            Ok(()) => true,
            Err(fault) => {
                tracing::warn!(backend = attached.name(), %fault, "a page from storage is not what it should be");
                false
            }
        }
    });
    if !outcome.in_use.is_empty() {
        // The call may still write these pages: nobody gets them before it returns.
        let mut state = fetch.state.lock();
        for page in outcome.in_use.clone() {
            if let Some(page) = state.lanes[component].page_mut(run.start + page) {
                *page = None;
            }
        }
        attached.hold(component, &pages[outcome.in_use.clone()], host);
    }
    let verdicts: Vec<StorageResult> = (0..run.len()).map(|page| outcome.verdict(page, status[page])).collect();
    let read = Run { place, attached: &attached, source, emptied, own, first: run.start };
    read.settle(&outcome, &verdicts, began)
}

/// What a read brought, page by page.
struct Run<'a> {
    place: &'a Place<'a>,
    attached: &'a Attached,
    source: usize,
    emptied: u32,
    own: &'a [PageKey],
    first: usize,
}

impl Run<'_> {
    fn settle(&self, outcome: &PagedOutcome, verdicts: &[StorageResult], began: Instant) -> Vec<Absent> {
        let &Place { shared, fetch, component, host } = self.place;
        let good = |verdict: &StorageResult| *verdict == StorageResult::Ok;
        let came = verdicts.iter().filter(|verdict| good(verdict)).count();
        if outcome.was_made() {
            for result in StorageResult::ALL {
                let pages = verdicts.iter().filter(|&&verdict| verdict == result).count();
                self.attached.figures.add(StorageOp::Get, result, pages as u64);
            }
        }
        let keys = self.own.iter().zip(verdicts).filter(|(_, verdict)| good(verdict)).map(|(key, _)| *key);
        self.attached.acknowledge(component, keys, self.emptied);
        if outcome.answered {
            let until = Instant::now() + SHUN_FAILED;
            self.attached.with_belief(component, |belief| {
                let bad = self.own.iter().zip(verdicts).filter(|(_, verdict)| !good(verdict));
                bad.for_each(|(key, _)| belief.shun(key, Some(until)));
            });
        }
        let corrupt: Vec<usize> =
            (0..verdicts.len()).filter(|&page| verdicts[page] == StorageResult::Corrupt).collect();
        {
            let mut state = fetch.state.lock();
            let promote = promoting(&state, self.source);
            state.unproven |= came > 0 && !self.attached.settings().sealed;
            for (page, _) in verdicts.iter().enumerate().filter(|(_, verdict)| good(verdict)) {
                state.lanes[component].came(self.first + page, promote);
            }
            // What a page takes differs: only those of all tokens are compared with computing.
            if component == Component::Full {
                note_reads(&mut state, self.source, outcome, verdicts, began);
            }
        }
        if !corrupt.is_empty() {
            let keys: Vec<PageKey> = corrupt.iter().map(|&page| self.own[page]).collect();
            let healed = heal(shared, self.attached, component, &keys);
            // What a store was rid of is offered to it, should another one deliver it.
            let lane = &mut fetch.state.lock().lanes[component];
            healed.into_iter().for_each(|at| lane.offer(self.first + corrupt[at], 1 << self.source));
        }
        if came > 0 {
            let pages = came as u64;
            if component == Component::Full {
                shared.counters.prefetched_tokens.fetch_add(pages * shared.page_size as u64, Ordering::Relaxed);
            }
            shared.events.storage_read(self.attached.name(), pages, pages * host.page_bytes(), began.elapsed());
        }
        let absent = verdicts.iter().enumerate().filter(|(_, verdict)| !good(verdict));
        absent.map(|(page, &verdict)| Absent { page: self.first + page, verdict }).collect()
    }
}

/// Removes corrupt pages of a component from the store, so that they can be written anew; says which of them are gone. Where a store can't
/// remove at all they are treated as missing for good; where it failed to, for a while, after which the page is looked at again.
pub(crate) fn heal(shared: &Shared, attached: &Attached, component: Component, keys: &[PageKey]) -> Vec<usize> {
    let counters = &shared.counters;
    counters.corrupt_pages.fetch_add(keys.len() as u64, Ordering::Relaxed);
    let mut status = vec![PageStatus::Unset; keys.len()];
    let can_remove = attached.limits().remove;
    let operation = CancelSet::default();
    let info = CallInfo { op: StorageOp::Remove, pages: keys.len(), bytes: 0, operation: &operation, within: None };
    let removed = can_remove
        && attached
            .call(&info, |backend, options| backend.batch_remove(options, component.into(), keys, &mut status))
            .is_ok();
    let until = can_remove.then(|| Instant::now() + SHUN_UNREMOVED);
    let mut healed = Vec::new();
    for (page, (key, status)) in keys.iter().zip(status).enumerate() {
        let gone = removed && matches!(status, PageStatus::Ok | PageStatus::Missing);
        attached.with_belief(component, |belief| match gone {
            true => belief.heal(key),
            false => belief.shun(key, until),
        });
        if gone {
            healed.push(page);
        }
    }
    counters.healed_pages.fetch_add(healed.len() as u64, Ordering::Relaxed);
    healed
}

/// The backends before `source`, as bits, that want what is read from one further down.
fn promoting(state: &FetchState, source: usize) -> u64 {
    let wants = |source: &Source| u64::from(source.attached.settings().promote);
    state.sources.iter().take(source).enumerate().fold(0, |bits, (index, source)| bits | wants(source) << index)
}

/// Takes note of how long a backend took.
fn note_reads(
    state: &mut FetchState,
    source: usize,
    outcome: &PagedOutcome,
    verdicts: &[StorageResult],
    began: Instant,
) {
    let called_off = matches!(&outcome.result, Err(CallFault::Failed(error)) if error.kind == ErrorKind::Cancelled);
    let count = |wanted: StorageResult| verdicts.iter().filter(|&&verdict| verdict == wanted).count();
    let (came, late) = (count(StorageResult::Ok), count(StorageResult::Late));
    let cut = late > 0 || called_off || matches!(outcome.result, Err(CallFault::CrowdedOut | CallFault::CalledOff));
    if came == 0 && !cut {
        return;
    }
    if let Some(source) = state.sources.get_mut(source) {
        let last = Instant::now();
        let asked = if cut { verdicts.len() } else { came };
        let reads = source.reads.get_or_insert(Reads { first: began, last, asked: 0, came: 0, cut: false });
        reads.first = reads.first.min(began);
        reads.last = last;
        reads.asked += asked;
        reads.came += came;
        reads.cut |= cut;
    }
}

/// What a fetch that ended says of the speed of its backends.
fn measure(shared: &Shared, fetch: &Fetch) {
    let mut state = fetch.state.lock();
    for source in &mut state.sources {
        let Some(reads) = source.reads.take() else { continue };
        let (took, page_bytes) = (reads.last - reads.first, shared.host.page_bytes());
        let speed = &source.attached.speed;
        if !reads.cut {
            speed.add(reads.came as u64 * page_bytes, took);
            continue;
        }
        // What was cut off in good time says nothing. Else only what came counts: taken as read, the rest would make a backend the faster
        // the more of it never came.
        let due = speed.fit().map(|fit| fit.seconds((reads.asked as u64 * page_bytes) as f64));
        if due.is_none_or(|due| took.as_secs_f64() >= due) {
            speed.add(reads.came.max(1) as u64 * page_bytes, took);
        }
    }
}
