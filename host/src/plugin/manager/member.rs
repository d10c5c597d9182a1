//! One instance in the manager's hands, from the first look for its plugin to its end.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value};

use super::super::admin::{AdminError, BackendStatus};
use super::super::backend::{BackendSettings, StorageBackend};
use super::super::controls::Controls;
use super::super::open::Opened;
use super::super::ranks::Ranks;
use super::super::state::{BackendState, StateCell};
use super::attach::{Answer, Refused};
use super::lock;

/// An instance and what is known of it before and after it is open.
pub(super) struct Member {
    /// Name it is attached under.
    pub name: String,
    plugin: String,
    settings: BackendSettings,
    /// Where it is in its life.
    pub state: Arc<StateCell>,
    /// Calls of `open` to the health check.
    pub calls: Arc<Controls>,
    opened: OnceLock<Opened>,
    called_off: Mutex<Option<String>>,
    /// Where the answer to its attach goes; the first one counts.
    answer: Mutex<Option<Sender<Answer>>>,
    /// Whether it could be closed, once its end was tried.
    end: Mutex<Option<bool>>,
    ended: Condvar,
}

impl Member {
    pub fn new(name: &str, plugin: &str, settings: BackendSettings, state: StateCell) -> Arc<Member> {
        Arc::new(Member {
            name: name.to_owned(),
            plugin: plugin.to_owned(),
            settings,
            state: Arc::new(state),
            calls: Arc::default(),
            opened: OnceLock::new(),
            called_off: Mutex::default(),
            answer: Mutex::default(),
            end: Mutex::default(),
            ended: Condvar::new(),
        })
    }

    /// Grows from request to request.
    pub fn ticket(&self) -> u64 {
        self.state.instance()
    }

    /// Its instance, that of each rank, once it is open.
    pub fn instance(&self) -> Option<&Arc<Ranks>> {
        self.opened.get().map(|opened| &opened.instance)
    }

    pub fn set_opened(&self, opened: Opened) {
        // It is opened once.
        let _ = self.opened.set(opened);
    }

    /// Where the answer to its attach comes.
    pub fn expect_answer(&self) -> Receiver<Answer> {
        let (answer, answered) = channel();
        *lock(&self.answer) = Some(answer);
        answered
    }

    /// Answers whoever asked for the attach, if that has not been done.
    pub fn answer(&self, answer: Answer) {
        if let Some(asked) = lock(&self.answer).take() {
            // Whoever asked may have gone.
            let _ = asked.send(answer);
        }
    }

    /// An attach that runs is to end without effect; whoever asked for it hears so now.
    pub fn call_off(&self, reason: &str) {
        lock(&self.called_off).get_or_insert_with(|| reason.to_owned());
        let error = AdminError::new(format!("storage backend {}: {reason}", self.name));
        self.answer(Err(Refused { error, member: None }));
    }

    /// Why the attach is to end without effect.
    pub fn called_off(&self) -> Option<String> {
        lock(&self.called_off).clone()
    }

    /// Whether a call into the plugin runs or never returned.
    pub fn is_idle(&self) -> bool {
        self.calls.is_idle() && self.instance().is_none_or(|instance| instance.is_idle())
    }

    /// Its end is tried, or tried again.
    pub fn begin_end(&self) {
        *lock(&self.end) = None;
    }

    /// Tells those who wait for its end how it went.
    pub fn set_end(&self, closed: bool) {
        *lock(&self.end) = Some(closed);
        self.ended.notify_all();
    }

    /// Waits for its end. Says whether it could be closed.
    pub fn wait_end(&self) -> bool {
        let mut end = lock(&self.end);
        loop {
            match *end {
                Some(closed) => return closed,
                None => end = self.ended.wait(end).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Waits for its end for a while. None when it takes longer.
    pub fn wait_end_within(&self, time: Duration) -> Option<bool> {
        let end = lock(&self.end);
        *self.ended.wait_timeout_while(end, time, |end| end.is_none()).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Version of its plugin; empty before it is open.
    pub fn version(&self) -> String {
        self.instance().map(|instance| instance.library().info.note.version.clone()).unwrap_or_default()
    }

    /// What the status reply says of it, without what the guards have seen.
    pub fn status(&self, in_use: bool) -> BackendStatus {
        let history = self.state.history();
        let report = history.last().cloned().unwrap_or_else(|| self.state.report());
        let instance = self.instance();
        let library = instance.map(|instance| instance.library());
        BackendStatus {
            name: self.name.clone(),
            plugin: library.map_or_else(|| self.plugin.clone(), |library| library.info.note.name.clone()),
            version: self.version(),
            sha256: library.map(|library| library.info.sha256_hex()).unwrap_or_default(),
            instance: self.ticket(),
            state: report.state,
            since: report.since,
            reason: report.reason,
            history,
            in_use,
            in_flight: instance.map_or(0, |instance| instance.in_flight() as u64),
            quarantined_pages: instance.map_or(0, |instance| instance.quarantined() as u64),
            ranks: instance.map(|instance| instance.rank_status()).unwrap_or_default(),
            guards: None,
            settings: self.settings.clone(),
            config: self.shown_config(),
        }
    }

    fn shown_config(&self) -> Map<String, Value> {
        self.opened.get().map(|opened| opened.shown_config.clone()).unwrap_or_default()
    }

    /// Whether it holds a name that an `add` may take: it is no longer, or was never, in use.
    pub fn is_broken(&self) -> bool {
        matches!(self.state.state(), BackendState::Failed | BackendState::Zombie | BackendState::Detached)
    }
}
