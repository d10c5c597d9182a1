//! The plugin: a store in memory. Its table of 0.1 comes from the export macro; the one of 0.2 is written by hand over it.

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::sync::LazyLock;

use kvdock_plugin_api::export::guard;
use kvdock_plugin_api::v0_1;
use kvdock_plugin_api::{
    Backend, Batch, Call, Capabilities, Exists, Get, NoLinker, Open, PageStatus, Remove, Result, Set, export_plugin,
    raw,
};
use parking_lot::{Mutex, RwLock};

use crate::v0_2::{self, BackendTable, BatchArgs, CallContext, ErrorOut, PageKey, Stats, Status};

/// Pinned keys by instance. Kept beside the instances, which are those of 0.1.
static PINNED: LazyLock<Mutex<HashMap<usize, HashSet<PageKey>>>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Memory {
    pages: RwLock<HashMap<PageKey, Vec<u8>>>,
}

impl Backend for Memory {
    type Linker = NoLinker<Self>;

    fn open(_: &Open<'_>) -> Result<Self> {
        Ok(Memory::default())
    }

    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        let pages = self.pages.read();
        for (index, key) in exists.keys().iter().enumerate() {
            if pages.contains_key(key) {
                exists.set(0, index, PageStatus::Ok);
            }
        }
        Ok(())
    }

    fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
        let pages = self.pages.read();
        for page in batch.into_pages() {
            match pages.get(page.key()) {
                Some(bytes) => page.fill(bytes),
                None => page.finish(PageStatus::Missing),
            }
        }
        Ok(())
    }

    fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
        for page in batch.into_pages() {
            let bytes = page.to_vec()?;
            self.pages.write().entry(*page.key()).or_insert(bytes);
            page.finish(PageStatus::Ok);
        }
        Ok(())
    }

    fn batch_remove(&self, batch: Batch<'_, Remove>) -> Result<()> {
        for page in batch.into_pages() {
            self.pages.write().remove(page.key());
            page.finish(PageStatus::Ok);
        }
        Ok(())
    }

    fn stats(&self, _: &Call<'_>) -> Result<v0_1::Stats> {
        let pages = self.pages.read();
        let bytes_used = pages.values().map(|page| page.len() as u64).sum();
        let pages = pages.len() as u64;
        Ok(v0_1::Stats { pages, bytes_used, bytes_total: 0, failures: 0, get_mean_ns: 0, set_mean_ns: 0 })
    }
}

export_plugin! {
    backend: Memory,
    name: "abi-trial",
    capabilities: Capabilities { remove: true, concurrency: 2, ..Capabilities::NONE },
    config_schema: r#"{"type": "object", "additionalProperties": false}"#,
    check_config: "{}",
    other_tables: [v0_2::VERSION => TABLE_0_2],
}

static TABLE_0_2: BackendTable = BackendTable {
    size: size_of::<BackendTable>() as u64,
    abi_version: v0_2::ABI_VERSION,
    reserved: 0,
    open: KVDOCK_TABLE.open,
    capabilities: KVDOCK_TABLE.capabilities,
    register_mem_pool_host: KVDOCK_TABLE.register_mem_pool_host,
    register_v2_side_pools: KVDOCK_TABLE.register_v2_side_pools,
    unregister: KVDOCK_TABLE.unregister,
    pools_ready: KVDOCK_TABLE.pools_ready,
    batch_exists: KVDOCK_TABLE.batch_exists,
    batch_get,
    batch_set,
    batch_remove,
    clear: KVDOCK_TABLE.clear,
    stats,
    health: KVDOCK_TABLE.health,
    flush: KVDOCK_TABLE.flush,
    report_held_pages: KVDOCK_TABLE.report_held_pages,
    pin,
    close,
    linker: std::ptr::null(),
};

fn pin_all(instance: *mut c_void, keys: &[PageKey]) {
    PINNED.lock().entry(instance as usize).or_default().extend(keys);
}

/// The part of a batch that 0.1 has.
fn old(args: &BatchArgs) -> v0_1::BatchArgs {
    v0_1::BatchArgs {
        context: args.context,
        transfers: args.transfers,
        transfer_count: args.transfer_count,
        chain_position: args.chain_position,
        prefix_keys: args.prefix_keys,
        prefix_key_count: args.prefix_key_count,
        session_id: args.session_id,
    }
}

unsafe extern "C" fn batch_get(instance: *mut c_void, args: *const BatchArgs, error: *mut ErrorOut) -> Status {
    // SAFETY: rules of the boundary.
    unsafe { (KVDOCK_TABLE.batch_get)(instance, &old(&*args), error) }
}

/// Pages of a set with a priority are pinned.
unsafe extern "C" fn batch_set(instance: *mut c_void, args: *const BatchArgs, error: *mut ErrorOut) -> Status {
    // SAFETY: rules of the boundary: the arguments and what they point at are valid for the call.
    unsafe {
        let args = &*args;
        let status = (KVDOCK_TABLE.batch_set)(instance, &old(args), error);
        if status == 0 && args.priority > 0 {
            for transfer in raw::slice(args.transfers, args.transfer_count) {
                pin_all(instance, raw::slice(transfer.keys, transfer.count));
            }
        }
        status
    }
}

unsafe extern "C" fn batch_remove(instance: *mut c_void, args: *const BatchArgs, error: *mut ErrorOut) -> Status {
    // SAFETY: rules of the boundary.
    unsafe { (KVDOCK_TABLE.batch_remove)(instance, &old(&*args), error) }
}

unsafe extern "C" fn stats(
    instance: *mut c_void,
    context: *const CallContext,
    out: *mut Stats,
    error: *mut ErrorOut,
) -> Status {
    let mut old = v0_1::Stats { pages: 0, bytes_used: 0, bytes_total: 0, failures: 0, get_mean_ns: 0, set_mean_ns: 0 };
    // SAFETY: rules of the boundary.
    let status = unsafe { (KVDOCK_TABLE.stats)(instance, context, &raw mut old, error) };
    let pinned = PINNED.lock().get(&(instance as usize)).map_or(0, |keys| keys.len() as u64);
    let v0_1::Stats { pages, bytes_used, bytes_total, failures, get_mean_ns, set_mean_ns } = old;
    // SAFETY: the host owns `out` for the call.
    unsafe { *out = Stats { pages, bytes_used, bytes_total, failures, get_mean_ns, set_mean_ns, pinned } };
    status
}

unsafe extern "C" fn pin(
    instance: *mut c_void,
    _context: *const CallContext,
    keys: *const PageKey,
    count: u64,
    error: *mut ErrorOut,
) -> Status {
    // SAFETY: rules of the boundary: the keys and the place for the error are valid for the call.
    unsafe {
        guard(error, || {
            pin_all(instance, raw::slice(keys, count));
            Ok(())
        })
    }
}

unsafe extern "C" fn close(instance: *mut c_void, context: *const CallContext, error: *mut ErrorOut) -> Status {
    PINNED.lock().remove(&(instance as usize));
    // SAFETY: rules of the boundary.
    unsafe { (KVDOCK_TABLE.close)(instance, context, error) }
}
