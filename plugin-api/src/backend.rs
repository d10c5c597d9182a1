//! The trait that a storage backend implements.

use serde::de::DeserializeOwned;

use crate::batch::{Batch, Get, Remove, Set};
use crate::call::Call;
use crate::exists::Exists;
use crate::host::Host;
use crate::linker::Linker;
use crate::pool::Pool;
use crate::v0_1::{PageKey, Stats};
use crate::{CacheMode, Capabilities, ClearScope, Error, ErrorKind, HealthState, HeldChange, HeldTier, Result};

/// Who this worker is. Everything that changes the bytes of a page is bound in `namespace`: pages under other
/// namespaces are not ours, and a backend that several models share keeps them apart by it.
#[derive(Debug, Clone)]
pub struct Identity {
    /// SHA-256 over what the namespace binds.
    pub namespace: [u8; 32],
    /// The bound values as a JSON object.
    pub namespace_json: String,
    /// Name of the model as clients use it.
    pub model_name: String,
    /// SHA-256 of the weights.
    pub weights_digest: [u8; 32],
    /// Which kernels write pages.
    pub numerics_id: String,
    /// Tokens a page.
    pub page_tokens: u32,
    /// Tensor-parallel rank and number of ranks, among those that share the attention of one request.
    pub tp: (u32, u32),
    /// Pipeline stage and number of stages.
    pub pp: (u32, u32),
    /// Context-parallel rank and number of ranks.
    pub cp: (u32, u32),
    /// Data-parallel rank and number of ranks. Pages do not depend on it.
    pub dp: (u32, u32),
    /// Decode-context-parallel rank and number of ranks.
    pub dcp: (u32, u32),
    /// Least common multiple of the tensor-parallel sizes that share pages by split heads; 0 for none.
    pub tp_lcm_size: u32,
    /// Every tensor-parallel rank holds the same bytes, and only the writer stores them.
    pub replicated: bool,
    /// This rank stores pages that are replicated.
    pub writer: bool,
}

/// What `open` is given.
#[derive(Debug)]
pub struct Open<'a> {
    pub(crate) call: Call<'a>,
    pub(crate) config_json: &'a str,
    pub(crate) instance_name: &'a str,
    pub(crate) identity: Identity,
    pub(crate) host: Host,
    pub(crate) cache_mode: CacheMode,
}

impl<'a> Open<'a> {
    /// Deadline and cancel flag.
    pub fn call(&self) -> &Call<'a> {
        &self.call
    }
    /// The configuration as JSON text. It fits the schema in the plugin's note.
    pub fn config_json(&self) -> &'a str {
        self.config_json
    }
    /// The configuration as a type of the plugin's own.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the key.
    pub fn config<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(self.config_json)
            .map_err(|e| Error::new(ErrorKind::InvalidConfig, format!("storage.{}: {e}", self.instance_name)))
    }
    /// Name of this instance in the host's configuration.
    pub fn instance_name(&self) -> &'a str {
        self.instance_name
    }
    /// Who this worker is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }
    /// Which face the host will use.
    pub fn cache_mode(&self) -> CacheMode {
        self.cache_mode
    }
    /// What the host offers. It may be kept.
    pub fn host(&self) -> Host {
        self.host
    }
}

/// How a backend feels, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// State.
    pub state: HealthState,
    /// For a person; empty when all is well.
    pub reason: String,
}

impl Health {
    /// All is well.
    pub fn ok() -> Health {
        Health { state: HealthState::Ok, reason: String::new() }
    }
}

/// Pages that the worker itself holds have changed.
#[derive(Debug, Clone, Copy)]
pub struct HeldPages<'a> {
    /// Deadline and cancel flag.
    pub call: Call<'a>,
    /// Where they are, or were.
    pub tier: HeldTier,
    /// What happened to them.
    pub change: HeldChange,
    /// Their keys; none when the tier was cleared.
    pub keys: &'a [PageKey],
}

/// A storage backend: a store of KV pages under 32-byte keys.
///
/// The export macro wraps every method, so that a panic becomes an error and fails the instance. Methods run on
/// the host's threads and may block until the deadline of their call; data calls (`batch_*`) run concurrently. Process-wide state is off limits:
/// signal handlers, working directory, umask, environment, locale, `atexit`, `fork` without `exec`.
pub trait Backend: Send + Sync + Sized + 'static {
    /// The linker face; [`crate::NoLinker`] when there is none.
    type Linker: Linker<Backend = Self>;

    /// Makes an instance.
    ///
    /// # Errors
    /// Whatever keeps the backend from starting; nothing may be left behind then.
    fn open(open: &Open<'_>) -> Result<Self>;

    /// What this instance can do, where that depends on its configuration or on what it found when it opened. `declared` is what the note says;
    /// an answer beyond it is a fault.
    fn capabilities(&self, declared: Capabilities) -> Capabilities {
        declared
    }

    /// Takes the anchor pool. A logical anchor owns page indices and no bytes: register no memory for it, and keep the
    /// existence of its pages by marker objects.
    ///
    /// # Errors
    /// When the pool can't be served; the attach fails.
    fn register_mem_pool_host(&self, _pool: &Pool) -> Result<()> {
        Ok(())
    }

    /// Takes side pools, all or none. May be called again later.
    ///
    /// # Errors
    /// When one of them can't be served.
    fn register_v2_side_pools(&self, _pools: &[Pool]) -> Result<()> {
        Ok(())
    }

    /// Gives pools back. No transfer names them afterwards.
    ///
    /// # Errors
    /// When their memory can't be released; it then stays mapped.
    fn unregister(&self, _pools: &[Pool]) -> Result<()> {
        Ok(())
    }

    /// All pools known so far are registered. Called once; side pools may still come later.
    ///
    /// # Errors
    /// When the backend can't serve this set of pools; the attach fails.
    fn pools_ready(&self) -> Result<()> {
        Ok(())
    }

    /// Says of each page of each pool whether it is stored in full.
    ///
    /// # Errors
    /// When the store can't be asked. A page that is not there is no error.
    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()>;

    /// Reads pages. Each page has its own status; the call fails only when it failed as a whole.
    ///
    /// # Errors
    /// When the store can't be reached.
    fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()>;

    /// Stores pages. A page that is stored already is a success. A page becomes visible whole or not at all.
    ///
    /// # Errors
    /// When the store can't be reached.
    fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()>;

    /// Removes pages. A page that is not there is a success (`Missing` may be written for it).
    ///
    /// # Errors
    /// When the store can't be reached, or `Unsupported`.
    fn batch_remove(&self, _batch: Batch<'_, Remove>) -> Result<()> {
        Err(Error::unsupported("removing pages"))
    }

    /// Removes everything of a scope.
    ///
    /// # Errors
    /// When something could not be removed, or `Unsupported`.
    fn clear(&self, _call: &Call<'_>, _scope: ClearScope) -> Result<()> {
        Err(Error::unsupported("clearing"))
    }

    /// Figures of the store.
    ///
    /// # Errors
    /// When the store can't be asked.
    fn stats(&self, call: &Call<'_>) -> Result<Stats>;

    /// How the backend feels.
    ///
    /// # Errors
    /// When it can't say, which counts as failed.
    fn health(&self, _call: &Call<'_>) -> Result<Health> {
        Ok(Health::ok())
    }

    /// Makes what was stored as durable as the backend promises.
    ///
    /// # Errors
    /// When that failed.
    fn flush(&self, _call: &Call<'_>) -> Result<()> {
        Ok(())
    }

    /// Takes note of which pages the worker holds itself. Called when the capability `held_pages` is declared. Advisory.
    ///
    /// # Errors
    /// When that could not be passed on; the host logs it.
    fn report_held_pages(&self, _held: &HeldPages<'_>) -> Result<()> {
        Ok(())
    }

    /// Stops the backend's threads and releases what it holds. The instance is dropped afterwards.
    ///
    /// # Errors
    /// Told to the operator; the instance is gone all the same.
    fn close(&self, _call: &Call<'_>) -> Result<()> {
        Ok(())
    }
}
