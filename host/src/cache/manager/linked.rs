//! Requests in linker mode: what storage has is asked while they wait, and comes layer by layer once they run.

mod plan;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::CacheManager;
use super::admit::{FOLLOW_UPS, Known, Request};
use super::grant::Phase;
use crate::cache::config::PrefetchPolicy;
use crate::cache::controller::{CancelSet, FetchStep};
use crate::cache::linker::{Answer, LoadBatch, LoadRun, Lookup};
use crate::cache::types::{CacheError, MissReason, PageTables, Prefetch, RequestId};
use crate::cache::unified::{Component, Lock, NodeId, PerComponent, Room, Side};

/// How a request stands with storage.
#[derive(Debug, Default)]
pub(super) struct Linked {
    asked: Option<Asked>,
    /// What storage said, until the request is done: it is not asked again while the pages before that are on the device.
    answer: Option<Answer>,
    times_asked: u32,
    /// Its load, until that is settled.
    run: Option<Arc<LoadRun>>,
    /// What a load brought that is not in the tree yet.
    loaded: Option<Loaded>,
    /// Pages of the tree in its page table, behind those that it holds: they lack a window or a state alone, which a load brings.
    lent: Option<Lent>,
    /// Until when it waits for transit pages.
    room_until: Option<Instant>,
}

/// A question that has no answer yet.
#[derive(Debug)]
struct Asked {
    lookup: Arc<Lookup>,
    span: usize,
    /// When the policy gives up; set at the first look that found the request blocked.
    until: Option<Instant>,
    bound: Duration,
}

impl Linked {
    /// Whether storage is being asked.
    pub fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    /// Pages of the sequence before those that still come.
    pub fn known_until(&self) -> usize {
        self.run.as_ref().map_or(usize::MAX, |run| run.span.start)
    }

    /// Pages of its sequence in whose place its table has the tree's own.
    pub fn lent_pages(&self) -> Range<usize> {
        self.lent.as_ref().map_or(0..0, |lent| lent.pages.clone())
    }

    /// The node up to whose end the tree's pages are lent.
    pub fn lent_node(&self) -> Option<NodeId> {
        self.lent.as_ref().map(|lent| lent.lock.node())
    }
}

/// Pages that a load brought, until they are in the tree.
#[derive(Debug)]
struct Loaded {
    /// Pages of the sequence before the first of each component.
    from: PerComponent<u32>,
    /// Pages of the sequence with all of them.
    end: usize,
    /// The bit in the tree of the backend that they came from.
    bit: u64,
}

/// Pages of the tree that a request reads and does not own.
#[derive(Debug)]
struct Lent {
    lock: Lock,
    pages: Range<usize>,
}

/// What became of the pages that a grant said would come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    /// Tokens of the sequence that are right now; what comes after them is to be computed.
    pub tokens: usize,
    /// Of these, tokens that came.
    pub came: usize,
    /// Slot of the recurrent state behind them, where the model has such and there are any: to be copied before anything else is asked of the
    /// cache.
    pub state: Option<u32>,
    /// Why the rest did not, if there is one.
    pub reason: Option<MissReason>,
}

impl CacheManager {
    /// Asks storage what it has behind the pages on the device.
    pub(super) fn look_up(&mut self, state: &mut Request, found: &Known, span: usize) -> Result<(), MissReason> {
        let Some(lower) = &self.lower else {
            return Err(MissReason::StorageOff);
        };
        let backends = lower.shared.registry.current();
        if backends.is_empty() {
            return Err(MissReason::StorageOff);
        }
        let threshold = self.config.prefetch_threshold.max(self.page_size);
        if span * self.page_size < threshold {
            return Err(MissReason::TooShort);
        }
        if backends.iter().all(|attached| attached.is_resting()) {
            self.count(|counters| &counters.breaker_skips, 1);
            return Err(MissReason::BackendFailed);
        }
        let path = found.found.as_ref().and_then(|found| self.tree.key_path_to(found.best).ok());
        let path = path.unwrap_or_else(|| self.tree.key_path_from(state.namespace.seed()));
        let bound = backends.iter().map(|attached| attached.settings().timeout).sum::<Duration>() * 2;
        let (from, to) = (found.pages * self.page_size, (found.pages + span) * self.page_size);
        let lookup = Arc::new(Lookup {
            id: self.new_id(),
            request: state.id,
            path,
            start: found.pages,
            held: found.resident().saturating_sub(found.pages),
            tokens: state.prompt.get(from..to).unwrap_or_default().to_vec(),
            threshold: threshold.div_ceil(self.page_size),
            until: self.patience(span, false).map(|patience| Instant::now() + patience),
            session: state.hints.session_id.clone().unwrap_or_default(),
            operation: CancelSet::default(),
        });
        state.linked.times_asked += 1;
        state.linked.asked = Some(Asked { lookup: Arc::clone(&lookup), span, until: None, bound });
        if let Some(lower) = &self.lower {
            lower.fetch(FetchStep::LookUp(lookup));
        }
        Ok(())
    }

    /// Whether a request still waits for the answer of storage.
    pub(super) fn poll_lookup(&mut self, state: &mut Request) -> Prefetch {
        // What the answer stands on may have left the device since.
        if let Some(answer) = &state.linked.answer
            && state.linked.times_asked <= FOLLOW_UPS
        {
            let found = self.find(state);
            if found.device_pages < answer.start || found.resident() < answer.start + answer.held {
                state.linked.answer = None;
                self.start_fetch(state);
            }
        }
        let policy = self.config.prefetch_policy;
        let patience = state.linked.asked.as_ref().and_then(|asked| self.patience(asked.span, false));
        let Some(asked) = &mut state.linked.asked else {
            return Prefetch::Ready;
        };
        let now = Instant::now();
        let until = match policy {
            PrefetchPolicy::BestEffort => now,
            PrefetchPolicy::Timeout | PrefetchPolicy::WaitComplete => {
                let patience = patience.unwrap_or(asked.bound).min(asked.bound);
                *asked.until.get_or_insert(now + patience)
            }
        };
        if now < until {
            return Prefetch::Waiting { until };
        }
        self.stop_lookup(state, true);
        Prefetch::Ready
    }

    /// Ends the wait for an answer. Its absence is not remembered: a request that comes back asks again.
    pub(super) fn stop_lookup(&mut self, state: &mut Request, expired: bool) {
        let Some(Asked { lookup, span, .. }) = state.linked.asked.take() else { return };
        match expired {
            true => lookup.operation.expire(),
            false => lookup.operation.cancel(),
        }
        state.storage.hit_end = lookup.start + span;
        state.storage.reason = Some(MissReason::BackendSlow);
    }

    /// Whether pages go between device and storage with no host tier between.
    pub fn is_linked(&self) -> bool {
        self.config.linked
    }

    /// Whether storage has said that it has more of a request's prompt than the device.
    pub fn has_hit(&self, request: RequestId) -> bool {
        let answer = self.requests.get(&request).and_then(|state| state.linked.answer.as_ref());
        answer.is_some_and(|answer| answer.end() > answer.start)
    }

    /// Storage has said what it has.
    pub(super) fn looked_up(&mut self, lookup: &Lookup, answer: Answer) {
        let Some(state) = self.requests.get_mut(&lookup.request) else { return };
        if state.linked.asked.take_if(|asked| asked.lookup.id == lookup.id).is_none() {
            return;
        }
        state.storage.hit_end = answer.end();
        state.storage.reason = answer.fault;
        state.linked.answer = Some(answer);
    }

    /// Starts all loads that were granted since the last time: those from one backend as one batch.
    pub fn start_loads(&mut self) {
        let queued = std::mem::take(&mut self.queued_loads);
        let mut batches: Vec<LoadBatch> = Vec::new();
        for run in queued.iter().filter_map(|id| self.arrivals.get(id)) {
            let same = |batch: &&mut LoadBatch| {
                Arc::ptr_eq(&batch.origin.attached, &run.origin.attached) && batch.origin.emptied == run.origin.emptied
            };
            match batches.iter_mut().find(same) {
                Some(batch) => batch.runs.push(Arc::clone(run)),
                None => batches.push(LoadBatch {
                    origin: run.origin.clone(),
                    runs: vec![Arc::clone(run)],
                    operation: Arc::default(),
                }),
            }
        }
        for batch in batches {
            batch.runs.iter().for_each(|run| run.hand_down(&batch.operation));
            if let Some(lower) = &self.lower {
                lower.fetch(FetchStep::Load(batch));
            }
        }
    }

    /// Takes in what came of the pages that still were to come for a request, if that is known: the good ones go into the tree, and are the
    /// request's as if they had been granted; the others leave its tables, with all that is behind them. `tokens` is its sequence. None while
    /// it is not over.
    pub fn settle_load(
        &mut self,
        request: RequestId,
        tokens: &[u32],
        tables: &mut PageTables,
    ) -> Result<Option<Settled>, CacheError> {
        let state = self.requests.get_mut(&request).ok_or(CacheError::UnknownRequest(request))?;
        let Some(verdict) = state.linked.run.as_ref().and_then(|run| run.verdict()) else {
            return Ok(None);
        };
        let Some(run) = state.linked.run.take() else { return Ok(None) };
        // Nothing of it writes into the slots any more, whatever the backend still does.
        run.abandon();
        let (span, size) = (&run.span, self.page_size);
        let end = span.start + verdict.good;
        let lent = state.linked.lent_pages();
        let stands = run.origin.attached.times_emptied() == run.origin.emptied;
        let bit = self.writes.view_of(&run.origin.attached).filter(|_| stands).map(|at| self.writes.views[at].bit);
        let from = PerComponent(Component::ALL.map(|component| span.from(component) as u32));
        state.linked.loaded = bit.map(|bit| Loaded { from, end, bit });
        // What storage has of the rest is not believed any more.
        if verdict.reason.is_some() {
            state.linked.answer = None;
        }
        let private = span.device[Component::State].first().copied();
        if end == span.end() {
            state.saves.extend(private.map(|slot| (end * size, slot)));
        } else {
            self.cut_tables(tables, end, &lent);
            self.give_back(Side::Device, Component::State, private.as_slice());
        }
        let held = end.min(lent.end).saturating_sub(lent.start);
        let came = (verdict.good - held) * size;
        self.count(|counters| &counters.granted_storage_tokens, came);
        self.count(|counters| &counters.granted_device_tokens, held * size);
        let lost = (run.pages() - verdict.good) * size;
        self.count(|counters| &counters.unfulfilled_storage_transfer_tokens, lost);
        let PageTables { pages, windows } = tables;
        let taken = self.commit(request, tokens.get(..end * size).unwrap_or_default(), pages, windows);
        let lent = self.requests.get_mut(&request).and_then(|state| state.linked.lent.take());
        self.give_back_lent(lent);
        taken?;
        Ok(Some(Settled { tokens: end * size, came, state: self.state_behind(request, end), reason: verdict.reason }))
    }

    /// Takes what is behind the first `kept` pages out of tables. Pages of `lent` are the tree's.
    fn cut_tables(&mut self, tables: &mut PageTables, kept: usize, lent: &Range<usize>) {
        let PageTables { pages, windows } = tables;
        let own: Vec<u32> = (kept..pages.len()).filter(|page| !lent.contains(page)).map(|page| pages[page]).collect();
        self.free_pages(&own);
        self.free_windows(windows.get(kept..).unwrap_or_default());
        pages.truncate(kept);
        windows.truncate(kept);
    }

    /// Slot of the state behind the first `pages` pages of a request, which are what it holds.
    fn state_behind(&self, request: RequestId, pages: usize) -> Option<u32> {
        let Phase::Granted { lock, committed } = &self.requests.get(&request)?.phase else { return None };
        let node = lock.node();
        (self.states.is_some() && *committed == pages && pages > 0).then_some(())?;
        self.tree.device_slots(Component::State, node).ok()?.first().copied()
    }

    /// Marks pages that a load brought as stored where they came from, so that they are not offered there again.
    pub(super) fn mark_loaded(&mut self, request: RequestId, node: NodeId, upto: usize) {
        let Some(state) = self.requests.get_mut(&request) else { return };
        let Some(loaded) = state.linked.loaded.take_if(|loaded| loaded.end <= upto) else { return };
        if loaded.end == upto {
            let marked = self.tree.mark_stored(node, loaded.from, loaded.bit);
            self.sound(marked);
        }
    }

    /// A request goes, or starts anew: its load, if it has one, goes on without it or does not begin. Gives back what of the tree's was in its
    /// table.
    pub(super) fn drop_load(&mut self, state: &mut Request) {
        state.linked.loaded = None;
        let lent = state.linked.lent.take();
        self.give_back_lent(lent);
        let Some(run) = state.linked.run.take() else { return };
        run.abandon();
        self.give_back(Side::Device, Component::State, &run.span.device[Component::State]);
        if let Some(at) = self.queued_loads.iter().position(|&queued| queued == run.id) {
            self.queued_loads.remove(at);
            return self.load_over(run.id);
        }
        let Some(operation) = run.operation() else { return };
        let in_batch = |other: &&Arc<LoadRun>| other.operation().is_some_and(|of| Arc::ptr_eq(&of, &operation));
        if self.arrivals.values().filter(in_batch).all(|other| other.is_abandoned() || other.verdict().is_some()) {
            operation.cancel();
        }
    }

    /// Nothing of a load runs any more. Pages that a late call still holds are held by it.
    pub(super) fn load_over(&mut self, id: u64) {
        if let Some(run) = self.arrivals.remove(&id)
            && let Some(lower) = &self.lower
        {
            lower.shared.release_host(run.span.transit.clone());
            for component in Component::ALL {
                if let Some(direct) = lower.shared.direct_of(&run.origin.attached, component) {
                    direct.held().release(&run.span.device[component]);
                }
            }
            self.sweep();
        }
    }

    /// The slots of a load that a backend fills itself are given to nobody before its call has returned.
    fn hold_slots(&self, run: &LoadRun) {
        let Some(lower) = &self.lower else { return };
        for component in Component::ALL {
            if let Some(direct) = lower.shared.direct_of(&run.origin.attached, component) {
                direct.held().hold(&run.span.device[component]);
            }
        }
    }

    /// What a pass that is void was to leave in the slots of states that were reserved for a request is not there: they are given back.
    pub fn forget_states(&mut self, request: RequestId) {
        let Some(state) = self.requests.get_mut(&request) else { return };
        let reserved: Vec<u32> = state.saves.drain(..).chain(state.trail.take()).map(|(_, slot)| slot).collect();
        self.give_back(Side::Device, Component::State, &reserved);
    }

    /// A forward pass was given up because a layer from storage was late.
    pub fn note_late_layer(&self) {
        self.count(|counters| &counters.late_layers, 1);
    }

    /// What a forward pass computed on pages from storage was thrown away: they were not right.
    pub fn note_recomputed_tail(&self) {
        self.count(|counters| &counters.recomputed_tails, 1);
    }
}
