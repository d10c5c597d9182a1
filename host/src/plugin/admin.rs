//! What the admin endpoints need from whoever owns the storage backends.
//!
//! The HTTP side knows names, configs and replies; loading, draining and switching are behind
//! [`StorageAdmin`]. All calls may block (they load libraries and drain operations), so the
//! server runs them on a blocking thread.

use std::time::{Duration, SystemTime};

use serde_json::{Map, Value};

use super::backend::{BackendSettings, GuardReport};
use super::state::{BackendState, StateReport};

/// How an attach treats backends that are attached already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachMode {
    /// Become the only backend: attach when there is none, replace the one there is.
    ReplaceOnly,
    /// Replace the named backend and keep the others.
    Replace(String),
    /// One more beside those already attached: where the configuration's list has its name, else at the end.
    Add,
}

/// One request to attach a storage backend. Names only: a backend is found in the search path.
#[derive(Clone, Debug, PartialEq)]
pub struct AttachRequest {
    /// The backend's name, as in `storage.<name>`.
    pub backend: String,
    /// The backend's own config, over what the config file says for `storage.<name>`. `None`
    /// takes the config file's table as it is.
    pub config: Option<Map<String, Value>>,
    /// Prefetch policy to switch to in the same step, if any. Checked to be a known name.
    pub prefetch_policy: Option<String>,
    /// Write policy to switch to in the same step, if any. Checked to be a known name.
    pub write_policy: Option<String>,
    /// What happens to backends that are attached.
    pub mode: AttachMode,
}

/// The part of a backend that serves one of several tensor-parallel ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankStatus {
    /// Where its instance is in its life.
    pub state: BackendState,
    /// Why; empty when there is nothing to say.
    pub reason: String,
    /// Operations in flight.
    pub in_flight: u64,
    /// Pages held by calls that are past their deadline and have not returned.
    pub quarantined_pages: u64,
    /// Calls that failed on this rank, and so on all.
    pub failed_calls: u64,
    /// Pages that did not come or go on this rank while they did on another one, and so count as lost on all.
    pub lost_pages: u64,
}

/// One backend as `GET /hicache/storage-backend` shows it.
#[derive(Clone, Debug)]
pub struct BackendStatus {
    /// The name it is attached under.
    pub name: String,
    /// The plugin that serves it.
    pub plugin: String,
    /// The plugin's own version.
    pub version: String,
    /// SHA-256 of the plugin's file, in hex.
    pub sha256: String,
    /// Tells two instances of one name apart, in the log too; grows.
    pub instance: u64,
    /// Where it is in its life.
    pub state: BackendState,
    /// Since when it has been in that state.
    pub since: SystemTime,
    /// Why it is degraded, failed or detached; empty when there is nothing to say.
    pub reason: String,
    /// The latest states with their times and reasons, the present one last.
    pub history: Vec<StateReport>,
    /// Whether the cache uses it. Not yet while it is being opened, and not any more once it was detached, replaced or has failed.
    pub in_use: bool,
    /// Operations in flight.
    pub in_flight: u64,
    /// Host pages held by calls that are past their deadline and have not returned.
    pub quarantined_pages: u64,
    /// Each of several ranks, in order; empty with one.
    pub ranks: Vec<RankStatus>,
    /// What the guards around it have seen, while it is in use.
    pub guards: Option<GuardReport>,
    /// How the host treats it.
    pub settings: BackendSettings,
    /// The config in use, as JSON, with secret values replaced.
    pub config: Map<String, Value>,
}

/// The answer to `GET /hicache/storage-backend`, before it is written as JSON.
#[derive(Clone, Debug, Default)]
pub struct StorageStatus {
    /// The prefetch policy in use.
    pub prefetch_policy: String,
    /// The write policy in use.
    pub write_policy: String,
    /// Attached backends, in the order they are asked; then those that are being opened, and those that are leaving or can't be
    /// closed.
    pub backends: Vec<BackendStatus>,
    /// Instances that have ended, the latest last. Only the last few are kept.
    pub past: Vec<BackendStatus>,
    /// How often the backends of these names went to a state since the start of the process.
    pub transitions: Vec<(String, BackendState, u64)>,
}

/// Why an admin call was refused. The text is shown to the client.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct AdminError {
    /// One line that a person can act on.
    pub message: String,
}

impl AdminError {
    /// An error that says `message`.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

/// Attach, detach, status and clear of storage backends, while requests run.
///
/// No call waits for another one, and on any error of `attach` nothing has changed. The text of a success is the second line of the
/// HTTP reply.
pub trait StorageAdmin: Send + Sync {
    /// Attaches or replaces a backend.
    fn attach(&self, request: AttachRequest) -> Result<String, AdminError>;

    /// Detaches `name`, or all backends, and calls off attaches that run. `force` skips the drain, also one that an earlier call
    /// began. Detaching when nothing is attached is a success.
    fn detach(&self, name: Option<&str>, force: bool) -> Result<String, AdminError>;

    /// What is attached, and how it is.
    fn status(&self) -> StorageStatus;

    /// Asks `name`, or every attached backend, to drop the pages of this server's namespace. Says what was
    /// cleared, by backend.
    fn clear(&self, name: Option<&str>, timeout: Duration) -> Result<String, AdminError>;
}
