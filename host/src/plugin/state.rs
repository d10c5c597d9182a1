//! Where an instance is in its life.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

/// Where an attached backend is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BackendState {
    /// Its library is being found, checked and mapped.
    Loading,
    /// Its instance is being made.
    Opening,
    /// The host pools are being registered.
    Registering,
    /// Serving.
    Active,
    /// Stopped taking operations; those in flight are finishing.
    Draining,
    /// Serving what it can; the reason says what it can't.
    Degraded,
    /// Broken; no operation is sent to it.
    Failed,
    /// A call never returned: the instance can't be closed before the process ends.
    Zombie,
    /// Closed, or never attached.
    Detached,
}

impl BackendState {
    /// All of them, in the order of a life.
    pub const ALL: [Self; 9] = [
        Self::Loading,
        Self::Opening,
        Self::Registering,
        Self::Active,
        Self::Degraded,
        Self::Draining,
        Self::Failed,
        Self::Zombie,
        Self::Detached,
    ];

    /// The name used in replies and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Opening => "opening",
            Self::Registering => "registering",
            Self::Active => "active",
            Self::Draining => "draining",
            Self::Degraded => "degraded",
            Self::Failed => "failed",
            Self::Zombie => "zombie",
            Self::Detached => "detached",
        }
    }

    /// Whether data calls are sent to it.
    pub fn serves(self) -> bool {
        matches!(self, Self::Active | Self::Degraded)
    }
}

/// A state with its time and reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateReport {
    /// State.
    pub state: BackendState,
    /// Since when.
    pub since: SystemTime,
    /// Why; empty when there is nothing to say.
    pub reason: String,
}

/// States kept of one instance, the present one among them.
const HISTORY: usize = 32;

/// How soon another reason for the same state is logged again.
const SAME_STATE_PAUSE: Duration = Duration::from_secs(600);

/// Whether a change is worth a line of the log: one to another state is, one to another reason rarely. A backend in trouble may find another
/// reason each time it is asked.
#[derive(Debug, Default)]
struct Said(Option<Instant>);

impl Said {
    fn is_due(&mut self, other_state: bool, now: Instant) -> bool {
        let due = other_state || self.0.is_none_or(|last| now.duration_since(last) >= SAME_STATE_PAUSE);
        if due {
            self.0 = Some(now);
        }
        due
    }
}

/// The state of one instance, with one log line a change, and a line each ten minutes at most where only the reason is another. The line's fields are stable: `backend`, `instance` (which tells two instances of
/// one name apart), `before`, `state`, `reason`.
pub struct StateCell {
    backend: String,
    instance: u64,
    life: Mutex<VecDeque<StateReport>>,
    said: Mutex<Said>,
    on_change: Box<dyn Fn(BackendState) + Send + Sync>,
}

impl std::fmt::Debug for StateCell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StateCell")
            .field("backend", &self.backend)
            .field("instance", &self.instance)
            .field("report", &self.report())
            .finish_non_exhaustive()
    }
}

impl StateCell {
    /// A backend that is being loaded. `on_change` is called after each change, from whatever thread makes it; it must not block.
    pub fn new(backend: &str, on_change: Box<dyn Fn(BackendState) + Send + Sync>) -> StateCell {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let first = StateReport { state: BackendState::Loading, since: SystemTime::now(), reason: String::new() };
        StateCell {
            backend: backend.to_owned(),
            instance: NEXT.fetch_add(1, Ordering::Relaxed),
            life: Mutex::new(VecDeque::from([first])),
            said: Mutex::default(),
            on_change,
        }
    }

    /// Differs between any two instances in the life of the process, and grows.
    pub fn instance(&self) -> u64 {
        self.instance
    }

    fn life(&self) -> MutexGuard<'_, VecDeque<StateReport>> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state now.
    pub fn report(&self) -> StateReport {
        let nothing = || StateReport { state: BackendState::Loading, since: SystemTime::now(), reason: String::new() };
        self.life().back().cloned().unwrap_or_else(nothing)
    }

    /// The latest states, the present one last.
    pub fn history(&self) -> Vec<StateReport> {
        self.life().iter().cloned().collect()
    }

    /// The state now, without time and reason.
    pub fn state(&self) -> BackendState {
        self.life().back().map_or(BackendState::Loading, |report| report.state)
    }

    /// Whether data calls are sent to it.
    pub fn serves(&self) -> bool {
        self.state().serves()
    }

    /// Goes to `state` if `from` allows it. Says whether it went.
    pub fn go_if(&self, from: impl FnOnce(BackendState) -> bool, state: BackendState, reason: &str) -> bool {
        let mut life = self.life();
        let Some((before, same)) = life.back().map(|now| (now.state, now.state == state && now.reason == reason))
        else {
            return false;
        };
        if same || !from(before) {
            return false;
        }
        if life.len() >= HISTORY {
            life.pop_front();
        }
        life.push_back(StateReport { state, since: SystemTime::now(), reason: reason.to_owned() });
        drop(life);
        if self.said.lock().unwrap_or_else(PoisonError::into_inner).is_due(before != state, Instant::now()) {
            self.log(before, state, reason);
        } else {
            tracing::debug!(
                backend = self.backend,
                instance = self.instance,
                reason,
                "storage backend still {}",
                state.as_str()
            );
        }
        (self.on_change)(state);
        true
    }

    fn log(&self, before: BackendState, state: BackendState, reason: &str) {
        // Whoever asked for an attach is told that it failed, and why; one that served fails on its own.
        let told = state == BackendState::Failed && !before.serves();
        let (backend, instance, before, now) = (self.backend.as_str(), self.instance, before.as_str(), state.as_str());
        match state {
            BackendState::Failed | BackendState::Zombie if !told => {
                tracing::error!(backend, instance, before, state = now, reason, "storage backend {now}");
            }
            BackendState::Failed | BackendState::Degraded => {
                tracing::warn!(backend, instance, before, state = now, reason, "storage backend {now}");
            }
            _ => tracing::info!(backend, instance, before, state = now, reason, "storage backend {now}"),
        }
    }

    /// Goes to `state`.
    pub fn go(&self, state: BackendState, reason: &str) -> bool {
        self.go_if(|_| true, state, reason)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_backend_in_trouble_was_logged_every_few_seconds_with_another_reason() {
        let (mut said, start) = (Said::default(), Instant::now());
        assert!(said.is_due(true, start));
        let due = (1..600).filter(|second| said.is_due(false, start + Duration::from_secs(*second))).count();
        assert_eq!(due, 0, "the state is the same");
        assert!(said.is_due(true, start + Duration::from_secs(5)), "another state is always told");
        assert!(said.is_due(false, start + SAME_STATE_PAUSE * 2), "now and then the reason is told too");
    }

    #[test]
    fn the_latest_states_are_kept_with_their_reasons() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let told = seen.clone();
        let cell = StateCell::new("file", Box::new(move |state| told.lock().unwrap().push(state)));
        assert!(cell.go(BackendState::Active, ""));
        assert!(!cell.go(BackendState::Active, ""), "no change");
        assert!(!cell.go_if(|before| before == BackendState::Draining, BackendState::Failed, "no"));
        let history: Vec<_> = cell.history().iter().map(|report| report.state).collect();
        assert_eq!(history, [BackendState::Loading, BackendState::Active]);
        assert_eq!(*seen.lock().unwrap(), [BackendState::Active]);
        for round in 0..100 {
            cell.go(BackendState::Degraded, &format!("reason {round}"));
        }
        let history = cell.history();
        assert_eq!(history.len(), HISTORY);
        assert_eq!(history.last().unwrap().reason, "reason 99");
        assert_eq!(cell.report().reason, "reason 99");
    }
}
