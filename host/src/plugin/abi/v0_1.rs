//! Version 0.1, the newest: its table is the face as it is.

use std::ffi::c_void;

use kvdock_plugin_api::v0_1::{
    self, BackendTable, BatchArgs, CallContext, CapabilitiesOut, ErrorOut, ExistsArgs, FinishArgs, HealthOut,
    LinkerTable, LoadArgs, OffloadArgs, OffloadDone, OpenArgs, PoolDesc, StartArgs, Stats, Status,
};

use super::{AbiVersion, Face, LinkerFace, RawInstance};

/// The version.
pub(super) const VERSION: AbiVersion = AbiVersion {
    text: v0_1::ABI_VERSION_TEXT,
    number: v0_1::ABI_VERSION,
    types: v0_1::TYPES_TEXT,
    types_sha256: v0_1::TYPES_DIGEST,
    table_bytes: size_of::<BackendTable>() as u64,
    adapt,
};

unsafe fn adapt(table: *const c_void) -> &'static dyn Face {
    // SAFETY: the caller's promise.
    unsafe { &*table.cast::<BackendTable>() }
}

/// Each function is a call through the pointer in the table.
impl Face for BackendTable {
    unsafe fn open(&self, args: *const OpenArgs, out: *mut *mut c_void, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.open)(args, out, error) }
    }
    unsafe fn capabilities(&self, instance: RawInstance, out: *mut CapabilitiesOut, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.capabilities)(instance.0, out, error) }
    }
    unsafe fn register_mem_pool_host(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        pool: *const PoolDesc,
        error: *mut ErrorOut,
    ) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.register_mem_pool_host)(instance.0, context, pool, error) }
    }
    unsafe fn register_v2_side_pools(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        pools: *const PoolDesc,
        count: u64,
        error: *mut ErrorOut,
    ) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.register_v2_side_pools)(instance.0, context, pools, count, error) }
    }
    unsafe fn pools_ready(&self, instance: RawInstance, context: *const CallContext, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.pools_ready)(instance.0, context, error) }
    }
    unsafe fn batch_exists(&self, instance: RawInstance, args: *const ExistsArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.batch_exists)(instance.0, args, error) }
    }
    unsafe fn batch_get(&self, instance: RawInstance, args: *const BatchArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.batch_get)(instance.0, args, error) }
    }
    unsafe fn batch_set(&self, instance: RawInstance, args: *const BatchArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.batch_set)(instance.0, args, error) }
    }
    unsafe fn batch_remove(&self, instance: RawInstance, args: *const BatchArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.batch_remove)(instance.0, args, error) }
    }
    unsafe fn clear(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        scope: u32,
        error: *mut ErrorOut,
    ) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.clear)(instance.0, context, scope, error) }
    }
    unsafe fn stats(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        out: *mut Stats,
        error: *mut ErrorOut,
    ) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.stats)(instance.0, context, out, error) }
    }
    unsafe fn health(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        out: *mut HealthOut,
        error: *mut ErrorOut,
    ) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.health)(instance.0, context, out, error) }
    }
    unsafe fn flush(&self, instance: RawInstance, context: *const CallContext, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.flush)(instance.0, context, error) }
    }
    unsafe fn close(&self, instance: RawInstance, context: *const CallContext, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.close)(instance.0, context, error) }
    }
    fn linker(&self) -> Option<&'static dyn LinkerFace> {
        // SAFETY: rule of the boundary: the address is null or that of a constant table, and the library stays mapped.
        let table: &'static LinkerTable = unsafe { self.linker.as_ref() }?;
        let fits = table.size >= size_of::<LinkerTable>() as u64 && table.abi_version == v0_1::ABI_VERSION;
        fits.then_some(table as &dyn LinkerFace)
    }
}

/// Each function is a call through the pointer in the table.
impl LinkerFace for LinkerTable {
    unsafe fn lookup(&self, instance: RawInstance, args: *const ExistsArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.lookup)(instance.0, args, error) }
    }
    unsafe fn load(&self, instance: RawInstance, args: *const LoadArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.load)(instance.0, args, error) }
    }
    unsafe fn start(&self, instance: RawInstance, args: *const StartArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.start_layer_wise_loading)(instance.0, args, error) }
    }
    unsafe fn finish(&self, instance: RawInstance, args: *const FinishArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.finish_layer_wise_loading)(instance.0, args, error) }
    }
    unsafe fn offload(&self, instance: RawInstance, args: *const OffloadArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.offload)(instance.0, args, error) }
    }
    unsafe fn completed(&self, instance: RawInstance) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { (self.num_completed_offloads)(instance.0) }
    }
    unsafe fn pop(&self, instance: RawInstance, out: *mut OffloadDone, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.pop_completed_offload)(instance.0, out, error) }
    }
    unsafe fn reset(&self, instance: RawInstance, context: *const CallContext, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { (self.reset)(instance.0, context, error) }
    }
}
