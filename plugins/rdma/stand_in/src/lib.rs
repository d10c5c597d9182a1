//! A stand-in for libibverbs, for tests: it has the functions, structures and rules of the real one that RDMA transports use, and moves bytes
//! between processes of one machine over Unix sockets. What a card does by itself, threads of the process do here, so the process that is
//! read or written takes no part, and one that is killed or stopped does not answer.
//!
//! Built as `libkvdock_verbs_stand_in.so`; a test gives it the name `libibverbs.so.1` in a folder of `LD_LIBRARY_PATH`.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `KVDOCK_STAND_IN` | folder by which processes find one another; without it there are no devices |
//! | `KVDOCK_STAND_IN_DEVICES` | names of the devices, with commas; `stand0` |
//! | `KVDOCK_STAND_IN_MAX_MR` | most bytes of a region |
//!
//! A file `fault-PID` in the folder plants a fault in that process; see [`faults`].

mod devices;
pub mod faults;
pub mod harness;
mod objects;
mod pair;
mod wire;

use std::path::PathBuf;

/// The folder by which processes find one another.
fn folder() -> Option<PathBuf> {
    std::env::var_os("KVDOCK_STAND_IN").map(PathBuf::from)
}

/// Sets the error number of the thread, as C functions do.
fn fail<T>(error: i32) -> *mut T {
    // SAFETY: the place is the thread's own.
    unsafe { *libc::__errno_location() = error };
    std::ptr::null_mut()
}
