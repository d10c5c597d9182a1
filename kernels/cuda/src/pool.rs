//! The KV pool of a GPU, and its exchange of pages with the host.
//!
//! Keys lie `[layer][page][head][token][d]`, values likewise. Pages are copied by kernels on streams of their own, beside what is
//! computed: a copy runs after everything that was queued for computing when it was asked for, and has run when the call returns, so that
//! whatever is queued later sees it. Host memory that was told to [`KvPool::pin_host`] is read and written by the GPU itself; other memory
//! by way of a pinned page.

mod checksums;
mod maps;
mod transfers;

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard, RwLock};

use super::driver::{Access, Arg, DevicePtr, Driver, Touch};
use super::memory::{DeviceMemory, Mark, PinnedMemory, Queue, Uploads, failed};
use super::module::{Extent, Kernels};
use super::order::Order;
use super::staging;
use super::units::Unit;
use kvdock_kernels::KernelError;
use kvdock_kernels::{Arrived, DeviceRanges, HostPage, KvPool, KvSpec, Moment, Transfer};
use maps::RowMaps;

/// Copies in each direction that run at a time.
const LANES: usize = 2;
/// Pages of a launch at most.
const BATCH: usize = 64;

/// Keys and values in the memory of a GPU.
pub(super) struct CudaKvPool {
    /// Tells pools apart.
    pub(super) id: u64,
    spec: KvSpec,
    driver: Arc<dyn Driver>,
    kernels: Arc<Kernels>,
    uploads: Arc<Uploads>,
    /// The order of what is computed.
    compute: Arc<Order>,
    keys: DeviceMemory,
    values: DeviceMemory,
    pinned: RwLock<Vec<Pinned>>,
    /// Memory for the jobs of transfers.
    spare: Arc<Mutex<Vec<DeviceMemory>>>,
    /// What kernels that copy boxes of rows are told of keys and values, from when it is first asked for.
    maps: Mutex<Option<Arc<RowMaps>>>,
    out: Lanes,
    into: Lanes,
}

/// Host memory that the GPU reaches.
struct Pinned {
    at: usize,
    bytes: usize,
    /// Where the GPU sees its first byte.
    device: DevicePtr,
}

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Out,
    Into,
}

struct Lanes {
    lanes: [Mutex<Lane>; LANES],
    next: AtomicUsize,
}

/// A stream for copies with what belongs to it.
struct Lane {
    queue: Queue,
    /// What is computed before a copy may begin.
    ready: Mark,
    /// Jobs of a launch, three numbers each.
    jobs: DeviceMemory,
    /// A page on its way to or from host memory that the GPU does not reach.
    page: Option<PinnedMemory>,
    /// Checksums of pages of a launch, and where they come to.
    sums: Option<(DeviceMemory, PinnedMemory)>,
}

impl Lanes {
    fn new(driver: &Arc<dyn Driver>, urgent: bool) -> Result<Self, KernelError> {
        let lane = || {
            Ok::<_, KernelError>(Mutex::new(Lane {
                queue: Queue::new(driver, urgent)?,
                ready: Mark::new(driver)?,
                jobs: DeviceMemory::new(driver, BATCH * JOB_BYTES, "the jobs of page copies")?,
                page: None,
                sums: None,
            }))
        };
        Ok(Self { lanes: [lane()?, lane()?], next: AtomicUsize::new(0) })
    }

    /// A lane that is free, or the next one when it becomes so.
    fn take(&self) -> MutexGuard<'_, Lane> {
        if let Some(lane) = self.lanes.iter().find_map(Mutex::try_lock) {
            return lane;
        }
        self.lanes[self.next.fetch_add(1, Ordering::Relaxed) % LANES].lock()
    }
}

/// A page to be copied, in addresses of the GPU.
#[derive(Clone, Copy)]
struct Job {
    page: u32,
    k: DevicePtr,
    v: DevicePtr,
}

/// Bytes of a job.
const JOB_BYTES: usize = 24;

/// Jobs as the kernels read them.
fn words(jobs: &[Job]) -> Vec<u8> {
    jobs.iter().flat_map(|job| [u64::from(job.page), job.k, job.v]).flat_map(u64::to_le_bytes).collect()
}

impl CudaKvPool {
    pub(super) fn new(
        id: u64,
        spec: KvSpec,
        driver: &Arc<dyn Driver>,
        kernels: &Arc<Kernels>,
        uploads: &Arc<Uploads>,
        compute: &Arc<Order>,
    ) -> Result<Self, KernelError> {
        let (key_bytes, value_bytes) = spec.checked_bytes()?;
        let keys = DeviceMemory::new(driver, key_bytes, "the keys of a KV pool")?;
        let values = DeviceMemory::new(driver, value_bytes, "the values of a KV pool")?;
        let pool = Self {
            id,
            spec,
            driver: Arc::clone(driver),
            kernels: Arc::clone(kernels),
            uploads: Arc::clone(uploads),
            compute: Arc::clone(compute),
            keys,
            values,
            pinned: RwLock::default(),
            spare: Arc::default(),
            maps: Mutex::default(),
            out: Lanes::new(driver, false)?,
            // Somebody waits for what is loaded.
            into: Lanes::new(driver, true)?,
        };
        let queue = pool.compute.enter();
        for memory in [&pool.keys, &pool.values] {
            // SAFETY: the memory is new; whatever uses it is ordered behind the queue.
            unsafe { driver.fill(memory.at(), 0, memory.bytes(), queue.id()) }.map_err(failed("alloc_kv_pool"))?;
        }
        drop(queue);
        Ok(pool)
    }

    /// Bytes of a layer's keys and values, over all pages.
    fn layer_bytes(&self) -> (usize, usize) {
        (self.keys.bytes() / self.spec.layers, self.values.bytes() / self.spec.layers)
    }

    /// First byte of a layer's keys and values.
    pub(super) fn layer(&self, layer: usize) -> (DevicePtr, DevicePtr) {
        let (keys, values) = self.layer_bytes();
        (self.keys.at() + (layer * keys) as u64, self.values.at() + (layer * values) as u64)
    }

    /// The bytes of a page in a layer: keys and values.
    pub(super) fn page(&self, layer: usize, page: u32, access: Access) -> [Touch; 2] {
        let (keys, values) = self.layer(layer);
        let (k, v) = (self.spec.page_k_bytes() / self.spec.layers, self.spec.page_v_bytes() / self.spec.layers);
        [
            Touch { at: keys + u64::from(page) * k as u64, len: k, access },
            Touch { at: values + u64::from(page) * v as u64, len: v, access },
        ]
    }

    fn check(&self, op: &'static str, page: u32, layers: &Range<usize>) -> Result<(), KernelError> {
        let refuse = |reason: String| Err(KernelError::Page { op, reason });
        if page as usize >= self.spec.pages {
            return refuse(format!("page {page}, but the pool has {}", self.spec.pages));
        }
        if layers.end > self.spec.layers {
            return refuse(format!("layer {}, but the pool has {}", layers.end - 1, self.spec.layers));
        }
        Ok(())
    }

    /// Where the GPU sees a host page, if it sees all of it.
    fn seen(&self, host: &HostPage) -> Option<(DevicePtr, DevicePtr)> {
        let [k, v] = staging::extents(&self.spec, host)?;
        let pinned = self.pinned.read();
        let find = |part: &Range<usize>| {
            let inside = |known: &&Pinned| known.at <= part.start && part.end <= known.at + known.bytes;
            pinned.iter().find(inside).map(|known| known.device + (part.start - known.at) as u64)
        };
        Some((find(&k)?, find(&v)?))
    }

    /// Copies layers of pages; they have been copied when this returns.
    ///
    /// # Safety
    /// As [`KvPool::copy_layer_out`] or [`KvPool::copy_layer_in`], for these layers of all pages.
    unsafe fn copy(
        &self,
        op: &'static str,
        way: Way,
        pages: &[(u32, HostPage)],
        layers: Range<usize>,
    ) -> Result<(), KernelError> {
        for (page, _) in pages {
            self.check(op, *page, &layers)?;
        }
        let lanes = if way == Way::Out { &self.out } else { &self.into };
        let mut lane = lanes.take();
        // Whatever was called before may still be queued: it writes the pages, or reads what was in them.
        lane.ready.record(&self.compute.enter(), op)?;
        lane.queue.wait(&lane.ready, op)?;
        // SAFETY: the caller's promise.
        let queued = unsafe { self.queue_copies(op, way, &mut lane, pages, layers) };
        // Also after an error: what has been queued still uses the host's pages.
        let ended = lane.queue.synchronize(op);
        queued.and(ended)
    }

    /// Queues copies of pages that have been checked.
    ///
    /// # Safety
    /// As [`CudaKvPool::copy`], until the queue has run.
    unsafe fn queue_copies(
        &self,
        op: &'static str,
        way: Way,
        lane: &mut Lane,
        pages: &[(u32, HostPage)],
        layers: Range<usize>,
    ) -> Result<(), KernelError> {
        let mut rest = pages;
        while let Some((page, first)) = rest.first() {
            let jobs: Vec<Job> = rest
                .iter()
                .take(BATCH)
                .take_while(|(_, host)| staging::strides(host) == staging::strides(first))
                .map_while(|(page, host)| self.seen(host).map(|(k, v)| Job { page: *page, k, v }))
                .collect();
            if jobs.is_empty() {
                // SAFETY: the caller's promise, for the first page.
                unsafe { self.copy_staged(op, way, lane, *page, first, layers.clone())? };
                rest = &rest[1..];
            } else {
                // SAFETY: the caller's promise, for these pages. The next launch's jobs take the place of these in the queue's order.
                unsafe { self.launch(op, way, (&lane.queue, lane.jobs.at()), &jobs, first, layers.clone())? };
                rest = &rest[jobs.len()..];
            }
        }
        Ok(())
    }

    /// Queues a copy of pages that the GPU reaches, whose strides are those of `host`. The jobs go to `jobs_at`.
    ///
    /// # Safety
    /// As [`CudaKvPool::copy`], until the queue has run; `jobs_at` has room for the jobs, and all of its uses are ordered by the queue.
    unsafe fn launch(
        &self,
        op: &'static str,
        way: Way,
        (queue, jobs_at): (&Queue, DevicePtr),
        jobs: &[Job],
        host: &HostPage,
        layers: Range<usize>,
    ) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe {
            self.uploads.send(&words(jobs), jobs_at, queue, op)?;
            self.launch_sent(way, (queue, jobs_at), jobs, host, layers)
        }
    }

    /// As [`CudaKvPool::launch`], of jobs that have been sent to `jobs_at`.
    ///
    /// # Safety
    /// As [`CudaKvPool::launch`].
    unsafe fn launch_sent(
        &self,
        way: Way,
        (queue, jobs_at): (&Queue, DevicePtr),
        jobs: &[Job],
        host: &HostPage,
        layers: Range<usize>,
    ) -> Result<(), KernelError> {
        let spec = &self.spec;
        let (k_layer, v_layer) = self.layer_bytes();
        let size = |bytes: usize| Arg::U32(bytes as u32);
        let wide = |bytes: usize| Arg::U64(bytes as u64);
        let args = [
            Arg::Address(self.keys.at()),
            Arg::Address(self.values.at()),
            Arg::read(jobs_at, jobs.len() * JOB_BYTES),
            size(layers.start),
            size(spec.kv_heads),
            size(spec.page_tokens),
            size(spec.head_dim_k * spec.dtype.bytes()),
            size(spec.head_dim_v * spec.dtype.bytes()),
            wide(k_layer),
            wide(v_layer),
            wide(host.k_layer_stride),
            wide(host.k_head_stride),
            wide(host.k_token_stride),
            wide(host.v_layer_stride),
            wide(host.v_head_stride),
            wide(host.v_token_stride),
        ];
        let (pool_access, host_access) = match way {
            Way::Out => (Access::Read, Access::Write),
            Way::Into => (Access::Write, Access::Read),
        };
        let touches = |tell: &mut dyn FnMut(Touch)| {
            for job in jobs {
                for layer in layers.clone() {
                    self.page(layer, job.page, pool_access).into_iter().for_each(&mut *tell);
                    staging::rows(spec, host, layer).for_each(|(is_key, offset, len)| {
                        let base = if is_key { job.k } else { job.v };
                        tell(Touch { at: base + offset as u64, len, access: host_access });
                    });
                }
            }
        };
        let name = if way == Way::Out { "kv_pages_out" } else { "kv_pages_in" };
        let extent = Extent { grid: [jobs.len(), layers.len(), 2], threads: 256, shared: 0 };
        // SAFETY: pages and layers have been checked, the host's bytes are the caller's promise, and the copy is ordered behind what
        // was computed.
        unsafe { self.kernels.launch_touching(Unit::PageCopy, name, extent, &args, &touches, queue) }
    }

    /// Copies one page by way of a pinned one.
    ///
    /// # Safety
    /// As [`CudaKvPool::copy`].
    unsafe fn copy_staged(
        &self,
        op: &'static str,
        way: Way,
        lane: &mut Lane,
        page: u32,
        host: &HostPage,
        layers: Range<usize>,
    ) -> Result<(), KernelError> {
        let bytes = self.spec.page_bytes();
        let mut pinned = match lane.page.take() {
            Some(pinned) => pinned,
            None => PinnedMemory::new(&self.driver, bytes, "a page on its way")?,
        };
        let dense = staging::dense(&self.spec, pinned.at());
        let job = Job { page, k: dense.k as u64, v: dense.v as u64 };
        let result = match way {
            Way::Out => {
                // SAFETY: the pinned page has every byte that its strides reach, and is used by this lane alone.
                let copied =
                    unsafe { self.launch(op, way, (&lane.queue, lane.jobs.at()), &[job], &dense, layers.clone()) };
                copied.and_then(|()| lane.queue.synchronize(op)).map(|()| {
                    // SAFETY: the copy has run; the host page is the caller's promise.
                    unsafe { staging::scatter(&self.spec, pinned.read(bytes), host, layers) };
                })
            }
            Way::Into => {
                // SAFETY: whatever was done with the pinned page has run; the host page is the caller's promise.
                unsafe { staging::gather(&self.spec, host, pinned.write(bytes), layers.clone()) };
                // SAFETY: as above; the pinned page is not touched before the queue has run.
                let copied = unsafe { self.launch(op, way, (&lane.queue, lane.jobs.at()), &[job], &dense, layers) };
                copied.and_then(|()| lane.queue.synchronize(op))
            }
        };
        match result {
            Ok(()) => {
                lane.page = Some(pinned);
                Ok(())
            }
            Err(error) => {
                // The device may still use the page: it is kept for ever rather than given back under it.
                std::mem::forget(pinned);
                Err(error)
            }
        }
    }
}

impl KvPool for CudaKvPool {
    fn spec(&self) -> &KvSpec {
        &self.spec
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    unsafe fn pin_host(&self, at: *mut u8, bytes: usize) -> Result<bool, KernelError> {
        // SAFETY: the caller promises that the range stays mapped.
        let device = unsafe { self.driver.pin_host(at, bytes) }.map_err(|error| KernelError::Memory {
            what: "pinned host pages",
            bytes,
            reason: error.to_string(),
        })?;
        self.pinned.write().push(Pinned { at: at as usize, bytes, device });
        Ok(true)
    }

    unsafe fn copy_layer_out(&self, page: u32, layer: usize, dst: &HostPage) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy("copy_layer_out", Way::Out, &[(page, *dst)], layer..layer + 1) }
    }

    unsafe fn copy_layer_in(&self, page: u32, layer: usize, src: &HostPage) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy("copy_layer_in", Way::Into, &[(page, *src)], layer..layer + 1) }
    }

    unsafe fn copy_page_out(&self, page: u32, dst: &HostPage) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy("copy_page_out", Way::Out, &[(page, *dst)], 0..self.spec.layers) }
    }

    unsafe fn copy_page_in(&self, page: u32, src: &HostPage) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy("copy_page_in", Way::Into, &[(page, *src)], 0..self.spec.layers) }
    }

    unsafe fn copy_pages_out(&self, pages: &[(u32, HostPage)]) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy("copy_pages_out", Way::Out, pages, 0..self.spec.layers) }
    }

    unsafe fn copy_pages_in(&self, pages: &[(u32, HostPage)]) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy("copy_pages_in", Way::Into, pages, 0..self.spec.layers) }
    }

    fn pages_at_once(&self) -> usize {
        BATCH
    }

    unsafe fn begin_pages_out(&self, pages: &[(u32, HostPage)]) -> Result<Box<dyn Transfer>, KernelError> {
        let whole = 0..self.spec.layers;
        // SAFETY: the caller's promise.
        match unsafe { self.begin("begin_pages_out", Way::Out, pages, std::slice::from_ref(&whole), None)? } {
            Some(transfer) => Ok(Box::new(transfer)),
            // SAFETY: the caller's promise.
            None => unsafe { self.copy_pages_out(pages) }.map(|()| Box::new(Arrived) as Box<dyn Transfer>),
        }
    }

    unsafe fn begin_pages_in(&self, pages: &[(u32, HostPage)]) -> Result<Box<dyn Transfer>, KernelError> {
        let steps: Vec<Range<usize>> = (0..self.spec.layers).map(|layer| layer..layer + 1).collect();
        // SAFETY: the caller's promise.
        match unsafe { self.begin("begin_pages_in", Way::Into, pages, &steps, None)? } {
            Some(transfer) => Ok(Box::new(transfer)),
            // SAFETY: the caller's promise.
            None => unsafe { self.copy_pages_in(pages) }.map(|()| Box::new(Arrived) as Box<dyn Transfer>),
        }
    }

    fn checksums(
        &self,
        pages: &[u32],
        by_heads: bool,
        moment: Option<&Moment>,
    ) -> Result<Option<Vec<u32>>, KernelError> {
        let all = 0..self.spec.layers;
        pages.iter().try_for_each(|page| self.check("checksums", *page, &all))?;
        let mut sums = Vec::with_capacity(2 * self.spec.layers * pages.len());
        // A moment of another device says nothing: then everything is waited for.
        let after = moment.and_then(Moment::downcast_ref);
        pages.chunks(BATCH).try_for_each(|pages| self.sum_up(pages, by_heads, after, &mut sums))?;
        Ok(Some(sums))
    }

    fn moment(&self) -> Result<Moment, KernelError> {
        Mark::moment(&self.driver, &self.compute)
    }

    fn pass(&self, moment: &Moment) -> Result<(), KernelError> {
        let op = "pass";
        match moment.downcast_ref::<Mark>() {
            Some(mark) => mark.wait_here(op),
            // A moment of another device says nothing: then everything is waited for.
            None => self.compute.synchronize(op),
        }
    }

    fn device_memory(&self) -> Option<DeviceRanges> {
        Some(DeviceRanges {
            keys: self.keys.at(),
            key_bytes: self.keys.bytes(),
            values: self.values.at(),
            value_bytes: self.values.bytes(),
            uuid: self.driver.gpu().uuid,
        })
    }

    unsafe fn begin_layer_in(
        &self,
        moment: &Moment,
        layer: usize,
        pages: &[(u32, HostPage)],
    ) -> Result<Box<dyn Transfer>, KernelError> {
        let op = "begin_layer_in";
        let step = layer..layer + 1;
        // A moment of another device says nothing: then everything is waited for.
        // SAFETY: the caller's promise.
        match unsafe { self.begin(op, Way::Into, pages, std::slice::from_ref(&step), moment.downcast_ref())? } {
            Some(transfer) => Ok(Box::new(transfer)),
            None => {
                for (page, host) in pages {
                    // SAFETY: the caller's promise.
                    unsafe { self.copy_layer_in(*page, layer, host)? };
                }
                Ok(Box::new(Arrived))
            }
        }
    }
}

impl Drop for CudaKvPool {
    fn drop(&mut self) {
        for lanes in [&self.out, &self.into] {
            for lane in &lanes.lanes {
                // Errors here are those of copies whose callers have been told.
                let _ = lane.lock().queue.synchronize("the end of a KV pool");
            }
        }
        for pinned in self.pinned.get_mut() {
            // SAFETY: the lanes have run, and nothing else of the GPU's uses the host's pages.
            let undone = unsafe { self.driver.unpin_host(std::ptr::with_exposed_provenance_mut(pinned.at)) };
            if let Err(error) = undone {
                tracing::warn!(%error, "host memory could not be unpinned");
            }
        }
    }
}
