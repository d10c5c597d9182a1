//! From the grant to the end of a request: what it computes becomes the tree's.

use super::CacheManager;
use super::admit::{Request, StorageOutcome};
use super::grant::Phase;
use crate::cache::types::{CacheError, PageTables, RequestId};
use crate::cache::unified::{Component, Insert, NO_SLOT, NodeId, Parts, PerComponent, Room, Side, StateOutcome};

impl CacheManager {
    /// A slot into which the state of `request` after `tokens` tokens, whole pages, is to be saved on the way. The commit that passes there
    /// puts it into the tree. None if no slot can be had; then it is computed without.
    pub fn reserve_state(&mut self, request: RequestId, tokens: usize) -> Option<u32> {
        let state = self.requests.get(&request)?;
        let Phase::Granted { committed, .. } = state.phase else { return None };
        let known = state.saves.iter().any(|&(saved, _)| saved == tokens);
        if known || !tokens.is_multiple_of(self.page_size) || tokens / self.page_size <= committed {
            return None;
        }
        let slots = self.take_slots(Side::Device, &PerComponent([0, 0, 1]))?;
        let slot = slots[Component::State].first().copied()?;
        self.requests.get_mut(&request)?.saves.push((tokens, slot));
        Some(slot)
    }

    /// A slot into which the state of `request` after `tokens` tokens, whole pages, is to be saved in this step. It is taken up when the
    /// request ends or is preempted with nothing computed past the next page, so that what goes on from all of it finds it; until then each
    /// such state takes the place of the one before. None if no slot can be had.
    pub fn trail_state(&mut self, request: RequestId, tokens: usize) -> Option<u32> {
        let state = self.requests.get(&request)?;
        let known = state.trail;
        if !matches!(state.phase, Phase::Granted { .. }) || !tokens.is_multiple_of(self.page_size) {
            return None;
        }
        let slot = match known {
            Some((_, slot)) => slot,
            None => self.take_slots(Side::Device, &PerComponent([0, 0, 1]))?[Component::State].first().copied()?,
        };
        self.requests.get_mut(&request)?.trail = Some((tokens, slot));
        Some(slot)
    }

    /// Takes the whole pages of `tokens` (all tokens of the sequence whose KV is computed) into the tree and
    /// extends the request's lock over them. `pages` is the request's page table from position 0:
    /// granted pages, then pages of `alloc_pages`. Where the tree had the page already, the entry is
    /// replaced by the tree's page and the request's own is freed. Cheap if no page became whole.
    ///
    /// `windows` is its window table, as long as `pages`; empty for a model without windows. Entries that no later token sees stand as
    /// [`NO_SLOT`] afterwards: their pages may leave.
    pub fn commit(
        &mut self,
        request: RequestId,
        tokens: &[u32],
        pages: &mut [u32],
        windows: &mut [u32],
    ) -> Result<(), CacheError> {
        self.commit_pages(request, tokens, pages, windows).inspect_err(|error| self.misuse(error))
    }

    fn commit_pages(
        &mut self,
        request: RequestId,
        tokens: &[u32],
        pages: &mut [u32],
        windows: &mut [u32],
    ) -> Result<(), CacheError> {
        let state = self.requests.get(&request).ok_or(CacheError::UnknownRequest(request))?;
        let Phase::Granted { lock, committed } = &state.phase else {
            return Err(CacheError::NotGranted(request));
        };
        let (from, committed) = (lock.node(), *committed);
        let before = lock.window_from().map_or(0, |from| from as usize);
        let (session, priority) = (state.session.clone(), state.hints.priority);
        // The tree's own already.
        let lent = state.linked.lent_pages();
        // What still comes from storage is not known to be right.
        let whole = (tokens.len() / self.page_size).min(state.linked.known_until());
        if whole <= committed {
            return Ok(());
        }
        let shape = |found| CacheError::PageTable { request, tokens: tokens.len(), needed: whole, found };
        let found = pages.len();
        let own = pages.get_mut(committed..whole).ok_or_else(|| shape(found))?;
        let foreign = |&(at, page): &(usize, u32)| !lent.contains(&(committed + at)) && !self.device.is_callers(page);
        if let Some((_, page)) = own.iter().copied().enumerate().find(foreign) {
            return Err(CacheError::ForeignPage { request, page });
        }
        let found = windows.len();
        let own_windows = match &self.windows {
            Some(pool) => {
                let own = windows.get_mut(committed..whole).ok_or_else(|| shape(found))?;
                if let Some(&page) = own.iter().find(|&&page| page != NO_SLOT && !pool.is_callers(page)) {
                    return Err(CacheError::ForeignPage { request, page });
                }
                own
            }
            None => &mut [],
        };
        let (mut from, mut at) = (from, committed);
        let mut stopped = false;
        for (end, saved) in self.stretches(request, committed, whole) {
            if stopped {
                self.free_states(saved.as_slice());
                continue;
            }
            let part = at - committed..end - committed;
            let own = &mut own[part.clone()];
            let own_windows = own_windows.get_mut(part).unwrap_or(&mut []);
            let (given, given_windows) = (own.to_vec(), own_windows.to_vec());
            let tokens = &tokens[at * self.page_size..end * self.page_size];
            let inserted =
                self.tree.insert(Insert { from, tokens, full: own, window: own_windows, state: saved, priority });
            let Some(inserted) = self.sound(inserted) else {
                self.free_states(saved.as_slice());
                stopped = true;
                continue;
            };
            // What the tree had already it frees as its own.
            let given: Vec<u32> =
                (0..inserted.pages).filter(|page| !lent.contains(&(at + page))).map(|page| given[page]).collect();
            self.give_to_tree(Component::Full, &given);
            if !given_windows.is_empty() {
                let live: Vec<u32> =
                    given_windows[..inserted.pages].iter().copied().filter(|&slot| slot != NO_SLOT).collect();
                self.give_to_tree(Component::Window, &live);
            }
            match inserted.state {
                StateOutcome::Taken | StateOutcome::Known => self.give_to_tree(Component::State, saved.as_slice()),
                StateOutcome::NotReached | StateOutcome::NotGiven => self.free_states(saved.as_slice()),
            }
            self.hold_longer(request, inserted.node, at + inserted.pages);
            self.mark_loaded(request, inserted.node, at + inserted.pages);
            self.carry_out_for(inserted.actions, session.as_ref(), at as u32);
            let joined = self.tree.merge_growing(inserted.node);
            if self.sound(joined) == Some(true) {
                self.want_stored(inserted.node);
            }
            from = inserted.node;
            at += inserted.pages;
            // The rest is being loaded: it can't be taken up yet.
            stopped = at < end;
        }
        if let Some(Phase::Granted { lock, .. }) = self.requests.get(&request).map(|state| &state.phase)
            && let Some(held) = lock.window_from()
            && let Some(passed) = windows.get_mut(before.min(held as usize)..held as usize)
        {
            passed.fill(NO_SLOT);
        }
        Ok(())
    }

    /// Takes up the state that a request left behind all that it committed, if it did.
    fn take_up_trail(&mut self, request: RequestId) {
        let Some(state) = self.requests.get_mut(&request) else { return };
        let Some((tokens, slot)) = state.trail.take() else { return };
        let Phase::Granted { lock, committed } = &state.phase else { return self.free_states(&[slot]) };
        let (from, priority, session) = (lock.node(), state.hints.priority, state.session.clone());
        if *committed * self.page_size != tokens {
            return self.free_states(&[slot]);
        }
        let insert = Insert { from, tokens: &[], full: &mut [], window: &mut [], state: Some(slot), priority };
        let inserted = self.tree.insert(insert);
        let Some(inserted) = self.sound(inserted) else { return self.free_states(&[slot]) };
        match inserted.state {
            StateOutcome::Taken | StateOutcome::Known => self.give_to_tree(Component::State, &[slot]),
            StateOutcome::NotReached | StateOutcome::NotGiven => self.free_states(&[slot]),
        }
        self.carry_out_for(inserted.actions, session.as_ref(), 0);
        // It came after the pages. Where they went down before, it follows them; to stores it goes by itself.
        if self.config.linked || self.tree.info(from).is_ok_and(|info| info.on_host || info.backing) {
            self.back_up_nodes(vec![from], 0, session.as_ref());
        }
    }

    /// The ends, in pages, of the stretches that a commit from page `from` to page `to` inserts one by one, with the state that was saved
    /// at each end. States of before it are given up.
    fn stretches(&mut self, request: RequestId, from: usize, to: usize) -> Vec<(usize, Option<u32>)> {
        let mut saves = Vec::new();
        if let Some(state) = self.requests.get_mut(&request) {
            saves = state.saves.extract_if(.., |(tokens, _)| *tokens / self.page_size <= to).collect();
        }
        saves.sort_unstable();
        let mut stretches = Vec::with_capacity(saves.len() + 1);
        for (tokens, slot) in saves {
            match tokens / self.page_size {
                end if end > from => stretches.push((end, Some(slot))),
                _ => self.free_states(&[slot]),
            }
        }
        if stretches.last().is_none_or(|&(end, _)| end < to) {
            stretches.push((to, None));
        }
        stretches
    }

    /// Gives back slots of states that were not committed.
    fn free_states(&mut self, slots: &[u32]) {
        self.give_back(Side::Device, Component::State, slots);
    }

    /// Holds the pages up to the end of `node` for a request in place of what it holds. Its state it has in a slot of its own.
    fn hold_longer(&mut self, request: RequestId, node: NodeId, committed: usize) {
        let locked = self.tree.lock_parts(node, Parts { window: true, state: false });
        if let Some(lock) = self.sound(locked)
            && let Some(state) = self.requests.get_mut(&request)
            && let Phase::Granted { lock, .. } = std::mem::replace(&mut state.phase, Phase::Granted { lock, committed })
        {
            self.unlock(lock);
        }
    }

    /// Ends a request: commits as `commit` does, unlocks, and frees the pages after the last whole one.
    /// `tokens` and the tables may be empty for a request that never was granted anything.
    pub fn finish(&mut self, request: RequestId, tokens: &[u32], tables: impl Into<PageTables>) {
        self.preempt(request, tokens, tables);
        self.abort(request, PageTables::default());
    }

    /// Ends a request in any state without committing: unlocks, frees what is not the tree's.
    pub fn abort(&mut self, request: RequestId, tables: impl Into<PageTables>) {
        let tables = tables.into();
        let Some(mut state) = self.requests.remove(&request) else { return self.free_tables(&tables, 0) };
        self.stop_waiting(&mut state, false);
        self.let_go(&mut state, &tables);
    }

    /// As `finish`, but the request stays known, and `acquire` may be called for it again.
    pub fn preempt(&mut self, request: RequestId, tokens: &[u32], tables: impl Into<PageTables>) {
        let mut tables = tables.into();
        let granted = matches!(self.requests.get(&request).map(|state| &state.phase), Some(Phase::Granted { .. }));
        if granted {
            let PageTables { pages, windows } = &mut tables;
            // What cannot be committed is freed; `commit` has logged why.
            let _ = self.commit(request, tokens, pages, windows);
            self.take_up_trail(request);
        }
        let Some(mut state) = self.requests.remove(&request) else { return self.free_tables(&tables, 0) };
        self.let_go(&mut state, &tables);
        // What storage said of the prompt is no news for the longer sequence.
        state.storage = StorageOutcome { hit_end: 0, reason: None };
        state.fetched = 0..0;
        self.requests.insert(request, state);
    }

    /// Frees the pages of tables after the first `kept`.
    fn free_tables(&mut self, tables: &PageTables, kept: usize) {
        self.free_pages(tables.pages.get(kept..).unwrap_or(&[]));
        self.free_windows(tables.windows.get(kept..).unwrap_or(&[]));
    }

    /// Unlocks what a request holds, and frees the pages of its tables that are not the tree's.
    fn let_go(&mut self, state: &mut Request, tables: &PageTables) {
        let lent = state.linked.lent_pages();
        // Before its pages are anybody else's.
        self.drop_load(state);
        let saves = std::mem::take(&mut state.saves).into_iter().chain(state.trail.take());
        for (_, slot) in saves {
            self.free_states(&[slot]);
        }
        let phase = std::mem::replace(&mut state.phase, Phase::Queued { ignore_host: false });
        let (lock, committed) = match phase {
            Phase::Queued { .. } => return self.free_tables(tables, 0),
            Phase::Loading(draft) => (draft.lock, 0),
            Phase::Granted { lock, committed } => (lock, committed),
        };
        if lent.is_empty() {
            self.free_tables(tables, committed);
        } else {
            let mut own = tables.clone();
            own.pages.get_mut(lent).into_iter().flatten().for_each(|page| *page = NO_SLOT);
            self.free_tables(&own, committed);
        }
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
