//! Fetching pages from storage: which backend has what, and who reads it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::attached::{Attached, CallFault, CallInfo, Way};
use super::fetch::{Fetch, FetchState, MOST_SOURCES, Source};
use super::guard::break_even::{Part, worth};
use super::paged::fault_result;
use super::read::{Batch, read};
use super::{Event, Shared};
use crate::cache::stats::{StorageOp, StorageResult};
use crate::cache::types::MissReason;
use crate::plugin::backend::{ChainInfo, PageKey};

/// Fewest pages worth a call of their own where one call could ask for more.
const SHARED_BATCH: usize = 32;

/// No backend has the page.
const NOBODY: usize = usize::MAX;

pub(super) fn finish(shared: &Shared, fetch: &Fetch) {
    shared.send(Event::FetchDone(fetch.id));
}

/// First step: keys, and what storage has of them.
pub(super) fn query(shared: &Shared, fetch: Arc<Fetch>) {
    if fetch.cancel.is_cancelled() {
        return finish(shared, &fetch);
    }
    let order = &fetch.order;
    let from = fetch.start * shared.page_size;
    let keys = order.path.keys_with(order.tokens.get(from..).unwrap_or(&[]));
    let mut found = Found::ask(shared, &fetch, &keys);
    shared.counters.storage_hit_tokens.fetch_add((found.covered * shared.page_size) as u64, Ordering::Relaxed);
    let hit = found.covered;
    let enough = hit >= order.threshold.max(1);
    if hit > 0 && !enough {
        found.fault = Some(MissReason::TooShort);
        let tokens = (hit * shared.page_size) as u64;
        shared.counters.unfulfilled_below_threshold_tokens.fetch_add(tokens, Ordering::Relaxed);
    }
    let wanted = if enough { found.keep_what_is_worth_it(shared, &fetch) } else { 0 };
    {
        let mut state = fetch.state.lock();
        state.keys = keys.into();
        state.hit = Some(hit);
        state.fault = found.fault;
        state.plan = found.plan(wanted);
        state.sources = found.sources;
    }
    if wanted == 0 || fetch.cancel.is_cancelled() {
        return finish(shared, &fetch);
    }
    let room = {
        let mut state = fetch.state.lock();
        shared.host.alloc(wanted).map(|pages| state.give_room(pages)).is_some()
    };
    if room {
        transfer(shared, &fetch);
    } else {
        shared.send(Event::FetchNeedsRoom { id: fetch.id, pages: wanted });
    }
}

/// What the backends say of a span.
struct Found {
    sources: Vec<Source>,
    /// For each page the first backend that has it.
    first: Vec<usize>,
    /// Leading pages that some backend has.
    covered: usize,
    fault: Option<MissReason>,
}

impl Found {
    /// Asks one backend after the other, each from the first page on that none before it has.
    fn ask(shared: &Shared, fetch: &Fetch, keys: &[PageKey]) -> Found {
        let backends = shared.registry.current();
        let span = keys.len().saturating_sub(fetch.start);
        let mut found = Found { sources: Vec::new(), first: vec![NOBODY; span], covered: 0, fault: None };
        let count = backends.len().min(MOST_SOURCES);
        for (index, attached) in backends.iter().take(MOST_SOURCES).enumerate() {
            let mut source = Source {
                attached: Arc::clone(attached),
                emptied: attached.times_emptied(),
                may_have: None,
                reads: None,
            };
            if found.covered < span && !fetch.cancel.is_cancelled() {
                let others = backends[index + 1..count].iter().filter(|other| !other.is_resting()).count();
                let within = fetch.share_among(others);
                match exists(attached, fetch, keys, found.covered, index + 1 == count, within) {
                    Ok(present) => {
                        let asked = found.first[found.covered..].iter_mut().zip(&present);
                        asked.filter(|(_, there)| **there).for_each(|(first, _)| *first = (*first).min(index));
                        let mut may_have = vec![true; found.covered];
                        may_have.extend(present);
                        source.may_have = Some(may_have);
                    }
                    Err(reason) => {
                        found.fault = Some(reason);
                        // What it may have is not asked for: it did not even answer.
                        source.may_have = Some(Vec::new());
                    }
                }
                found.covered = found.first.iter().position(|&first| first == NOBODY).unwrap_or(span);
            }
            found.sources.push(source);
        }
        found
    }

    /// Runs of pages by backend, up to page `end`.
    fn plan(&self, end: usize) -> Vec<(usize, usize)> {
        let mut plan = Vec::new();
        let mut at = 0;
        for run in self.first[..end].chunk_by(|a, b| a == b) {
            at += run.len();
            plan.push((at, run[0]));
        }
        plan
    }

    /// How many leading pages of the hit are read: all, or where the cache goes by the break-even, those that come faster than they
    /// are computed.
    fn keep_what_is_worth_it(&mut self, shared: &Shared, fetch: &Fetch) -> usize {
        let Some(prefill) = shared.prefill.rate().filter(|_| fetch.order.break_even) else { return self.covered };
        let mut parts = Vec::new();
        let mut from = 0;
        for (end, source) in self.plan(self.covered) {
            parts.push(Part { source, pages: end - from, fit: self.sources[source].attached.speed.fit() });
            from = end;
        }
        let page_bytes = shared.host.page_bytes();
        let worth = worth(&parts, page_bytes, shared.page_size, prefill);
        let mut pages = worth.pages;
        if pages < self.covered {
            self.fault = Some(MissReason::NotWorthIt);
            // The backend of the first page that is left out is the slow one.
            let slow = parts.iter().find(|part| part.source == self.first[pages]).map(|part| part.source);
            let slow = slow.and_then(|source| self.sources.get(source)).map(|source| &source.attached);
            if fetch.order.explore || slow.is_some_and(|attached| attached.speed.refuse()) {
                pages = self.covered.min(pages + fetch.order.threshold.max(1));
                shared.counters.break_even_explored.fetch_add(1, Ordering::Relaxed);
            }
            let tokens = ((self.covered - pages) * shared.page_size) as u64;
            shared.counters.unfulfilled_not_worth_tokens.fetch_add(tokens, Ordering::Relaxed);
        }
        tracing::debug!(
            fetch = fetch.id,
            hit_tokens = self.covered * shared.page_size,
            loaded_tokens = pages * shared.page_size,
            load_seconds = worth.load_seconds,
            prefill_seconds = worth.prefill_seconds,
            "break-even of a hit"
        );
        for part in &parts {
            let attached = &self.sources[part.source].attached;
            let report = attached.speed.report(Some(prefill), page_bytes as f64 / shared.page_size as f64);
            attached.speed.note(attached.name(), report, fetch.order.threshold * shared.page_size);
        }
        pages
    }
}

/// Which pages of the span one backend has, from page `from` on; what lies past the end of the answer is of no use. `last` says that no
/// backend after it can fill a hole.
fn exists(
    attached: &Attached,
    fetch: &Fetch,
    keys: &[PageKey],
    from: usize,
    last: bool,
    within: Option<Duration>,
) -> Result<Vec<bool>, MissReason> {
    let (prefix, asked) = keys.split_at((fetch.start + from).min(keys.len()));
    let now = Instant::now();
    let mut shunned: Vec<bool> =
        attached.with_belief(|belief| asked.iter().map(|key| belief.is_shunned(key, now)).collect());
    if shunned.iter().all(|&shunned| shunned) || (last && shunned.first() == Some(&true)) {
        return Err(MissReason::BackendFailed);
    }
    if last {
        // What comes after a hole that nobody fills is of no use.
        let usable = shunned.iter().position(|&shunned| shunned).unwrap_or(asked.len());
        shunned.truncate(usable);
    }
    let asked = &asked[..shunned.len()];
    let chain = ChainInfo { position: prefix.len() as u64, prefix_keys: prefix, session_id: &fetch.order.session };
    let info = CallInfo { op: StorageOp::Exists, pages: asked.len(), bytes: 0, operation: &fetch.cancel, within };
    match attached.call(&info, |backend, options| backend.batch_exists(options, asked, &chain)) {
        Ok(restorable) => {
            let there: Vec<bool> = (0..asked.len()).map(|page| restorable.has_page(page)).collect();
            let hit = there.iter().filter(|&&there| there).count() as u64;
            attached.figures.add(StorageOp::Exists, StorageResult::Ok, hit);
            attached.figures.add(StorageOp::Exists, StorageResult::Missing, asked.len() as u64 - hit);
            // The store may have dropped pages by itself; a belief that outlives them would stop
            // them from ever being written again.
            attached.with_belief(|belief| {
                asked.iter().zip(&there).filter(|(_, there)| !**there).for_each(|(key, _)| belief.gone(key));
            });
            Ok(there.iter().zip(&shunned).map(|(&there, &shunned)| there && !shunned).collect())
        }
        Err(fault) => {
            let result = fault_result(&fault);
            if matches!(fault, CallFault::Failed(_)) {
                attached.figures.add(StorageOp::Exists, result, asked.len() as u64);
            }
            Err(reason_of(result))
        }
    }
}

/// Second step: the pages, once there is room for them.
pub(super) fn transfer(shared: &Shared, fetch: &Arc<Fetch>) {
    let batches = batches(shared, fetch, &fetch.state.lock());
    if batches.is_empty() || fetch.started.swap(true, Ordering::AcqRel) {
        return finish(shared, fetch);
    }
    fetch.batches_left.store(batches.len(), Ordering::Release);
    let mut batches = batches.into_iter();
    let first = batches.next();
    for batch in batches {
        // Other workers take these while this one does the first.
        if let Err(unsent) = shared.batch_sender.send(batch) {
            read(shared, &unsent.into_inner());
        }
    }
    if let Some(first) = first {
        read(shared, &first);
    }
}

fn batches(shared: &Shared, fetch: &Arc<Fetch>, state: &FetchState) -> Vec<Batch> {
    let mut batches = Vec::new();
    let mut from = 0;
    for &(end, source) in &state.plan {
        let end = end.min(state.pages.len());
        // A hit of less than a batch for each reader is cut, so that reading and checking overlap.
        let share = (end - from.min(end)).div_ceil(shared.readers).max(SHARED_BATCH);
        let page_bytes = shared.host.page_bytes();
        let suits = state.sources.get(source).map_or(1, |source| source.attached.batch(Way::Read, page_bytes));
        let longest = suits.min(share);
        while from < end {
            let to = end.min(from + longest);
            batches.push(Batch { fetch: Arc::clone(fetch), source, from, to });
            from = to;
        }
    }
    batches
}

/// Why a page that counts so in a read was no hit.
pub(super) fn reason_of(result: StorageResult) -> MissReason {
    match result {
        StorageResult::Corrupt => MissReason::Corrupt,
        StorageResult::Late => MissReason::BackendSlow,
        StorageResult::Missing => MissReason::Evicted,
        StorageResult::Ok | StorageResult::Refused | StorageResult::Failed => MissReason::BackendFailed,
    }
}
