//! The plugin that is measured, called through the boundary or as code of this program.

use std::ffi::c_void;
use std::hint::black_box;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use kvdock_plugin_api::mock::{key, table_of};
use kvdock_plugin_api::v0_1::{
    BackendTable, BatchArgs, Bytes, CallContext, ENTRY_SYMBOL, EntryFn, ErrorOut, ExistsArgs, HostTable, Identity,
    NONE, OpenArgs, PoolDesc, PoolQuery, PoolTransfer, Status,
};
use kvdock_plugin_api::{CacheMode, Dtype, HitPolicy, PageStatus, PoolRole};

use crate::keys;

/// The table of the plugin in `library`.
///
/// # Errors
/// When it can't be loaded or has no table of this version.
pub fn load(library: &Path) -> Result<&'static BackendTable> {
    ensure!(library.exists(), "{} is missing; `cargo xtask bench` builds it", library.display());
    // SAFETY: the library is one of ours, just built; its constructors do nothing of note.
    let library =
        unsafe { libloading::Library::new(library) }.with_context(|| format!("can't load {}", library.display()))?;
    // SAFETY: a plugin's entry symbol has this type.
    let entry: EntryFn = *unsafe { library.get::<EntryFn>(ENTRY_SYMBOL) }.context("no entry symbol")?;
    // The table is constant data of the library, which therefore stays mapped.
    std::mem::forget(library);
    table_of(entry).map_err(|error| anyhow!("{error}"))
}

/// An open instance that holds one key, called with nothing in between. It is called without a deadline, and its pool has no memory: neither
/// is looked at, and valgrind can't follow how rustix asks for the time and the page size.
pub struct Store {
    table: &'static BackendTable,
    /// Called as a function of this program and not through the table.
    linked: bool,
    instance: *mut c_void,
}

const UNBOUNDED: CallContext = CallContext { deadline_ns: 0, cancel: std::ptr::null(), trace_id: 0 };

impl Store {
    /// From the library, as any plugin is loaded.
    ///
    /// # Errors
    /// When it can't be loaded or called.
    pub fn loaded(library: &Path) -> Result<Self> {
        Self::open(load(library)?, false)
    }

    /// From the same source, as code of this program.
    ///
    /// # Errors
    /// When it can't be called.
    pub fn linked() -> Result<Self> {
        Self::open(table_of(keys::kvdock_plugin_entry).map_err(|error| anyhow!("{error}"))?, true)
    }

    fn open(table: &'static BackendTable, linked: bool) -> Result<Self> {
        let identity = identity();
        let args = OpenArgs {
            context: UNBOUNDED,
            config_json: "{}".into(),
            instance_name: "bench".into(),
            identity: &raw const identity,
            host: &raw const HOST,
            host_context: std::ptr::null_mut(),
            cache_mode: CacheMode::Hierarchical.raw(),
            reserved: 0,
        };
        let mut instance = std::ptr::null_mut();
        let done = |what: &str, status: Status| {
            ensure!(status == 0, "{what} answers {status}");
            Ok(())
        };
        let (pool, key) = (pool(), key(1));
        let mut stored = PageStatus::Unset.raw();
        let transfer = PoolTransfer {
            pool: 0,
            layer_first: 0,
            layer_count: 0,
            chain_offset: 0,
            keys: &raw const key,
            pages: &raw const PAGE,
            count: 1,
            statuses: &raw mut stored,
        };
        let set = BatchArgs {
            context: UNBOUNDED,
            transfers: &raw const transfer,
            transfer_count: 1,
            chain_position: 0,
            prefix_keys: std::ptr::null(),
            prefix_key_count: 0,
            session_id: "".into(),
        };
        let error = std::ptr::null_mut();
        // SAFETY: the order of calls is that of the boundary; all arguments live until the calls return.
        unsafe {
            done("open", (table.open)(&raw const args, &raw mut instance, error))?;
            done("registration", (table.register_mem_pool_host)(instance, &UNBOUNDED, &raw const pool, error))?;
            done("pools_ready", (table.pools_ready)(instance, &UNBOUNDED, error))?;
            done("batch_set", (table.batch_set)(instance, &raw const set, error))?;
        }
        ensure!(stored == PageStatus::Ok.raw(), "the key was not stored: status {stored}");
        Ok(Self { table, linked, instance })
    }

    /// Asks `calls` times for the key.
    ///
    /// # Errors
    /// When a call fails or does not find it.
    pub fn exists(&self, calls: u32) -> Result<()> {
        if self.linked {
            // SAFETY: the instance is of this table, and the arguments are valid.
            ask(calls, self.instance, |instance, args, error| unsafe { keys::exists(instance, args, error) })
        } else {
            // SAFETY: as above.
            ask(calls, self.instance, |instance, args, error| unsafe {
                (self.table.batch_exists)(instance, args, error)
            })
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the instance is open and no call runs.
        unsafe { (self.table.close)(self.instance, &UNBOUNDED, std::ptr::null_mut()) };
    }
}

fn ask(
    calls: u32,
    instance: *mut c_void,
    function: impl Fn(*mut c_void, *const ExistsArgs, *mut ErrorOut) -> Status,
) -> Result<()> {
    let key = black_box(key(1));
    let query = PoolQuery {
        pool: 0,
        hit_policy: HitPolicy::AllPages.raw(),
        trailing_pages: 0,
        block_pages: 0,
        group_pages: 0,
        held_pages: 0,
    };
    let mut found = 0;
    for _ in 0..calls {
        let (mut restorable, mut present) = ([0u8; 2], 0u8);
        let args = ExistsArgs {
            context: UNBOUNDED,
            keys: &raw const key,
            key_count: 1,
            pools: &raw const query,
            pool_count: 1,
            chain_position: 0,
            prefix_keys: std::ptr::null(),
            prefix_key_count: 0,
            request: 0,
            restorable: restorable.as_mut_ptr(),
            present: &raw mut present,
        };
        let status = function(instance, black_box(&raw const args), std::ptr::null_mut());
        found += u32::from(status == 0 && black_box(restorable)[1] == 1);
    }
    ensure!(found == calls, "the key was found in {found} of {calls} calls");
    Ok(())
}

static PAGE: u32 = 0;

fn pool() -> PoolDesc {
    PoolDesc {
        pool: 0,
        role: PoolRole::Anchor.raw(),
        logical: 1,
        dtype: Dtype::Bytes.raw(),
        name: "kv".into(),
        layout: "page_first".into(),
        page_count: 1,
        page_tokens: 16,
        layers: 0,
        page_bytes: 0,
        regions: std::ptr::null(),
        region_count: 0,
        segments: std::ptr::null(),
        segment_count: 0,
        components: std::ptr::null(),
        component_count: 0,
        seal_segment: NONE,
        hit_policy: HitPolicy::AllPages.raw(),
        trailing_pages: 0,
        block_pages: 0,
        group_pages: 0,
        indices_from_pool: NONE,
        replicated: 0,
        reserved: 0,
    }
}

fn identity() -> Identity {
    Identity {
        namespace_digest: [0; 32],
        namespace_json: "{}".into(),
        model_name: "bench".into(),
        weights_digest: [0; 32],
        numerics_id: "bench".into(),
        page_tokens: 16,
        tp_rank: 0,
        tp_size: 1,
        pp_rank: 0,
        pp_size: 1,
        cp_rank: 0,
        cp_size: 1,
        dp_rank: 0,
        dp_size: 1,
        dcp_rank: 0,
        dcp_size: 1,
        tp_lcm_size: 0,
        replicated: 0,
        writer: 1,
    }
}

/// The plugin tells the host nothing.
static HOST: HostTable = HostTable {
    size: size_of::<HostTable>() as u64,
    abi_version: kvdock_plugin_api::v0_1::ABI_VERSION,
    reserved: 0,
    log,
    metric,
    health_changed,
    offload_completed,
    layers_settled,
};

unsafe extern "C" fn log(_: *mut c_void, _: u32, _: Bytes, _: Bytes) {}
unsafe extern "C" fn metric(_: *mut c_void, _: u32, _: Bytes, _: Bytes, _: f64) {}
unsafe extern "C" fn health_changed(_: *mut c_void, _: u32, _: Bytes) {}
unsafe extern "C" fn offload_completed(_: *mut c_void) {}
unsafe extern "C" fn layers_settled(_: *mut c_void, _: u64) {}
