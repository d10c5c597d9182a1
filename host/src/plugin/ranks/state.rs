//! One state for the instances of all ranks.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::super::state::{BackendState, StateCell};

/// What the instances of several ranks are together, shown in one cell.
pub struct RankStates {
    shown: Arc<StateCell>,
    ranks: Vec<Arc<StateCell>>,
    /// Held while they are summed up; false while what single ranks do is not to be shown.
    showing: Mutex<bool>,
}

/// Of the states that ranks have, the first of these is that of all: what one can't do, all can't.
const ORDER: [BackendState; 9] = [
    BackendState::Failed,
    BackendState::Zombie,
    BackendState::Draining,
    BackendState::Loading,
    BackendState::Opening,
    BackendState::Registering,
    BackendState::Degraded,
    BackendState::Active,
    BackendState::Detached,
];

impl RankStates {
    /// Cells for `count` ranks of the backend `name`, summed up in `shown`.
    pub fn new(name: &str, count: usize, shown: Arc<StateCell>) -> Arc<RankStates> {
        Arc::new_cyclic(|all: &Weak<RankStates>| {
            let cell = |rank: usize| {
                let all = all.clone();
                let changed = move |_| {
                    if let Some(all) = all.upgrade() {
                        all.sum_up();
                    }
                };
                Arc::new(StateCell::new(&format!("{name}, rank {rank}"), Box::new(changed)))
            };
            RankStates { shown, ranks: (0..count).map(cell).collect(), showing: Mutex::new(true) }
        })
    }

    /// The cell of one rank.
    pub fn rank(&self, rank: usize) -> Option<&Arc<StateCell>> {
        self.ranks.get(rank)
    }

    /// What single ranks do from here on is not shown: they are ended because an attach failed, and whoever asked for it tells why.
    pub fn stop_showing(&self) {
        *self.showing.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// All ranks that serve go to `Draining`: none of them serves while another is ended.
    pub fn drain(&self, reason: &str) {
        for rank in &self.ranks {
            rank.go_if(BackendState::serves, BackendState::Draining, reason);
        }
    }

    /// Each rank that serves is well.
    pub fn heal(&self) {
        for rank in &self.ranks {
            rank.go_if(BackendState::serves, BackendState::Active, "");
        }
    }

    fn sum_up(&self) {
        let showing = self.showing.lock().unwrap_or_else(PoisonError::into_inner);
        let states: Vec<BackendState> = self.ranks.iter().map(|rank| rank.state()).collect();
        let Some(worst) = ORDER.into_iter().find(|state| states.contains(state)).filter(|_| *showing) else { return };
        let rank = states.iter().position(|state| *state == worst).unwrap_or_default();
        let reason = match self.ranks.get(rank).map(|rank| rank.report().reason) {
            Some(reason) if !reason.is_empty() && worst != BackendState::Detached => format!("rank {rank}: {reason}"),
            reason => reason.unwrap_or_default(),
        };
        // What was switched out does not serve again, whatever its ranks say.
        let ended = [BackendState::Draining, BackendState::Failed, BackendState::Zombie, BackendState::Detached];
        let may = |before: BackendState| match worst {
            BackendState::Draining => before.serves(),
            BackendState::Detached => before != BackendState::Failed,
            worst if worst.serves() || !ended.contains(&worst) => !ended.contains(&before),
            _ => true,
        };
        self.shown.go_if(may, worst, &reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use BackendState::{Active, Degraded, Detached, Draining, Failed, Loading, Opening, Registering, Zombie};

    fn states(count: usize) -> (Arc<RankStates>, Arc<StateCell>) {
        let shown = Arc::new(StateCell::new("file", Box::new(|_| {})));
        (RankStates::new("file", count, shown.clone()), shown)
    }

    fn go(states: &RankStates, rank: usize, state: BackendState, reason: &str) {
        states.rank(rank).unwrap().go(state, reason);
    }

    #[test]
    fn all_serve_when_each_does() {
        let (ranks, shown) = states(2);
        for rank in 0..2 {
            for state in [Opening, Registering, Active] {
                go(&ranks, rank, state, "");
            }
        }
        let history: Vec<_> = shown.history().iter().map(|report| report.state).collect();
        assert_eq!(history, [Loading, Opening, Registering, Active]);
        go(&ranks, 1, Degraded, "the disk is full");
        assert_eq!((shown.state(), shown.report().reason.as_str()), (Degraded, "rank 1: the disk is full"));
        go(&ranks, 1, Active, "");
        assert_eq!(shown.state(), Active);
        go(&ranks, 0, Failed, "it panicked");
        assert_eq!((shown.state(), shown.report().reason.as_str()), (Failed, "rank 0: it panicked"));
    }

    /// A rank that was opened in trouble, and was asked later and is well, is not remembered for it.
    #[test]
    fn a_rank_that_is_well_again_is_shown_as_such() {
        let (ranks, shown) = states(2);
        go(&ranks, 0, Degraded, "no room");
        go(&ranks, 1, Active, "");
        assert_eq!(shown.report().reason, "rank 0: no room");
        ranks.heal();
        assert_eq!(shown.state(), Active);
        go(&ranks, 1, Failed, "it panicked");
        ranks.heal();
        assert_eq!(shown.state(), Failed, "what has failed stays so");
    }

    #[test]
    fn all_are_detached_when_the_last_is() {
        let (ranks, shown) = states(3);
        (0..3).for_each(|rank| go(&ranks, rank, Active, ""));
        shown.go(Draining, "detached");
        go(&ranks, 2, Degraded, "slow");
        assert_eq!(shown.state(), Draining, "it does not serve again");
        ranks.drain("detached");
        go(&ranks, 0, Detached, "detached");
        go(&ranks, 1, Zombie, "a call has not returned");
        assert_eq!(shown.state(), Zombie);
        go(&ranks, 2, Detached, "detached");
        assert_eq!(shown.state(), Zombie);
        go(&ranks, 1, Detached, "detached");
        assert_eq!((shown.state(), shown.report().reason.as_str()), (Detached, "detached"));
    }

    #[test]
    fn what_is_not_to_be_shown_is_not() {
        let (ranks, shown) = states(2);
        go(&ranks, 0, Active, "");
        ranks.stop_showing();
        go(&ranks, 0, Detached, "rank 1 could not be opened");
        assert_eq!(shown.state(), Loading, "rank 1 had not begun");
    }
}
