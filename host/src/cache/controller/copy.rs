//! Copies between device and host.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use smallvec::SmallVec;

use super::{Event, Shared};
use crate::cache::pool::{DeviceMemory, HostPool};
use crate::cache::unified::Component;

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

/// Copies pages to the host, given as pairs of a device page and a host page; false if that failed.
///
/// # Safety
///
/// The caller holds the host pages and they are no one else's yet; the device pages are complete, and stay
/// so during the call.
pub(crate) unsafe fn copy_out(device: &DeviceMemory, pages: &[(u32, u32)], host: &HostPool) -> bool {
    // SAFETY: the host pool of a cache is made for its device memory; the rest is the caller's promise.
    match unsafe { device.copy_out(pages, host) } {
        Ok(()) => true,
        Err(error) => {
            tracing::error!(%error, pages = pages.len(), "device pages could not be copied to the host");
            false
        }
    }
}

/// Copies pages to the device, given as pairs of a device page and a host page; false if that failed.
///
/// # Safety
///
/// The host pages are complete and not written during the call; the device pages belong to the caller
/// and nobody reads them yet.
pub(crate) unsafe fn copy_in(device: &DeviceMemory, pages: &[(u32, u32)], host: &HostPool) -> bool {
    // SAFETY: the host pool of a cache is made for its device memory; the rest is the caller's promise.
    match unsafe { device.copy_in(pages, host) } {
        Ok(()) => true,
        Err(error) => {
            tracing::error!(%error, pages = pages.len(), "host pages could not be copied to the device");
            false
        }
    }
}

/// Calls `copy` with what of `copies` is of one component and follows each other; false if one of the calls said so.
pub(crate) fn by_component(
    shared: &Shared,
    copies: &[PageCopy],
    mut copy: impl FnMut(&DeviceMemory, &[(u32, u32)], &HostPool) -> bool,
) -> bool {
    let mut ok = true;
    for run in copies.chunk_by(|one, next| one.component == next.component) {
        let pages: SmallVec<[(u32, u32); 8]> = run.iter().map(|copy| (copy.device, copy.host)).collect();
        let pools = run.first().and_then(|first| shared.pools(first.component));
        ok &= pools.is_some_and(|(device, host)| copy(device, &pages, host));
    }
    ok
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
    // What a worker takes at a time of a load that several work on.
    let at_once = shared.device.pages_at_once();
    loop {
        let from = job.next.fetch_add(at_once, Ordering::Relaxed);
        let Some(rest) = job.copies.get(from..) else { return };
        let step = &rest[..rest.len().min(at_once)];
        if step.is_empty() {
            return;
        }
        // SAFETY: the host pages are complete and locked in the tree; the device pages are marked as
        // loading there, so nobody reads them before this job is reported.
        if !by_component(shared, step, |device, pages, host| unsafe { copy_in(device, pages, host) }) {
            job.failed.store(true, Ordering::Release);
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
    for step in job.copies.chunks(shared.device.pages_at_once()) {
        while let Ok(urgent) = shared.load_queue.try_recv() {
            load(shared, &urgent);
        }
        // SAFETY: the node is locked, so its device pages stay; its host pages are marked as being
        // filled, so nobody reads them before this job is reported.
        ok &= by_component(shared, step, |device, pages, host| unsafe { copy_out(device, pages, host) });
    }
    shared.send(Event::BackedUp { job, ok, took: began.elapsed() });
}
