//! Requests in linker mode: what storage has is asked while they wait, and comes layer by layer once they run.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::CacheManager;
use super::admit::{FOLLOW_UPS, Known, Request};
use super::grant::{Draft, Phase};
use crate::cache::config::PrefetchPolicy;
use crate::cache::controller::{CancelSet, FetchStep};
use crate::cache::linker::{Answer, Arriving, LoadBatch, LoadRun, Lookup, Origin};
use crate::cache::pool::HostPool;
use crate::cache::types::{Acquire, CacheError, MissReason, Prefetch, RequestId};
use crate::cache::unified::{Component, NodeId, PerComponent, Room, Side};

/// How a request stands with storage.
#[derive(Debug, Default)]
pub(super) struct Linked {
    asked: Option<Asked>,
    /// What storage said, until the request is done: it is not asked again while the pages before that are on the device.
    answer: Option<Answer>,
    times_asked: u32,
    /// Its load, until that is settled.
    run: Option<Arc<LoadRun>>,
    /// Pages of the sequence that a load brought and that are not in the tree yet, and the backend's bit there.
    loaded: Option<(Range<usize>, u64)>,
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
        self.run.as_ref().map_or(usize::MAX, |run| run.start)
    }
}

/// What became of the pages that a grant said would come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    /// Tokens of the sequence that are right now; what comes after them is to be computed.
    pub tokens: usize,
    /// Of these, tokens that came.
    pub came: usize,
    /// Why the rest did not, if there is one.
    pub reason: Option<MissReason>,
}

/// What can be loaded behind the pages of a grant.
enum Plan {
    Nothing,
    /// Others hold the transit pages that it takes.
    Wait,
    NoSpace,
    Load {
        origin: Origin,
        keys: Arc<[[u8; 32]]>,
        device: Vec<u32>,
        transit: Vec<u32>,
    },
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
            && self.find(state).device_pages < answer.start
        {
            state.linked.answer = None;
            self.start_fetch(state);
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

    /// Storage has said what it has.
    pub(super) fn looked_up(&mut self, lookup: &Lookup, answer: Answer) {
        let Some(state) = self.requests.get_mut(&lookup.request) else { return };
        if state.linked.asked.take_if(|asked| asked.lookup.id == lookup.id).is_none() {
            return;
        }
        state.storage.hit_end = answer.hit.as_ref().map_or(answer.start, |(end, _)| *end);
        state.storage.reason = answer.fault;
        state.linked.answer = Some(answer);
    }

    /// Grants what is on the device, and behind it slots for what storage has.
    pub(super) fn grant_with_load(&mut self, state: &mut Request, draft: Draft, tokens: &[u32]) -> Acquire {
        let pages = self.tree.end(draft.lock.node()).map_or(0, |end| end as usize);
        let (origin, keys, device, transit) = match self.plan_load(state, pages, tokens) {
            Plan::Nothing => return self.grant(state, draft, tokens),
            Plan::NoSpace => {
                self.unlock(draft.lock);
                return Acquire::NoSpace;
            }
            Plan::Wait => {
                self.unlock(draft.lock);
                state.phase = Phase::Queued { ignore_host: false };
                return Acquire::Loading;
            }
            Plan::Load { origin, keys, device, transit } => (origin, keys, device, transit),
        };
        let layers = self.host().map_or(0, HostPool::layers);
        let id = self.new_id();
        let run = LoadRun::new(id, state.id, origin, keys, pages, device, transit, layers);
        self.arrivals.insert(id, Arc::clone(&run));
        self.queued_loads.push(id);
        state.linked.run = Some(Arc::clone(&run));
        let mut acquired = self.grant(state, draft, tokens);
        if let Acquire::Granted(grant) = &mut acquired {
            let root = self.tree.root(&state.namespace);
            let come = run.pages() * self.page_size;
            grant.pages.extend_from_slice(&run.device);
            grant.tokens += come;
            grant.from_storage += come;
            grant.why = self.misses(state, root, tokens, pages + run.pages());
            grant.arriving = Some(Arriving(run));
        }
        acquired
    }

    fn plan_load(&mut self, state: &mut Request, pages: usize, tokens: &[u32]) -> Plan {
        let Some(Answer { start, keys, hit: Some((end, origin)), .. }) = &state.linked.answer else {
            return Plan::Nothing;
        };
        let (keys, origin) = (Arc::clone(keys), origin.clone());
        let end = (*end).min(state.reusable_pages(tokens.len(), self.page_size));
        // Storage may have been changed or emptied since.
        let stands =
            self.writes.view_of(&origin.attached).is_some() && origin.attached.times_emptied() == origin.emptied;
        if *start > pages || end <= pages || !stands {
            return Plan::Nothing;
        }
        let (free, capacity) = self.host().map_or((0, 0), |host| (host.free_count(), host.capacity()));
        let mut count = (end - pages).min(capacity);
        if free < count {
            let now = Instant::now();
            let patience = self.config.prefetch_timeout_base;
            let until = *state.linked.room_until.get_or_insert(now + patience);
            if now < until && !(self.arrivals.is_empty() && self.writes.held.is_empty()) {
                return Plan::Wait;
            }
            count = free;
        }
        let full = |count: usize| PerComponent([count, 0, 0]);
        let mut slots = self.take_slots(Side::Device, &full(count));
        if slots.is_none() {
            if !self.nobody_else_holds_pages() {
                return Plan::NoSpace;
            }
            // Waiting would bring nothing: what fits.
            count = count.min(self.available_pages());
            slots = self.take_slots(Side::Device, &full(count));
        }
        let Some(mut slots) = slots.filter(|_| count > 0) else {
            state.storage.reason = Some(MissReason::HostFull);
            return Plan::Nothing;
        };
        let device = std::mem::take(&mut slots[Component::Full]);
        let Some(transit) = self.host().and_then(|host| host.alloc(count)) else {
            self.free_pages(&device);
            return Plan::Nothing;
        };
        state.linked.room_until = None;
        if pages + count < end {
            state.storage.reason = Some(MissReason::HostFull);
        }
        let keys = keys.get(..pages + count).map_or(keys.clone(), Arc::from);
        Plan::Load { origin, keys, device, transit }
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
    /// request's as if they had been granted. `pages` is its page table, `tokens` its sequence. None while it is not over.
    pub fn settle_load(
        &mut self,
        request: RequestId,
        tokens: &[u32],
        pages: &mut [u32],
    ) -> Result<Option<Settled>, CacheError> {
        let state = self.requests.get_mut(&request).ok_or(CacheError::UnknownRequest(request))?;
        let Some(verdict) = state.linked.run.as_ref().and_then(|run| run.verdict()) else {
            return Ok(None);
        };
        let Some(run) = state.linked.run.take() else { return Ok(None) };
        // Nothing of it writes into the slots any more, whatever the backend still does.
        run.abandon();
        let end = run.start + verdict.good;
        let stands = run.origin.attached.times_emptied() == run.origin.emptied;
        let bit = self.writes.view_of(&run.origin.attached).filter(|_| stands).map(|at| self.writes.views[at].bit);
        state.linked.loaded = bit.map(|bit| (run.start..end, bit));
        // What storage has of the rest is not believed any more.
        if verdict.reason.is_some() {
            state.linked.answer = None;
        }
        let (came, size) = (verdict.good * self.page_size, self.page_size);
        self.count(|counters| &counters.granted_storage_tokens, came);
        let lost = (run.pages() - verdict.good) * size;
        self.count(|counters| &counters.unfulfilled_storage_transfer_tokens, lost);
        self.commit(request, tokens.get(..end * size).unwrap_or_default(), pages, &mut [])?;
        Ok(Some(Settled { tokens: end * size, came, reason: verdict.reason }))
    }

    /// Marks pages that a load brought as stored where they came from, so that they are not offered there again.
    pub(super) fn mark_loaded(&mut self, request: RequestId, node: NodeId, upto: usize) {
        let Some(state) = self.requests.get_mut(&request) else { return };
        let Some((range, bit)) = state.linked.loaded.take_if(|(range, _)| range.end <= upto) else { return };
        if range.end == upto && !range.is_empty() {
            let marked = self.tree.mark_stored(node, range.start as u32, bit);
            self.sound(marked);
        }
    }

    /// A request goes, or starts anew: its load, if it has one, goes on without it or does not begin.
    pub(super) fn drop_load(&mut self, state: &mut Request) {
        state.linked.loaded = None;
        let Some(run) = state.linked.run.take() else { return };
        run.abandon();
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
        if let Some(run) = self.arrivals.remove(&id) {
            self.give_back(Side::Host, Component::Full, &run.transit);
        }
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
