//! Pools of opaque pages in the memory of a GPU.
//!
//! A layer's pages lie one after another, layers one after another. Pages go to and from the host by way of pinned memory, on a stream of
//! their own, behind what was queued for computing; copies among pages are queued with what is computed.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use kvdock_kernels::{KernelError, Moment, PageMemory, PagePool, PageSpec};
use parking_lot::Mutex;

use super::driver::{Access, DevicePtr, Driver, Touch};
use super::memory::{DeviceMemory, Mark, PinnedMemory, Queue, failed};
use super::order::Order;

/// Pages of bytes on a GPU.
pub(super) struct CudaPages {
    /// The device that made it.
    pub(super) device: u64,
    spec: PageSpec,
    driver: Arc<dyn Driver>,
    compute: Arc<Order>,
    memory: DeviceMemory,
    lane: Mutex<Lane>,
}

/// A stream for copies with what belongs to it.
struct Lane {
    queue: Queue,
    /// What is computed before a copy may begin.
    ready: Mark,
    /// Bytes on their way.
    pinned: Option<PinnedMemory>,
}

impl CudaPages {
    pub(super) fn new(
        device: u64,
        spec: PageSpec,
        driver: &Arc<dyn Driver>,
        compute: &Arc<Order>,
    ) -> Result<Self, KernelError> {
        let bytes = PagePool::layer_bytes(&spec)? * spec.layers;
        let memory = DeviceMemory::new(driver, bytes, "a pool of pages")?;
        // SAFETY: the memory is new; whatever uses it is ordered behind the queue.
        unsafe { driver.fill(memory.at(), 0, bytes, compute.enter().id()) }.map_err(failed("alloc_page_pool"))?;
        let lane = Lane { queue: Queue::new(driver, true)?, ready: Mark::new(driver)?, pinned: None };
        Ok(Self {
            device,
            spec,
            driver: Arc::clone(driver),
            compute: Arc::clone(compute),
            memory,
            lane: Mutex::new(lane),
        })
    }

    /// First byte of a layer.
    pub(super) fn layer(&self, layer: usize) -> DevicePtr {
        self.memory.at() + (layer * self.spec.pages * self.spec.page_bytes) as u64
    }

    /// First byte of a page.
    fn page_at(&self, layer: usize, page: u32) -> DevicePtr {
        self.layer(layer) + u64::from(page) * self.spec.page_bytes as u64
    }

    /// The bytes of a page in a layer.
    pub(super) fn page(&self, layer: usize, page: u32, access: Access) -> Touch {
        Touch { at: self.page_at(layer, page), len: self.spec.page_bytes, access }
    }

    /// Bytes of a page.
    pub(super) fn page_bytes(&self) -> usize {
        self.spec.page_bytes
    }

    /// Lends pinned memory of `bytes` bytes and a queue that is behind `after`, or else behind all that was computed; `copy` queues copies, which
    /// have run when `then` is called.
    fn staged(
        &self,
        op: &'static str,
        bytes: usize,
        after: Option<&Mark>,
        before: impl FnOnce(&mut PinnedMemory),
        copy: impl Fn(&PinnedMemory, &Queue) -> Result<(), KernelError>,
        then: impl FnOnce(&PinnedMemory),
    ) -> Result<(), KernelError> {
        let mut lane = self.lane.lock();
        let mut pinned = match lane.pinned.take().filter(|memory| memory.bytes() >= bytes) {
            Some(pinned) => pinned,
            None => PinnedMemory::new(&self.driver, bytes, "a page on its way")?,
        };
        before(&mut pinned);
        match after {
            Some(after) => lane.queue.wait(after, op)?,
            None => {
                lane.ready.record(&self.compute.enter(), op)?;
                lane.queue.wait(&lane.ready, op)?;
            }
        }
        let queued = copy(&pinned, &lane.queue);
        // Also after an error: what has been queued still uses the memory.
        let ended = lane.queue.synchronize(op);
        match queued.and(ended) {
            Ok(()) => {
                then(&pinned);
                lane.pinned = Some(pinned);
                Ok(())
            }
            Err(error) => {
                // The device may still use the memory: it is kept for ever rather than given back under it.
                std::mem::forget(pinned);
                Err(error)
            }
        }
    }
}

impl PageMemory for CudaPages {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn copy_out(&self, page: u32, layers: Range<usize>, out: &mut [u8]) -> Result<(), KernelError> {
        let op = "copy_layer_out";
        let (bytes, all) = (self.spec.page_bytes, out.len());
        let copy = |pinned: &PinnedMemory, queue: &Queue| {
            layers.clone().enumerate().try_for_each(|(index, layer)| {
                let to = pinned.at().wrapping_add(index * bytes);
                // SAFETY: the page lies within the pool, the pinned memory has room for all layers and is read when the copies have run.
                unsafe { self.driver.to_host(to, self.page_at(layer, page), bytes, queue.id()) }.map_err(failed(op))
            })
        };
        // SAFETY: the copies have run.
        self.staged(op, all, None, |_| (), copy, |pinned| out.copy_from_slice(unsafe { pinned.read(all) }))
    }

    fn copy_in(
        &self,
        page: u32,
        layers: Range<usize>,
        from: &[u8],
        moment: Option<&Moment>,
    ) -> Result<(), KernelError> {
        let op = "copy_layer_in";
        let bytes = self.spec.page_bytes;
        // SAFETY: what was last copied with this memory has run, and the lane's lock keeps others away.
        let before = |pinned: &mut PinnedMemory| unsafe { pinned.write(from.len()) }.copy_from_slice(from);
        let copy = |pinned: &PinnedMemory, queue: &Queue| {
            layers.clone().enumerate().try_for_each(|(index, layer)| {
                let source = pinned.at().wrapping_add(index * bytes);
                // SAFETY: the page lies within the pool; the pinned memory is not written before the copies have run.
                unsafe { self.driver.to_device(self.page_at(layer, page), source, bytes, queue.id()) }
                    .map_err(failed(op))
            })
        };
        // A moment of another device says nothing: then everything is waited for.
        self.staged(op, from.len(), moment.and_then(Moment::downcast_ref), before, copy, |_| ())
    }

    fn moment(&self) -> Result<Moment, KernelError> {
        Mark::moment(&self.driver, &self.compute)
    }

    fn copy_page(&self, from: u32, to: u32, mut layers: Range<usize>) -> Result<(), KernelError> {
        let queue = self.compute.enter();
        layers.try_for_each(|layer| {
            let (to, from) = (self.page_at(layer, to), self.page_at(layer, from));
            // SAFETY: both lie within the pool and are different pages; what uses them is ordered by the queue, or behind it.
            unsafe { self.driver.on_device(to, from, self.spec.page_bytes, queue.id()) }.map_err(failed("copy_page"))
        })
    }

    fn clear_page(&self, page: u32) -> Result<(), KernelError> {
        let queue = self.compute.enter();
        (0..self.spec.layers).try_for_each(|layer| {
            // SAFETY: as in `copy_page`.
            unsafe { self.driver.fill(self.page_at(layer, page), 0, self.spec.page_bytes, queue.id()) }
                .map_err(failed("clear_page"))
        })
    }
}
