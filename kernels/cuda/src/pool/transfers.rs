//! Copies of pages that run while others compute: an event a layer, and nobody waits in the process.

use std::ops::Range;
use std::sync::Arc;

use kvdock_kernels::{HostPage, KernelError, Transfer};
use parking_lot::Mutex;

use super::{BATCH, CudaKvPool, JOB_BYTES, Job, Way, words};
use crate::memory::{DeviceMemory, Mark};
use crate::order::Order;
use crate::staging;

/// Pages on their way, on a lane's queue.
pub(super) struct CudaTransfer {
    compute: Arc<Order>,
    /// What has been copied: layer by layer, or all at once.
    marks: Vec<Mark>,
    /// What the copies read, and where it goes when they have run. Giving memory back to the driver would wait for all that runs.
    jobs: Option<DeviceMemory>,
    spare: Arc<Mutex<Vec<DeviceMemory>>>,
}

/// Memory for jobs that is kept for later transfers.
const SPARE_JOBS: usize = 64;

impl Transfer for CudaTransfer {
    fn before_layer(&self, layer: usize) -> Result<(), KernelError> {
        match self.marks.get(layer).or(self.marks.last()) {
            Some(mark) => self.compute.enter().wait(mark, "before_layer"),
            None => Ok(()),
        }
    }

    fn is_done(&self) -> Result<bool, KernelError> {
        self.marks.last().map_or(Ok(true), |mark| mark.is_done("a transfer of pages"))
    }

    fn wait(&self) -> Result<(), KernelError> {
        self.marks.last().map_or(Ok(()), |mark| mark.wait_here("a transfer of pages"))
    }
}

impl Drop for CudaTransfer {
    fn drop(&mut self) {
        let waited = self.wait();
        let Some(jobs) = self.jobs.take() else { return };
        match waited {
            Ok(()) => {
                let mut spare = self.spare.lock();
                if spare.len() < SPARE_JOBS && jobs.bytes() == BATCH * JOB_BYTES {
                    spare.push(jobs);
                }
            }
            Err(error) => {
                tracing::warn!(%error, "pages on their way could not be waited for");
                // The copies may still read it.
                std::mem::forget(jobs);
            }
        }
    }
}

impl CudaKvPool {
    /// Queues copies of pages that the GPU reaches, with an event behind each of `steps`; `None` where it does not reach them all, or their
    /// strides differ. They run behind `after`, or else behind all that was queued to be computed.
    ///
    /// # Safety
    /// As [`CudaKvPool::copy`], until the transfer has been waited for.
    pub(super) unsafe fn begin(
        &self,
        op: &'static str,
        way: Way,
        pages: &[(u32, HostPage)],
        steps: &[Range<usize>],
        after: Option<&Mark>,
    ) -> Result<Option<CudaTransfer>, KernelError> {
        let touched = 0..steps.iter().map(|layers| layers.end).max().unwrap_or(0);
        for (page, _) in pages {
            self.check(op, *page, &touched)?;
        }
        let Some((_, first)) = pages.first() else { return Ok(None) };
        let alike = |host: &HostPage| staging::strides(host) == staging::strides(first);
        let job = |(page, host): &(u32, HostPage)| {
            let (k, v) = self.seen(host).filter(|_| alike(host))?;
            Some(Job { page: *page, k, v })
        };
        let Some(jobs) = pages.iter().map(job).collect::<Option<Vec<_>>>() else { return Ok(None) };
        let spare = self.spare.lock().pop().filter(|_| jobs.len() <= BATCH);
        let memory = match spare {
            Some(memory) => memory,
            None => DeviceMemory::new(&self.driver, jobs.len().max(BATCH) * JOB_BYTES, "the jobs of page copies")?,
        };
        let lanes = if way == Way::Out { &self.out } else { &self.into };
        let lane = lanes.take();
        match after {
            Some(after) => lane.queue.wait(after, op)?,
            None => {
                lane.ready.record(&self.compute.enter(), op)?;
                lane.queue.wait(&lane.ready, op)?;
            }
        }
        // Whatever comes of it, what has been queued is waited for when this is dropped, before the jobs are used again.
        let at = (&lane.queue, memory.at());
        let mut transfer = CudaTransfer {
            compute: Arc::clone(&self.compute),
            marks: Vec::new(),
            jobs: Some(memory),
            spare: Arc::clone(&self.spare),
        };
        // SAFETY: the memory has room for the jobs, which only this queue uses.
        unsafe { self.uploads.send(&words(&jobs), at.1, at.0, op)? };
        for layers in steps {
            let mark = Mark::new(&self.driver)?;
            // SAFETY: the caller's promise.
            let queued = unsafe { self.launch_sent(way, at, &jobs, first, layers.clone()) };
            let marked = mark.record(at.0, op);
            if marked.is_ok() {
                transfer.marks.push(mark);
            }
            queued.and(marked)?;
        }
        Ok(Some(transfer))
    }
}
