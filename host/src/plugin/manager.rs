//! Attaches, replaces and detaches storage backends while requests run.
//!
//! An attach brings the new instance up beside what is there: found, mapped, opened, registered and asked for its health, and only then
//! switched in, in one step. On any failure nothing has changed. A detach switches the instance out first; calls that run get a time to
//! return, are cancelled after it, and the instance is closed. A request never fails because of any of this: a call that fails is a miss.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Map, Value};

use super::abi::AbiVersions;
use super::admin::{AdminError, AttachMode, AttachRequest, BackendStatus, StorageAdmin, StorageStatus};
use super::backend::{BackendSink, CallOptions, Place, PolicyChange, StorageBackend};
use super::discover::find_with;
use super::host_table::PluginMetric;
use super::identity::WorkerIdentity;
use super::instance::Instance;
use super::open::{OpenRequest, open};
use super::state::{BackendState, StateCell};
use crate::config::{BackendTable, StorageConfig};

/// Time after that for cancelled calls to return and for `close`.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// What a plugin reported: backend, name of the metric, labels, value.
pub type ReportedMetric = (String, String, String, PluginMetric);

/// Owns the attached backends.
#[derive(Clone)]
pub struct PluginManager {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for PluginManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PluginManager").field("attached", &lock(&self.shared.attached).len()).finish_non_exhaustive()
    }
}

struct Shared {
    abi: AbiVersions,
    config: StorageConfig,
    folders: Vec<PathBuf>,
    identity: Arc<WorkerIdentity>,
    sink: Arc<dyn BackendSink>,
    /// One admin call at a time.
    turn: Mutex<()>,
    attached: Mutex<Vec<Attached>>,
    /// Backends that were asked for at the start and could not be attached.
    absent: Mutex<Vec<BackendStatus>>,
    /// Instances that can't be closed.
    zombies: Mutex<Vec<Arc<Instance>>>,
}

struct Attached {
    instance: Arc<Instance>,
    shown_config: Map<String, Value>,
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
        PluginManager {
            shared: Arc::new(Shared {
                abi,
                config,
                folders,
                identity: Arc::new(identity),
                sink,
                turn: Mutex::default(),
                attached: Mutex::default(),
                absent: Mutex::default(),
                zombies: Mutex::default(),
            }),
        }
    }

    /// Attaches what the configuration names. With `storage.required = false` a failure is logged and shown in the status, and
    /// serving goes on without it.
    ///
    /// # Errors
    /// When a required backend can't be attached.
    pub fn attach_configured(&self) -> Result<(), AdminError> {
        let _turn = lock(&self.shared.turn);
        for name in self.shared.config.selected() {
            let table = self.shared.config.table(name);
            let plugin = table.plugin.clone();
            match self.shared.bring_up(table) {
                Ok(attached) => {
                    self.shared.sink.attached(attached.instance.clone(), Place::Of(name.to_owned()));
                    lock(&self.shared.attached).push(attached);
                }
                Err(error) if self.shared.config.required => return Err(error),
                Err(error) => {
                    tracing::error!(backend = %name, "serving without this storage backend (storage.required = false): {error}");
                    lock(&self.shared.absent).push(BackendStatus {
                        name: name.to_owned(),
                        plugin,
                        version: String::new(),
                        sha256: String::new(),
                        state: BackendState::Detached,
                        since: SystemTime::now(),
                        reason: error.to_string(),
                        in_flight: 0,
                        quarantined_pages: 0,
                        config: Map::new(),
                    });
                }
            }
        }
        Ok(())
    }

    /// Detaches everything. Says whether every instance could be closed; if not, the process must end by `_exit`, because a
    /// plugin's thread may still run.
    pub fn shut_down(&self) -> bool {
        let result = self.detach(None, false);
        if let Err(error) = &result {
            tracing::warn!("{error}");
        }
        lock(&self.shared.zombies).is_empty()
    }

    /// What the plugins reported as metrics.
    pub fn reported_metrics(&self) -> Vec<ReportedMetric> {
        let attached = lock(&self.shared.attached);
        let of = |a: &Attached| {
            let backend = a.instance.name().to_owned();
            a.instance
                .context()
                .metrics()
                .into_iter()
                .map(move |((name, labels), v)| (backend.clone(), name, labels, v))
        };
        attached.iter().flat_map(of).collect()
    }
}

impl Shared {
    /// Opens an instance that is not switched in yet.
    fn bring_up(self: &Arc<Self>, config: BackendTable) -> Result<Attached, AdminError> {
        let pool = self.sink.host_pool().ok_or_else(|| {
            AdminError::new("there is no host pool to move pages through: set cache.host_tokens above 0 and cache.mode = \"hierarchical\"")
        })?;
        let weak = Arc::downgrade(self);
        let on_change = Box::new(move |state| {
            if state == BackendState::Failed {
                spawn_sweep(&weak);
            }
        });
        let request = OpenRequest {
            abi: self.abi,
            state: Arc::new(StateCell::new(&config.name, on_change)),
            calls: Arc::default(),
            config,
            folders: self.folders.clone(),
            identity: self.identity.clone(),
            pool,
        };
        let opened = open(&request).map_err(AdminError::new)?;
        Ok(Attached { instance: opened.instance, shown_config: opened.shown_config })
    }

    fn retire(&self, instance: &Arc<Instance>, force: bool, reason: &str) -> bool {
        let now = Instant::now();
        let drain = if force { now } else { now + instance.settings().drain_timeout };
        let closed = instance.shut(drain, drain + CLOSE_TIMEOUT, reason);
        if !closed {
            lock(&self.zombies).push(instance.clone());
        }
        closed
    }

    /// Switches out and closes what has failed. It stays in the status, with its reason.
    fn sweep_failed(&self) {
        let _turn = lock(&self.turn);
        let failed: Vec<Arc<Instance>> = lock(&self.attached)
            .iter()
            .filter(|a| a.instance.state().report().state == BackendState::Failed)
            .map(|a| a.instance.clone())
            .collect();
        for instance in failed {
            self.sink.detached(instance.name());
            self.retire(&instance, true, "it failed");
        }
    }

    fn status_of(attached: &Attached) -> BackendStatus {
        let instance = &attached.instance;
        let note = &instance.library().info.note;
        let report = instance.state().report();
        BackendStatus {
            name: instance.name().to_owned(),
            plugin: note.name.clone(),
            version: note.version.clone(),
            sha256: instance.library().info.sha256_hex(),
            state: report.state,
            since: report.since,
            reason: report.reason,
            in_flight: instance.in_flight() as u64,
            quarantined_pages: instance.quarantined() as u64,
            config: attached.shown_config.clone(),
        }
    }
}

/// Runs `sweep_failed` on a thread of its own: whoever saw the failure is inside a call.
fn spawn_sweep(shared: &Weak<Shared>) {
    let shared = shared.clone();
    let spawned = thread::Builder::new().name("kv-sweep".into()).spawn(move || {
        if let Some(shared) = shared.upgrade() {
            shared.sweep_failed();
        }
    });
    if let Err(error) = spawned {
        tracing::error!("a failed storage backend can't be closed, no thread for it: {error}");
    }
}

impl StorageAdmin for PluginManager {
    fn attach(&self, request: AttachRequest) -> Result<String, AdminError> {
        let _turn = lock(&self.shared.turn);
        let name = request.backend.clone();
        let names: Vec<String> = lock(&self.shared.attached).iter().map(|a| a.instance.name().to_owned()).collect();
        let old = match &request.mode {
            AttachMode::ReplaceOnly => match names.as_slice() {
                [] => None,
                [only] => Some(only.clone()),
                many => {
                    return Err(AdminError::new(format!(
                        "several backends are attached ({}): kvdock_backend names the one to replace, kvdock_mode \"add\" appends",
                        many.join(", ")
                    )));
                }
            },
            AttachMode::Replace(old) if names.contains(old) => Some(old.clone()),
            AttachMode::Replace(old) => {
                return Err(AdminError::new(format!(
                    "no backend named {old:?} is attached; there are: {}",
                    names.join(", ")
                )));
            }
            AttachMode::Add if names.is_empty() => None,
            AttachMode::Add => {
                return Err(AdminError::new(format!(
                    "this build attaches one backend at a time, and {} is attached: leave kvdock_mode out to replace it",
                    names.join(", ")
                )));
            }
        };
        let table = self.shared.config.table(&name);
        let mut table = match &request.config {
            Some(over) => table.overlaid(over).map_err(AdminError::new)?,
            None => table,
        };
        let mut change = PolicyChange {
            prefetch: request.prefetch_policy.clone(),
            write: request.write_policy.clone().or_else(|| table.settings.write_policy.clone()),
            ..PolicyChange::default()
        };
        let plugin = find_with(self.shared.abi, &table.plugin, &self.shared.folders).map_err(AdminError::new)?;
        change.take_from(&mut table.own, &plugin.note.config_schema).map_err(AdminError::new)?;
        self.shared.sink.check_policies(&change).map_err(AdminError::new)?;
        let new = self.shared.bring_up(table)?;
        let new_instance = new.instance.clone();
        // From here on nothing fails.
        self.shared.sink.set_policies(&change);
        let place = Place::Of(old.clone().unwrap_or_else(|| name.clone()));
        self.shared.sink.attached(new_instance.clone(), place);
        let retired = {
            let mut attached = lock(&self.shared.attached);
            match old.as_ref().and_then(|old| attached.iter().position(|a| a.instance.name() == old)) {
                Some(index) => Some(std::mem::replace(&mut attached[index], new)),
                None => {
                    attached.push(new);
                    None
                }
            }
        };
        lock(&self.shared.absent).retain(|absent| absent.name != name);
        let version = &new_instance.library().info.note.version;
        let mut text = format!("{name} (version {version}) is attached.");
        if let Some(retired) = retired {
            let old = retired.instance.name();
            let closed = self.shared.retire(&retired.instance, false, "replaced");
            text.push_str(&format!(" It replaces {old}"));
            text.push_str(if closed { "." } else { ", which can't be closed because a call into it does not return." });
        }
        Ok(text)
    }

    fn detach(&self, name: Option<&str>, force: bool) -> Result<String, AdminError> {
        let _turn = lock(&self.shared.turn);
        let leaving: Vec<Attached> = {
            let mut attached = lock(&self.shared.attached);
            if let Some(name) = name
                && !attached.iter().any(|a| a.instance.name() == name)
                && !attached.is_empty()
            {
                let names: Vec<&str> = attached.iter().map(|a| a.instance.name()).collect();
                return Err(AdminError::new(format!(
                    "no backend named {name:?} is attached; there are: {}",
                    names.join(", ")
                )));
            }
            let (leaving, staying) =
                std::mem::take(&mut *attached).into_iter().partition(|a| name.is_none_or(|n| n == a.instance.name()));
            *attached = staying;
            leaving
        };
        if leaving.is_empty() {
            return Ok("no storage backend was attached.".into());
        }
        for gone in &leaving {
            self.shared.sink.detached(gone.instance.name());
        }
        let mut said = Vec::new();
        for gone in &leaving {
            let closed = self.shared.retire(&gone.instance, force, "detached");
            let name = gone.instance.name();
            said.push(if closed {
                format!("{name} is detached.")
            } else {
                format!("{name} is detached, but can't be closed because a call into it does not return.")
            });
        }
        Ok(said.join(" "))
    }

    fn status(&self) -> StorageStatus {
        let mut backends: Vec<BackendStatus> = lock(&self.shared.attached).iter().map(Shared::status_of).collect();
        backends.extend(lock(&self.shared.absent).iter().cloned());
        let (prefetch_policy, write_policy) = self.shared.sink.policies();
        StorageStatus { prefetch_policy, write_policy, backends }
    }

    fn clear(&self, timeout: Duration) -> Result<String, AdminError> {
        let instances: Vec<Arc<Instance>> = lock(&self.shared.attached).iter().map(|a| a.instance.clone()).collect();
        if instances.is_empty() {
            return Ok("no storage backend is attached.".into());
        }
        let mut said = Vec::new();
        let mut failed = Vec::new();
        for instance in instances {
            let cleared = instance.clear(&CallOptions::within(timeout));
            // A clear that failed may have removed a part.
            self.shared.sink.emptied(instance.name());
            match cleared {
                Ok(()) => said.push(format!("{} is cleared.", instance.name())),
                Err(error) => failed.push(error.to_string()),
            }
        }
        if failed.is_empty() { Ok(said.join(" ")) } else { Err(AdminError::new([failed, said].concat().join(" "))) }
    }
}
