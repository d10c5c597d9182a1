//! libibverbs, loaded when it is first asked for.

use std::ffi::{c_char, c_int};
use std::sync::OnceLock;

use libc::{c_uint, c_void, size_t};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::RdmaError;
use crate::verbs::{
    AsyncEvent, CompletionChannel, CompletionQueue, Context, Device, DeviceAttributes, GidEntry, MemoryRegion,
    PortAttributes, ProtectionDomain, QueueAttributes, QueueInit, QueuePair,
};

const NAME: &str = "libibverbs.so.1";

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the library that are used. It is never unloaded: drivers keep threads and handlers.
        pub struct Verbs {
            $(pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Verbs {
            fn find(library: &Library) -> Result<Verbs, RdmaError> {
                Ok(Verbs {
                    $(
                        // SAFETY: the symbol is the library's function of this name, whose type the C header declares so.
                        $field: unsafe { library.get(concat!($symbol, "\0").as_bytes()) }
                            .map(|symbol| *symbol)
                            .map_err(|_| RdmaError::OldLibrary($symbol))?,
                    )*
                })
            }
        }
    };
}

functions! {
    fork_init = "ibv_fork_init": fn() -> c_int;
    get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut Device;
    free_device_list = "ibv_free_device_list": fn(*mut *mut Device);
    open_device = "ibv_open_device": fn(*mut Device) -> *mut Context;
    close_device = "ibv_close_device": fn(*mut Context) -> c_int;
    query_device = "ibv_query_device": fn(*mut Context, *mut DeviceAttributes) -> c_int;
    query_port = "ibv_query_port": fn(*mut Context, u8, *mut PortAttributes) -> c_int;
    query_gid = "_ibv_query_gid_ex": fn(*mut Context, u32, u32, *mut GidEntry, u32, size_t) -> c_int;
    alloc_pd = "ibv_alloc_pd": fn(*mut Context) -> *mut ProtectionDomain;
    dealloc_pd = "ibv_dealloc_pd": fn(*mut ProtectionDomain) -> c_int;
    reg_mr = "ibv_reg_mr_iova2": fn(*mut ProtectionDomain, *mut c_void, size_t, u64, c_uint) -> *mut MemoryRegion;
    dereg_mr = "ibv_dereg_mr": fn(*mut MemoryRegion) -> c_int;
    create_channel = "ibv_create_comp_channel": fn(*mut Context) -> *mut CompletionChannel;
    destroy_channel = "ibv_destroy_comp_channel": fn(*mut CompletionChannel) -> c_int;
    create_cq = "ibv_create_cq":
        fn(*mut Context, c_int, *mut c_void, *mut CompletionChannel, c_int) -> *mut CompletionQueue;
    destroy_cq = "ibv_destroy_cq": fn(*mut CompletionQueue) -> c_int;
    get_cq_event = "ibv_get_cq_event":
        fn(*mut CompletionChannel, *mut *mut CompletionQueue, *mut *mut c_void) -> c_int;
    ack_cq_events = "ibv_ack_cq_events": fn(*mut CompletionQueue, c_uint);
    get_async_event = "ibv_get_async_event": fn(*mut Context, *mut AsyncEvent) -> c_int;
    ack_async_event = "ibv_ack_async_event": fn(*mut AsyncEvent);
    create_qp = "ibv_create_qp": fn(*mut ProtectionDomain, *mut QueueInit) -> *mut QueuePair;
    modify_qp = "ibv_modify_qp": fn(*mut QueuePair, *mut QueueAttributes, c_int) -> c_int;
    destroy_qp = "ibv_destroy_qp": fn(*mut QueuePair) -> c_int;
    status_text = "ibv_wc_status_str": fn(c_int) -> *const c_char;
}

impl Verbs {
    /// The library of this machine.
    ///
    /// # Errors
    /// When it can't be loaded, or is too old. It is looked for again when it is asked for again.
    pub fn get() -> Result<&'static Verbs, RdmaError> {
        static VERBS: OnceLock<Verbs> = OnceLock::new();
        if let Some(verbs) = VERBS.get() {
            return Ok(verbs);
        }
        // SAFETY: the constructors of libibverbs and of its drivers prepare their own state.
        let library = unsafe { Library::open(Some(NAME), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| RdmaError::NoLibrary(reason(&error)))?;
        let verbs = Verbs::find(&library)?;
        std::mem::forget(library);
        // Children of this process must not get copies of pages that a card writes to. Where the kernel sees to it by itself the
        // library does nothing; where it can't be had the process does not fork without executing another program anyway.
        // SAFETY: no object of the library exists yet.
        unsafe { (verbs.fork_init)() };
        Ok(VERBS.get_or_init(|| verbs))
    }

    /// What a status of a completion means.
    pub fn status(&self, status: c_int) -> String {
        // SAFETY: the library gives a constant text, or null.
        let text = unsafe { (self.status_text)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: it is a text with an end.
        let text = unsafe { std::ffi::CStr::from_ptr(text) };
        format!("{} (status {status})", text.to_string_lossy())
    }
}

fn reason(error: &libloading::Error) -> String {
    use std::error::Error;
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// What the system says of the call that just failed: its result where that is an error number, else the thread's.
pub fn system_error(result: c_int) -> std::io::Error {
    if result > 0 { std::io::Error::from_raw_os_error(result) } else { std::io::Error::last_os_error() }
}
