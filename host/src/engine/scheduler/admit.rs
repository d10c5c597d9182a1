//! From waiting to running.

use std::time::Instant;

use kvdock_models::PageSource;

use super::arrive::Arrival;
use super::sequence::{Sequence, Wait};
use super::{Scheduler, earlier, insert};
use crate::cache::{Acquire, Grant, PageTables, Prefetch};
use crate::engine::request::{AbortKind, FinishReason};

/// Part of a sample's future set aside at first, at least and at most, and how it moves.
pub(super) const FIRST_RESERVE: f64 = 0.4;
const LEAST_RESERVE: f64 = 0.1;
const RESERVE_DECAY: f64 = 0.998;
const RESERVE_RISE: f64 = 0.2;

/// A prefix that a running prompt will have computed in a moment is worth waiting for if it is
/// this many tokens longer than what is there already.
const WORTH_WAITING: usize = 32;

/// What came of trying to admit one sample.
enum Attempt {
    Admitted(Sequence),
    /// It waits for storage or for a copy; others may pass.
    Later(Sequence, Option<Instant>),
    /// There are no pages for it; nobody passes, or it might wait for ever.
    NoRoom(Sequence),
    Failed(Sequence, String),
}

impl Scheduler {
    /// Admits samples in order of service and returns when a wait ends at the latest.
    pub(super) fn admit(&mut self) -> Option<Instant> {
        let mut until = None;
        let mut short = false;
        let mut passed = Vec::new();
        let mut waiting = std::mem::take(&mut self.waiting).into_iter();
        while self.takes_more() {
            let Some(sequence) = waiting.next() else { break };
            match self.try_admit(sequence) {
                Attempt::Admitted(sequence) => insert(&mut self.running, sequence),
                Attempt::Later(sequence, wait_until) => {
                    until = earlier(until, wait_until);
                    passed.push(sequence);
                }
                Attempt::NoRoom(sequence) => {
                    (self.blocked, short) = (true, true);
                    passed.push(sequence);
                }
                Attempt::Failed(sequence, message) => {
                    let kind = AbortKind::Internal;
                    self.retire(sequence, FinishReason::Abort { kind, message });
                }
            }
        }
        passed.extend(waiting);
        // A failed sample may have released followers into the queue.
        let released = std::mem::replace(&mut self.waiting, passed);
        for sequence in released {
            insert(&mut self.waiting, sequence);
        }
        if short && self.give_back_early() {
            self.blocked = false;
        }
        self.load_early();
        self.parts.cache.start_loads();
        until
    }

    /// Whether another sample could be of use now: there is a place, pages, and part of a step's
    /// prefill that those before it leave. Pages are better not held before they are computed.
    fn takes_more(&self) -> bool {
        let prefill: usize = self.running.iter().filter(|s| !s.is_decoding()).map(Sequence::uncomputed).sum();
        !self.blocked
            && self.running.len() < self.parts.config.max_running_requests
            && prefill < self.parts.config.prefill_chunk
    }

    fn try_admit(&mut self, mut sequence: Sequence) -> Attempt {
        let id = sequence.cache_id;
        if let Some(grant) = sequence.early.take() {
            return self.settle(sequence, grant);
        }
        if self.prefix_is_coming(&sequence) {
            return Attempt::Later(sequence, None);
        }
        if sequence.wait != Wait::Loading
            && let Prefetch::Waiting { until } = self.parts.cache.poll(id)
        {
            return Attempt::Later(sequence, Some(until));
        }
        match self.parts.cache.acquire(id, &sequence.tokens) {
            Ok(Acquire::Granted(grant)) => self.settle(sequence, grant),
            Ok(Acquire::Loading) => {
                sequence.wait = Wait::Loading;
                Attempt::Later(sequence, None)
            }
            Ok(Acquire::NoSpace) => Attempt::NoRoom(sequence),
            Err(error) => Attempt::Failed(sequence, format!("the cache failed: {error}")),
        }
    }

    /// Whether a running prompt is about to compute a prefix that this sample shares. It waits for
    /// the pages then; requests with the same prompt at the same time compute it once.
    pub(super) fn prefix_is_coming(&self, sequence: &Sequence) -> bool {
        let limit = sequence.next_prompt_row().unwrap_or(sequence.tokens.len() - 1);
        self.running.iter().any(|other| {
            if other.known() >= other.prompt_len || other.group.namespace != sequence.group.namespace {
                return false;
            }
            let whole = |tokens: usize| tokens / self.page_size * self.page_size;
            if whole(other.prompt_len.min(limit)) < whole(other.known()) + WORTH_WAITING {
                // Whatever it shares; long prompts take a while to compare.
                return false;
            }
            let prompt = other.tokens.iter().take(other.prompt_len);
            let shared = prompt.zip(&sequence.tokens).take_while(|(a, b)| a == b).count();
            if self.parts.pool.is_recurrent() && whole(shared) < whole(other.prompt_len.saturating_sub(1)) {
                // It leaves no state where this sample branches off.
                return false;
            }
            whole(shared.min(limit)) >= whole(other.known()) + WORTH_WAITING
        })
    }

    /// Takes a grant, or gives it back where the pool has no room for what is to follow.
    fn settle(&mut self, mut sequence: Sequence, grant: Grant) -> Attempt {
        sequence.wait = Wait::Prefetch;
        note_hits(&mut sequence, &grant);
        let counts = sequence.times.admitted.is_none();
        let Grant { pages, windows, tokens, state, branch, arriving, .. } = grant;
        if !self.has_room(&sequence, pages.len()) {
            let known = sequence.tokens.get(..tokens).unwrap_or_default();
            self.parts.cache.preempt(sequence.cache_id, known, PageTables { pages, windows });
            return Attempt::NoRoom(sequence);
        }
        sequence.tables = PageTables { pages, windows };
        sequence.saved = tokens;
        sequence.computed = tokens;
        sequence.arrival = arriving.map(|load| Arrival {
            known: load.start() * self.page_size,
            promised: tokens,
            load,
            counts,
            parked: false,
        });
        sequence.branch = branch;
        if let Err(message) = self.take_slot(&mut sequence, state) {
            return Attempt::Failed(sequence, message);
        }
        let past_limit = sequence.next_prompt_row().is_some_and(|row| row < tokens);
        if tokens >= sequence.tokens.len() || past_limit {
            let message =
                format!("the cache granted {tokens} of {} tokens, more than may be reused", sequence.tokens.len());
            return Attempt::Failed(sequence, message);
        }
        if sequence.times.admitted.is_none() {
            sequence.times.admitted = Some(Instant::now());
        }
        // What still comes counts when it has come.
        if counts && sequence.arrival.is_none() {
            self.parts.shared.counters.prompt_started(&sequence.usage);
        }
        Attempt::Admitted(sequence)
    }

    /// Gives a sample a slot of its own, where the model has pools of slots, with the recurrent state behind what it was granted.
    fn take_slot(&mut self, sequence: &mut Sequence, state: Option<u32>) -> Result<(), String> {
        let memory = &self.parts.pool;
        if !memory.has(PageSource::Slot) {
            return Ok(());
        }
        let slot = self.slots.take().ok_or("more samples run than there are slots")?;
        // What still comes is put in place layer by layer.
        if memory.is_recurrent() && sequence.computed > 0 && sequence.arrival.is_none() {
            let state = state.ok_or("the cache granted a prefix without the state behind it")?;
            memory.copy_slot(state, slot.number()).map_err(|error| format!("a state could not be copied: {error}"))?;
        }
        sequence.slot = Some(slot);
        Ok(())
    }

    /// Whether the pool has pages for what this sample and the running ones are expected to
    /// need, beyond what they hold. A sample alone always may try.
    pub(super) fn has_room(&self, sequence: &Sequence, granted: usize) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let more = |s: &Sequence, held: usize| self.pages_for(s.expected_len(self.reserve)).saturating_sub(held);
        let promised: usize = self.running.iter().map(|s| more(s, s.tables.pages.len())).sum();
        more(sequence, granted) + promised <= self.parts.cache.available_pages()
            && self.has_window_room(more(sequence, granted))
    }

    /// Whether there are window pages for a sample that is to compute `more` pages, beside one more for each that runs: those that it has passed
    /// make room for the next.
    fn has_window_room(&self, more: usize) -> bool {
        let cache = &self.parts.cache;
        cache
            .available_windows()
            .is_none_or(|available| more.min(cache.window_pages() + 1) + self.running.len() <= available)
    }

    /// A step went well: a little less needs to be set aside.
    pub(super) fn relax_reserve(&mut self) {
        self.reserve = (self.reserve * RESERVE_DECAY).max(LEAST_RESERVE);
    }

    /// Pages ran out: more must be set aside.
    pub(super) fn raise_reserve(&mut self) {
        self.reserve = (self.reserve + RESERVE_RISE).min(1.0);
    }
}

/// Records where the prompt came from. A grant that was given back and taken again keeps its
/// first tiers: by then its pages are on the device.
fn note_hits(sequence: &mut Sequence, grant: &Grant) {
    if sequence.times.admitted.is_some() {
        return;
    }
    let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
    if sequence.usage.cached_tokens() != count(grant.tokens) {
        sequence.usage.cached_device = count(grant.from_device);
        sequence.usage.cached_host = count(grant.from_host);
        sequence.usage.cached_storage = count(grant.from_storage);
    }
    sequence.why.clone_from(&grant.why);
}
