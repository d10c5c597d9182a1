//! The tables, and the faults below the safe traits: each function here is that of the safe side, but for one fault.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdock_plugin_api::export::{Tables, open};
use kvdock_plugin_api::v0_1::{
    BackendTable, BatchArgs, CallContext, CapabilitiesOut, ErrorOut, ExistsArgs, HostTable, LinkerTable, LoadArgs,
    OffloadArgs, OffloadDone, OpenArgs, PoolDesc, PoolQuery, PoolTransfer, ReadyHandle, Region, StartArgs, Status,
};
use kvdock_plugin_api::{Capability, ErrorKind, HitPolicy, MemoryKind, PageStatus, ReadyKind};

use crate::CAPABILITIES;
use crate::backend::Backend;
use crate::fault::{Fault, is, takes_device_memory};

const RIGHT: BackendTable = Tables::<Backend>::backend(open_right);
const RIGHT_LINKER: LinkerTable = Tables::<Backend>::LINKER;

static LINKER: LinkerTable =
    LinkerTable { lookup, load, start_layer_wise_loading: start, offload, pop_completed_offload: pop, ..RIGHT_LINKER };

/// The table of the plugin.
pub static TABLE: BackendTable = BackendTable {
    open: open_instance,
    capabilities,
    register_mem_pool_host: register_anchor,
    register_v2_side_pools: register_sides,
    batch_exists: exists,
    batch_get: get,
    clear,
    linker: &raw const LINKER,
    ..RIGHT
};

/// The table with a size that is not its own.
pub static SHORT_TABLE: BackendTable = BackendTable { size: TABLE_BYTES - 8, linker: &raw const LINKER, ..RIGHT };
const TABLE_BYTES: u64 = size_of::<BackendTable>() as u64;

/// A registration was refused in this process.
pub static REFUSED: AtomicBool = AtomicBool::new(false);

// Every function is called by the host by the rules of the boundary; so are the functions that it calls in turn, with the same
// arguments or with ones that live as long.

unsafe extern "C" fn open_right(args: *const OpenArgs, out: *mut *mut c_void, error: *mut ErrorOut) -> Status {
    // SAFETY: rules of the boundary.
    unsafe { open::<Backend>(CAPABILITIES, args, out, error) }
}

unsafe extern "C" fn told_nothing(_: *mut c_void, _: u64) {}

unsafe extern "C" fn open_instance(args: *const OpenArgs, out: *mut *mut c_void, error: *mut ErrorOut) -> Status {
    if !is(Fault::LayersNotTold) {
        // SAFETY: rules of the boundary.
        return unsafe { (RIGHT.open)(args, out, error) };
    }
    // SAFETY: rules of the boundary.
    let right = unsafe { &*args };
    // SAFETY: the host's table lives as long as the process.
    let table = HostTable { layers_settled: told_nothing, ..unsafe { *right.host } };
    let args = OpenArgs { host: Box::leak(Box::new(table)), ..*right };
    // SAFETY: rules of the boundary.
    unsafe { (RIGHT.open)(&raw const args, out, error) }
}

unsafe extern "C" fn capabilities(this: *mut c_void, out: *mut CapabilitiesOut, error: *mut ErrorOut) -> Status {
    // SAFETY: rules of the boundary.
    let status = unsafe { (RIGHT.capabilities)(this, out, error) };
    let hidden = [
        (Fault::LinkerUndeclared, Capability::Linker),
        (Fault::RemoveUndeclared, Capability::Remove),
        (Fault::RangesUndeclared, Capability::Ranges),
        (Fault::LogicalUndeclared, Capability::LogicalPools),
    ];
    if let Some((_, capability)) = hidden.into_iter().find(|(fault, _)| is(*fault)) {
        // SAFETY: rules of the boundary.
        unsafe { (*out).flags &= !capability.raw() };
    }
    if takes_device_memory() && status == 0 {
        // SAFETY: rules of the boundary.
        unsafe { (*out).flags |= Capability::CudaMemory.raw() };
    }
    status
}

/// The regions of a pool; memory that is taken for host memory is called so.
///
/// # Safety
/// `pool` is a description by the rules of the boundary.
unsafe fn regions(pool: &PoolDesc) -> Vec<Region> {
    let mut regions = match pool.region_count {
        0 => Vec::new(),
        // SAFETY: the caller's promise.
        count => unsafe { std::slice::from_raw_parts(pool.regions, count as usize) }.to_vec(),
    };
    for region in &mut regions {
        let unknown = region.memory_kind == 77 && is(Fault::AcceptsUnknownMemory);
        let device =
            region.memory_kind == MemoryKind::Cuda.raw() && (is(Fault::AcceptsDeviceMemory) || takes_device_memory());
        if unknown || device {
            region.memory_kind = MemoryKind::Host.raw();
        }
    }
    regions
}

unsafe extern "C" fn register_anchor(
    this: *mut c_void,
    context: *const CallContext,
    desc: *const PoolDesc,
    error: *mut ErrorOut,
) -> Status {
    // SAFETY: rules of the boundary.
    let right = unsafe { &*desc };
    // SAFETY: rules of the boundary.
    let regions = unsafe { regions(right) };
    let desc = PoolDesc { regions: regions.as_ptr(), ..*right };
    // SAFETY: rules of the boundary.
    let status = unsafe { (RIGHT.register_mem_pool_host)(this, context, &raw const desc, error) };
    if status != 0 {
        REFUSED.store(true, Ordering::Relaxed);
    }
    status
}

/// Set by a refused side pool.
pub static SIDE_REFUSED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn register_sides(
    this: *mut c_void,
    context: *const CallContext,
    descs: *const PoolDesc,
    count: u64,
    error: *mut ErrorOut,
) -> Status {
    // SAFETY: rules of the boundary; the call has `count` descriptions.
    let right = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(descs, count as usize) } };
    // SAFETY: rules of the boundary.
    let all: Vec<Vec<Region>> = right.iter().map(|pool| unsafe { regions(pool) }).collect();
    let known = |(pool, regions): (&PoolDesc, &Vec<Region>)| PoolDesc { regions: regions.as_ptr(), ..*pool };
    let own: Vec<PoolDesc> = right.iter().zip(&all).map(known).collect();
    // Memory of an unknown kind in a side pool is a rule of its own, and left as it is.
    let descs = if takes_device_memory() { own.as_ptr() } else { descs };
    let (step, calls) = if is(Fault::RegistersSome) { (1, count) } else { (count, 1) };
    for call in 0..calls {
        // SAFETY: rules of the boundary; the call has `count` descriptions.
        let status =
            unsafe { (RIGHT.register_v2_side_pools)(this, context, descs.add((call * step) as usize), step, error) };
        if status != 0 {
            REFUSED.store(true, Ordering::Relaxed);
            SIDE_REFUSED.store(true, Ordering::Relaxed);
            return status;
        }
    }
    0
}

unsafe extern "C" fn exists(this: *mut c_void, args: *const ExistsArgs, error: *mut ErrorOut) -> Status {
    // SAFETY: rules of the boundary.
    let right = unsafe { &*args };
    if is(Fault::NeedsPresent) && right.present.is_null() {
        // SAFETY: rules of the boundary.
        return unsafe { fail(error, ErrorKind::Unsupported, "planted: it needs room for the statuses") };
    }
    if !is(Fault::AcceptsUnknownPolicy) || right.pool_count == 0 {
        // SAFETY: rules of the boundary.
        return unsafe { (RIGHT.batch_exists)(this, args, error) };
    }
    // SAFETY: rules of the boundary.
    let pools = unsafe { std::slice::from_raw_parts(right.pools, right.pool_count as usize) };
    let known = |pool: &PoolQuery| match HitPolicy::try_from_raw(pool.hit_policy) {
        Some(_) => *pool,
        None => PoolQuery { hit_policy: HitPolicy::AllPages.raw(), ..*pool },
    };
    let pools: Vec<PoolQuery> = pools.iter().map(known).collect();
    let args = ExistsArgs { pools: pools.as_ptr(), ..*right };
    // SAFETY: rules of the boundary.
    unsafe { (RIGHT.batch_exists)(this, &raw const args, error) }
}

/// # Safety
/// As for every function here: `error` is null or the host's.
unsafe fn fail(error: *mut ErrorOut, kind: ErrorKind, message: &str) -> Status {
    // SAFETY: the caller's promise.
    if let Some(out) = unsafe { error.as_mut() } {
        let len = message.len().min(out.message_capacity as usize);
        // SAFETY: the buffer is the host's and has this room.
        unsafe { std::ptr::copy_nonoverlapping(message.as_ptr(), out.message, len) };
        (out.kind, out.retryable, out.panicked, out.message_len) = (kind.raw(), 0, 0, len as u64);
    }
    kind.raw()
}

/// The number of a pool that the suite never registers.
const STRANGER: u32 = 9;

unsafe extern "C" fn get(this: *mut c_void, args: *const BatchArgs, error: *mut ErrorOut) -> Status {
    // SAFETY: rules of the boundary.
    let status = unsafe { (RIGHT.batch_get)(this, args, error) };
    if status == 0 {
        return 0;
    }
    if is(Fault::ErrorWithoutMessage)
        // SAFETY: rules of the boundary.
        && let Some(out) = unsafe { error.as_mut() }
    {
        out.message_len = 0;
    }
    // SAFETY: rules of the boundary.
    let transfers = unsafe { transfers((*args).transfers, (*args).transfer_count) };
    if is(Fault::SkipsUnknownPool) && transfers.iter().any(|transfer| transfer.pool == STRANGER) {
        for transfer in transfers {
            // SAFETY: rules of the boundary: there is a status for each key.
            unsafe { std::ptr::write_bytes(transfer.statuses, PageStatus::Missing.raw(), transfer.count as usize) };
        }
        return 0;
    }
    status
}

/// # Safety
/// As for `std::slice::from_raw_parts`, but null with a count of 0 is the empty slice.
unsafe fn transfers<'a>(first: *const PoolTransfer, count: u64) -> &'a [PoolTransfer] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(first, count as usize) }
}

unsafe extern "C" fn clear(this: *mut c_void, context: *const CallContext, scope: u32, error: *mut ErrorOut) -> Status {
    let scope = if is(Fault::AcceptsUnknownScope) && scope == 77 { 1 } else { scope };
    // SAFETY: rules of the boundary.
    unsafe { (RIGHT.clear)(this, context, scope, error) }
}

unsafe extern "C" fn lookup(this: *mut c_void, args: *const ExistsArgs, error: *mut ErrorOut) -> Status {
    // SAFETY: rules of the boundary.
    let status = unsafe { (RIGHT_LINKER.lookup)(this, args, error) };
    if status == 0 && is(Fault::LookupLongestOnly) {
        // SAFETY: rules of the boundary: there is an entry for each length.
        let restorable = unsafe { std::slice::from_raw_parts_mut((*args).restorable, (*args).key_count as usize + 1) };
        let longest = restorable.iter().rposition(|can| *can == 1).unwrap_or(0);
        restorable.iter_mut().enumerate().filter(|(length, _)| *length != longest).for_each(|(_, can)| *can = 0);
    }
    status
}

unsafe extern "C" fn load(this: *mut c_void, args: *const LoadArgs, error: *mut ErrorOut) -> Status {
    // SAFETY: rules of the boundary.
    let right = unsafe { &*args };
    if is(Fault::LoadSkipsUnknownPool) {
        // SAFETY: rules of the boundary.
        let known: Vec<PoolTransfer> = unsafe { transfers(right.transfers, right.transfer_count) }
            .iter()
            .filter(|transfer| transfer.pool != STRANGER)
            .copied()
            .collect();
        let args = LoadArgs { transfers: known.as_ptr(), transfer_count: known.len() as u64, ..*right };
        // SAFETY: rules of the boundary; the array of transfers is copied by the call.
        return unsafe { (RIGHT_LINKER.load)(this, &raw const args, error) };
    }
    // SAFETY: rules of the boundary.
    let status = unsafe { (RIGHT_LINKER.load)(this, args, error) };
    if status == ErrorKind::InvalidConfig.raw() && is(Fault::DoubleLoadTaken) { 0 } else { status }
}

/// # Safety
/// `first` points at `count` handles, or is null with a count of 0.
unsafe fn known_handles(first: *const ReadyHandle, count: u64) -> Vec<ReadyHandle> {
    let handles = match count {
        0 => &[],
        // SAFETY: the caller's promise.
        count => unsafe { std::slice::from_raw_parts(first, count as usize) },
    };
    let now = ReadyHandle { kind: ReadyKind::Now.raw(), reserved: 0, handle: 0 };
    handles.iter().map(|handle| ReadyKind::try_from_raw(handle.kind).map_or(now, |_| *handle)).collect()
}

unsafe extern "C" fn start(this: *mut c_void, args: *const StartArgs, error: *mut ErrorOut) -> Status {
    if !is(Fault::StartUnknownReady) {
        // SAFETY: rules of the boundary.
        return unsafe { (RIGHT_LINKER.start_layer_wise_loading)(this, args, error) };
    }
    // SAFETY: rules of the boundary.
    let right = unsafe { &*args };
    // SAFETY: rules of the boundary.
    let ready = unsafe { known_handles(right.ready, right.ready_count) };
    let args = StartArgs { ready: ready.as_ptr(), ..*right };
    // SAFETY: rules of the boundary; the array of handles is copied by the call.
    unsafe { (RIGHT_LINKER.start_layer_wise_loading)(this, &raw const args, error) }
}

unsafe extern "C" fn offload(this: *mut c_void, args: *const OffloadArgs, error: *mut ErrorOut) -> Status {
    if !is(Fault::OffloadUnknownReady) {
        // SAFETY: rules of the boundary.
        return unsafe { (RIGHT_LINKER.offload)(this, args, error) };
    }
    // SAFETY: rules of the boundary.
    let right = unsafe { &*args };
    // SAFETY: rules of the boundary.
    let ready = unsafe { known_handles(right.ready, right.ready_count) };
    let args = OffloadArgs { ready: ready.as_ptr(), ..*right };
    // SAFETY: rules of the boundary; the array of handles is copied by the call.
    unsafe { (RIGHT_LINKER.offload)(this, &raw const args, error) }
}

unsafe extern "C" fn pop(this: *mut c_void, out: *mut OffloadDone, error: *mut ErrorOut) -> Status {
    // SAFETY: rules of the boundary.
    let status = unsafe { (RIGHT_LINKER.pop_completed_offload)(this, out, error) };
    if status == ErrorKind::NotFound.raw() && is(Fault::PopEmptyFails) {
        // SAFETY: rules of the boundary.
        return unsafe { fail(error, ErrorKind::Unavailable, "planted: nothing to pop") };
    }
    status
}
