//! Attaches, replaces and detaches storage backends while requests run.
//!
//! An attach brings the new instance up beside what is there: found, mapped, opened, registered and asked for its health, and only then
//! switched in, in one step. On any failure nothing has changed. A detach switches the instance out first; calls that run get a time to
//! return, are cancelled after it, and the instance is closed. A request never fails because of any of this: a call that fails is a miss.
//!
//! Nothing waits for a plugin with the [`board`] locked: opening runs on the thread of whoever asked, closing on a thread of its own. So an
//! admin call acts at once whatever the others do, and the status shows what they do. Requests that meet are told apart by their
//! tickets: the later one wins.

mod attach;
mod board;
mod detach;
mod member;
#[cfg(test)]
mod shutdown_tests;
pub(super) mod watch;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::abi::AbiVersions;
use super::admin::{AdminError, AttachMode, AttachRequest, StorageAdmin, StorageStatus};
use super::backend::{BackendSink, CallOptions, PolicyChange, StorageBackend};
use super::host_table::{HostContext, PluginMetric};
use super::identity::WorkerIdentity;
use super::ranks::Ranks;
use super::state::BackendState;
use crate::config::StorageConfig;
use board::Board;

/// What a plugin reported.
#[derive(Debug, Clone, PartialEq)]
pub struct ReportedMetric {
    /// The backend.
    pub backend: String,
    /// Name of the metric.
    pub name: String,
    /// Labels, as the plugin gave them.
    pub labels: String,
    /// The rank whose instance reported it, where there are several.
    pub rank: Option<usize>,
    /// The value.
    pub metric: PluginMetric,
}

/// Most names whose changes of state are counted; names come from the configuration and from admin requests.
const MOST_NAMES: usize = 256;

/// How often the drains that are left are cut short once a shutdown has no more time for them.
const HURRY_PAUSE: Duration = Duration::from_millis(100);

/// Owns the attached backends.
#[derive(Clone)]
pub struct PluginManager {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for PluginManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PluginManager").field("attached", &lock(&self.shared.board).names()).finish_non_exhaustive()
    }
}

struct Shared {
    abi: AbiVersions,
    config: StorageConfig,
    folders: Vec<PathBuf>,
    identity: Arc<WorkerIdentity>,
    sink: Arc<dyn BackendSink>,
    board: Mutex<Board>,
    /// How often backends went to a state, by name.
    transitions: Mutex<BTreeMap<(String, BackendState), u64>>,
    /// The thread that looks after the backends ends with it.
    _watch: Sender<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PluginManager {
    /// A manager without backends. `folders` is the search path.
    pub fn new(
        config: StorageConfig,
        folders: Vec<PathBuf>,
        identity: WorkerIdentity,
        sink: Arc<dyn BackendSink>,
    ) -> PluginManager {
        PluginManager::with_abi(AbiVersions::BUILT_IN, config, folders, identity, sink)
    }

    /// As [`PluginManager::new`], for a host that speaks these ABI versions.
    pub fn with_abi(
        abi: AbiVersions,
        config: StorageConfig,
        folders: Vec<PathBuf>,
        identity: WorkerIdentity,
        sink: Arc<dyn BackendSink>,
    ) -> PluginManager {
        let (watch, watched) = channel();
        let shared = Arc::new(Shared {
            abi,
            config,
            folders,
            identity: Arc::new(identity),
            sink,
            board: Mutex::default(),
            transitions: Mutex::default(),
            _watch: watch,
        });
        watch::start(&shared, watched);
        PluginManager { shared }
    }

    /// Attaches what the configuration names, in its order. With `storage.required = false` a failure is logged and shown in the status,
    /// and serving goes on without it.
    ///
    /// # Errors
    /// When a required backend can't be attached. None is attached then.
    pub fn attach_configured(&self) -> Result<(), AdminError> {
        for name in self.shared.config.selected() {
            match self.shared.bring_in(self.shared.config.table(name), &AttachMode::Add, &PolicyChange::default()) {
                Ok(_) => {}
                Err(refused) if self.shared.config.required => {
                    self.shut_down();
                    return Err(refused.error);
                }
                Err(refused) => {
                    let error = &refused.error;
                    tracing::error!(backend = %name, "serving without this storage backend (storage.required = false): {error}");
                    self.shared.keep_place(name, refused.member);
                }
            }
        }
        Ok(())
    }

    /// As [`PluginManager::shut_down`], but calls that still run after `time` are cancelled, however long their backends' `drain_timeout` is.
    pub fn shut_down_within(&self, time: Duration) -> bool {
        let (ended, end) = channel::<()>();
        let shared = &self.shared;
        let hurry = move || {
            let mut pause = time;
            // Again and again, since what an attach that just ran has replaced may begin to drain late.
            while end.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                shared.hurry_drains();
                pause = HURRY_PAUSE;
            }
        };
        thread::scope(|scope| {
            let all_ended = match thread::Builder::new().name("kv-hurry".into()).spawn_scoped(scope, hurry) {
                Ok(_) => self.shut_down(),
                Err(error) => {
                    tracing::warn!("no thread to watch the time of the drains, so there are none: {error}");
                    if let Err(error) = self.detach(None, true) {
                        tracing::warn!("{error}");
                    }
                    self.shut_down()
                }
            };
            drop(ended);
            all_ended
        })
    }

    /// Detaches everything. Says whether every instance could be closed; if not, the process must end by `_exit`, because a
    /// plugin's thread may still run.
    pub fn shut_down(&self) -> bool {
        if let Err(error) = self.detach(None, false) {
            tracing::warn!("{error}");
        }
        self.shared.wait_for_drains();
        let board = lock(&self.shared.board);
        board.slots.is_empty() && board.coming.is_empty() && board.leaving.is_empty()
    }

    /// Asks every backend in use how it is, and takes out what has failed. This is done every few seconds anyway.
    pub fn check_health(&self) {
        self.shared.look_after();
    }

    /// What the plugins reported as metrics.
    pub fn reported_metrics(&self) -> Vec<ReportedMetric> {
        let of = |instance: &Arc<Ranks>| {
            let several = instance.instances().len() > 1;
            let of_rank = |(rank, context): (usize, &'static HostContext)| {
                let backend = instance.name().to_owned();
                let rank = several.then_some(rank);
                let metrics = context.metrics().into_iter();
                metrics.map(move |((name, labels), metric)| ReportedMetric {
                    backend: backend.clone(),
                    name,
                    labels,
                    rank,
                    metric,
                })
            };
            instance.contexts().enumerate().flat_map(of_rank).collect::<Vec<_>>()
        };
        self.shared.in_use().iter().flat_map(of).collect()
    }
}

impl Shared {
    /// The instances that the cache uses, in order.
    fn in_use(&self) -> Vec<Arc<Ranks>> {
        let board = lock(&self.board);
        board.slots.iter().filter(|slot| slot.in_use).filter_map(|slot| slot.member.instance().cloned()).collect()
    }

    fn count(&self, name: &str, state: BackendState) {
        let mut transitions = lock(&self.transitions);
        if transitions.len() < MOST_NAMES * BackendState::ALL.len()
            || transitions.contains_key(&(name.to_owned(), state))
        {
            *transitions.entry((name.to_owned(), state)).or_default() += 1;
        }
    }

    fn status(&self) -> StorageStatus {
        let board = lock(&self.board);
        let of_slot = |slot: &board::Slot| {
            let mut status = slot.member.status(slot.in_use);
            status.guards = slot.in_use.then(|| self.sink.guards(&slot.member.name)).flatten();
            status
        };
        let mut backends: Vec<_> = board.slots.iter().map(of_slot).collect();
        backends.extend(board.coming.iter().chain(&board.leaving).map(|member| member.status(false)));
        let past = board.past.iter().cloned().collect();
        drop(board);
        let transitions = lock(&self.transitions)
            .iter()
            .filter(|((name, _), _)| backends.iter().any(|backend| backend.name == *name))
            .map(|((name, state), count)| (name.clone(), *state, *count))
            .collect();
        let (prefetch_policy, write_policy) = self.sink.policies();
        StorageStatus { prefetch_policy, write_policy, backends, past, transitions }
    }

    fn clear(&self, name: Option<&str>, timeout: Duration) -> Result<String, AdminError> {
        let mut instances = self.in_use();
        if instances.is_empty() {
            return Ok("no storage backend is attached.".into());
        }
        let names: Vec<String> = instances.iter().map(|instance| instance.name().to_owned()).collect();
        instances.retain(|instance| name.is_none_or(|name| name == instance.name()));
        if instances.is_empty() {
            let name = name.unwrap_or_default();
            return Err(AdminError::new(format!(
                "no backend named {name:?} is attached; there are: {}",
                names.join(", ")
            )));
        }
        let mut said = Vec::new();
        let mut failed = Vec::new();
        for instance in instances {
            let cleared = instance.clear(&CallOptions::within(timeout));
            // A clear that failed may have removed a part.
            self.sink.emptied(instance.name());
            match cleared {
                Ok(()) => said.push(format!("{} is cleared.", instance.name())),
                Err(error) => failed.push(error.to_string()),
            }
        }
        if failed.is_empty() { Ok(said.join(" ")) } else { Err(AdminError::new([failed, said].concat().join(" "))) }
    }
}

impl StorageAdmin for PluginManager {
    fn attach(&self, request: AttachRequest) -> Result<String, AdminError> {
        self.shared.attach(request)
    }

    fn detach(&self, name: Option<&str>, force: bool) -> Result<String, AdminError> {
        self.shared.detach(name, force)
    }

    fn status(&self) -> StorageStatus {
        self.shared.status()
    }

    fn clear(&self, name: Option<&str>, timeout: Duration) -> Result<String, AdminError> {
        self.shared.clear(name, timeout)
    }
}
