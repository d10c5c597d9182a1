//! What the master is to be told: events in bundles with numbers, or everything at once.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::MutexGuard;

use super::Pool;
use super::state::State;
use crate::local::below::Below;
use crate::local::state::Change;
use crate::wire::master::{EventBundle, KvEvent};
use crate::wire::peer::tier;

/// `KvEvent.Kind`.
const ADD: i32 = 0;
const REMOVE: i32 = 1;
/// Events of a message that tells everything. What does not fit follows as news.
const WHOLE: usize = 16_384;

/// How much goes into a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Events of a bundle.
    pub events: usize,
    /// Bundles of a heartbeat.
    pub bundles: usize,
}

/// What a heartbeat carries.
#[derive(Debug, Clone, PartialEq)]
pub struct Beat {
    /// It replaces all that the master knows of this node.
    pub whole: bool,
    /// Its bundles.
    pub bundles: Vec<EventBundle>,
    /// Number of the bundle that comes before them.
    pub baseline: u64,
    upto: u64,
}

/// What has happened and what of it the master has acknowledged.
#[derive(Debug)]
pub struct Log {
    queue: VecDeque<KvEvent>,
    /// Sent and not acknowledged, each with the number of its last event.
    bundles: VecDeque<(EventBundle, u64)>,
    /// Number of the last bundle.
    seq: u64,
    /// The master has to be told everything.
    whole: bool,
    /// Number of the last event of what was told so: what did not fit into its message counts too.
    whole_upto: u64,
    /// Events so far: that happened, that went into bundles, that were acknowledged.
    happened: u64,
    taken: u64,
    acknowledged: u64,
    /// Objects that have gone, with the number of that event, as long as it is not acknowledged.
    leaving: HashMap<Arc<str>, u64>,
}

impl Default for Log {
    fn default() -> Log {
        Log {
            queue: VecDeque::new(),
            bundles: VecDeque::new(),
            seq: 0,
            whole: true,
            whole_upto: 0,
            happened: 0,
            taken: 0,
            acknowledged: 0,
            leaving: HashMap::new(),
        }
    }
}

impl Log {
    pub fn add(&mut self, name: &Arc<str>, size: u64, tier: i32) {
        self.happened += 1;
        self.queue.push_back(event(ADD, name, size, tier));
        self.leaving.remove(name);
    }

    pub fn remove(&mut self, name: &Arc<str>, tier: i32) {
        self.happened += 1;
        self.queue.push_back(event(REMOVE, name, 0, tier));
        self.leaving.insert(name.clone(), self.happened);
    }

    pub fn is_leaving(&self, name: &str) -> bool {
        self.leaving.contains_key(name)
    }

    /// Events that were not sent yet.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Whether the master has acknowledged so many events. Where it has to be told everything, it knows none of what is here, also if nothing has happened.
    fn has_told(&self, events: u64) -> bool {
        !self.whole && self.acknowledged >= events.max(self.whole_upto)
    }

    fn reached(&mut self, upto: u64) {
        if upto > self.acknowledged {
            self.acknowledged = upto;
            self.leaving.retain(|_, number| *number > upto);
        }
    }
}

fn event(kind: i32, name: &Arc<str>, size: u64, tier: i32) -> KvEvent {
    KvEvent { kind, key: name.to_string(), tier, size, logical_tier: String::new() }
}

impl Pool {
    /// What the next heartbeat carries.
    pub fn beat(&self, bounds: Bounds) -> Beat {
        let mut state = self.hear();
        if state.log.whole {
            let all = state.all();
            // Nothing of it is news any more.
            let below = self.below.as_ref().map(Below::all).unwrap_or_default();
            let below = below.iter().filter_map(|(name, len)| Some((Arc::from(std::str::from_utf8(name).ok()?), *len)));
            let log = &mut state.log;
            log.bundles.clear();
            log.queue = all.iter().map(|(name, len)| event(ADD, name, *len, tier::DRAM)).collect();
            log.queue.extend(below.map(|(name, len)| event(ADD, &name, len, tier::SSD)));
            log.taken = log.happened;
            log.happened += log.queue.len() as u64;
            log.whole_upto = log.happened;
            let first = log.queue.len().min(WHOLE);
            let events: Vec<KvEvent> = log.queue.drain(..first).collect();
            log.taken += first as u64;
            // Numbers go on: what follows this has the next.
            let bundles = vec![EventBundle { seq: log.seq, events }];
            return Beat { whole: true, bundles, baseline: log.seq, upto: log.taken };
        }
        let log = &mut state.log;
        while log.bundles.len() < bounds.bundles && !log.queue.is_empty() {
            let count = log.queue.len().min(bounds.events.max(1));
            let events: Vec<KvEvent> = log.queue.drain(..count).collect();
            log.seq += 1;
            log.taken += count as u64;
            log.bundles.push_back((EventBundle { seq: log.seq, events }, log.taken));
        }
        let bundles = log.bundles.iter().map(|(bundle, _)| bundle.clone()).collect();
        let baseline = log.bundles.front().map_or(log.seq, |(bundle, _)| bundle.seq - 1);
        Beat { whole: false, bundles, baseline, upto: log.taken }
    }

    /// The master has taken a heartbeat, up to a bundle. Says whether more waits to be sent.
    pub fn taken(&self, beat: &Beat, seq: u64) -> bool {
        let mut state = self.state.lock();
        let log = &mut state.log;
        if beat.whole {
            log.whole = false;
            log.reached(beat.upto);
        }
        while log.bundles.front().is_some_and(|(bundle, _)| bundle.seq <= seq) {
            if let Some((_, upto)) = log.bundles.pop_front() {
                log.reached(upto);
            }
        }
        let more = !log.queue.is_empty();
        drop(state);
        self.acknowledged.notify_all();
        more
    }

    /// The master knows nothing of this node, or not the same.
    pub fn tell_all(&self) {
        self.state.lock().log.whole = true;
    }

    /// Events so far.
    pub fn happened(&self) -> u64 {
        self.hear().log.happened
    }

    /// The state, with all in its log that has happened in segments.
    pub(super) fn hear(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        let Some(below) = &self.below else { return state };
        for Change { name, len } in below.changes() {
            // Names that are no texts were put there by somebody else, and nobody can ask for them.
            let Ok(name) = std::str::from_utf8(&name).map(Arc::from) else { continue };
            match len {
                Some(len) => state.log.add(&name, len, tier::SSD),
                None => state.log.remove(&name, tier::SSD),
            }
        }
        state
    }

    /// Waits until the master has acknowledged so many events; no longer than until `until`. Says whether it has.
    pub fn wait_acknowledged(&self, events: u64, until: Instant) -> bool {
        let mut state = self.state.lock();
        while !state.log.has_told(events) {
            if self.acknowledged.wait_until(&mut state, until).timed_out() {
                return state.log.has_told(events);
            }
        }
        true
    }
}
