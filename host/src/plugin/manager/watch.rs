//! Looking after the backends: how they are, what has failed, and what can be closed after all.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use kvdock_plugin_api::HealthState;

use super::super::backend::{BreakerState, ErrorKind, GuardReport, StorageBackend};
use super::super::ranks::Ranks;
use super::super::state::BackendState;
use super::member::Member;
use super::{Shared, lock};

/// How often backends are asked how they are.
const INTERVAL: Duration = Duration::from_secs(3);

/// Most time for the answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts the thread that looks after the backends. It ends when the manager does.
pub(super) fn start(shared: &Arc<Shared>, ended: Receiver<()>) {
    let weak = Arc::downgrade(shared);
    let work = move || {
        while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
            match weak.upgrade() {
                Some(shared) => shared.look_after(),
                None => return,
            }
        }
    };
    if let Err(error) = thread::Builder::new().name("kv-watch".into()).spawn(work) {
        tracing::error!("storage backends are not asked for their health, no thread for it: {error}");
    }
}

impl Shared {
    pub fn look_after(self: &Arc<Self>) {
        for instance in self.in_use() {
            let resting = self.sink.guards(instance.name()).and_then(|guards| resting(&guards));
            ask(&instance, resting);
        }
        self.sweep_failed();
        self.close_late();
    }

    /// Runs `sweep_failed` on a thread of its own: whoever saw the failure is inside a call.
    pub fn sweep_soon(self: &Arc<Self>) {
        let shared = self.clone();
        if let Err(error) = thread::Builder::new().name("kv-sweep".into()).spawn(move || shared.sweep_failed()) {
            tracing::warn!("a failed storage backend is closed a little later, no thread for it now: {error}");
        }
    }

    /// Switches out and closes what has failed. It keeps its place in the status, with its reason.
    fn sweep_failed(self: &Arc<Self>) {
        let mut board = lock(&self.board);
        let failed: Vec<Arc<Member>> = board
            .slots
            .iter_mut()
            .filter(|slot| slot.in_use && slot.member.state.state() == BackendState::Failed)
            .map(|slot| {
                self.sink.detached(&slot.member.name);
                slot.in_use = false;
                slot.member.clone()
            })
            .collect();
        drop(board);
        for member in failed {
            self.retire(&member, true, "it failed");
        }
    }

    /// Closes what could not be closed before because a call had not returned.
    fn close_late(self: &Arc<Self>) {
        let board = lock(&self.board);
        let members = board.slots.iter().filter(|slot| !slot.in_use).map(|slot| &slot.member).chain(&board.leaving);
        let returned: Vec<Arc<Member>> =
            members.filter(|m| m.state.state() == BackendState::Zombie && m.is_idle()).cloned().collect();
        drop(board);
        for member in returned {
            self.retire(&member, true, "its calls have returned after all");
        }
    }
}

/// What the guards know that the plugin may not: that it keeps failing.
fn resting(guards: &GuardReport) -> Option<String> {
    let rests = |way: BreakerState| way != BreakerState::Closed;
    let which = match (rests(guards.reads.breaker), rests(guards.writes.breaker)) {
        (false, false) => return None,
        (true, false) => "reads",
        (false, true) => "writes",
        (true, true) => "reads and writes",
    };
    // Without figures, so that a backend that goes on failing is one event and not many.
    Some(format!("{which} keep failing and are left alone for now"))
}

/// Asks one backend how it is, and shows the answer.
pub(in super::super) fn ask(instance: &Ranks, resting: Option<String>) {
    let answer = instance.health(Instant::now() + ANSWER_TIMEOUT.min(instance.settings().timeout));
    let trouble = match answer {
        Ok((HealthState::Ok, _)) => instance.told_trouble().or(resting),
        // A backend that says it fails may still heal; it is the host that fails an instance for good.
        Ok((HealthState::Degraded | HealthState::Failed, reason)) => Some(reason),
        Err(error) if error.kind == ErrorKind::TimedOut => Some("it does not answer when asked for its health".into()),
        Err(error) => Some(format!("it can't say how it is: {}", error.message)),
    };
    let (state, reason) = match &trouble {
        None => (BackendState::Active, ""),
        Some(reason) => (BackendState::Degraded, reason.as_str()),
    };
    instance.show(state, reason);
}
