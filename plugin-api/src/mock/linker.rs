//! The linker face of an open instance.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

use super::instance::{self, call};
use super::{Found, Instance, Options, Part, Query};
use crate::v0_1::{
    FinishArgs, LinkerTable, LoadArgs, OffloadArgs, OffloadDone, PageKey, PoolTransfer, ReadyHandle, StartArgs,
};
use crate::{Completed, Error, ErrorKind, PageStatus, Result, monotonic_ns};

/// The linker face. Calls come from one thread at a time, except [`MockLinker::cancel`].
#[derive(Debug, Clone, Copy)]
pub struct MockLinker<'a> {
    pub(super) table: &'static LinkerTable,
    pub(super) this: *mut c_void,
    pub(super) instance: PhantomData<&'a Instance>,
}

// SAFETY: the plugin promises that its calls may come from any thread.
unsafe impl Send for MockLinker<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for MockLinker<'_> {}

/// What a queued load or offload names. It has to outlive the operation, whose end a test may never wait for, so it is leaked.
#[derive(Debug)]
struct Pending {
    parts: Vec<Part>,
    prefix_keys: Vec<PageKey>,
    statuses: Vec<Vec<AtomicStatus>>,
}

type AtomicStatus = std::sync::atomic::AtomicU8;

impl Pending {
    fn new(options: &Options<'_>, parts: &[Part]) -> Box<Pending> {
        let statuses = parts.iter().map(|part| part.keys.iter().map(|_| AtomicStatus::new(0)).collect()).collect();
        Box::new(Pending { parts: parts.to_vec(), prefix_keys: options.prefix_keys.to_vec(), statuses })
    }
    fn transfers(&self) -> Vec<PoolTransfer> {
        let statuses = self.statuses.iter().map(|part| part.as_ptr().cast_mut().cast::<u8>());
        self.parts.iter().zip(statuses).map(|(part, statuses)| part.transfer(statuses)).collect()
    }
    fn statuses(&self) -> Vec<Vec<PageStatus>> {
        let read = |status: &AtomicStatus| PageStatus::from_raw(status.load(Ordering::Acquire));
        self.statuses.iter().map(|part| part.iter().map(read).collect()).collect()
    }
}

/// A queued load. Its statuses may be read once its batch is finished.
#[derive(Debug)]
pub struct PendingLoad(std::mem::ManuallyDrop<Box<Pending>>);

impl PendingLoad {
    /// Status of each page, part after part.
    pub fn statuses(&self) -> Vec<Vec<PageStatus>> {
        self.0.statuses()
    }
}

/// A queued offload. Its statuses may be read once it is popped.
#[derive(Debug)]
pub struct PendingOffload(std::mem::ManuallyDrop<Box<Pending>>);

impl PendingOffload {
    /// Status of each page, part after part.
    pub fn statuses(&self) -> Vec<Vec<PageStatus>> {
        self.0.statuses()
    }
}

impl MockLinker<'_> {
    /// `lookup`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn lookup(&self, options: &Options<'_>, keys: &[PageKey], queries: &[Query]) -> Result<Found> {
        instance::exists(options, keys, queries, |args, error| {
            // SAFETY: everything in `args` lives through the call.
            unsafe { (self.table.lookup)(self.this, args, error) }
        })
    }

    /// `load`: queues.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn load(&self, options: &Options<'_>, parts: &[Part]) -> Result<PendingLoad> {
        let pending = Pending::new(options, parts);
        let transfers = pending.transfers();
        let args = LoadArgs {
            request: options.request,
            transfers: transfers.as_ptr(),
            transfer_count: transfers.len() as u64,
            chain_position: options.position,
            prefix_keys: pending.prefix_keys.as_ptr(),
            prefix_key_count: pending.prefix_keys.len() as u64,
        };
        // SAFETY: `args` lives through the call, and what it names is never freed once it is queued.
        let queued = call(|error| unsafe { (self.table.load)(self.this, &raw const args, error) });
        queued.map(|()| PendingLoad(std::mem::ManuallyDrop::new(pending)))
    }

    /// `start_layer_wise_loading`. The words say which layers are settled.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn start(&self, options: &Options<'_>, batch: u64, layers: usize) -> Result<&'static [AtomicU32]> {
        let words: &'static [AtomicU32] = Box::leak((0..layers).map(|_| AtomicU32::new(0)).collect());
        let args = StartArgs {
            context: options.context(),
            batch,
            ready: std::ptr::null(),
            ready_count: 0,
            layer_done: words.as_ptr().cast_mut().cast(),
            layer_count: layers as u64,
        };
        // SAFETY: `args` lives through the call, the words for ever.
        call(|error| unsafe { (self.table.start_layer_wise_loading)(self.this, &raw const args, error) })?;
        Ok(words)
    }

    /// `finish_layer_wise_loading`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn finish(&self, options: &Options<'_>, batch: u64) -> Result<()> {
        let args = FinishArgs { context: options.context(), batch };
        // SAFETY: `args` lives through the call.
        call(|error| unsafe { (self.table.finish_layer_wise_loading)(self.this, &raw const args, error) })
    }

    /// `cancel_queued_load`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn cancel(&self, request: u64) -> Result<()> {
        // SAFETY: the instance is open.
        call(|error| unsafe { (self.table.cancel_queued_load)(self.this, request, error) })
    }

    /// `offload`: queues. `ready` are pairs of a kind, as the number that crosses the boundary, and a handle.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn offload(
        &self,
        options: &Options<'_>,
        operation: u64,
        parts: &[Part],
        ready: &[(u32, u64)],
    ) -> Result<PendingOffload> {
        let pending = Pending::new(options, parts);
        let transfers = pending.transfers();
        let ready: Vec<ReadyHandle> =
            ready.iter().map(|(kind, handle)| ReadyHandle { kind: *kind, reserved: 0, handle: *handle }).collect();
        let args = OffloadArgs {
            operation,
            deadline_ns: options.deadline.map_or(0, |time| monotonic_ns() + time.as_nanos() as u64),
            transfers: transfers.as_ptr(),
            transfer_count: transfers.len() as u64,
            ready: ready.as_ptr(),
            ready_count: ready.len() as u64,
            chain_position: options.position,
            prefix_keys: pending.prefix_keys.as_ptr(),
            prefix_key_count: pending.prefix_keys.len() as u64,
            session_id: options.session_id.into(),
        };
        // SAFETY: `args` lives through the call, and what it names is never freed once it is queued.
        let queued = call(|error| unsafe { (self.table.offload)(self.this, &raw const args, error) });
        queued.map(|()| PendingOffload(std::mem::ManuallyDrop::new(pending)))
    }

    /// `num_completed_offloads`.
    pub fn completed(&self) -> u64 {
        // SAFETY: the instance is open.
        unsafe { (self.table.num_completed_offloads)(self.this) }
    }

    /// `pop_completed_offload`; none when there is none.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn pop(&self) -> Result<Option<Completed>> {
        let mut done = OffloadDone { operation: 0, status: 0, retryable: 0 };
        // SAFETY: `done` lives through the call.
        match call(|error| unsafe { (self.table.pop_completed_offload)(self.this, &raw mut done, error) }) {
            Err(error) if error.kind == ErrorKind::NotFound => return Ok(None),
            other => other?,
        }
        let result = match done.status {
            0 => Ok(()),
            kind => {
                let error = Error::new(ErrorKind::from_raw(kind), "the offload failed");
                Err(if done.retryable != 0 { error.retryable() } else { error })
            }
        };
        Ok(Some(Completed { operation: done.operation, result }))
    }

    /// `reset`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn reset(&self, options: &Options<'_>) -> Result<()> {
        let context = options.context();
        // SAFETY: the instance is open.
        call(|error| unsafe { (self.table.reset)(self.this, &raw const context, error) })
    }
}
