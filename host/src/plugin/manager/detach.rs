//! Taking backends out and ending them.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::super::admin::AdminError;
use super::super::backend::StorageBackend;
use super::super::state::BackendState;
use super::board::Slot;
use super::member::Member;
use super::{Shared, lock};

/// Time after the drain for cancelled calls to return and for `close`.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

impl Shared {
    /// Stops the use of one backend or all at once, calls off their attaches, and waits until they are closed. `force` skips the drain, also one
    /// that an earlier call began; without it such a drain is not waited for.
    pub fn detach(self: &Arc<Self>, name: Option<&str>, force: bool) -> Result<String, AdminError> {
        let meant = |other: &Arc<Member>| name.is_none_or(|name| name == other.name);
        let mut board = lock(&self.board);
        let draining = |member: &&Arc<Member>| meant(member) && member.state.state() == BackendState::Draining;
        let drained_before: Vec<Arc<Member>> = board.leaving.iter().filter(draining).cloned().collect();
        let called_off: Vec<Arc<Member>> = board.coming.iter().filter(|member| meant(member)).cloned().collect();
        let (going, staying): (Vec<Slot>, Vec<Slot>) =
            std::mem::take(&mut board.slots).into_iter().partition(|slot| meant(&slot.member));
        board.slots = staying;
        if let Some(name) = name
            && drained_before.is_empty()
            && called_off.is_empty()
            && going.is_empty()
            && !board.slots.is_empty()
        {
            return Err(AdminError::new(format!(
                "no backend named {name:?} is attached; there are: {}",
                board.names()
            )));
        }
        for slot in &going {
            if slot.in_use {
                self.sink.detached(&slot.member.name);
            }
            board.leave(&slot.member, "detached");
        }
        for member in &called_off {
            member.call_off("it was detached while it was being opened");
        }
        drop(board);

        for slot in &going {
            self.retire(&slot.member, force, "detached");
        }
        if force {
            drained_before.iter().filter_map(|member| member.instance()).for_each(|instance| instance.hurry());
        }
        let waited_for = if force { drained_before.as_slice() } else { &[] };
        let ends = going.iter().map(|slot| &slot.member).chain(waited_for);
        let mut said: Vec<String> = ends
            .map(|member| match member.wait_end() {
                true => format!("{} is detached.", member.name),
                false => {
                    format!("{} is detached, but can't be closed because a call into it does not return.", member.name)
                }
            })
            .collect();
        said.extend(
            called_off.iter().map(|member| format!("{} was being opened and will not be attached.", member.name)),
        );
        if !force {
            let drains = |member: &Arc<Member>| format!("{} still drains; force=true ends that.", member.name);
            said.extend(drained_before.iter().map(drains));
        }
        if said.is_empty() {
            said.push("no storage backend was attached.".into());
        }
        Ok(said.join(" "))
    }

    /// Waits until nothing drains any more.
    pub fn wait_for_drains(&self) {
        let draining: Vec<Arc<Member>> = lock(&self.board)
            .leaving
            .iter()
            .filter(|member| member.state.state() == BackendState::Draining)
            .cloned()
            .collect();
        for member in draining {
            member.wait_end();
        }
    }

    /// Ends all drains: calls that run are cancelled.
    pub fn hurry_drains(&self) {
        let draining = |member: &&Arc<Member>| member.state.state() == BackendState::Draining;
        let leaving: Vec<Arc<Member>> = lock(&self.board).leaving.iter().filter(draining).cloned().collect();
        leaving.iter().filter_map(|member| member.instance()).for_each(|instance| instance.hurry());
    }

    /// Drains and closes what is not in use any more, on a thread of its own.
    pub fn retire(self: &Arc<Self>, member: &Arc<Member>, force: bool, reason: &str) {
        member.begin_end();
        let work = {
            let (shared, member, reason) = (self.clone(), member.clone(), reason.to_owned());
            move || shared.end(&member, force, &reason)
        };
        if let Err(error) = thread::Builder::new().name("kv-retire".into()).spawn(work) {
            tracing::warn!(backend = %member.name, "no thread to close it with, so this one does: {error}");
            self.end(member, force, reason);
        }
    }

    fn end(self: &Arc<Self>, member: &Arc<Member>, force: bool, reason: &str) {
        let closed = match member.instance() {
            Some(instance) => {
                let now = Instant::now();
                let drain = if force { now } else { now + instance.settings().drain_timeout };
                instance.shut(drain, drain + CLOSE_TIMEOUT, reason)
            }
            None => member.calls.is_idle(),
        };
        self.ended(member, closed);
    }

    /// Takes note of how the end of an instance went.
    pub fn ended(&self, member: &Arc<Member>, closed: bool) {
        let mut board = lock(&self.board);
        if closed {
            // An attach that hung in the plugin; an instance says so itself.
            let returned = "its calls have returned after all";
            member.state.go_if(|before| before == BackendState::Zombie, BackendState::Detached, returned);
            // What has failed keeps its place in the list.
            if board.leaving.iter().any(|leaving| Arc::ptr_eq(leaving, member)) {
                board.bury(member);
            }
        }
        drop(board);
        member.set_end(closed);
    }
}
