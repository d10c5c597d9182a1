//! What all handlers share.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use kvdock_models::{ChatTemplate, ModelSpec, Tokenizer};
use parking_lot::Mutex;
use serde_json::Value;

use super::auth::Keys;
use super::error::ApiError;
use super::fields::UnknownFields;
use crate::engine::EngineHandle;
use crate::plugin::admin::StorageAdmin;
use crate::telemetry::{HttpMetrics, Metrics};

/// What is there once the model is loaded.
pub struct Served {
    /// The running engine.
    pub engine: EngineHandle,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages to text, where the checkpoint has a template.
    pub template: Option<Arc<ChatTemplate>>,
    /// Sizes and identity of the model.
    pub spec: ModelSpec,
    /// The name clients use.
    pub model_name: String,
    /// The path it was loaded from.
    pub model_path: String,
    /// The storage tier's controls; `None` without a host tier.
    pub storage: Option<Arc<dyn StorageAdmin>>,
    /// The configuration as `/get_server_info` shows it, without secrets.
    pub settings: Value,
    /// Tokens a page.
    pub page_size: u32,
    /// Tokens the device pool holds.
    pub device_tokens: u64,
    /// Tokens the host pool holds.
    pub host_tokens: u64,
    /// All metrics.
    pub metrics: Metrics,
    /// Seconds from the start of the process until it was ready.
    pub startup_seconds: f64,
}

impl Served {
    /// Name of the attached storage backend, several joined with commas.
    pub fn storage_backend(&self) -> Option<String> {
        let status = self.storage.as_ref()?.status();
        let names: Vec<_> = status
            .backends
            .into_iter()
            .filter(|backend| backend.in_use && backend.state.serves())
            .map(|backend| backend.name)
            .collect();
        (!names.is_empty()).then(|| names.join(","))
    }
}

/// The server, from before the model is loaded until the last answer.
pub struct Server {
    /// Who may do what.
    pub keys: Keys,
    /// Largest body, bytes.
    pub max_body: usize,
    /// Unknown fields logged so far.
    pub unknown: UnknownFields,
    /// Requests and answers counted at the HTTP level.
    pub http: HttpMetrics,
    /// When the process began to serve.
    pub started: Instant,
    served: OnceLock<Arc<Served>>,
    draining: AtomicBool,
    /// Requests of several prompts: their name, and the engine's names for the prompts.
    groups: Mutex<HashMap<String, Vec<String>>>,
}

/// Several prompts that go by one name, for as long as this lives.
pub struct Group {
    server: Arc<Server>,
    name: String,
}

impl Drop for Group {
    fn drop(&mut self) {
        self.server.groups.lock().remove(&self.name);
    }
}

impl Server {
    /// A server that is still loading.
    pub fn new(keys: Keys, max_body: usize) -> Self {
        Self {
            keys,
            max_body,
            unknown: UnknownFields::default(),
            http: HttpMetrics::default(),
            started: Instant::now(),
            served: OnceLock::new(),
            draining: AtomicBool::new(false),
            groups: Mutex::default(),
        }
    }

    /// Loading is over: requests are served from now on. Later calls change nothing.
    pub fn ready(&self, served: Served) {
        let _ = self.served.set(Arc::new(served));
    }

    /// From now on new requests are refused.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Makes several prompts known by one name, under which they can be aborted.
    ///
    /// # Errors
    /// 400 when another request in flight bears the name.
    pub fn group(self: &Arc<Self>, name: &str, members: Vec<String>) -> Result<Group, ApiError> {
        match self.groups.lock().entry(name.to_owned()) {
            Entry::Occupied(_) => {
                Err(ApiError::bad_request(format!("a request with the id {name:?} is already in flight")))
            }
            Entry::Vacant(free) => {
                free.insert(members);
                Ok(Group { server: self.clone(), name: name.to_owned() })
            }
        }
    }

    /// The engine's names for what goes by `name`.
    pub fn members(&self, name: &str) -> Vec<String> {
        self.groups.lock().get(name).cloned().unwrap_or_else(|| vec![name.to_owned()])
    }

    /// Whether requests are served.
    pub fn is_ready(&self) -> bool {
        !self.is_draining() && self.served.get().is_some_and(|served| served.engine.is_accepting())
    }

    /// Whether the server is on its way out.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// What is served, also while draining.
    ///
    /// # Errors
    /// 503 while the model loads.
    pub fn served(&self) -> Result<Arc<Served>, ApiError> {
        self.served.get().cloned().ok_or_else(|| ApiError::unavailable("the model is still loading"))
    }

    /// What is served, for a request that makes new work.
    ///
    /// # Errors
    /// 503 while the model loads and while the server shuts down.
    pub fn accepting(&self) -> Result<Arc<Served>, ApiError> {
        let served = self.served()?;
        if self.is_draining() {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        if !served.engine.is_alive() {
            return Err(ApiError::unavailable("the engine has stopped"));
        }
        Ok(served)
    }
}

/// Seconds since 1970.
pub(super) fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A name that no other request of this process bears, and that can't be guessed.
pub(super) fn fresh_id(prefix: &str) -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let (high, low) = (RandomState::new(), RandomState::new());
    format!("{prefix}{:016x}{:016x}", high.hash_one(count), low.hash_one(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_fresh() {
        let ids: std::collections::HashSet<_> = (0..100).map(|_| fresh_id("x-")).collect();
        assert_eq!(ids.len(), 100);
        assert!(ids.iter().all(|id| id.len() == 34 && id.starts_with("x-")));
    }

    #[test]
    fn a_group_is_known_while_it_lives() {
        let server = Arc::new(Server::new(Keys::default(), 1));
        let group = server.group("a", vec!["a-0".into(), "a-1".into()]).ok().unwrap();
        assert_eq!(server.members("a"), ["a-0", "a-1"]);
        assert!(server.group("a", Vec::new()).is_err());
        drop(group);
        assert_eq!(server.members("a"), ["a"]);
    }

    #[test]
    fn nothing_is_served_while_loading() {
        let server = Server::new(Keys::default(), 1);
        assert!(!server.is_ready());
        assert_eq!(server.accepting().err().map(|e| e.status.as_u16()), Some(503));
    }
}
