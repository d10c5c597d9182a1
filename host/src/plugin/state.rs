//! Where an instance is in its life.

use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use serde::Serialize;

/// Where an attached backend is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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
#[derive(Debug, Clone)]
pub struct StateReport {
    /// State.
    pub state: BackendState,
    /// Since when.
    pub since: SystemTime,
    /// Why; empty when there is nothing to say.
    pub reason: String,
}

/// The state of one instance, with one log line a change.
pub struct StateCell {
    backend: String,
    report: Mutex<StateReport>,
    on_failed: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for StateCell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StateCell")
            .field("backend", &self.backend)
            .field("report", &self.report)
            .finish_non_exhaustive()
    }
}

impl StateCell {
    /// A backend that is being loaded. `on_failed` is called when it fails, from whatever thread sees it first; it must not block.
    pub fn new(backend: &str, on_failed: Box<dyn Fn() + Send + Sync>) -> StateCell {
        let report = StateReport { state: BackendState::Loading, since: SystemTime::now(), reason: String::new() };
        StateCell { backend: backend.to_owned(), report: Mutex::new(report), on_failed }
    }

    /// The state now.
    pub fn report(&self) -> StateReport {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether data calls are sent to it.
    pub fn serves(&self) -> bool {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).state.serves()
    }

    /// Goes to `state` if `from` allows it. Says whether it went.
    pub fn go_if(&self, from: impl FnOnce(BackendState) -> bool, state: BackendState, reason: &str) -> bool {
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        if !from(report.state) || (report.state == state && report.reason == reason) {
            return false;
        }
        let before = report.state;
        *report = StateReport { state, since: SystemTime::now(), reason: reason.to_owned() };
        drop(report);
        let (backend, before, now) = (self.backend.as_str(), before.as_str(), state.as_str());
        match state {
            BackendState::Failed | BackendState::Zombie => {
                tracing::error!(backend, before, state = now, "storage backend {now}: {reason}");
            }
            BackendState::Degraded => {
                tracing::warn!(backend, before, state = now, "storage backend degraded: {reason}")
            }
            _ => tracing::info!(backend, before, state = now, reason, "storage backend {now}"),
        }
        if state == BackendState::Failed {
            (self.on_failed)();
        }
        true
    }

    /// Goes to `state`.
    pub fn go(&self, state: BackendState, reason: &str) -> bool {
        self.go_if(|_| true, state, reason)
    }
}
