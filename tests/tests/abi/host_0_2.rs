//! A host that knows the trial version 0.2: the same host as ever, with another list of versions. Its newest version is 0.2, and the table of a 0.1
//! plugin is adapted upward to it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use kvdock::plugin::AbiVersions;
use kvdock::plugin::abi::{AbiVersion, Face, RawInstance};
use kvdock_abi_trial::v0_2;
use kvdock_plugin_api::v0_1::{
    self, BatchArgs, CallContext, CapabilitiesOut, ErrorOut, ExistsArgs, HealthOut, OpenArgs, PoolDesc, Stats, Status,
};
use kvdock_plugin_api::{Error, raw};

const V0_1: AbiVersion = AbiVersion {
    text: v0_1::ABI_VERSION_TEXT,
    number: v0_1::ABI_VERSION,
    types: v0_1::TYPES_TEXT,
    types_sha256: v0_1::TYPES_DIGEST,
    table_bytes: size_of::<v0_1::BackendTable>() as u64,
    adapt: |table| {
        // SAFETY: the host hands in a table of this version that stays mapped.
        Host0_2::leak(Newest::Adapted(unsafe { &*table.cast() }))
    },
};

const V0_2: AbiVersion = AbiVersion {
    text: v0_2::ABI_VERSION_TEXT,
    number: v0_2::ABI_VERSION,
    types: v0_2::TYPES_TEXT,
    types_sha256: v0_2::VERSION.types_sha256,
    table_bytes: size_of::<v0_2::BackendTable>() as u64,
    adapt: |table| {
        // SAFETY: as above.
        Host0_2::leak(Newest::Own(unsafe { &*table.cast() }))
    },
};

/// What a release after 0.1 would know.
pub static KNOWS_BOTH: AbiVersions = AbiVersions::new(&[V0_1, V0_2]);
/// What a release would know that has dropped 0.1.
pub static KNOWS_0_2: AbiVersions = AbiVersions::new(&[V0_2]);

/// A plugin by the newest version: its own table, or that of 0.1 adapted upward.
#[derive(Debug, Clone, Copy)]
enum Newest {
    Own(&'static v0_2::BackendTable),
    Adapted(&'static v0_1::BackendTable),
}

/// A function that both tables have with the same type.
macro_rules! same {
    ($newest:expr, $function:ident) => {
        match $newest {
            Newest::Own(table) => table.$function,
            Newest::Adapted(table) => table.$function,
        }
    };
}

#[derive(Clone, Copy)]
enum Batch {
    Get,
    Set,
    Remove,
}

impl Newest {
    unsafe fn batch(self, which: Batch, instance: *mut c_void, args: &v0_2::BatchArgs, error: *mut ErrorOut) -> Status {
        match self {
            Newest::Own(table) => {
                let function = match which {
                    Batch::Get => table.batch_get,
                    Batch::Set => table.batch_set,
                    Batch::Remove => table.batch_remove,
                };
                // SAFETY: the caller's promise.
                unsafe { function(instance, args, error) }
            }
            Newest::Adapted(table) => {
                let function = match which {
                    Batch::Get => table.batch_get,
                    Batch::Set => table.batch_set,
                    Batch::Remove => table.batch_remove,
                };
                // 0.1 has no place for the priority.
                let args = BatchArgs {
                    context: args.context,
                    transfers: args.transfers,
                    transfer_count: args.transfer_count,
                    chain_position: args.chain_position,
                    prefix_keys: args.prefix_keys,
                    prefix_key_count: args.prefix_key_count,
                    session_id: args.session_id,
                };
                // SAFETY: the caller's promise.
                unsafe { function(instance, &raw const args, error) }
            }
        }
    }

    unsafe fn stats(
        self,
        instance: *mut c_void,
        context: *const CallContext,
        out: &mut v0_2::Stats,
        error: *mut ErrorOut,
    ) -> Status {
        match self {
            // SAFETY: the caller's promise.
            Newest::Own(table) => unsafe { (table.stats)(instance, context, out, error) },
            Newest::Adapted(table) => {
                let mut old =
                    Stats { pages: 0, bytes_used: 0, bytes_total: 0, failures: 0, get_mean_ns: 0, set_mean_ns: 0 };
                // SAFETY: the caller's promise.
                let status = unsafe { (table.stats)(instance, context, &raw mut old, error) };
                let Stats { pages, bytes_used, bytes_total, failures, get_mean_ns, set_mean_ns } = old;
                // A 0.1 plugin does not say how much is pinned.
                let pinned = 0;
                *out = v0_2::Stats { pages, bytes_used, bytes_total, failures, get_mean_ns, set_mean_ns, pinned };
                status
            }
        }
    }

    unsafe fn pin(
        self,
        instance: *mut c_void,
        context: *const CallContext,
        keys: &[v0_2::PageKey],
        error: *mut ErrorOut,
    ) -> Status {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Newest::Own(table) => (table.pin)(instance, context, keys.as_ptr(), keys.len() as u64, error),
                Newest::Adapted(_) => raw::write_error(&Error::unsupported("pinning pages"), error),
            }
        }
    }
}

const UNBOUNDED: CallContext = CallContext { deadline_ns: 0, cancel: std::ptr::null(), trace_id: 0 };

/// One plugin as the host of this trial calls it, with what it does by 0.2.
#[derive(Debug)]
pub struct Host0_2 {
    newest: Newest,
    /// What the host gives as priority.
    pub priority: AtomicU32,
    instances: Mutex<Vec<RawInstance>>,
}

static HOSTS: Mutex<Vec<&'static Host0_2>> = Mutex::new(Vec::new());

impl Host0_2 {
    fn leak(newest: Newest) -> &'static dyn Face {
        let host = Box::leak(Box::new(Host0_2 { newest, priority: AtomicU32::new(0), instances: Mutex::default() }));
        HOSTS.lock().unwrap_or_else(PoisonError::into_inner).push(host);
        host
    }

    /// The one behind the face of a library.
    pub fn behind(face: &'static dyn Face) -> &'static Host0_2 {
        let hosts = HOSTS.lock().unwrap();
        hosts.iter().copied().find(|host| std::ptr::addr_eq(*host, face)).expect("a library of this host")
    }

    /// Which version the plugin is called by.
    pub fn is_adapted(&self) -> bool {
        matches!(self.newest, Newest::Adapted(_))
    }

    fn last_instance(&self) -> *mut c_void {
        self.instances.lock().unwrap().last().expect("an instance was opened").0
    }

    /// Pins pages of the instance that was opened last; answers the status and the message.
    pub fn pin(&self, keys: &[v0_2::PageKey]) -> (Status, String) {
        let mut message = [0u8; 256];
        let mut error = ErrorOut {
            kind: 0,
            retryable: 0,
            panicked: 0,
            reserved: [0; 2],
            message: message.as_mut_ptr(),
            message_capacity: message.len() as u64,
            message_len: 0,
        };
        // SAFETY: the instance is open, the keys live until the call returns.
        let status = unsafe { self.newest.pin(self.last_instance(), &UNBOUNDED, keys, &raw mut error) };
        (status, String::from_utf8_lossy(&message[..error.message_len as usize]).into_owned())
    }

    /// Pinned pages of the instance that was opened last.
    pub fn pinned(&self) -> u64 {
        let mut out = v0_2::Stats {
            pages: 0,
            bytes_used: 0,
            bytes_total: 0,
            failures: 0,
            get_mean_ns: 0,
            set_mean_ns: 0,
            pinned: u64::MAX,
        };
        // SAFETY: the instance is open.
        let status = unsafe { self.newest.stats(self.last_instance(), &UNBOUNDED, &mut out, std::ptr::null_mut()) };
        assert_eq!(status, 0);
        out.pinned
    }

    unsafe fn batch(
        &self,
        which: Batch,
        instance: RawInstance,
        args: *const BatchArgs,
        error: *mut ErrorOut,
    ) -> Status {
        // SAFETY: the caller's promise.
        let args = unsafe { &*args };
        let args = v0_2::BatchArgs {
            context: args.context,
            transfers: args.transfers,
            transfer_count: args.transfer_count,
            chain_position: args.chain_position,
            prefix_keys: args.prefix_keys,
            prefix_key_count: args.prefix_key_count,
            session_id: args.session_id,
            priority: self.priority.load(Ordering::SeqCst),
            reserved: 0,
        };
        // SAFETY: the caller's promise.
        unsafe { self.newest.batch(which, instance.0, &args, error) }
    }
}

/// What the rest of the host calls. In a release this face would have the arguments of 0.2; here the ones of today's host come in, and what 0.2
/// has more is added.
impl Face for Host0_2 {
    unsafe fn open(&self, args: *const OpenArgs, out: *mut *mut c_void, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        let status = unsafe { same!(self.newest, open)(args, out, error) };
        if status == 0 {
            // SAFETY: `open` wrote the instance.
            self.instances.lock().unwrap().push(RawInstance(unsafe { *out }));
        }
        status
    }
    unsafe fn batch_get(&self, instance: RawInstance, args: *const BatchArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { self.batch(Batch::Get, instance, args, error) }
    }
    unsafe fn batch_set(&self, instance: RawInstance, args: *const BatchArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { self.batch(Batch::Set, instance, args, error) }
    }
    unsafe fn batch_remove(&self, instance: RawInstance, args: *const BatchArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { self.batch(Batch::Remove, instance, args, error) }
    }
    unsafe fn stats(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        out: *mut Stats,
        error: *mut ErrorOut,
    ) -> Status {
        let mut newer = v0_2::Stats {
            pages: 0,
            bytes_used: 0,
            bytes_total: 0,
            failures: 0,
            get_mean_ns: 0,
            set_mean_ns: 0,
            pinned: 0,
        };
        // SAFETY: the caller's promise.
        let status = unsafe { self.newest.stats(instance.0, context, &mut newer, error) };
        let v0_2::Stats { pages, bytes_used, bytes_total, failures, get_mean_ns, set_mean_ns, .. } = newer;
        // SAFETY: the caller's promise.
        unsafe { *out = Stats { pages, bytes_used, bytes_total, failures, get_mean_ns, set_mean_ns } };
        status
    }
    unsafe fn capabilities(&self, instance: RawInstance, out: *mut CapabilitiesOut, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { same!(self.newest, capabilities)(instance.0, out, error) }
    }
    unsafe fn register_mem_pool_host(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        pool: *const PoolDesc,
        error: *mut ErrorOut,
    ) -> Status {
        // SAFETY: the caller's promise.
        unsafe { same!(self.newest, register_mem_pool_host)(instance.0, context, pool, error) }
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
        unsafe { same!(self.newest, register_v2_side_pools)(instance.0, context, pools, count, error) }
    }
    unsafe fn pools_ready(&self, instance: RawInstance, context: *const CallContext, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { same!(self.newest, pools_ready)(instance.0, context, error) }
    }
    unsafe fn batch_exists(&self, instance: RawInstance, args: *const ExistsArgs, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { same!(self.newest, batch_exists)(instance.0, args, error) }
    }
    unsafe fn clear(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        scope: u32,
        error: *mut ErrorOut,
    ) -> Status {
        // SAFETY: the caller's promise.
        unsafe { same!(self.newest, clear)(instance.0, context, scope, error) }
    }
    unsafe fn health(
        &self,
        instance: RawInstance,
        context: *const CallContext,
        out: *mut HealthOut,
        error: *mut ErrorOut,
    ) -> Status {
        // SAFETY: the caller's promise.
        unsafe { same!(self.newest, health)(instance.0, context, out, error) }
    }
    unsafe fn flush(&self, instance: RawInstance, context: *const CallContext, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { same!(self.newest, flush)(instance.0, context, error) }
    }
    unsafe fn close(&self, instance: RawInstance, context: *const CallContext, error: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { same!(self.newest, close)(instance.0, context, error) }
    }
}
