//! What the host offers to a plugin.

use std::ffi::c_void;

use crate::v0_1::{Bytes, HostTable};
use crate::{HealthState, LogLevel, MetricKind};

/// A counter that is a message too: see [`Host::contents_lost`].
pub const CONTENTS_LOST: &str = "kvdock_contents_lost";

/// The host's functions. Cheap to copy, usable from any thread for the life of the process; no call blocks.
#[derive(Debug, Clone, Copy)]
pub struct Host {
    table: &'static HostTable,
    context: *mut c_void,
}

// SAFETY: the host promises that its functions may be called from any thread with this context (see `HostTable`).
unsafe impl Send for Host {}
// SAFETY: as for `Send`.
unsafe impl Sync for Host {}

impl Host {
    /// # Safety
    /// `table` is null or a host table that lives as long as the process, and `context` belongs to it.
    pub unsafe fn from_raw(table: *const HostTable, context: *mut c_void) -> Option<Host> {
        // SAFETY: the caller's promise.
        unsafe { table.as_ref() }.map(|table| Host { table, context })
    }

    /// Writes a log line. `target` names the part of the plugin.
    pub fn log(&self, level: LogLevel, target: &str, message: &str) {
        // SAFETY: the table and the context are the host's; the texts live through the call.
        unsafe { (self.table.log)(self.context, level.raw(), target.into(), message.into()) }
    }

    /// Reports a metric value. `labels` is a JSON object, or empty.
    pub fn metric(&self, kind: MetricKind, name: &str, labels: &str, value: f64) {
        // SAFETY: as in `log`.
        unsafe { (self.table.metric)(self.context, kind.raw(), name.into(), labels.into(), value) }
    }

    /// Tells that the health of the backend has changed, and why.
    pub fn health_changed(&self, state: HealthState, reason: &str) {
        let reason: Bytes = reason.into();
        // SAFETY: as in `log`.
        unsafe { (self.table.health_changed)(self.context, state.raw(), reason) }
    }

    /// Tells that what the store held is gone, or a part of it that can't be named: the host believes nothing of this instance any more and offers
    /// what it has anew. It is told when the store takes pages again, not before. That single pages were evicted is no such loss.
    pub fn contents_lost(&self) {
        self.metric(MetricKind::CounterAdd, CONTENTS_LOST, "", 1.0);
    }

    /// Tells that layers of a batch of loads were settled.
    pub(crate) fn layers_settled(&self, batch: u64) {
        // SAFETY: as in `log`.
        unsafe { (self.table.layers_settled)(self.context, batch) }
    }

    /// Tells that a completed offload waits to be popped.
    pub fn offload_completed(&self) {
        // SAFETY: as in `log`.
        unsafe { (self.table.offload_completed)(self.context) }
    }
}
