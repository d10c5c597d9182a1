//! The C functions of a backend, called as a host calls them.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::*;
use crate::v0_1::*;
use crate::{CacheMode, Capabilities, Capability, HeldChange, HeldTier, HitPolicy, MemoryKind, PageStatus, PoolRole};
use crate::{Completed, Exists, Get, Load, Offload, Open, Remove, Set, Start};

/// Does what the name of its instance says.
struct Probe {
    claims: bool,
}

static POSITIONS: AtomicU64 = AtomicU64::new(0);
static HELD: AtomicU64 = AtomicU64::new(0);
static SETTLED: AtomicU64 = AtomicU64::new(0);

impl Backend for Probe {
    type Linker = ProbeLinker;
    fn open(open: &Open<'_>) -> Result<Self> {
        assert_eq!(open.cache_mode(), CacheMode::Linker);
        Ok(Probe { claims: open.instance_name() == "claims" })
    }
    fn capabilities(&self, declared: Capabilities) -> Capabilities {
        Capabilities { durable: self.claims, concurrency: 2, ..declared }
    }
    fn batch_exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        exists.set(0, 2, PageStatus::Ok);
        Ok(())
    }
    fn batch_get(&self, batch: crate::Batch<'_, Get>) -> Result<()> {
        batch.into_pages().for_each(|page| page.finish(PageStatus::Ok));
        Ok(())
    }
    fn batch_set(&self, batch: crate::Batch<'_, Set>) -> Result<()> {
        for page in batch.into_pages() {
            POSITIONS.fetch_add(page.position(), Ordering::SeqCst);
            page.finish(PageStatus::Ok);
        }
        Ok(())
    }
    fn batch_remove(&self, _: crate::Batch<'_, Remove>) -> Result<()> {
        Ok(())
    }
    fn stats(&self, _: &crate::Call<'_>) -> Result<Stats> {
        Err(Error::unsupported("figures"))
    }
    fn report_held_pages(&self, held: &crate::HeldPages<'_>) -> Result<()> {
        assert_eq!((held.tier, held.change), (HeldTier::Device, HeldChange::Added));
        HELD.fetch_add(held.keys.len() as u64, Ordering::SeqCst);
        Ok(())
    }
}

struct ProbeLinker;

impl Linker for ProbeLinker {
    type Backend = Probe;
    fn lookup(_: &Probe, _: &mut Exists<'_>) -> Result<()> {
        Ok(())
    }
    fn load(_: &Probe, _: Load) -> Result<()> {
        Ok(())
    }
    fn start_layer_wise_loading(_: &Probe, start: Start) -> Result<()> {
        assert_eq!((start.batch, start.ready.len(), start.done.layers()), (9, 1, 3));
        start.done.settle(0);
        start.done.settle_all();
        Ok(())
    }
    fn finish_layer_wise_loading(_: &Probe, _: &crate::Call<'_>, _: u64) -> Result<()> {
        Ok(())
    }
    fn cancel_queued_load(_: &Probe, _: u64) -> Result<()> {
        Ok(())
    }
    fn offload(_: &Probe, _: Offload) -> Result<()> {
        Ok(())
    }
    fn num_completed_offloads(_: &Probe) -> u64 {
        0
    }
    fn pop_completed_offload(_: &Probe) -> Option<Completed> {
        None
    }
    fn reset(_: &Probe, _: &crate::Call<'_>) -> Result<()> {
        Ok(())
    }
}

const DECLARED: Capabilities = Capabilities { ranges: true, held_pages: true, ..Capabilities::NONE };

unsafe extern "C" fn open_probe(args: *const OpenArgs, out: *mut *mut c_void, error: *mut ErrorOut) -> Status {
    // SAFETY: called by the rules of the boundary.
    unsafe { open::<Probe>(DECLARED, args, out, error) }
}

static TABLE: BackendTable = Tables::<Probe>::backend(open_probe);

unsafe extern "C" fn log(_: *mut c_void, _: u32, _: Bytes, _: Bytes) {}
unsafe extern "C" fn metric(_: *mut c_void, _: u32, _: Bytes, _: Bytes, _: f64) {}
unsafe extern "C" fn health(_: *mut c_void, _: u32, _: Bytes) {}
unsafe extern "C" fn offloaded(_: *mut c_void) {}
unsafe extern "C" fn settled(_: *mut c_void, batch: u64) {
    SETTLED.fetch_add(batch, Ordering::SeqCst);
}

static HOST: HostTable = HostTable {
    size: size_of::<HostTable>() as u64,
    abi_version: ABI_VERSION,
    reserved: 0,
    log,
    metric,
    health_changed: health,
    offload_completed: offloaded,
    layers_settled: settled,
};

const CONTEXT: CallContext = CallContext { deadline_ns: 0, cancel: std::ptr::null(), trace_id: 0 };

fn call(run: impl FnOnce(*mut ErrorOut) -> Status) -> std::result::Result<(), (ErrorKind, String)> {
    let mut text = [0u8; 256];
    let (message, message_capacity) = (text.as_mut_ptr(), text.len() as u64);
    let mut out =
        ErrorOut { kind: 0, retryable: 0, panicked: 0, reserved: [0; 2], message, message_capacity, message_len: 0 };
    match run(&raw mut out) {
        0 => Ok(()),
        kind => {
            let message = String::from_utf8_lossy(&text[..out.message_len as usize]).into_owned();
            Err((ErrorKind::from_raw(kind), message))
        }
    }
}

fn attach(name: &str, cache_mode: u32) -> std::result::Result<*mut c_void, (ErrorKind, String)> {
    let identity = Identity {
        namespace_digest: [1; 32],
        namespace_json: "{}".into(),
        model_name: "m".into(),
        weights_digest: [2; 32],
        numerics_id: "n".into(),
        page_tokens: 4,
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
    };
    let args = OpenArgs {
        context: CONTEXT,
        config_json: "{}".into(),
        instance_name: name.into(),
        identity: &raw const identity,
        host: &raw const HOST,
        host_context: std::ptr::null_mut(),
        cache_mode,
        reserved: 0,
    };
    let mut this = std::ptr::null_mut();
    // SAFETY: everything in `args` lives through the call.
    call(|error| unsafe { (TABLE.open)(&raw const args, &raw mut this, error) })?;
    Ok(this)
}

/// An instance with a pool of 8 pages of 64 bytes.
fn with_pool() -> *mut c_void {
    let this = attach("probe", CacheMode::Linker.raw()).unwrap();
    let memory: &'static mut [u8] = Box::leak(vec![0u8; 512].into_boxed_slice());
    let region = Region {
        base: memory.as_mut_ptr().cast(),
        len: 512,
        memory_kind: MemoryKind::Host.raw(),
        fd: -1,
        fd_offset: 0,
        device_uuid: [0; 16],
        flags: 0,
    };
    let segment = Segment { region: 0, reserved: 0, offset: 0, stride: 64, len: 64 };
    let desc = PoolDesc {
        pool: 0,
        role: PoolRole::Anchor.raw(),
        logical: 0,
        dtype: 0,
        name: "kv".into(),
        layout: "page_first".into(),
        page_count: 8,
        page_tokens: 4,
        layers: 0,
        page_bytes: 64,
        regions: &raw const region,
        region_count: 1,
        segments: &raw const segment,
        segment_count: 1,
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
    };
    let context = CONTEXT;
    // SAFETY: the description lives through the call, the memory for ever.
    call(|error| unsafe { (TABLE.register_mem_pool_host)(this, &raw const context, &raw const desc, error) }).unwrap();
    this
}

fn close(this: *mut c_void) {
    let context = CONTEXT;
    // SAFETY: no other call runs.
    call(|error| unsafe { (TABLE.close)(this, &raw const context, error) }).unwrap();
}

type Function = unsafe extern "C" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> Status;

fn batch(
    function: Function,
    this: *mut c_void,
    offset: u32,
    layers: u32,
) -> std::result::Result<(), (ErrorKind, String)> {
    let (keys, pages, mut statuses) = ([[7u8; 32], [8; 32]], [0u32, 1], [0u8; 2]);
    let transfer = PoolTransfer {
        pool: 0,
        layer_first: 0,
        layer_count: layers,
        chain_offset: offset,
        keys: keys.as_ptr(),
        pages: pages.as_ptr(),
        count: 2,
        statuses: statuses.as_mut_ptr(),
    };
    let args = BatchArgs {
        context: CONTEXT,
        transfers: &raw const transfer,
        transfer_count: 1,
        chain_position: 5,
        prefix_keys: std::ptr::null(),
        prefix_key_count: 0,
        session_id: "".into(),
    };
    // SAFETY: everything in `args` lives through the call.
    let result = call(|error| unsafe { function(this, &raw const args, error) });
    if result.is_ok() {
        assert_eq!(statuses, [PageStatus::Ok.raw(); 2]);
    }
    result
}

#[test]
fn an_instance_answers_what_it_can_do() {
    let this = attach("probe", CacheMode::Linker.raw()).unwrap();
    let mut out = Capabilities::NONE.raw();
    // SAFETY: the instance is open and `out` lives through the call.
    call(|error| unsafe { (TABLE.capabilities)(this, &raw mut out, error) }).unwrap();
    assert_eq!(out.flags, Capability::Ranges.raw() | Capability::HeldPages.raw());
    assert_eq!((out.concurrency, out.preferred_batch), (2, 128));
    close(this);
    let (kind, message) = attach("claims", CacheMode::Linker.raw()).unwrap_err();
    assert_eq!(kind, ErrorKind::Internal);
    assert!(message.contains("capability durable"), "{message}");
    let (kind, message) = attach("probe", 77).unwrap_err();
    assert_eq!((kind, message.contains("cache mode 77")), (ErrorKind::Unsupported, true));
}

#[test]
fn a_page_has_its_depth_and_only_reads_have_ranges() {
    let this = with_pool();
    batch(TABLE.batch_set, this, 2, 0).unwrap();
    assert_eq!(POSITIONS.load(Ordering::SeqCst), 7 + 8);
    batch(TABLE.batch_get, this, 0, 1).unwrap();
    for function in [TABLE.batch_set, TABLE.batch_remove] {
        let (kind, message) = batch(function, this, 0, 1).unwrap_err();
        assert_eq!((kind, message.contains("can be read only")), (ErrorKind::Internal, true));
    }
    close(this);
}

#[test]
fn pages_that_the_worker_holds_are_not_asked_of_the_store() {
    let this = with_pool();
    for (held_pages, expected) in [(0, [1, 0, 0, 0]), (1, [1, 1, 0, 0]), (2, [1, 1, 1, 1])] {
        let query = PoolQuery {
            pool: 0,
            hit_policy: HitPolicy::AllPages.raw(),
            trailing_pages: 0,
            block_pages: 0,
            group_pages: 0,
            held_pages,
        };
        let (keys, mut restorable) = ([[1u8; 32], [2; 32], [3; 32]], [0u8; 4]);
        let args = ExistsArgs {
            context: CONTEXT,
            keys: keys.as_ptr(),
            key_count: 3,
            pools: &raw const query,
            pool_count: 1,
            chain_position: 0,
            prefix_keys: std::ptr::null(),
            prefix_key_count: 0,
            request: 0,
            restorable: restorable.as_mut_ptr(),
            present: std::ptr::null_mut(),
        };
        // SAFETY: everything in `args` lives through the call.
        call(|error| unsafe { (TABLE.batch_exists)(this, &raw const args, error) }).unwrap();
        assert_eq!(restorable, expected, "{held_pages} held");
    }
    let keys = [[4u8; 32]; 3];
    let mut held = HeldPages {
        context: CONTEXT,
        tier: HeldTier::Device.raw(),
        change: HeldChange::Added.raw(),
        keys: keys.as_ptr(),
        key_count: 3,
    };
    for tier in [held.tier, 99] {
        held.tier = tier;
        // SAFETY: everything in `held` lives through the call.
        call(|error| unsafe { (TABLE.report_held_pages)(this, &raw const held, error) }).unwrap();
    }
    assert_eq!(HELD.load(Ordering::SeqCst), 3, "a tier that it does not know is ignored");
    close(this);
}

#[test]
fn a_start_brings_handles_and_settled_layers_are_told() {
    let this = with_pool();
    let words: [AtomicU32; 3] = Default::default();
    let mut handle = ReadyHandle { kind: 1, reserved: 0, handle: 0 };
    for (kind, expected) in [(1, None), (50, Some(ErrorKind::Unsupported))] {
        handle.kind = kind;
        let args = StartArgs {
            context: CONTEXT,
            batch: 9,
            ready: &raw const handle,
            ready_count: 1,
            layer_done: words.as_ptr().cast_mut().cast(),
            layer_count: 3,
        };
        let start = Tables::<Probe>::LINKER.start_layer_wise_loading;
        // SAFETY: everything in `args` lives through the call, and the probe keeps nothing.
        let result = call(|error| unsafe { start(this, &raw const args, error) });
        assert_eq!(result.err().map(|(kind, _)| kind), expected);
    }
    assert!(words.iter().all(|word| word.load(Ordering::Acquire) == 1));
    assert_eq!(SETTLED.load(Ordering::SeqCst), 18, "once for a layer, once for the rest");
    close(this);
}
