//! Copies between device and host.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use super::{Event, Shared};
use crate::cache::pool::{DeviceMemory, HostPool};
use crate::cache::unified::Component;

/// Pages a worker takes at a time from a load that several work on.
const LOAD_STEP: usize = 2;

/// One page, or one state, to be copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageCopy {
    /// Of which pools.
    pub component: Component,
    /// Device page.
    pub device: u32,
    /// Host page.
    pub host: u32,
}

/// Device pages of a node to be copied to the host. The node is locked until it is done.
#[derive(Debug)]
pub(crate) struct BackupJob {
    /// Which job it is.
    pub id: u64,
    /// Source and target of each page.
    pub copies: Vec<PageCopy>,
    /// Session the pages come from.
    pub session: Option<Arc<str>>,
}

/// Host pages to be copied to the device, by several workers at once.
#[derive(Debug)]
pub(crate) struct LoadJob {
    /// Which load it is.
    pub id: u64,
    /// From the host to the device.
    pub copies: Vec<PageCopy>,
    /// When it began.
    pub began: Instant,
    next: AtomicUsize,
    left: AtomicUsize,
    failed: AtomicBool,
}

impl LoadJob {
    /// A load that has not begun.
    pub fn new(id: u64, copies: Vec<PageCopy>) -> Arc<Self> {
        Arc::new(LoadJob {
            id,
            began: Instant::now(),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(copies.len()),
            failed: AtomicBool::new(false),
            copies,
        })
    }
}

/// Copies one page to the host; false if that failed.
///
/// # Safety
///
/// The caller holds the host page and it is no one else's yet; the device page is complete, and stays
/// so during the call.
pub(crate) unsafe fn copy_out(device: &DeviceMemory, from: u32, host: &HostPool, to: u32) -> bool {
    // SAFETY: the host pool of a cache is made for its device memory; the rest is the caller's promise.
    match unsafe { device.copy_out(from, host, to) } {
        Ok(()) => true,
        Err(error) => {
            tracing::error!(%error, page = from, "device page could not be copied to the host");
            false
        }
    }
}

/// Copies one page to the device; false if that failed.
///
/// # Safety
///
/// The host page is complete and not written during the call; the device page belongs to the caller
/// and nobody reads it yet.
pub(crate) unsafe fn copy_in(device: &DeviceMemory, host: &HostPool, from: u32, to: u32) -> bool {
    // SAFETY: the host pool of a cache is made for its device memory; the rest is the caller's promise.
    match unsafe { device.copy_in(host, from, to) } {
        Ok(()) => true,
        Err(error) => {
            tracing::error!(%error, page = to, "host page could not be copied to the device");
            false
        }
    }
}

/// What a copy worker does until the channels close. Loads come first, also in the middle of a backup:
/// a request waits for them.
pub(super) fn work(shared: &Shared) {
    let (loads, backups) = (&shared.load_queue, &shared.copy_queue);
    loop {
        crossbeam_channel::select_biased! {
            recv(loads) -> job => match job {
                Ok(job) => load(shared, &job),
                Err(_) => return,
            },
            recv(backups) -> job => match job {
                Ok(job) => backup(shared, job),
                Err(_) => return,
            },
        }
    }
}

fn load(shared: &Shared, job: &LoadJob) {
    loop {
        let from = job.next.fetch_add(LOAD_STEP, Ordering::Relaxed);
        let Some(rest) = job.copies.get(from..) else { return };
        let step = &rest[..rest.len().min(LOAD_STEP)];
        if step.is_empty() {
            return;
        }
        for copy in step {
            let done = shared.pools(copy.component).is_some_and(|(device, host)| {
                // SAFETY: the host page is complete and locked in the tree; the device page is marked as
                // loading there, so nobody reads it before this job is reported.
                unsafe { copy_in(device, host, copy.host, copy.device) }
            });
            if !done {
                job.failed.store(true, Ordering::Release);
            }
        }
        if job.left.fetch_sub(step.len(), Ordering::AcqRel) == step.len() {
            let ok = !job.failed.load(Ordering::Acquire);
            shared.send(Event::Loaded { id: job.id, ok, took: job.began.elapsed() });
            return;
        }
    }
}

fn backup(shared: &Shared, job: BackupJob) {
    let began = Instant::now();
    let mut ok = true;
    for copy in &job.copies {
        while let Ok(urgent) = shared.load_queue.try_recv() {
            load(shared, &urgent);
        }
        ok &= shared.pools(copy.component).is_some_and(|(device, host)| {
            // SAFETY: the node is locked, so its device pages stay; its host pages are marked as being
            // filled, so nobody reads them before this job is reported.
            unsafe { copy_out(device, copy.device, host, copy.host) }
        });
    }
    shared.send(Event::BackedUp { job, ok, took: began.elapsed() });
}
