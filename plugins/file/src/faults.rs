//! Planted faults, for tests on machines where a full or broken file system can't be made.

use std::io;
use std::sync::atomic::{AtomicI32, Ordering};

static WRITE_ERROR: AtomicI32 = AtomicI32::new(0);

/// Lets every write of this library fail with an error number of the system; 0 for none.
#[doc(hidden)]
pub fn fail_writes_with(errno: i32) {
    WRITE_ERROR.store(errno, Ordering::SeqCst);
}

pub(crate) fn check() -> io::Result<()> {
    match WRITE_ERROR.load(Ordering::Relaxed) {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}
