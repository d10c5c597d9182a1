//! Loads that begin before their sample runs.
//!
//! While all places are taken, or those before it leave nothing of a step's prefill, a sample whose pages storage has may get them all the same:
//! slots that nobody is going to need are as good for that as any. They are the sample's by a grant that it takes up when it is admitted. Until
//! then anybody who needs them gets them: the grant is given back, and the sample is as if it had never had it.

use super::Scheduler;
use super::sequence::{Sequence, Wait};
use crate::cache::{Acquire, Grant, PageTables, Prefetch};

/// Samples that may hold pages while they wait, the first ones.
const EARLY: usize = 2;

impl Scheduler {
    /// Gets pages from storage for those who wait, as far as nobody else is going to need the slots.
    pub(super) fn load_early(&mut self) {
        if self.blocked || self.running.is_empty() || !self.parts.cache.is_linked() {
            return;
        }
        let mut waiting = std::mem::take(&mut self.waiting);
        for sequence in waiting.iter_mut().take(EARLY) {
            if sequence.early.is_none() && !self.get_early(sequence) {
                break;
            }
        }
        self.waiting = waiting;
    }

    /// False if there is no room for it, and so for nobody after it.
    fn get_early(&mut self, sequence: &mut Sequence) -> bool {
        let id = sequence.cache_id;
        if sequence.wait == Wait::New || self.prefix_is_coming(sequence) {
            return true;
        }
        if matches!(self.parts.cache.poll(id), Prefetch::Waiting { .. }) || !self.parts.cache.has_hit(id) {
            return true;
        }
        // First, so that nothing is evicted for what is given back at once.
        if !self.has_room(sequence, 0) {
            return false;
        }
        let grant = match self.parts.cache.acquire(id, &sequence.tokens) {
            Ok(Acquire::Granted(grant)) => grant,
            // What is wrong comes up again when it is admitted.
            Ok(Acquire::Loading | Acquire::NoSpace) | Err(_) => return false,
        };
        let comes = grant.arriving.is_some();
        let fits = self.has_room(sequence, grant.pages.len());
        if comes && fits {
            sequence.early = Some(grant);
        } else {
            self.parts.cache.preempt(id, &[], tables_of(grant));
        }
        fits
    }

    /// Gives back what those who wait hold. Says whether they held anything.
    pub(super) fn give_back_early(&mut self) -> bool {
        let mut any = false;
        for sequence in &mut self.waiting {
            if let Some(grant) = sequence.early.take() {
                self.parts.cache.preempt(sequence.cache_id, &[], tables_of(grant));
                any = true;
            }
        }
        any
    }
}

/// The tables of a grant that is not taken up.
pub(super) fn tables_of(grant: Grant) -> PageTables {
    PageTables { pages: grant.pages, windows: grant.windows }
}
