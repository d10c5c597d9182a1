//! Which backends are in use. Changes at any time, under load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::Shared;
use super::attached::Attached;
use crate::cache::stats::CacheCounters;
use crate::cache::unified::Component;
use crate::plugin::backend::{Place, StorageBackend};

/// The backends in use, in order, and those that were, as long as calls of theirs run.
pub(crate) struct Registry {
    current: ArcSwap<Vec<Arc<Attached>>>,
    past: Mutex<Vec<Arc<Attached>>>,
    counters: Arc<CacheCounters>,
}

impl Registry {
    /// No backend.
    pub fn new(counters: Arc<CacheCounters>) -> Self {
        Registry { current: ArcSwap::default(), past: Mutex::default(), counters }
    }

    /// The backends in use. The list does not change under the caller.
    pub fn current(&self) -> Arc<Vec<Arc<Attached>>> {
        self.current.load_full()
    }

    /// A store was emptied: nothing is believed of it any more.
    pub fn emptied(&self, name: &str) {
        for attached in self.current().iter().filter(|attached| attached.name() == name) {
            attached.empty();
        }
    }

    /// Puts a backend to use; the one whose place it takes leaves in the same step.
    pub fn attach(&self, backend: Arc<dyn StorageBackend>, place: &Place) {
        let mut past = self.past.lock();
        let mut list = Vec::clone(&self.current());
        let attached = Arc::new(Attached::new(backend, Arc::clone(&self.counters)));
        match place {
            Place::Of(name) => match list.iter_mut().find(|other| other.name() == name) {
                Some(place) => past.push(std::mem::replace(place, attached)),
                None => list.push(attached),
            },
            Place::At(index) => list.insert((*index).min(list.len()), attached),
        }
        self.current.store(Arc::new(list));
        past.iter().for_each(|gone| gone.retire());
    }

    /// Stops using a backend. False if there is none of this name.
    pub fn detach(&self, name: &str) -> bool {
        let mut past = self.past.lock();
        let mut list = Vec::clone(&self.current());
        let Some(at) = list.iter().position(|attached| attached.name() == name) else {
            return false;
        };
        past.push(list.remove(at));
        self.current.store(Arc::new(list));
        past.iter().for_each(|gone| gone.retire());
        true
    }

    /// Waits until no call of a backend that was detached or replaced under this name is running.
    pub fn quiesced(&self, name: &str, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let gone: Vec<_> = self.past.lock().iter().cloned().collect();
        gone.iter().filter(|attached| attached.name() == name).all(|attached| attached.wait_idle(deadline))
    }

    /// Gives back what late calls held, and forgets past backends that hold nothing any more. Returns the
    /// pages that are still held.
    pub fn collect(&self, shared: &Shared) -> usize {
        let mut past = self.past.lock();
        let current = self.current();
        let mut held = 0;
        for attached in current.iter().chain(past.iter()) {
            for (component, host) in shared.hosts() {
                held += match shared.direct_of(attached, component) {
                    Some(direct) => attached.collect(component, direct.held().as_ref()),
                    None => attached.collect(component, host),
                };
            }
        }
        // Whoever is about to call a past backend, or to report pages that a call of it holds, has it in hand.
        past.retain(|attached| Arc::strong_count(attached) > 1 || !attached.is_done_with());
        held
    }

    /// All pages of the host pool of a component that late calls hold, once a call.
    pub fn held(&self, component: Component) -> Vec<u32> {
        let past = self.past.lock();
        let current = self.current();
        let of_host = current.iter().chain(past.iter()).filter(|attached| !attached.is_direct());
        of_host.flat_map(|attached| attached.held(component)).collect()
    }
}
