//! From `acquire` to the grant.

use std::time::Duration;

use super::CacheManager;
use super::admit::Request;
use crate::cache::controller::{LoadJob, PageCopy, by_component, copy_in};
use crate::cache::pool::{DeviceMemory, HostPool};
use crate::cache::types::{Acquire, CacheError, Grant, RequestId};
use crate::cache::unified::{Component, LoadCopy, LoadTicket, Lock, NO_SLOT, NodeId, Readiness, Room, Side, Slots};

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
    /// Pages after which a state would have made a longer hit.
    branch: Option<u32>,
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
        // What is held and loaded of windows is the one before the end, however long the node is that it lies in.
        let cut = self.tree.cut_window(node);
        self.sound(cut);
        let locked = self.tree.lock(node);
        let lock = self.sound(locked)?;
        Some(Draft { branch: found.state_branch, ..self.draft(state, lock, !ignore_host) })
    }

    /// Grants a prefix that is held, or starts to load what it lacks on the device. What others are loading is waited for.
    fn bring(&mut self, state: &mut Request, draft: Draft, tokens: &[u32]) -> Brought {
        let mut draft = draft;
        let node = draft.lock.node();
        match self.tree.readiness(node) {
            Ok(Readiness::Ready) if self.config.linked => {
                return Brought::Answer(self.grant_with_load(state, draft, tokens));
            }
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

    pub(super) fn nobody_else_holds_pages(&self) -> bool {
        self.loads.is_empty()
            && self.writes.backups.is_empty()
            && self.device.caller_count() == 0
            && [&self.windows, &self.states].into_iter().flatten().all(|pool| pool.caller_count() == 0)
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
            let node = self.sound(settled)?;
            let cut = self.tree.cut_window(node);
            self.sound(cut);
            Some(node)
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
        let mut draft = Draft { lock, device: 0, storage: 0, may_load, branch: None };
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
        if slots == Slots::default() {
            return true;
        }
        let begun = self.tree.begin_load(node, slots.clone());
        let Some(ticket) = self.sound(begun) else {
            self.give_back_all(Side::Device, slots);
            return false;
        };
        for component in Component::ALL {
            self.give_to_tree(component, &slots[component]);
        }
        let mut copies = Vec::new();
        for LoadCopy { component, host, device } in self.tree.load_copies(&ticket).unwrap_or_default() {
            copies.extend(host.into_iter().zip(device).map(|(host, device)| PageCopy { component, device, host }));
        }
        let id = self.new_id();
        let inline = copies.len() <= INLINE_PAGES;
        let job = LoadJob::new(id, copies);
        self.loads.insert(id, ActiveLoad { ticket, pages: slots[Component::Full].len() });
        let Some(lower) = &self.lower else { return true };
        if inline {
            // SAFETY: the host pages are complete and locked in the tree; the device pages are marked as
            // loading, so nobody reads them yet.
            let copy =
                |device: &DeviceMemory, pages: &[(u32, u32)], host: &HostPool| unsafe { copy_in(device, pages, host) };
            let ok = by_component(&lower.shared, &job.copies, copy);
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
            let bytes = pages * self.memory.page_bytes();
            self.count(|counters| &counters.load_back_tokens, tokens);
            self.count(|counters| &counters.load_back_bytes, bytes);
            self.listener.loaded_back(tokens as u64, bytes as u64, took);
        }
    }

    pub(super) fn unlock(&mut self, lock: Lock) {
        let unlocked = self.tree.unlock(lock);
        self.sound(unlocked);
    }

    pub(super) fn grant(&mut self, state: &mut Request, draft: Draft, tokens: &[u32]) -> Acquire {
        let Draft { lock, device, storage, branch, .. } = draft;
        let node = lock.node();
        let pages = self.tree.device_table(Component::Full, node).unwrap_or_default();
        let granted = pages.len();
        let windows = self.window_table(&lock);
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
            state: self.tree.components().contains(&Component::State).then(|| self.state_at(node)).flatten(),
            branch: branch.map(|pages| pages as usize * size),
            arriving: None,
            pages,
            windows,
        };
        self.count(|counters| &counters.granted_device_tokens, grant.from_device);
        self.count(|counters| &counters.granted_host_tokens, grant.from_host);
        self.count(|counters| &counters.granted_storage_tokens, grant.from_storage);
        Acquire::Granted(grant)
    }

    /// The window table up to what a lock holds, with the pages that it holds; empty without windows.
    fn window_table(&self, lock: &Lock) -> Vec<u32> {
        if self.windows.is_none() {
            return Vec::new();
        }
        let mut table = self.tree.device_table(Component::Window, lock.node()).unwrap_or_default();
        let held = lock.window_from().map_or(table.len(), |from| from as usize).min(table.len());
        table[..held].fill(NO_SLOT);
        table
    }

    fn state_at(&self, node: NodeId) -> Option<u32> {
        self.tree.device_slots(Component::State, node).ok()?.first().copied()
    }
}
