//! Which backends there are, in what order, and where a new one goes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::MOST_BACKENDS;
use super::super::admin::{AttachMode, BackendStatus};
use super::super::backend::Place;
use super::super::state::BackendState;
use super::member::Member;

/// Instances that have ended and are still told of.
const PAST: usize = 16;

/// A name in the list of backends. It keeps its place when what stands in it has failed.
pub(super) struct Slot {
    /// Place by the configuration's list; the greatest number for names that are not in it.
    pub rank: usize,
    pub member: Arc<Member>,
    /// Whether the cache uses it.
    pub in_use: bool,
}

/// Everything the manager knows of. Locked only for moments, never over a call into a plugin.
#[derive(Default)]
pub(super) struct Board {
    /// The backends, in order.
    pub slots: Vec<Slot>,
    /// Those that are being opened.
    pub coming: Vec<Arc<Member>>,
    /// Names whose plugins are being looked for, which reads whole files. They are opened next.
    pub sought: Vec<String>,
    /// Those that were switched out and are not closed yet, and attaches that hang in the plugin.
    pub leaving: Vec<Arc<Member>>,
    /// Those that have ended, the latest last.
    pub past: VecDeque<BackendStatus>,
}

/// Where a new backend goes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// In the place of the slot of this index.
    Over(usize),
    /// Between others.
    Insert(usize),
}

/// Most attaches at a time; each holds a thread and, for a while, a plugin's file, and none lasts for ever.
const MOST_COMING: usize = 8;

impl Board {
    /// Whether one more may be opened beside those that are, and the names for which `others` stands.
    ///
    /// # Errors
    /// Which ones there are.
    pub fn check_room(&self, others: &[String]) -> Result<(), String> {
        if self.coming.len() + others.len() < MOST_COMING {
            return Ok(());
        }
        let coming = self.coming.iter().map(|coming| coming.name.as_str());
        let names: Vec<&str> = coming.chain(others.iter().map(String::as_str)).collect();
        Err(format!("{MOST_COMING} backends are being opened already: {}", names.join(", ")))
    }

    pub fn names(&self) -> String {
        self.slots.iter().map(|slot| slot.member.name.as_str()).collect::<Vec<_>>().join(", ")
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.slots.iter().position(|slot| slot.member.name == name)
    }

    /// Where the backend `name` of the request `ticket` goes. Of two requests for one place the later one wins, whichever is ready first.
    ///
    /// # Errors
    /// Why it can't be attached.
    pub fn plan(&self, name: &str, mode: &AttachMode, ticket: u64, rank: usize) -> Result<Plan, String> {
        let over = match mode {
            AttachMode::ReplaceOnly if self.slots.len() > 1 => {
                return Err(format!(
                    "several backends are attached ({}): kvdock_backend names the one to replace, kvdock_mode \"add\" attaches one more",
                    self.names()
                ));
            }
            AttachMode::ReplaceOnly => self.slots.first().map(|_| 0),
            AttachMode::Replace(old) => match self.position(old) {
                Some(index) => Some(index),
                None if self.slots.is_empty() => {
                    return Err(format!("no backend named {old:?} is attached; there is none at all"));
                }
                None => return Err(format!("no backend named {old:?} is attached; there are: {}", self.names())),
            },
            AttachMode::Add => match self.position(name) {
                Some(index) if !self.slots[index].in_use && self.slots[index].member.is_broken() => Some(index),
                Some(_) => {
                    return Err(format!(
                        "{name} is attached already; \"kvdock_backend\": {name:?} without kvdock_mode replaces it"
                    ));
                }
                None => None,
            },
        };
        let Some(index) = over else {
            if self.slots.len() >= MOST_BACKENDS {
                return Err(format!(
                    "{} backends are attached already, the most that can be in use at a time; detach one or replace one",
                    self.slots.len()
                ));
            }
            return Ok(Plan::Insert(self.slots.iter().position(|slot| slot.rank > rank).unwrap_or(self.slots.len())));
        };
        let old = &self.slots[index].member;
        if self.position(name).is_some_and(|other| other != index) {
            return Err(format!("{name} is attached already and can't replace {} too", old.name));
        }
        if old.ticket() > ticket {
            return Err(format!("a later request has attached {} meanwhile", old.name));
        }
        Ok(Plan::Over(index))
    }

    /// Where the cache puts the backend of a plan.
    pub fn place(&self, plan: &Plan) -> Place {
        let (Plan::Over(index) | Plan::Insert(index)) = *plan;
        match plan {
            Plan::Over(_) if self.slots[index].in_use => Place::Of(self.slots[index].member.name.clone()),
            _ => Place::At(self.slots[..index].iter().filter(|slot| slot.in_use).count()),
        }
    }

    /// Carries out a plan. Gives the one whose place was taken, if it was in use or could not be closed before.
    pub fn put(&mut self, plan: &Plan, rank: usize, member: Arc<Member>, in_use: bool) -> Option<Arc<Member>> {
        match *plan {
            Plan::Insert(index) => {
                self.slots.insert(index, Slot { rank, member, in_use });
                None
            }
            Plan::Over(index) => {
                // The rank stays: it is where it stands now.
                let slot = &mut self.slots[index];
                slot.in_use = in_use;
                Some(std::mem::replace(&mut slot.member, member))
            }
        }
    }

    /// Moves what the cache does not use any more to those that leave. From here on it can be found there, and its drain be cut short.
    pub fn leave(&mut self, member: &Arc<Member>, reason: &str) {
        member.state.go_if(BackendState::serves, BackendState::Draining, reason);
        self.leaving.push(member.clone());
    }

    pub fn forget(list: &mut Vec<Arc<Member>>, member: &Arc<Member>) {
        list.retain(|other| !Arc::ptr_eq(other, member));
    }

    /// Keeps what is to be told of an instance that has ended.
    pub fn bury(&mut self, member: &Arc<Member>) {
        Board::forget(&mut self.leaving, member);
        if self.past.iter().any(|past| past.instance == member.ticket()) {
            return;
        }
        if self.past.len() >= PAST {
            self.past.pop_front();
        }
        self.past.push_back(member.status(false));
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::backend::BackendSettings;
    use super::super::super::state::StateCell;
    use super::*;

    fn member(name: &str) -> Arc<Member> {
        let state = StateCell::new(name, Box::new(|_| {}));
        state.go(BackendState::Active, "");
        Member::new(name, "file", BackendSettings::default(), state)
    }

    const LAST: usize = usize::MAX;

    /// Slots in order, by name and rank.
    fn board(slots: &[(&str, usize)]) -> Board {
        let slot = |(name, rank): &(&str, usize)| Slot { rank: *rank, member: member(name), in_use: true };
        Board { slots: slots.iter().map(slot).collect(), ..Board::default() }
    }

    fn plan(board: &Board, name: &str, mode: AttachMode, rank: usize) -> Result<Plan, String> {
        board.plan(name, &mode, u64::MAX, rank)
    }

    #[test]
    fn an_added_backend_goes_where_the_config_has_it() {
        let board = board(&[("a", 0), ("c", 2), ("stranger", LAST)]);
        assert_eq!(plan(&board, "b", AttachMode::Add, 1), Ok(Plan::Insert(1)));
        assert_eq!(plan(&board, "d", AttachMode::Add, 3), Ok(Plan::Insert(2)), "before those that are not in the list");
        assert_eq!(plan(&board, "e", AttachMode::Add, LAST), Ok(Plan::Insert(3)));
        assert!(plan(&board, "c", AttachMode::Add, 2).unwrap_err().starts_with("c is attached already"));
    }

    #[test]
    fn a_replacement_names_one_or_there_is_one() {
        let one = board(&[("a", 0)]);
        assert_eq!(plan(&one, "b", AttachMode::ReplaceOnly, LAST), Ok(Plan::Over(0)));
        assert_eq!(plan(&board(&[]), "b", AttachMode::ReplaceOnly, LAST), Ok(Plan::Insert(0)));
        let two = board(&[("a", 0), ("b", 1)]);
        assert!(
            plan(&two, "c", AttachMode::ReplaceOnly, LAST)
                .unwrap_err()
                .contains("several backends are attached (a, b)")
        );
        assert_eq!(plan(&two, "c", AttachMode::Replace("b".into()), LAST), Ok(Plan::Over(1)));
        assert_eq!(plan(&two, "b", AttachMode::Replace("b".into()), 1), Ok(Plan::Over(1)));
        let error = plan(&two, "a", AttachMode::Replace("b".into()), 0).unwrap_err();
        assert_eq!(error, "a is attached already and can't replace b too");
        assert!(plan(&two, "c", AttachMode::Replace("x".into()), LAST).unwrap_err().contains("there are: a, b"));
    }

    #[test]
    fn an_add_beyond_what_the_cache_can_tell_apart_was_taken_and_never_written_to() {
        let names: Vec<String> = (0..MOST_BACKENDS).map(|number| format!("b{number}")).collect();
        let slots: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), LAST)).collect();
        let mut board = board(&slots);
        let error = plan(&board, "one_more", AttachMode::Add, LAST).unwrap_err();
        assert!(error.starts_with("64 backends are attached already, the most"), "{error}");
        assert_eq!(plan(&board, "other", AttachMode::Replace("b3".into()), LAST), Ok(Plan::Over(3)));
        board.slots.pop();
        assert_eq!(plan(&board, "one_more", AttachMode::Add, LAST), Ok(Plan::Insert(63)));
    }

    #[test]
    fn of_two_requests_the_later_one_wins() {
        let board = board(&[("a", 0)]);
        let ticket = board.slots[0].member.ticket();
        let error = board.plan("b", &AttachMode::ReplaceOnly, ticket - 1, LAST).unwrap_err();
        assert_eq!(error, "a later request has attached a meanwhile");
        assert_eq!(board.plan("b", &AttachMode::ReplaceOnly, ticket + 1, LAST), Ok(Plan::Over(0)));
    }

    #[test]
    fn a_failed_backend_keeps_its_place_until_something_takes_it() {
        let mut board = board(&[("a", 0), ("b", 1), ("c", 2)]);
        board.slots[1].in_use = false;
        board.slots[1].member.state.go(BackendState::Failed, "broken");
        let taken = plan(&board, "b", AttachMode::Add, 1).unwrap();
        assert_eq!((&taken, board.place(&taken)), (&Plan::Over(1), Place::At(1)));
        let behind = plan(&board, "d", AttachMode::Add, 3).unwrap();
        assert_eq!((&behind, board.place(&behind)), (&Plan::Insert(3), Place::At(2)), "the cache has only two");
        let error = plan(&board, "x", AttachMode::ReplaceOnly, LAST).unwrap_err();
        assert!(error.contains("a, b, c"), "a failed one does not make the others a choice: {error}");
    }
}
