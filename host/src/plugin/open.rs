//! From a name to an open, registered, healthy instance; on any failure nothing is left behind.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdock_plugin_api::v0_1::{CapabilitiesOut, Identity, OpenArgs, PoolDesc};
use kvdock_plugin_api::{CacheMode, Capabilities, ErrorKind, HealthState};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::abi::{AbiVersions, Face, RawInstance};
use super::backend::{DevicePools, HostPoolDescription};
use super::call::{CallFailure, invoke};
use super::controls::Controls;
use super::discover::find_with;
use super::host_table::{HOST_TABLE, HostContext};
use super::identity::WorkerIdentity;
use super::instance::{Instance, Parts, control_context, health};
use super::library::{Library, load_with};
use super::pool_desc::{OwnedPoolDesc, Registered};
use super::ranks::{RankStates, Ranks, roll_back};
use super::schema::validate;
use super::state::{BackendState, StateCell};
use crate::config::{BackendTable as BackendConfig, KeyScheme};

/// Time for `open`, registration and the health check together.
pub const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

/// Time for the ranks that were opened before one that could not be, to be closed again.
const ROLL_BACK_TIMEOUT: Duration = Duration::from_secs(5);

/// What an attach needs to know.
#[derive(Debug, Clone)]
pub struct OpenRequest {
    /// The backend's table in the configuration.
    pub config: BackendConfig,
    /// The ABI versions that the host speaks.
    pub abi: AbiVersions,
    /// Folders searched for the plugin.
    pub folders: Vec<PathBuf>,
    /// Who this worker is; with several ranks, the group of them.
    pub identity: Arc<WorkerIdentity>,
    /// The pools to register, the anchor first, of each rank.
    pub pools: Vec<Arc<[HostPoolDescription]>>,
    /// The device's pools themselves, for a plugin that takes its memory; none where there are none, or several ranks.
    pub device: Option<DevicePools>,
    /// Which face the host will use.
    pub mode: CacheMode,
    /// Where its state is shown while it opens, and later.
    pub state: Arc<StateCell>,
    /// Where the calls from `open` to the health check are counted; busy after a failure as long as one has not returned.
    pub calls: Arc<Controls>,
}

/// An instance that is ready for traffic.
#[derive(Debug)]
pub struct Opened {
    /// The instance, of each rank.
    pub instance: Arc<Ranks>,
    /// Its configuration as it was given to the plugin, with secret values replaced.
    pub shown_config: Map<String, Value>,
}

/// Finds, maps, opens and registers, for one rank after the other.
///
/// # Errors
/// One line that says which step failed and why, and on which of several ranks. What was opened is closed again, on all of them.
pub fn open(request: &OpenRequest) -> Result<Opened, String> {
    let name = request.config.name.clone();
    let fail = |what: String| format!("storage backend {name}: {what}");
    let state = request.state.clone();
    let info = find_with(request.abi, &request.config.plugin, &request.folders).map_err(fail)?;
    let library = load_with(request.abi, &info.path, request.config.sha256.as_deref())
        .map_err(|refusal| fail(refusal.to_string()))?;
    let schema = &library.info.note.config_schema;
    let own = request.config.for_schema(schema).map_err(fail)?;
    let shown_config = validate(&name, schema, &own).map_err(fail)?;
    let anchor = request.pools.first().and_then(|pools| pools.first());
    let alike = request.identity.replicated && anchor.is_some_and(|pool| !pool.logical);
    request.config.check_key_scheme(schema, &request.identity.namespace.host_layout, alike).map_err(fail)?;
    if request.mode == CacheMode::Linker {
        if !library.info.note.capabilities.linker {
            return Err(fail(lacks_linker(&request.config.plugin)));
        }
        if request.config.settings.write_policy.as_deref() == Some("write_back") {
            return Err(fail(
                "its write_policy = \"write_back\" stores pages that leave the device for the host tier, and cache.mode = \"linker\" has no host \
                 tier; set \"write_through\" or \"write_through_selective\""
                    .into(),
            ));
        }
        if request.config.key_scheme != KeyScheme::Kvdock {
            return Err(fail(
                "its pages would carry no seal under another engine's names, and with cache.mode = \"linker\" a page counts \
                 only by its seal; set key_scheme = \"kvdock\""
                    .into(),
            ));
        }
    }

    let common = Common {
        request,
        library: &library,
        config_json: Value::Object(own).to_string(),
        deadline: Instant::now() + OPEN_TIMEOUT,
    };
    if let [pools] = request.pools.as_slice() {
        let instance = common.open(&request.identity, pools, &state).map_err(fail)?;
        return Ok(Opened { instance: Arc::new(Ranks::alone(instance)), shown_config });
    }
    let count = request.pools.len();
    let states = RankStates::new(&name, count, state.clone());
    let mut ranks: Vec<Arc<Instance>> = Vec::with_capacity(count);
    for (rank, pools) in request.pools.iter().enumerate() {
        let identity = Arc::new(request.identity.of_rank(u32::try_from(rank).unwrap_or(u32::MAX)));
        let opened = match states.rank(rank) {
            Some(cell) => common.open(&identity, pools, cell),
            None => Err("it has no state".to_owned()),
        };
        match opened {
            Ok(instance) => ranks.push(instance),
            Err(why) => {
                states.stop_showing();
                let error = fail(format!("rank {rank} of {count}: {why}"));
                common.roll_back(ranks, &error);
                return Err(error);
            }
        }
    }
    let mut ranks = ranks.into_iter();
    let first = ranks.next().ok_or_else(|| fail("there is no rank to open it for".to_owned()))?;
    let group = Ranks::new(first, ranks.collect(), (states, state), request.identity.writers() as usize);
    Ok(Opened { instance: Arc::new(group), shown_config })
}

/// What the instances of all ranks are opened with.
struct Common<'a> {
    request: &'a OpenRequest,
    library: &'a Arc<Library>,
    config_json: String,
    deadline: Instant,
}

impl Common<'_> {
    /// Opens one instance and registers its pools.
    fn open(
        &self,
        identity: &Arc<WorkerIdentity>,
        pools: &Arc<[HostPoolDescription]>,
        state: &Arc<StateCell>,
    ) -> Result<Arc<Instance>, String> {
        if let Some(device) = self.device_pools() {
            match self.open_with(identity, &device.descriptions, Some(device), state) {
                Err(refused) if refused.kind == ErrorKind::Unsupported => {
                    let name = &self.request.config.name;
                    tracing::info!(backend = name, "pages go by way of the host: {}", refused.message);
                }
                opened => return opened.map_err(said),
            }
        }
        self.open_with(identity, pools, None, state).map_err(said)
    }

    /// The device's pools, where this plugin may take them and the linker face is used.
    fn device_pools(&self) -> Option<&DevicePools> {
        let takes = self.library.info.note.capabilities.cuda_memory && self.request.mode == CacheMode::Linker;
        self.request.device.as_ref().filter(|_| takes && self.request.pools.len() == 1)
    }

    /// Opens one instance over these pools, which are the device's if `device` is given. `Unsupported`: the instance does not take them.
    fn open_with(
        &self,
        identity: &Arc<WorkerIdentity>,
        pools: &Arc<[HostPoolDescription]>,
        device: Option<&DevicePools>,
        state: &Arc<StateCell>,
    ) -> Result<Arc<Instance>, CallFailure> {
        state.go(BackendState::Opening, "");
        let (request, library, deadline) = (self.request, self.library, self.deadline);
        let mut identity = WorkerIdentity::clone(identity);
        if let Some(pool) = pools.first().filter(|_| device.is_some()) {
            // The bytes of a page lie in another order there, so these are other pages.
            identity.namespace.host_layout.clone_from(&pool.layout);
        }
        let name = request.config.name.clone();
        let context = HostContext::leak(&name);
        let steps = Steps {
            name: name.clone(),
            library: library.clone(),
            identity,
            pools: pools.clone(),
            device: device.map(|device| device.keep.clone()),
            mode: request.mode,
            plugin: request.config.plugin.clone(),
            key_scheme: request.config.key_scheme,
            config_json: self.config_json.clone(),
            context,
            deadline,
            state: state.clone(),
        };
        let Ready { raw, capabilities, trouble } = request.calls.run(deadline, move || steps.run())?;
        let parts = Parts {
            name,
            library: library.clone(),
            raw,
            capabilities,
            pools: Registered::of(pools),
            device: device.map(|device| device.keep.clone()),
            context,
            settings: request.config.settings.clone(),
            state: state.clone(),
        };
        let instance = Instance::new(parts).map_err(|error| {
            close(library.face(), raw, deadline);
            CallFailure::new(ErrorKind::Unavailable, true, format!("its threads can't be started: {error}"))
        })?;
        if device.is_some() {
            tracing::info!(backend = request.config.name, "pages go straight between the GPU and the plugin");
        }
        match trouble {
            Some(reason) => state.go(BackendState::Degraded, &reason),
            None => state.go(BackendState::Active, ""),
        };
        Ok(instance)
    }

    /// Closes the instances of the ranks before one that could not be opened. What hangs in the plugin counts as a call of the attach until it
    /// is closed.
    fn roll_back(&self, ranks: Vec<Arc<Instance>>, reason: &str) {
        let (deadline, reason) = (Instant::now() + ROLL_BACK_TIMEOUT, reason.to_owned());
        let ended = self.request.calls.run(deadline + ROLL_BACK_TIMEOUT, move || {
            roll_back(&ranks, deadline, &reason);
            Ok(())
        });
        if let Err(failure) = ended {
            tracing::warn!("the other ranks of a storage backend that could not be attached: {}", failure.message);
        }
    }
}

/// An instance that is registered and works.
struct Ready {
    raw: RawInstance,
    capabilities: Capabilities,
    /// What it can't do, by its own words.
    trouble: Option<String>,
}

/// The calls from `open` to `health`, made on one thread.
struct Steps {
    name: String,
    library: Arc<Library>,
    identity: WorkerIdentity,
    pools: Arc<[HostPoolDescription]>,
    /// Keeps device memory that is registered, also while a call hangs.
    device: Option<Arc<dyn Any + Send + Sync>>,
    mode: CacheMode,
    plugin: String,
    key_scheme: KeyScheme,
    config_json: String,
    context: &'static HostContext,
    deadline: Instant,
    state: Arc<StateCell>,
}

impl Steps {
    fn run(self) -> Result<Ready, CallFailure> {
        let face = self.library.face();
        let raw = self.open(face)?;
        let rest = self.capabilities(face, raw).and_then(|capabilities| {
            let trouble = self.register(face, raw)?;
            if Instant::now() >= self.deadline {
                // Nobody waits any more.
                return Err(CallFailure::new(ErrorKind::TimedOut, true, "it was ready too late"));
            }
            Ok(Ready { raw, capabilities, trouble })
        });
        if rest.is_err() {
            close(face, raw, Instant::now() + OPEN_TIMEOUT);
        }
        rest
    }

    /// What the instance can do, which is never more than its note says.
    fn capabilities(&self, face: &dyn Face, raw: RawInstance) -> Result<Capabilities, CallFailure> {
        let mut out = CapabilitiesOut { flags: 0, alignment: 1, preferred_batch: 0, concurrency: 0, reserved: 0 };
        invoke(&mut Vec::new(), |error| {
            // SAFETY: the instance is open; `out` lives until the call returns.
            unsafe { face.capabilities(raw, &raw mut out, error) }
        })?;
        let capabilities = Capabilities::from_raw(&out);
        if let Some(capability) = capabilities.beyond(&(&self.library.info.note.capabilities).into()) {
            let message = format!("it claims the capability {capability}, which its note does not declare");
            return Err(CallFailure::new(ErrorKind::Internal, false, message));
        }
        if self.mode == CacheMode::Linker && !(capabilities.linker && face.linker().is_some()) {
            return Err(CallFailure::new(ErrorKind::Unsupported, false, lacks_linker(&self.plugin)));
        }
        if self.device.is_some() && !capabilities.cuda_memory {
            let message = "with this configuration it takes no memory of a GPU";
            return Err(CallFailure::new(ErrorKind::Unsupported, false, message));
        }
        Ok(capabilities)
    }

    fn open(&self, face: &dyn Face) -> Result<RawInstance, CallFailure> {
        let namespace = &self.identity.namespace;
        let namespace_json = namespace.json_named(self.key_scheme);
        let identity = Identity {
            namespace_digest: Sha256::digest(namespace_json.as_bytes()).into(),
            namespace_json: namespace_json.as_str().into(),
            model_name: self.identity.model_name.as_str().into(),
            weights_digest: self.identity.weights_digest,
            numerics_id: namespace.numerics_id.as_str().into(),
            page_tokens: namespace.page_tokens,
            tp_rank: self.identity.tp.0,
            tp_size: self.identity.tp.1,
            pp_rank: namespace.pp.0,
            pp_size: namespace.pp.1,
            cp_rank: self.identity.cp.0,
            cp_size: self.identity.cp.1,
            dp_rank: 0,
            dp_size: 1,
            dcp_rank: 0,
            dcp_size: 1,
            tp_lcm_size: 0,
            replicated: u32::from(self.identity.replicated),
            writer: u32::from(self.identity.is_writer()),
        };
        let args = OpenArgs {
            context: control_context(self.deadline),
            config_json: self.config_json.as_str().into(),
            instance_name: self.name.as_str().into(),
            identity: &raw const identity,
            host: &raw const HOST_TABLE,
            host_context: self.context.raw(),
            cache_mode: self.mode.raw(),
            reserved: 0,
        };
        let mut raw = std::ptr::null_mut();
        invoke(&mut Vec::new(), |error| {
            // SAFETY: the arguments live until the call returns; the host's table and context for ever.
            unsafe { face.open(&raw const args, &raw mut raw, error) }
        })?;
        Ok(RawInstance(raw))
    }

    /// Registers the pools and asks for the health. Gives the trouble of an instance that serves all the same.
    fn register(&self, face: &dyn Face, raw: RawInstance) -> Result<Option<String>, CallFailure> {
        self.state.go(BackendState::Registering, "");
        let context = control_context(self.deadline);
        let pools = OwnedPoolDesc::all(&self.pools, self.key_scheme == KeyScheme::Kvdock, self.identity.replicated);
        let descs: Vec<PoolDesc> = pools.iter().map(OwnedPoolDesc::raw).collect();
        let Some((anchor, sides)) = descs.split_first() else {
            return Err(CallFailure::new(ErrorKind::Internal, false, "there is no pool to register"));
        };
        let mut message = Vec::new();
        invoke(&mut message, |error| {
            // SAFETY: the instance is open; the description lives until the call returns, a host pool as long as the process, and device
            // memory until the instance is closed.
            unsafe { face.register_mem_pool_host(raw, &raw const context, &raw const *anchor, error) }
        })?;
        if !sides.is_empty() {
            invoke(&mut message, |error| {
                // SAFETY: as above.
                unsafe {
                    face.register_v2_side_pools(raw, &raw const context, sides.as_ptr(), sides.len() as u64, error)
                }
            })?;
        }
        invoke(&mut message, |error| {
            // SAFETY: the instance is open.
            unsafe { face.pools_ready(raw, &raw const context, error) }
        })?;
        let (health, reason) = health(face, raw, &context)?;
        match health {
            HealthState::Ok => Ok(None),
            HealthState::Degraded => Ok(Some(reason)),
            HealthState::Failed => {
                let message = format!("it says that it does not work: {reason}");
                Err(CallFailure::new(ErrorKind::Unavailable, true, message))
            }
        }
    }
}

/// A failure of an attach in one line.
fn said(failure: CallFailure) -> String {
    format!("{}: {}", failure.kind, failure.message)
}

fn lacks_linker(plugin: &str) -> String {
    format!(
        "with this configuration the plugin {plugin} has no linker face, by which pages come layer by layer, and cache.mode = \"linker\" needs one; \
         take another plugin, or cache.mode = \"hierarchical\""
    )
}

/// Closes an instance that takes no traffic. What `close` says is logged only: there is no way back.
fn close(face: &dyn Face, raw: RawInstance, deadline: Instant) {
    let context = control_context(deadline);
    let closed = invoke(&mut Vec::new(), |error| {
        // SAFETY: the instance is open and no other call runs.
        unsafe { face.close(raw, &raw const context, error) }
    });
    if let Err(failure) = closed {
        tracing::warn!("closing a storage backend that could not be attached failed: {}", failure.message);
    }
}
