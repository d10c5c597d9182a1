//! From `acquire` to the end of a request.

use std::time::Duration;

use super::CacheManager;
use super::admit::{Request, StorageOutcome};
use crate::cache::config::WritePolicy;
use crate::cache::controller::{LoadJob, copy_in};
use crate::cache::tree::{NodeId, Removed};
use crate::cache::types::{Acquire, CacheError, Grant, RequestId};

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
    /// Holds a lock on a prefix that is being loaded.
    Loading(Draft),
    /// Holds a lock on `node`, which ends the first `committed` pages of its sequence.
    Granted { node: NodeId, committed: usize },
}

/// A grant in the making.
#[derive(Debug, Clone, Copy)]
pub(super) struct Draft {
    pub node: NodeId,
    /// Pages found on the device.
    device: usize,
    /// Pages that storage brought for this request.
    storage: usize,
}

/// A load that runs.
#[derive(Debug)]
pub(super) struct ActiveLoad {
    /// The node it holds, which ends the pages it loads.
    pub lock: NodeId,
    /// First page of the sequence that it loads.
    start: u32,
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
        if let Phase::Loading(draft) = state.phase {
            match self.readiness(draft.node) {
                Readiness::Ready => return self.grant(state, draft, tokens),
                Readiness::Loading => return Acquire::Loading,
                Readiness::Broken => {
                    self.tree.unlock(draft.node);
                    state.phase = Phase::Queued { ignore_host: true };
                }
            }
        }
        self.stop_waiting(state, false);
        let root = self.tree.root(&state.namespace);
        let pages = state.reusable_pages(tokens.len(), self.page_size);
        let found = self.tree.find(root, tokens.get(..pages * self.page_size).unwrap_or(&[]));
        let mut node = self.tree.settle(found);
        let host_tokens = (found.pages - found.device_pages) * self.page_size;
        let ignore_host = matches!(state.phase, Phase::Queued { ignore_host: true });
        if ignore_host || host_tokens < self.config.load_back_threshold {
            while !self.tree.node(node).on_device() && !self.tree.node(node).is_root() {
                node = self.tree.node(node).parent;
            }
        }
        self.tree.lock(node);
        let Some(node) = self.load_back(state, node) else {
            return Acquire::NoSpace;
        };
        let Phase::Loading(draft) = state.phase else {
            self.tree.unlock(node);
            return Acquire::NoSpace;
        };
        match self.readiness(node) {
            Readiness::Ready => self.grant(state, draft, tokens),
            Readiness::Loading | Readiness::Broken => Acquire::Loading,
        }
    }

    /// Starts to load what the path to `node`, which the caller has locked, lacks on the device. Returns the
    /// locked end of the path, which may be shorter, and sets the draft; None, unlocked, without room.
    fn load_back(&mut self, state: &mut Request, node: NodeId) -> Option<NodeId> {
        let mut node = node;
        let mut missing = self.missing_pages(node);
        let mut pages = Vec::new();
        if missing > 0 {
            self.make_device_room(missing);
            match self.device.alloc(missing) {
                Some(got) => pages = got,
                None if self.nobody_else_holds_pages() => {
                    // Waiting would bring nothing: take what fits.
                    node = self.shorten(node, missing);
                    missing = self.missing_pages(node);
                    self.make_device_room(missing);
                    pages = self.device.alloc(missing).or_else(|| {
                        self.tree.unlock(node);
                        None
                    })?;
                }
                None => {
                    self.tree.unlock(node);
                    return None;
                }
            }
        }
        let draft = self.draft(state, node);
        if missing > 0 {
            self.start_load(node, pages);
        }
        state.phase = Phase::Loading(draft);
        Some(node)
    }

    fn missing_pages(&self, node: NodeId) -> usize {
        let path = self.tree.path(node);
        path.iter().filter(|&&id| !self.tree.node(id).on_device()).map(|&id| self.tree.len(id)).sum()
    }

    fn nobody_else_holds_pages(&self) -> bool {
        self.loads.is_empty()
            && self.writes.backups.is_empty()
            && self.device.caller_count() == 0
            && self.requests.values().all(|request| matches!(request.phase, Phase::Queued { .. }))
    }

    /// Moves the caller's lock up so that what is missing on the path fits into the device pool.
    fn shorten(&mut self, node: NodeId, missing: usize) -> NodeId {
        let fits = self.available_pages();
        let end = self.tree.node(node).start as usize + self.tree.len(node);
        let keep = end - missing + missing.min(fits);
        let mut at = node;
        while self.tree.node(at).start as usize >= keep && !self.tree.node(at).is_root() {
            at = self.tree.node(at).parent;
        }
        let start = self.tree.node(at).start as usize;
        if start + self.tree.len(at) > keep {
            at = self.tree.split(at, keep - start);
        }
        if at != node {
            self.tree.lock(at);
            self.tree.unlock(node);
        }
        at
    }

    fn draft(&self, state: &Request, node: NodeId) -> Draft {
        let mut draft = Draft { node, device: 0, storage: 0 };
        for id in self.tree.path(node) {
            let part = self.tree.node(id);
            let pages = part.start as usize..part.start as usize + self.tree.len(id);
            if part.on_device() && !part.loading {
                draft.device += pages.len();
            } else {
                let from = pages.start.max(state.fetched.start);
                draft.storage += pages.end.min(state.fetched.end).saturating_sub(from);
            }
        }
        draft
    }

    fn start_load(&mut self, node: NodeId, pages: Vec<u32>) {
        let mut pairs = Vec::with_capacity(pages.len());
        let mut start = None;
        let mut rest = pages.as_slice();
        for id in self.tree.path(node) {
            if self.tree.node(id).on_device() {
                continue;
            }
            let (own, others) = rest.split_at(self.tree.len(id).min(rest.len()));
            rest = others;
            pairs.extend(self.tree.node(id).host.iter().copied().zip(own.iter().copied()));
            self.tree.set_device(id, own.to_vec(), true);
            start.get_or_insert(self.tree.node(id).start);
        }
        for &page in &pages {
            if let Err(fault) = self.device.give_to_tree(page) {
                tracing::error!(%fault, "a fresh device page was not the caller's");
            }
        }
        self.tree.lock(node);
        let id = self.new_id();
        let inline = pairs.len() <= INLINE_PAGES;
        let job = LoadJob::new(id, pairs);
        self.loads.insert(id, ActiveLoad { lock: node, start: start.unwrap_or(0) });
        let Some(lower) = &self.lower else { return };
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
    }

    /// A load has ended.
    pub(super) fn loaded(&mut self, id: u64, ok: bool, took: Duration) {
        let Some(load) = self.loads.remove(&id) else { return };
        // Nodes may have been cut meanwhile: all from the first page to the locked end were loaded.
        let loading = self.tree.update_since(load.lock, load.start, |node| node.loading &= !ok);
        let pages: usize = loading.iter().map(|&id| self.tree.len(id)).sum();
        self.tree.unlock(load.lock);
        if ok {
            let tokens = pages * self.page_size;
            let bytes = pages * self.pool.spec().page_bytes();
            self.count(|counters| &counters.load_back_tokens, tokens);
            self.count(|counters| &counters.load_back_bytes, bytes);
            self.listener.loaded_back(tokens as u64, bytes as u64, took);
        } else {
            for &id in loading.iter().rev() {
                let device = self.tree.cancel_load(id);
                self.free(Removed { device, host: Vec::new() });
            }
        }
    }

    fn readiness(&self, end: NodeId) -> Readiness {
        let mut readiness = Readiness::Ready;
        for id in self.tree.path(end) {
            let node = self.tree.node(id);
            if !node.on_device() {
                return Readiness::Broken;
            }
            if node.loading {
                readiness = Readiness::Loading;
            }
        }
        readiness
    }

    fn grant(&mut self, state: &mut Request, draft: Draft, tokens: &[u32]) -> Acquire {
        let path = self.tree.path(draft.node);
        let pages: Vec<u32> = path.iter().flat_map(|&id| self.tree.node(id).device.iter().copied()).collect();
        let granted = pages.len();
        state.phase = Phase::Granted { node: draft.node, committed: granted };
        self.tree.hit(draft.node);
        self.used(&path, state.session.clone());
        let root = self.tree.root(&state.namespace);
        let size = self.page_size;
        let grant = Grant {
            tokens: granted * size,
            from_device: draft.device * size,
            from_storage: draft.storage * size,
            from_host: (granted - draft.device - draft.storage) * size,
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
        let Phase::Granted { node, committed } = state.phase else {
            return Err(CacheError::NotGranted(request));
        };
        let session = state.session.clone();
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
        let result = self.tree.insert_device(node, &tokens[committed * self.page_size..whole * self.page_size], own);
        for &page in &result.adopted {
            if let Err(fault) = self.device.give_to_tree(page) {
                tracing::error!(%fault, "the tree was given a page that was not the caller's");
            }
        }
        self.free_pages(&result.duplicates);
        self.tree.lock(result.node);
        self.tree.unlock(node);
        if let Some(state) = self.requests.get_mut(&request) {
            state.phase = Phase::Granted { node: result.node, committed: committed + result.pages };
        }
        if self.host_policy() == WritePolicy::WriteThrough {
            for node in result.fresh {
                self.back_up(node, session.clone());
            }
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
        let (node, committed) = match phase {
            Phase::Queued { .. } => return self.free_pages(pages),
            Phase::Loading(draft) => (draft.node, 0),
            Phase::Granted { node, committed } => (node, committed),
        };
        self.free_pages(pages.get(committed..).unwrap_or(&[]));
        let node_ref = self.tree.reference(node);
        self.tree.unlock(node);
        if let Some(node) = self.tree.resolve(node_ref)
            && !self.tree.node(node).is_root()
        {
            self.tree.merge_up(node);
            // Its parts may have waited for storage under names that are gone now.
            self.want_stored(node);
        }
    }
}

/// Whether a path can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Readiness {
    Ready,
    Loading,
    Broken,
}
