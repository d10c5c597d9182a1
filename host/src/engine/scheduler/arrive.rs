//! Samples whose prefix still comes from storage while they are computed.
//!
//! The forward waits before each layer for that layer alone. It never waits long when anybody else could be served: then the pass is given up,
//! and runs again without the late sample, which waits until its load is over. What a pass has computed for a sample on pages that turned out
//! wrong is thrown away, and computed again from the last good page on.
//!
//! Where a model has slots or rings, a pass that was given up has changed what the next one begins with. So there a sample that waits for its
//! pages shares a pass only with others that do: what these begin with comes from storage, and is put in place anew.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use kvdock_models::{LayerHooks, ModelError};
use parking_lot::Mutex;

use super::Scheduler;
use super::sequence::Sequence;
use super::step::Chunk;
use crate::cache::{Arriving, Gate, Miss};
use crate::engine::handle::Command;
use crate::engine::memory::ModelMemory;

/// How long a pass waits for a layer, or for a verdict, where others could be served meanwhile.
const SHORT_WAIT: Duration = Duration::from_millis(50);
/// How long it waits otherwise; the load itself has an end before.
const LONG_WAIT: Duration = Duration::from_secs(60);
/// Between two looks at who waits.
const LOOK: Duration = Duration::from_millis(2);

/// Pages of a sample that still come.
pub(super) struct Arrival {
    pub load: Arriving,
    /// Tokens of the sequence before them.
    pub known: usize,
    /// Tokens with them.
    pub promised: usize,
    /// They count as the sample's hit.
    pub counts: bool,
    /// A pass was given up for it; it joins none before it is over.
    pub parked: bool,
}

/// A load that a pass waits for, layer by layer.
pub(super) struct Gated<'a> {
    pub load: &'a Arriving,
    /// Where the recurrent state that comes is computed on: the slot that it comes to, and the sample's own.
    pub state: Option<(u32, u32)>,
}

/// What the hooks of a pass look at.
pub(super) struct Gates<'a> {
    pub loads: Vec<Gated<'a>>,
    pub memory: &'a ModelMemory,
    /// The first layer whose states have not been put in place.
    pub states_from: Mutex<usize>,
    /// Samples of the pass that wait for nothing.
    pub others: bool,
    /// Samples wait for what the cache tells.
    pub waiting: bool,
    pub mailbox: &'a Receiver<Command>,
    pub wake_pending: &'a AtomicBool,
    /// The pass was given up.
    pub late: AtomicBool,
}

impl Gates<'_> {
    /// Whether anybody could be served in place of waiting.
    fn is_urgent(&self) -> bool {
        let woken = self.wake_pending.load(Ordering::Acquire);
        self.others || self.mailbox.len() > usize::from(woken) || (woken && self.waiting)
    }

    fn is_bad(load: &Arriving) -> bool {
        load.wait_verdict(Instant::now()).is_some_and(|verdict| verdict.reason.is_some())
    }

    /// Whether pages that the pass stands on are not right, or are not known to be.
    pub fn is_doubtful(&self) -> bool {
        let until = Instant::now() + SHORT_WAIT;
        self.loads.iter().any(|gated| gated.load.wait_verdict(until).is_none_or(|verdict| verdict.reason.is_some()))
    }

    /// Copies the states of a layer, which have come, to where they are computed on. Once, whoever asks.
    fn put_states(&self, layer: usize) -> Result<(), ModelError> {
        let mut from = self.states_from.lock();
        if layer < *from {
            return Ok(());
        }
        *from = layer + 1;
        let mut states = self.loads.iter().filter_map(|gated| gated.state);
        states.try_for_each(|(from, to)| self.memory.copy_slot_layer(from, to, layer))
    }

    fn give_up<T>(&self, layer: usize) -> Result<T, ModelError> {
        self.late.store(true, Ordering::Relaxed);
        Err(ModelError::Batch(format!("layer {layer} has not come from storage")))
    }
}

impl LayerHooks for Gates<'_> {
    fn before_layer(&self, layer: usize) -> Result<(), ModelError> {
        for Gated { load, .. } in &self.loads {
            let began = Instant::now();
            while load.wait(layer, Instant::now() + LOOK) == Gate::Closed {
                let most = if self.is_urgent() { SHORT_WAIT } else { LONG_WAIT };
                if began.elapsed() >= most {
                    return self.give_up(layer);
                }
            }
            // What may still be on its way to the device is waited for there.
            load.before_layer(layer)?;
        }
        // Nothing of the pass would be kept.
        if !self.loads.is_empty() && !self.others && self.loads.iter().all(|gated| Self::is_bad(gated.load)) {
            return self.give_up(layer);
        }
        self.put_states(layer)
    }
}

impl Scheduler {
    /// Takes in the loads that are over.
    pub(super) fn settle_arrivals(&mut self) {
        let mut running = std::mem::take(&mut self.running);
        for sequence in &mut running {
            if sequence.arrival.as_ref().is_some_and(|arrival| arrival.load.is_over()) {
                self.settle_arrival(sequence, false);
            }
        }
        self.running = running;
        self.retire_ended();
    }

    /// Takes in a load that is over. Says whether all of it came. `passed` says that a pass was computed on it.
    fn settle_arrival(&mut self, sequence: &mut Sequence, passed: bool) -> bool {
        let settled = self.parts.cache.settle_load(sequence.cache_id, &sequence.tokens, &mut sequence.tables);
        let settled = match settled {
            Ok(Some(settled)) => settled,
            Ok(None) => return false,
            Err(error) => {
                sequence.arrival = None;
                sequence.fail(format!("the cache failed: {error}"));
                return false;
            }
        };
        let Some(Arrival { promised, counts, .. }) = sequence.arrival.take() else { return false };
        sequence.computed = settled.tokens;
        let whole = settled.tokens == promised;
        if !(passed && whole)
            && let Err(message) = self.resume_state(sequence, settled.state)
        {
            sequence.fail(message);
            return false;
        }
        if counts {
            let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
            // There is no tier between.
            sequence.usage.cached_device = count(settled.tokens - settled.came);
            sequence.usage.cached_storage = count(settled.came);
            self.parts.shared.counters.prompt_started(&sequence.usage);
            if let Some(reason) = settled.reason {
                sequence.why.insert(0, Miss { start: settled.tokens, end: promised, reason });
            }
        }
        whole
    }

    /// Puts the recurrent state behind what is computed into the slot of a sample, and gives up what a pass that is void was to leave.
    fn resume_state(&mut self, sequence: &mut Sequence, state: Option<u32>) -> Result<(), String> {
        self.forget_saves(sequence);
        if !self.parts.pool.is_recurrent() || sequence.computed == 0 {
            return Ok(());
        }
        let slot = sequence.slot.as_ref().ok_or("a sample of a recurrent model runs without a slot")?.number();
        let state = state.ok_or("pages came from storage without the state behind them")?;
        self.parts.pool.copy_slot(state, slot).map_err(|error| format!("a state could not be copied: {error}"))
    }

    /// A pass is void: what states it was to leave are not there.
    fn forget_saves(&mut self, sequence: &mut Sequence) {
        if self.parts.pool.is_recurrent() {
            self.parts.cache.forget_states(sequence.cache_id);
            sequence.saved = sequence.known();
        }
    }

    /// Whether a sample may join the next pass: it waits for nothing, or nothing else is to be computed, or its layers come as fast as they are
    /// needed.
    pub(super) fn may_join(&self, sequence: &Sequence, tokens: usize) -> bool {
        let Some(arrival) = &sequence.arrival else { return true };
        if arrival.parked {
            return false;
        }
        if self.running.iter().all(|other| other.arrival.is_some()) {
            return true;
        }
        if self.parts.pool.is_stateful() {
            return false;
        }
        let pass = self.token_seconds * tokens as f64;
        arrival.load.pace().is_some_and(|(layer, left)| layer * left as f64 <= pass)
    }

    /// After a pass: what it computed on pages that were not right, or are not known to be, is void.
    pub(super) fn judge(&mut self, chunks: &mut [Chunk]) {
        let mut running = std::mem::take(&mut self.running);
        for chunk in chunks {
            let Some(sequence) = running.get_mut(chunk.slot) else { continue };
            let Some(arrival) = &mut sequence.arrival else { continue };
            // All layers have landed, or the load is over, so this is the time that checksums take.
            if arrival.load.wait_verdict(Instant::now() + SHORT_WAIT).is_none() {
                arrival.parked = true;
                chunk.void = true;
                self.forget_saves(sequence);
                self.parts.cache.note_late_layer();
            } else if !self.settle_arrival(sequence, true) {
                chunk.void = true;
                self.parts.cache.note_recomputed_tail();
            }
        }
        self.running = running;
    }

    /// A pass was given up: those that it waited for wait by themselves.
    pub(super) fn park(&mut self, chunks: &[Chunk]) {
        let mut late = false;
        let mut running = std::mem::take(&mut self.running);
        for chunk in chunks {
            let Some(sequence) = running.get_mut(chunk.slot) else { continue };
            let Some(arrival) = &mut sequence.arrival else { continue };
            if !arrival.load.is_over() {
                arrival.parked = true;
                late = true;
            }
            self.forget_saves(sequence);
        }
        self.running = running;
        if late {
            self.parts.cache.note_late_layer();
        }
    }
}
