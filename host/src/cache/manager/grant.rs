//! From `acquire` to the end of a request.

use std::time::Duration;

use super::CacheManager;
use super::admit::{Request, StorageOutcome};
use crate::cache::controller::{LoadJob, copy_in};
use crate::cache::types::{Acquire, CacheError, Grant, RequestId};
use crate::cache::unified::{Component, Insert, LoadTicket, Lock, NodeId, Readiness, Room, Side, Slots};

/// Pages that are loaded on the scheduler's thread: waking a worker takes as long.
const INLINE_PAGES: usize = 1;

/// Where a request stands.
#[derive(Debug)]
pub(super) enum Phase {
    /// Holds nothing.
    Queued {
        /// A load failed: take what is on the device.
        ignore_host: bool,
    },
    /// Holds a prefix that is being loaded.
    Loading(Draft),
    /// Holds the first `committed` pages of its sequence.
    Granted { lock: Lock, committed: usize },
}

/// A grant in the making.
#[derive(Debug)]
pub(super) struct Draft {
    pub lock: Lock,
    /// Pages found on the device.
    device: usize,
    /// Pages that storage brought for this request.
    storage: usize,
    /// What is missing on the device may be loaded. It is, once.
    may_load: bool,
}

/// A load that runs.
#[derive(Debug)]
pub(super) struct ActiveLoad {
    pub ticket: LoadTicket,
    pages: usize,
}

/// What came of bringing a prefix to the device.
enum Brought {
    Answer(Acquire),
    /// A load failed, or the prefix is not to be had.
    Failed,
}

impl CacheManager {
    /// Grants the longest prefix of `tokens` that is in device or host, but never the last token, which
    /// prefill needs. `tokens` is the prompt, or prompt and output after a preemption. Ends a
    /// prefetch that is still running. A request holds at most one grant.
    pub fn acquire(&mut self, request: RequestId, tokens: &[u32]) -> Result<Acquire, CacheError> {
        self.take_events();
        let mut state = self.requests.remove(&request).ok_or(CacheError::UnknownRequest(request))?;
        let result = match state.phase {
            Phase::Granted { .. } => Err(CacheError::AlreadyGranted(request)),
            _ => Ok(self.acquire_state(&mut state, tokens)),
        };
        self.requests.insert(request, state);
        result.inspect_err(|error| self.misuse(error))
    }

    fn acquire_state(&mut self, state: &mut Request, tokens: &[u32]) -> Acquire {
        let phase = std::mem::replace(&mut state.phase, Phase::Queued { ignore_host: false });
        let mut ignore_host = matches!(phase, Phase::Queued { ignore_host: true });
        let mut held = match phase {
            Phase::Loading(draft) => Some(draft),
            Phase::Queued { .. } | Phase::Granted { .. } => None,
        };
        if held.is_none() {
            self.stop_waiting(state, false);
        }
        loop {
            let Some(draft) = held.take().or_else(|| self.hold(state, tokens, ignore_host)) else {
                return Acquire::NoSpace;
            };
            match self.bring(state, draft, tokens) {
                Brought::Answer(answer) => {
                    if matches!(answer, Acquire::NoSpace) {
                        state.phase = Phase::Queued { ignore_host };
                    }
                    return answer;
                }
                // Each time round it takes less: in the end what is on the device.
                Brought::Failed => ignore_host = true,
            }
        }
    }

    /// Locks the longest prefix of `tokens` that may be reused.
    fn hold(&mut self, state: &Request, tokens: &[u32], ignore_host: bool) -> Option<Draft> {
        let root = self.tree.root(&state.namespace);
        let pages = state.reusable_pages(tokens.len(), self.page_size);
        let found = self.tree.find(root, tokens.get(..pages * self.page_size).unwrap_or(&[]))?;
        let host_tokens = (found.best.pages - found.device.pages) as usize * self.page_size;
        let ignore_host = ignore_host || host_tokens < self.config.load_back_threshold;
        let settled = self.tree.settle(if ignore_host { found.device } else { found.best });
        let node = self.sound(settled)?;
        let locked = self.tree.lock(node);
        let lock = self.sound(locked)?;
        Some(self.draft(state, lock, !ignore_host))
    }

    /// Grants a prefix that is held, or starts to load what it lacks on the device. What others are loading is waited for.
    fn bring(&mut self, state: &mut Request, draft: Draft, tokens: &[u32]) -> Brought {
        let mut draft = draft;
        let node = draft.lock.node();
        match self.tree.readiness(node) {
            Ok(Readiness::Ready) => return Brought::Answer(self.grant(state, draft, tokens)),
            Ok(Readiness::Loading) => {
                state.phase = Phase::Loading(draft);
                return Brought::Answer(Acquire::Loading);
            }
            Ok(Readiness::Lacking) if draft.may_load => {}
            Ok(Readiness::Lacking) | Err(_) => {
                self.unlock(draft.lock);
                return Brought::Failed;
            }
        }
        let needs = self.tree.load_needs(node);
        let Some(needs) = self.sound(needs) else {
            self.unlock(draft.lock);
            return Brought::Failed;
        };
        let slots = match self.take_slots(Side::Device, &needs) {
            Some(slots) => slots,
            None if self.nobody_else_holds_pages() => {
                // Waiting would bring nothing: take what fits.
                let end = self.tree.end(node).map_or(0, |end| end as usize);
                let fits = end.saturating_sub(needs[Component::Full]);
                let pages = fits + needs[Component::Full].min(self.available_pages());
                match self.shorten(state, draft, tokens, pages) {
                    Some((shorter, slots)) => {
                        draft = shorter;
                        slots
                    }
                    None => return Brought::Answer(Acquire::NoSpace),
                }
            }
            None => {
                self.unlock(draft.lock);
                return Brought::Answer(Acquire::NoSpace);
            }
        };
        draft.may_load = false;
        if !self.start_load(draft.lock.node(), slots) {
            self.unlock(draft.lock);
            return Brought::Failed;
        }
        match self.tree.readiness(draft.lock.node()) {
            Ok(Readiness::Ready) => Brought::Answer(self.grant(state, draft, tokens)),
            Ok(Readiness::Loading) => {
                state.phase = Phase::Loading(draft);
                Brought::Answer(Acquire::Loading)
            }
            Ok(Readiness::Lacking) | Err(_) => {
                self.unlock(draft.lock);
                Brought::Failed
            }
        }
    }

    fn nobody_else_holds_pages(&self) -> bool {
        self.loads.is_empty()
            && self.writes.backups.is_empty()
            && self.device.caller_count() == 0
            && self.requests.values().all(|request| matches!(request.phase, Phase::Queued { .. }))
    }

    /// Holds no more than the first `pages` pages in place of what `draft` holds, with the device slots that they lack. None, with nothing
    /// held, if there is no room even for them.
    fn shorten(&mut self, state: &Request, draft: Draft, tokens: &[u32], pages: usize) -> Option<(Draft, Slots)> {
        let known = tokens.get(..pages * self.page_size).unwrap_or(tokens);
        let root = self.tree.root(&state.namespace);
        let found = self.tree.find(root, known);
        let node = found.and_then(|found| {
            let settled = self.tree.settle(found.best);
            self.sound(settled)
        });
        let lock = node.and_then(|node| {
            let locked = self.tree.lock(node);
            self.sound(locked)
        });
        self.unlock(draft.lock);
        let shorter = self.draft(state, lock?, true);
        let needs = self.tree.load_needs(shorter.lock.node()).unwrap_or_default();
        let slots = self.take_slots(Side::Device, &needs);
        if slots.is_none() {
            self.unlock(shorter.lock);
            return None;
        }
        slots.map(|slots| (shorter, slots))
    }

    fn draft(&self, state: &Request, lock: Lock, may_load: bool) -> Draft {
        let mut draft = Draft { lock, device: 0, storage: 0, may_load };
        for node in self.tree.path(draft.lock.node()).unwrap_or_default() {
            let Ok(part) = self.tree.info(node) else { continue };
            let pages = part.start as usize..(part.start + part.pages) as usize;
            if part.on_device && !part.loading {
                draft.device += pages.len();
            } else {
                let from = pages.start.max(state.fetched.start);
                draft.storage += pages.end.min(state.fetched.end).saturating_sub(from);
            }
        }
        draft
    }

    /// Starts to load what the path to `node` lacks into these slots. False, with the slots given back, if it can't be.
    fn start_load(&mut self, node: NodeId, slots: Slots) -> bool {
        if slots[Component::Full].is_empty() {
            return true;
        }
        let begun = self.tree.begin_load(node, slots.clone());
        let Some(ticket) = self.sound(begun) else {
            self.give_back_all(Side::Device, slots);
            return false;
        };
        self.give_to_tree(&slots[Component::Full]);
        let copies = self.tree.load_copies(&ticket).unwrap_or_default();
        let pairs: Vec<(u32, u32)> =
            copies.iter().flat_map(|copy| copy.host.iter().copied().zip(copy.device.iter().copied())).collect();
        let id = self.new_id();
        let inline = pairs.len() <= INLINE_PAGES;
        let job = LoadJob::new(id, pairs);
        self.loads.insert(id, ActiveLoad { ticket, pages: job.pairs.len() });
        let Some(lower) = &self.lower else { return true };
        if inline {
            let ok = job.pairs.iter().all(|&(from, to)| {
                // SAFETY: the host page is complete and locked in the tree; the device page is marked as
                // loading, so nobody reads it yet.
                unsafe { copy_in(&*self.pool, &lower.shared.host, from, to) }
            });
            self.loaded(id, ok, job.began.elapsed());
        } else {
            lower.load(&job);
        }
        true
    }

    /// A load has ended.
    pub(super) fn loaded(&mut self, id: u64, ok: bool, took: Duration) {
        let Some(ActiveLoad { ticket, pages }) = self.loads.remove(&id) else { return };
        let ended = self.tree.finish_load(ticket, ok);
        if let Some(actions) = self.sound(ended) {
            self.carry_out(actions);
        }
        if ok {
            let tokens = pages * self.page_size;
            let bytes = pages * self.pool.spec().page_bytes();
            self.count(|counters| &counters.load_back_tokens, tokens);
            self.count(|counters| &counters.load_back_bytes, bytes);
            self.listener.loaded_back(tokens as u64, bytes as u64, took);
        }
    }

    pub(super) fn unlock(&mut self, lock: Lock) {
        let unlocked = self.tree.unlock(lock);
        self.sound(unlocked);
    }

    fn grant(&mut self, state: &mut Request, draft: Draft, tokens: &[u32]) -> Acquire {
        let Draft { lock, device, storage, .. } = draft;
        let node = lock.node();
        let pages = self.tree.device_table(Component::Full, node).unwrap_or_default();
        let granted = pages.len();
        state.phase = Phase::Granted { lock, committed: granted };
        let touched = self.tree.touch(node).and_then(|()| self.tree.prioritize(node, state.hints.priority));
        self.sound(touched);
        let counted = self.tree.count_use(node, 0);
        if let Some(actions) = self.sound(counted) {
            self.carry_out_for(actions, state.session.as_ref(), 0);
        }
        self.used(node);
        let root = self.tree.root(&state.namespace);
        let size = self.page_size;
        let grant = Grant {
            tokens: granted * size,
            from_device: device * size,
            from_storage: storage * size,
            from_host: (granted - device - storage) * size,
            why: self.misses(state, root, tokens, granted),
            pages,
        };
        self.count(|counters| &counters.granted_device_tokens, grant.from_device);
        self.count(|counters| &counters.granted_host_tokens, grant.from_host);
        self.count(|counters| &counters.granted_storage_tokens, grant.from_storage);
        Acquire::Granted(grant)
    }

    /// Takes the whole pages of `tokens` (all tokens of the sequence whose KV is computed) into the tree and
    /// extends the request's lock over them. `pages` is the request's page table from position 0:
    /// granted pages, then pages of `alloc_pages`. Where the tree had the page already, the entry is
    /// replaced by the tree's page and the request's own is freed. Cheap if no page became whole.
    pub fn commit(&mut self, request: RequestId, tokens: &[u32], pages: &mut [u32]) -> Result<(), CacheError> {
        self.commit_pages(request, tokens, pages).inspect_err(|error| self.misuse(error))
    }

    fn commit_pages(&mut self, request: RequestId, tokens: &[u32], pages: &mut [u32]) -> Result<(), CacheError> {
        let state = self.requests.get(&request).ok_or(CacheError::UnknownRequest(request))?;
        let Phase::Granted { lock, committed } = &state.phase else {
            return Err(CacheError::NotGranted(request));
        };
        let (from, committed) = (lock.node(), *committed);
        let (session, priority) = (state.session.clone(), state.hints.priority);
        let whole = tokens.len() / self.page_size;
        if whole <= committed {
            return Ok(());
        }
        let found = pages.len();
        let own = pages.get_mut(committed..whole).ok_or(CacheError::PageTable {
            request,
            tokens: tokens.len(),
            needed: whole,
            found,
        })?;
        if let Some(&page) = own.iter().find(|&&page| !self.device.is_callers(page)) {
            return Err(CacheError::ForeignPage { request, page });
        }
        let given = own.to_vec();
        let tokens = &tokens[committed * self.page_size..whole * self.page_size];
        let inserted = self.tree.insert(Insert { from, tokens, full: own, window: &mut [], state: None, priority });
        let Some(inserted) = self.sound(inserted) else { return Ok(()) };
        // What the tree had already it frees as its own.
        self.give_to_tree(&given[..inserted.pages]);
        let locked = self.tree.lock(inserted.node);
        if let Some(lock) = self.sound(locked)
            && let Some(state) = self.requests.get_mut(&request)
        {
            let longer = Phase::Granted { lock, committed: committed + inserted.pages };
            if let Phase::Granted { lock, .. } = std::mem::replace(&mut state.phase, longer) {
                self.unlock(lock);
            }
        }
        self.carry_out_for(inserted.actions, session.as_ref(), committed as u32);
        let joined = self.tree.merge_growing(inserted.node);
        if self.sound(joined) == Some(true) {
            self.want_stored(inserted.node);
        }
        Ok(())
    }

    /// Ends a request: commits as `commit` does, unlocks, and frees the pages after the last whole one.
    /// `tokens` and `pages` may be empty for a request that never was granted anything.
    pub fn finish(&mut self, request: RequestId, tokens: &[u32], pages: Vec<u32>) {
        self.preempt(request, tokens, pages);
        self.abort(request, Vec::new());
    }

    /// Ends a request in any state without committing: unlocks, frees what is not the tree's.
    pub fn abort(&mut self, request: RequestId, pages: Vec<u32>) {
        let Some(mut state) = self.requests.remove(&request) else {
            return self.free_pages(&pages);
        };
        self.stop_waiting(&mut state, false);
        self.let_go(&mut state, &pages);
    }

    /// As `finish`, but the request stays known, and `acquire` may be called for it again.
    pub fn preempt(&mut self, request: RequestId, tokens: &[u32], pages: Vec<u32>) {
        let mut pages = pages;
        let granted = matches!(self.requests.get(&request).map(|state| &state.phase), Some(Phase::Granted { .. }));
        if granted {
            // What cannot be committed is freed; `commit` has logged why.
            let _ = self.commit(request, tokens, &mut pages);
        }
        let Some(mut state) = self.requests.remove(&request) else {
            return self.free_pages(&pages);
        };
        self.let_go(&mut state, &pages);
        // What storage said of the prompt is no news for the longer sequence.
        state.storage = StorageOutcome { hit_end: 0, reason: None };
        state.fetched = 0..0;
        self.requests.insert(request, state);
    }

    /// Unlocks what a request holds, and frees the pages of its table that are not the tree's.
    fn let_go(&mut self, state: &mut Request, pages: &[u32]) {
        let phase = std::mem::replace(&mut state.phase, Phase::Queued { ignore_host: false });
        let (lock, committed) = match phase {
            Phase::Queued { .. } => return self.free_pages(pages),
            Phase::Loading(draft) => (draft.lock, 0),
            Phase::Granted { lock, committed } => (lock, committed),
        };
        self.free_pages(pages.get(committed..).unwrap_or(&[]));
        let node = lock.node();
        self.unlock(lock);
        if self.tree.contains(node) {
            let joined = self.tree.merge_up(node);
            self.sound(joined);
            // Its parts may have waited for storage under names that are gone now.
            self.want_stored(node);
        }
    }
}
