//! Deadline, cancel flag and chain position of a call.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::v0_1::{CallContext, PageKey};
use crate::{Error, ErrorKind, Result};

/// Nanoseconds of CLOCK_MONOTONIC, the clock of deadlines.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Deadline and cancel flag of a call.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    deadline_ns: u64,
    cancel: Option<&'a AtomicU32>,
    trace_id: u64,
}

impl<'a> Call<'a> {
    /// A call without a deadline, for tests and for work of the plugin's own.
    pub const fn unbounded() -> Call<'static> {
        Call { deadline_ns: 0, cancel: None, trace_id: 0 }
    }

    /// # Safety
    /// `context.cancel` is null or points at a word that lives for `'a` and is written atomically only.
    pub unsafe fn from_raw(context: &CallContext) -> Call<'a> {
        // SAFETY: the caller's promise; `AtomicU32` has the layout of `u32`.
        let cancel = unsafe { context.cancel.cast::<AtomicU32>().as_ref() };
        Call { deadline_ns: context.deadline_ns, cancel, trace_id: context.trace_id }
    }

    /// Number of the call, for logs.
    pub fn trace_id(&self) -> u64 {
        self.trace_id
    }

    /// Whether the host asks the call to return.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|flag| flag.load(Ordering::Acquire) != 0)
    }

    /// Time left until the deadline; none when there is no deadline.
    pub fn remaining(&self) -> Option<Duration> {
        (self.deadline_ns != 0).then(|| Duration::from_nanos(self.deadline_ns.saturating_sub(monotonic_ns())))
    }

    /// Whether the call should go on.
    ///
    /// # Errors
    /// `Cancelled` or `TimedOut`.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "the host cancelled the call"));
        }
        if self.remaining() == Some(Duration::ZERO) {
            return Err(Error::new(ErrorKind::TimedOut, "the deadline of the call has passed").retryable());
        }
        Ok(())
    }
}

/// The part of a chain that a call is about. Where single keys stand is said by [`crate::Transfer::position`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Chain<'a> {
    /// Pages of the sequence before that part.
    pub position: u64,
    /// Keys of those pages from the start of the sequence, or empty when the host does not pass them.
    pub prefix_keys: &'a [PageKey],
    /// Session that the request names, or empty.
    pub session_id: &'a str,
}
