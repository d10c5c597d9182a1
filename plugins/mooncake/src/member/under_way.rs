//! Objects that calls of this process are just storing or removing.
//!
//! To the master an object exists from the moment that its put begins, and can be read when the put has ended. That may take any time: a thread
//! may stand still in between. So calls of one process wait for one another where they name the same objects, instead of asking the master
//! again and again. Reads wait for nobody; they are told whether anything was removed meanwhile.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use parking_lot::{Condvar, Mutex};

use crate::limit::{Limit, Stop};

/// What is under way.
#[derive(Debug, Default)]
pub struct UnderWay {
    /// Stands for names: two that fall together wait for one another without need.
    hasher: RandomState,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// How many times a name is claimed. More than once only where puts are to be taken back.
    claims: HashMap<u64, u32>,
    removals_begun: u64,
    removals_ended: u64,
}

impl State {
    fn free(&mut self, names: &[u64]) {
        for name in names {
            match self.claims.get_mut(name) {
                Some(count) if *count > 1 => *count -= 1,
                _ => drop(self.claims.remove(name)),
            }
        }
    }
}

/// Names that are one call's to change. They are free again when it goes.
#[derive(Debug)]
pub struct Claim<'a> {
    of: &'a UnderWay,
    names: Vec<u64>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.of.state.lock().free(&self.names);
        self.of.freed.notify_all();
    }
}

/// Objects are being removed, until it goes.
#[derive(Debug)]
pub struct Removing<'a>(&'a UnderWay);

impl Drop for Removing<'_> {
    fn drop(&mut self) {
        self.0.state.lock().removals_ended += 1;
    }
}

/// How far removals were at some moment.
#[derive(Debug, Clone, Copy)]
pub struct Removals(u64);

impl UnderWay {
    fn numbers<'n>(&self, names: impl Iterator<Item = &'n str>) -> Vec<u64> {
        let mut numbers: Vec<u64> = names.map(|name| self.hasher.hash_one(name)).collect();
        // A name may come twice in a call.
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Claims names, all at once: waits until no other call has any of them. Nobody waits who holds some already.
    ///
    /// # Errors
    /// When the time for it is over.
    pub fn claim<'n>(&self, names: impl Iterator<Item = &'n str>, limit: &Limit<'_>) -> Result<Claim<'_>, Stop> {
        let names = self.numbers(names);
        let mut state = self.state.lock();
        while names.iter().any(|name| state.claims.contains_key(name)) {
            self.freed.wait_for(&mut state, limit.slice()?);
        }
        state.claims.extend(names.iter().map(|name| (*name, 1)));
        Ok(Claim { of: self, names })
    }

    /// Claims names whose puts are to be taken back, beside the call that began them.
    pub(super) fn claim_more<'n>(&self, names: impl Iterator<Item = &'n str>) {
        let names = self.numbers(names);
        let mut state = self.state.lock();
        names.iter().for_each(|name| *state.claims.entry(*name).or_default() += 1);
    }

    /// Gives back what [`UnderWay::claim_more`] claimed.
    pub(super) fn give_back<'n>(&self, names: impl Iterator<Item = &'n str>) {
        let names = self.numbers(names);
        self.state.lock().free(&names);
        self.freed.notify_all();
    }

    /// Says that objects are being removed. It comes before the master is asked to.
    pub fn remove(&self) -> Removing<'_> {
        self.state.lock().removals_begun += 1;
        Removing(self)
    }

    /// How far removals are now.
    pub fn removals(&self) -> Removals {
        Removals(self.state.lock().removals_ended)
    }

    /// Whether a removal was under way at that moment, or has begun since.
    pub fn removed_since(&self, moment: Removals) -> bool {
        self.state.lock().removals_begun != moment.0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    fn claim<'a>(under_way: &'a UnderWay, names: &[&str], time: Duration) -> Result<Claim<'a>, Stop> {
        under_way.claim(names.iter().copied(), &Limit::within(time))
    }

    #[test]
    fn a_name_is_one_calls_at_a_time() {
        let under_way = UnderWay::default();
        let long = Duration::from_secs(60);
        let first = claim(&under_way, &["a", "b", "a"], long).unwrap();
        assert_eq!(claim(&under_way, &["b", "c"], Duration::from_millis(5)).err(), Some(Stop::TimedOut));
        // Nothing stays of a claim that failed.
        drop(claim(&under_way, &["c"], long).unwrap());
        let freed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                let claim = claim(&under_way, &["c", "b"], long);
                assert!(freed.load(Ordering::Acquire));
                drop(claim.unwrap());
            });
            freed.store(true, Ordering::Release);
            drop(first);
            second.join().unwrap();
        });
        drop(claim(&under_way, &["a", "b", "c"], long).unwrap());
    }

    #[test]
    fn a_put_that_is_to_be_taken_back_keeps_its_name_until_it_is() {
        let under_way = UnderWay::default();
        let call = claim(&under_way, &["a"], Duration::from_secs(60)).unwrap();
        under_way.claim_more(["a"].into_iter());
        drop(call);
        assert!(claim(&under_way, &["a"], Duration::from_millis(5)).is_err());
        under_way.give_back(["a"].into_iter());
        drop(claim(&under_way, &["a"], Duration::from_secs(60)).unwrap());
    }

    #[test]
    fn a_removal_is_noticed_by_all_that_run_beside_it() {
        let under_way = UnderWay::default();
        let before = under_way.removals();
        assert!(!under_way.removed_since(before));
        let removing = under_way.remove();
        let beside = under_way.removals();
        assert!(under_way.removed_since(before) && under_way.removed_since(beside));
        drop(removing);
        assert!(under_way.removed_since(before) && under_way.removed_since(beside));
        assert!(!under_way.removed_since(under_way.removals()));
    }
}
