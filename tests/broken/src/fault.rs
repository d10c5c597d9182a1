//! Which fault is planted. One compilation gives every broken plugin: a test copies the built file and writes the name of a
//! fault over the marker.

use std::sync::OnceLock;

use kvdock_plugin_api::{Error, ErrorKind, Result};

/// The marker; what follows the `=` is the name of the fault, padded with `.`.
#[used]
static MARKER: [u8; 64] = *b"kvdock-planted-fault=none.......................................";

macro_rules! faults {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// A fault that may be planted.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Fault { $($(#[doc = $doc])+ $variant,)+ }

        impl Fault {
            fn of(name: &str) -> Option<Fault> {
                match name { $($name => Some(Fault::$variant),)+ _ => None }
            }
        }

        /// Every name, so that a test helper can see in the file whether a fault is known.
        #[used]
        static NAMES: &[u8] = concat!("kvdock-known-faults=", $($name, "|",)+).as_bytes();
    };
}

faults! {
    /// No fault at all.
    None = "none",

    // Faults of a running server.
    /// `batch_get` never returns.
    HangInGet = "hang_in_get",
    /// `batch_set` never returns.
    HangInSet = "hang_in_set",
    /// `batch_exists` never returns.
    HangInExists = "hang_in_exists",
    /// `open` never returns.
    HangInOpen = "hang_in_open",
    /// `close` never returns.
    HangInClose = "hang_in_close",
    /// `open` panics.
    PanicInOpen = "panic_in_open",
    /// Registering the anchor panics.
    PanicInRegister = "panic_in_register",
    /// `pools_ready` panics.
    PanicInPoolsReady = "panic_in_pools_ready",
    /// `batch_exists` panics.
    PanicInExists = "panic_in_exists",
    /// `batch_get` panics.
    PanicInGet = "panic_in_get",
    /// `batch_set` panics.
    PanicInSet = "panic_in_set",
    /// `batch_remove` panics.
    PanicInRemove = "panic_in_remove",
    /// `clear` panics.
    PanicInClear = "panic_in_clear",
    /// `stats` panics.
    PanicInStats = "panic_in_stats",
    /// `health` panics, but not the first time, which is asked for by the attach.
    PanicInHealth = "panic_in_health",
    /// `flush` panics.
    PanicInFlush = "panic_in_flush",
    /// `close` panics.
    PanicInClose = "panic_in_close",
    /// `batch_get` gives bytes of the right length that were never stored, as good.
    GarbageGet = "garbage_get",
    /// `batch_get` writes the first half of a page and calls it good.
    HalfGet = "half_get",
    /// `batch_get` gives one page's bytes for another key, as good.
    SwappedGet = "swapped_get",
    /// `batch_get` says `Ok` and writes nothing.
    NothingGet = "nothing_get",
    /// The process ends when an instance is opened with the configuration of the check.
    AbortInCheck = "abort_in_check",
    /// A page that is read takes 300 milliseconds.
    SlowGet = "slow_get",
    /// `batch_set` does not return before a second after its deadline, and does not look at its cancel flag.
    LateSet = "late_set",
    /// `batch_get` does not return before a second after its deadline, and writes its pages then.
    LateGet = "late_get",
    /// Every second data call fails with an error that a retry helps.
    ErrorRetryableThenOk = "error_retryable_then_ok",
    /// Every data call fails with an error that says a retry may help.
    ErrorAlways = "error_always",
    /// Every data call fails with an error that says that no retry helps.
    ErrorFatal = "error_fatal",
    /// Every set is refused.
    RefuseSets = "refuse_sets",
    /// `health` says failed.
    HealthFailed = "health_failed",
}

/// Whether this fault is planted.
pub fn is(fault: Fault) -> bool {
    planted() == Ok(fault)
}

/// What is planted.
///
/// # Errors
/// The name, when it is no fault of this plugin.
pub fn planted() -> std::result::Result<Fault, &'static str> {
    static PLANTED: OnceLock<std::result::Result<Fault, &'static str>> = OnceLock::new();
    *PLANTED.get_or_init(|| {
        // SAFETY: a static is readable. Volatile, because the bytes in the file are not those that the compiler saw.
        let marker: &'static [u8; 64] = Box::leak(Box::new(unsafe { std::ptr::read_volatile(&raw const MARKER) }));
        let text = std::str::from_utf8(marker).unwrap_or("(no UTF-8)");
        let name = text.split_once('=').map_or(text, |(_, name)| name).trim_end_matches('.');
        Fault::of(name).ok_or(name)
    })
}

/// Refuses a name that is no fault.
///
/// # Errors
/// When the marker was overwritten with something else.
pub fn check() -> Result<()> {
    planted().map(|_| ()).map_err(|name| {
        Error::new(ErrorKind::InvalidConfig, format!("the planted fault {name:?} is none of this plugin's"))
    })
}

/// A call that never returns.
pub fn hang() -> ! {
    loop {
        std::thread::sleep(std::time::Duration::from_secs(3600));
    }
}
