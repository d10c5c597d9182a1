//! How the host calls a plugin, whatever version of the boundary the plugin speaks.

use std::ffi::c_void;
use std::fmt::Debug;

use kvdock_plugin_api::v0_1::{
    BatchArgs, CallContext, CapabilitiesOut, ErrorOut, ExistsArgs, FinishArgs, HealthOut, LoadArgs, OffloadArgs,
    OffloadDone, OpenArgs, PoolDesc, StartArgs, Stats, Status,
};

/// An instance of a plugin, as its functions take it.
#[derive(Debug, Clone, Copy)]
pub struct RawInstance(pub *mut c_void);

// SAFETY: an instance may be used from any thread (rules of the boundary); its life is kept by `Instance`.
unsafe impl Send for RawInstance {}
// SAFETY: as for `Send`: data calls run concurrently.
unsafe impl Sync for RawInstance {}

/// The functions that the host calls, with the arguments of the newest version it knows. The table of that version is a face as it is; that of an
/// older one gets an adapter, which is made once for a library and makes no allocation in a call.
///
/// An adapter follows three rules. An argument that the older version can't carry is left out. A figure that it does not give has the
/// value that the newer version defines for "unknown". A function that it lacks answers `Unsupported`.
///
/// # Safety of the calls
/// The caller keeps the rules of the boundary (`ABI.md`): the order of calls, and that what the arguments point at is valid and lives until the
/// call returns.
#[allow(clippy::missing_safety_doc)] // It is the same for all of them, and stands above.
pub trait Face: Debug + Send + Sync {
    /// Makes an instance.
    unsafe fn open(&self, args: *const OpenArgs, out: *mut *mut c_void, error: *mut ErrorOut) -> Status;
    /// What the instance can do.
    unsafe fn capabilities(&self, instance: RawInstance, out: *mut CapabilitiesOut, error: *mut ErrorOut) -> Status;
    /// Registers the anchor pool.
    unsafe fn register_mem_pool_host(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        pool: *const PoolDesc,
        error: *mut ErrorOut,
    ) -> Status;
    /// Registers pools that travel with the anchor.
    unsafe fn register_v2_side_pools(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        pools: *const PoolDesc,
        count: u64,
        error: *mut ErrorOut,
    ) -> Status;
    /// All pools known so far are registered.
    unsafe fn pools_ready(&self, instance: RawInstance, context: *const CallContext, error: *mut ErrorOut) -> Status;
    /// Which prefixes can be restored.
    unsafe fn batch_exists(&self, instance: RawInstance, args: *const ExistsArgs, error: *mut ErrorOut) -> Status;
    /// Reads pages.
    unsafe fn batch_get(&self, instance: RawInstance, args: *const BatchArgs, error: *mut ErrorOut) -> Status;
    /// Stores pages.
    unsafe fn batch_set(&self, instance: RawInstance, args: *const BatchArgs, error: *mut ErrorOut) -> Status;
    /// Removes pages.
    unsafe fn batch_remove(&self, instance: RawInstance, args: *const BatchArgs, error: *mut ErrorOut) -> Status;
    /// Removes everything of a scope.
    unsafe fn clear(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        scope: u32,
        error: *mut ErrorOut,
    ) -> Status;
    /// Figures of the store.
    unsafe fn stats(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        out: *mut Stats,
        error: *mut ErrorOut,
    ) -> Status;
    /// How the backend feels.
    unsafe fn health(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        out: *mut HealthOut,
        error: *mut ErrorOut,
    ) -> Status;
    /// Makes what was stored durable.
    unsafe fn flush(&self, instance: RawInstance, context: *const CallContext, error: *mut ErrorOut) -> Status;
    /// Ends the instance.
    unsafe fn close(&self, instance: RawInstance, context: *const CallContext, error: *mut ErrorOut) -> Status;
    /// The functions of the linker face; none if the plugin has none.
    fn linker(&self) -> Option<&'static dyn LinkerFace> {
        None
    }
}

/// The functions of the linker face, as [`Face`] has the others.
///
/// # Safety of the calls
/// As for [`Face`]: among the rules of the boundary are which of these calls may run beside which.
#[allow(clippy::missing_safety_doc)] // It is the same for all of them, and stands above.
pub trait LinkerFace: Debug + Send + Sync {
    /// Which prefixes can be restored into the device pools.
    unsafe fn lookup(&self, instance: RawInstance, args: *const ExistsArgs, error: *mut ErrorOut) -> Status;
    /// Queues a load.
    unsafe fn load(&self, instance: RawInstance, args: *const LoadArgs, error: *mut ErrorOut) -> Status;
    /// Starts what is queued as one batch.
    unsafe fn start(&self, instance: RawInstance, args: *const StartArgs, error: *mut ErrorOut) -> Status;
    /// Waits for the end of a batch.
    unsafe fn finish(&self, instance: RawInstance, args: *const FinishArgs, error: *mut ErrorOut) -> Status;
    /// Queues an offload.
    unsafe fn offload(&self, instance: RawInstance, args: *const OffloadArgs, error: *mut ErrorOut) -> Status;
    /// How many completed offloads wait to be popped.
    unsafe fn completed(&self, instance: RawInstance) -> u64;
    /// Pops the oldest completed offload.
    unsafe fn pop(&self, instance: RawInstance, out: *mut OffloadDone, error: *mut ErrorOut) -> Status;
    /// Ends everything that is queued or runs.
    unsafe fn reset(&self, instance: RawInstance, context: *const CallContext, error: *mut ErrorOut) -> Status;
}
