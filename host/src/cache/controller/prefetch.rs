//! Fetching pages from storage: which backend has what, and who reads it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::attached::{Attached, CallFault, CallInfo, Way};
use super::fetch::{Fetch, FetchState, Lane, MOST_SOURCES, Source};
use super::guard::break_even::{Part, worth};
use super::paged::fault_result;
use super::read::{Batch, read};
use super::{Event, Shared};
use crate::cache::pool::HostPool;
use crate::cache::stats::{StorageOp, StorageResult};
use crate::cache::types::MissReason;
use crate::cache::unified::{Component, PerComponent};
use crate::plugin::backend::{ChainInfo, Held, PageKey};

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
    let needed = {
        let mut state = fetch.state.lock();
        state.keys = keys.into();
        state.hit = Some(hit);
        state.fault = found.fault;
        state.lanes = found.lanes(wanted);
        state.sources = found.sources;
        state.room_needed()
    };
    if wanted == 0 || fetch.cancel.is_cancelled() {
        return finish(shared, &fetch);
    }
    match shared.alloc_host(&needed) {
        Some(room) => {
            fetch.state.lock().give_room(room);
            transfer(shared, &fetch);
        }
        None => shared.send(Event::FetchNeedsRoom { id: fetch.id, needed }),
    }
}

/// What the backends say of a span.
struct Found {
    sources: Vec<Source>,
    /// For each page of a component the first backend that has it.
    first: PerComponent<Vec<usize>>,
    /// Leading pages of all tokens that the tree has.
    held: usize,
    /// Pages of windows that going on from a page's end needs; none without windows.
    window: Option<usize>,
    /// Whether it needs a state.
    states: bool,
    /// Leading pages that some backend has, with all that going on from their end needs.
    covered: usize,
    fault: Option<MissReason>,
}

impl Found {
    /// Asks one backend after the other, each from the first page on that none before it has; from the start where other components have
    /// gaps as well.
    fn ask(shared: &Shared, fetch: &Fetch, keys: &[PageKey]) -> Found {
        let backends = shared.registry.current();
        let span = keys.len().saturating_sub(fetch.start);
        let mut found = Found {
            sources: Vec::new(),
            first: PerComponent([(); 3].map(|()| vec![NOBODY; span])),
            held: fetch.order.held.min(span),
            window: shared.window_pages,
            states: shared.host_of(Component::State).is_some(),
            covered: 0,
            fault: None,
        };
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
                let alone = found.is_of_pages_alone();
                let from = if alone { found.covered } else { 0 };
                let held = if alone { 0 } else { found.full_pages() };
                let window = found.window.unwrap_or(0);
                let question = Question { from, held, last: index + 1 == count, alone, window };
                match exists(attached, fetch, keys, &question, within) {
                    Ok(present) => source.may_have = Some(found.take_in(index, from, present)),
                    Err(reason) => {
                        found.fault = Some(reason);
                        // What it may have is not asked for: it did not even answer.
                        source.may_have = Some(PerComponent::default());
                    }
                }
            }
            found.sources.push(source);
        }
        found
    }

    fn is_of_pages_alone(&self) -> bool {
        self.window.is_none() && !self.states
    }

    /// Takes in what a backend has of the pages from `from` on. Says what it may have of the whole span.
    fn take_in(&mut self, index: usize, from: usize, present: PerComponent<Vec<bool>>) -> PerComponent<Vec<bool>> {
        let mut may_have = PerComponent::default();
        for component in Component::ALL {
            let asked = self.first[component].iter_mut().skip(from).zip(&present[component]);
            asked.filter(|(_, there)| **there).for_each(|(first, _)| *first = (*first).min(index));
            let mut pages = vec![true; from];
            pages.extend(&present[component]);
            may_have[component] = pages;
        }
        self.covered = self.longest(self.full_pages());
        may_have
    }

    /// Leading pages of all tokens that the tree or some backend has.
    fn full_pages(&self) -> usize {
        let first = &self.first[Component::Full];
        first.iter().skip(self.held).position(|&first| first == NOBODY).map_or(first.len(), |gap| self.held + gap)
    }

    /// The longest prefix of at most `most` pages that all components can restore.
    fn longest(&self, most: usize) -> usize {
        let mut longest = 0;
        let mut run = 0;
        for end in 1..=most {
            let has = |component: Component| self.first[component][end - 1] != NOBODY;
            // What is before the span is there, or nothing could go on from its start.
            run = if has(Component::Window) { run + 1 } else { 0 };
            let window = self.window.is_none_or(|needed| run >= needed.min(end));
            if window && (!self.states || has(Component::State)) {
                longest = end;
            }
        }
        longest
    }

    /// What is read to go on from page `end`: pages of all tokens that the tree lacks, the window before it, the state at it.
    fn lanes(&self, end: usize) -> PerComponent<Lane> {
        let window = end - self.window.unwrap_or(0).min(end);
        let state = if self.states { end.saturating_sub(1) } else { end };
        let from = PerComponent([self.held.min(end), window, state]);
        let mut lanes = PerComponent::<Lane>::default();
        for component in Component::ALL {
            let span = from[component]..end;
            lanes[component] = Lane { plan: self.plan(component, span.clone()), span, ..Lane::default() };
        }
        lanes
    }

    /// Runs of pages by backend.
    fn plan(&self, component: Component, span: Range<usize>) -> Vec<(usize, usize)> {
        let mut at = span.start;
        let runs = self.first[component][span].chunk_by(|a, b| a == b);
        runs.map(|run| {
            at += run.len();
            (at, run[0])
        })
        .collect()
    }

    /// How many leading pages of the hit are read: all, or where the cache goes by the break-even, those that come faster than they
    /// are computed.
    fn keep_what_is_worth_it(&mut self, shared: &Shared, fetch: &Fetch) -> usize {
        let Some(prefill) = shared.prefill.rate().filter(|_| fetch.order.break_even) else { return self.covered };
        let mut parts = Vec::new();
        let held = self.held.min(self.covered);
        let mut from = held;
        for (end, source) in self.plan(Component::Full, held..self.covered) {
            parts.push(Part { source, pages: end - from, fit: self.sources[source].attached.speed.fit() });
            from = end;
        }
        if parts.is_empty() {
            // A window or a state alone saves computing all that is held.
            return self.covered;
        }
        let page_bytes = shared.host.page_bytes();
        let worth = worth(&parts, page_bytes, shared.page_size, prefill);
        let mut pages = held + worth.pages;
        if pages < self.covered {
            self.fault = Some(MissReason::NotWorthIt);
            // The backend of the first page that is left out is the slow one.
            let slow =
                parts.iter().find(|part| part.source == self.first[Component::Full][pages]).map(|part| part.source);
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
        self.longest(pages)
    }
}

/// What one backend is asked of a span.
struct Question {
    /// First page of the span that it is asked about.
    from: usize,
    /// Leading pages of all tokens after that one that it need not have.
    held: usize,
    /// No backend after it can fill a hole.
    last: bool,
    /// There are neither windows nor states.
    alone: bool,
    /// Pages of a window.
    window: usize,
}

/// Which pages of the span one backend has, from the question's first page on, component by component; what lies past the end of an answer is
/// of no use.
fn exists(
    attached: &Attached,
    fetch: &Fetch,
    keys: &[PageKey],
    question: &Question,
    within: Option<Duration>,
) -> Result<PerComponent<Vec<bool>>, MissReason> {
    let &Question { from, held, last, alone, window } = question;
    let (prefix, asked) = keys.split_at((fetch.start + from).min(keys.len()));
    let now = Instant::now();
    let shunned_of = |component| -> Vec<bool> {
        attached.with_belief(component, |belief| asked.iter().map(|key| belief.is_shunned(key, now)).collect())
    };
    let mut shunned = shunned_of(Component::Full);
    shunned[..held.min(asked.len())].fill(false);
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
    let held_pages: Held = [u32::try_from(held).unwrap_or(u32::MAX), 0, 0];
    match attached.call(&info, |backend, options| backend.batch_exists(options, asked, &held_pages, &chain)) {
        Ok(restorable) => {
            let there: Vec<bool> = (0..asked.len()).map(|page| page < held || restorable.has_page(page)).collect();
            let hit = there.iter().skip(held).filter(|&&there| there).count() as u64;
            attached.figures.add(StorageOp::Exists, StorageResult::Ok, hit);
            attached.figures.add(StorageOp::Exists, StorageResult::Missing, (asked.len() - held) as u64 - hit);
            // The store may have dropped pages by itself; a belief that outlives them would stop
            // them from ever being written again.
            attached.with_belief(Component::Full, |belief| {
                asked.iter().zip(&there).filter(|(_, there)| !**there).for_each(|(key, _)| belief.gone(key));
            });
            let usable = |there: Vec<bool>, shunned: Vec<bool>| -> Vec<bool> {
                there.into_iter().zip(shunned).map(|(there, shunned)| there && !shunned).collect()
            };
            let mut present = PerComponent::default();
            present[Component::Full] = usable(there, shunned);
            if !alone {
                for (component, reach) in [(Component::Window, window), (Component::State, 1)] {
                    let mut there: Vec<bool> =
                        (0..asked.len()).map(|page| restorable.names(component.into(), page)).collect();
                    // Where the store can restore a length, it has what that needs, named or not.
                    for end in (1..=asked.len()).filter(|&end| restorable.contains(end)) {
                        there[end.saturating_sub(reach)..end].fill(true);
                    }
                    present[component] = usable(there, shunned_of(component));
                }
            }
            Ok(present)
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
    for component in Component::ALL {
        let lane = &state.lanes[component];
        let page_bytes = shared.host_of(component).map_or(0, HostPool::page_bytes);
        let mut from = lane.span.start;
        for &(end, source) in &lane.plan {
            let end = end.min(lane.span.end);
            // A hit of less than a batch for each reader is cut, so that reading and checking overlap.
            let share = (end - from.min(end)).div_ceil(shared.readers).max(SHARED_BATCH);
            let suits = state.sources.get(source).map_or(1, |source| source.attached.batch(Way::Read, page_bytes));
            let longest = suits.min(share);
            while from < end {
                let to = end.min(from + longest);
                batches.push(Batch { fetch: Arc::clone(fetch), component, source, from, to });
                from = to;
            }
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
