//! The CUDA device: what it consists of, its handles, and which kernel serves what.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kvdock_kernels::{Buf, KernelError, KvPool, NarrowFormat, Plan, RopeStyle, Weight};
use parking_lot::Mutex;

use super::code::CodeSource;
use super::driver::{Access, Arg, DevicePtr, Driver, Touch};
use super::graphs::Graphs;
use super::memory::{Block, Blocks, DeviceMemory, PinnedMemory, Queue, Uploads};
use super::module::{Extent, Kernels};
use super::order::Order;
use super::plan::CudaPlan;
use super::pool::CudaKvPool;
use super::replays::Replays;
use super::script::Script;
use super::units::Unit;

/// What may be given up for speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arithmetic {
    /// Nothing: a row's values do not depend on how many rows are computed with it, so the law of bits holds.
    #[default]
    Reproducible,
    /// Products with few rows and attention of single rows take kernels of their own, which add in another order; tensor cores get numbers rounded to 16 bits
    /// where they else get two parts.
    Fast,
}

impl Arithmetic {
    /// The name used in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reproducible => "reproducible",
            Self::Fast => "fast",
        }
    }
}

/// A GPU as a [`kvdock_kernels::Device`].
///
/// Operations are queued in the call and run on the GPU in the order of the calls; an error of the GPU itself may be told by a later one.
pub struct CudaDevice {
    /// Tells devices apart.
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) numerics_id: String,
    pub(super) arithmetic: Arithmetic,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) kernels: Arc<Kernels>,
    pub(super) uploads: Arc<Uploads>,
    pub(super) blocks: Arc<Blocks>,
    pub(super) order: Arc<Order>,
    /// What splits of attention leave for the merge.
    pub(super) partial: Mutex<Option<Arc<DeviceMemory>>>,
    /// Memory that results pass through.
    pub(super) download: Mutex<Option<PinnedMemory>>,
    pub(super) graphs: Mutex<Graphs>,
    pub(super) replays: Mutex<Replays>,
    /// The step that is gone through.
    pub(super) script: Arc<Script>,
    /// Whether steps are recorded.
    pub(super) recordings: bool,
    /// The lowest end of a rotary table that was used since it was last reset.
    pub(super) position_limit: AtomicUsize,
}

/// Numbers that tell devices and pools apart.
pub(super) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What is behind a buffer.
pub(super) struct CudaBuf {
    pub(super) device: u64,
    /// All uses of buffers are ordered by the device's queue, so their memory is used again while work on it is still queued.
    pub(super) memory: Block,
}

/// What is behind a weight: the file's bytes, rows in the order asked for.
pub(super) struct CudaWeight {
    pub(super) device: u64,
    pub(super) memory: DeviceMemory,
    /// Of weights of eight and four bits.
    pub(super) narrow: Option<Narrow>,
}

/// What weights of eight and four bits have beside their bytes.
pub(super) struct Narrow {
    pub(super) format: NarrowFormat,
    pub(super) scales: DeviceMemory,
    /// Scales are powers of two in a byte, not f32.
    pub(super) powers: bool,
}

impl Narrow {
    /// The format's name in names of kernels.
    pub(super) fn name(&self) -> &'static str {
        match self.format {
            NarrowFormat::Fp8 => "fp8",
            NarrowFormat::Mxfp4 => "mxfp4",
        }
    }

    /// What scales are, as kernels take it.
    pub(super) fn scale_kind(&self) -> u32 {
        u32::from(self.powers)
    }
}

impl CudaWeight {
    /// Where its scales lie, if it has some.
    pub(super) fn scales(&self) -> DevicePtr {
        self.narrow.as_ref().map_or(0, |narrow| narrow.scales.at())
    }

    /// What its scales are, if it has some.
    pub(super) fn narrow_kind(&self) -> Option<(NarrowFormat, bool)> {
        self.narrow.as_ref().map(|narrow| (narrow.format, narrow.powers))
    }

    /// All memory that a product reads of it.
    pub(super) fn touches(&self) -> Vec<Touch> {
        let scales = self.narrow.as_ref().map(|narrow| &narrow.scales);
        let touch = |memory: &DeviceMemory| Touch { at: memory.at(), len: memory.bytes(), access: Access::Read };
        [Some(&self.memory), scales].into_iter().flatten().map(touch).collect()
    }
}

/// What is behind a rotary embedding: cosines and sines, `[positions, dim / 2]`.
pub(super) struct CudaRope {
    pub(super) device: u64,
    pub(super) style: RopeStyle,
    pub(super) offset: usize,
    pub(super) cos: DeviceMemory,
    pub(super) sin: DeviceMemory,
}

/// Every kernel that a dense model needs whatever its shape is.
const ALWAYS: [Unit; 7] =
    [Unit::Norm, Unit::Elementwise, Unit::Rope, Unit::KvWrite, Unit::Heads, Unit::Gguf, Unit::PageCopy];

impl CudaDevice {
    /// The GPU of `driver`, with machine code from `source`. The kernels that every model needs are loaded at once, so that a source
    /// that does not compile is told here.
    ///
    /// # Errors
    /// A GPU that is too old, machine code that can't be had, memory or streams that can't.
    pub fn new(
        driver: Arc<dyn Driver>,
        source: Arc<dyn CodeSource>,
        arithmetic: Arithmetic,
    ) -> Result<Self, KernelError> {
        let gpu = driver.gpu();
        if gpu.compute < (8, 0) {
            let (major, minor) = gpu.compute;
            let reason = format!("{} has compute capability {major}.{minor}; the kernels need 8.0 or later", gpu.name);
            return Err(KernelError::Device { op: "the GPU", reason });
        }
        let script = Arc::new(Script::default());
        let kernels = Arc::new(Kernels::new(&driver, source, &script));
        for unit in ALWAYS {
            kernels.prepare(unit)?;
        }
        Ok(Self {
            id: next_id(),
            name: format!("cuda {} ({}, {})", gpu.ordinal, gpu.name, gpu.architecture()),
            numerics_id: format!("cuda-{}-{}-3", gpu.architecture(), arithmetic.name()),
            arithmetic,
            kernels,
            uploads: Arc::new(Uploads::new(&driver, &script)),
            blocks: Blocks::new(&driver, &script),
            order: Order::new(&driver)?,
            driver,
            partial: Mutex::default(),
            download: Mutex::default(),
            graphs: Mutex::default(),
            replays: Mutex::default(),
            script,
            recordings: true,
            position_limit: AtomicUsize::new(usize::MAX),
        })
    }

    /// The same device, which queues every step kernel by kernel: to compare with.
    pub fn kernel_by_kernel(self) -> Self {
        let mut device = self;
        device.recordings = false;
        device
    }

    pub(super) fn foreign(&self, op: &'static str, what: &'static str) -> KernelError {
        KernelError::ForeignHandle { op, what, device: self.name.clone() }
    }

    /// Where the first `need` elements of a buffer lie.
    pub(super) fn floats(
        &self,
        op: &'static str,
        what: &'static str,
        buf: &Buf,
        need: usize,
    ) -> Result<DevicePtr, KernelError> {
        let inner: &CudaBuf = buf
            .downcast_ref()
            .filter(|inner: &&CudaBuf| inner.device == self.id)
            .ok_or_else(|| self.foreign(op, what))?;
        if buf.len() < need {
            let (expected, found) = (format!("at least {need} elements"), format!("{} elements long", buf.len()));
            return Err(shape(op, what, expected, found));
        }
        Ok(inner.memory.at())
    }

    pub(super) fn weight<'a>(&self, op: &'static str, weight: &'a Weight) -> Result<&'a CudaWeight, KernelError> {
        let inner: Option<&CudaWeight> = weight.downcast_ref();
        inner.filter(|inner| inner.device == self.id).ok_or_else(|| self.foreign(op, "weight"))
    }

    pub(super) fn plan_of<'a>(&self, op: &'static str, plan: &'a Plan) -> Result<&'a CudaPlan, KernelError> {
        plan.downcast_ref().ok_or_else(|| self.foreign(op, "plan"))
    }

    pub(super) fn pool<'a>(&self, op: &'static str, pool: &'a dyn KvPool) -> Result<&'a CudaKvPool, KernelError> {
        pool.as_any().downcast_ref().ok_or_else(|| self.foreign(op, "pool"))
    }

    /// The pool and the plan of an operation on a layer, found to belong together.
    pub(super) fn pool_and_plan<'a>(
        &self,
        op: &'static str,
        pool: &'a dyn KvPool,
        layer: usize,
        plan: &'a Plan,
    ) -> Result<(&'a CudaKvPool, &'a CudaPlan), KernelError> {
        let (pool, plan) = (self.pool(op, pool)?, self.plan_of(op, plan)?);
        if plan.pool != pool.id {
            return Err(shape(op, "the plan's pool", "the pool given".into(), "another pool".into()));
        }
        if layer >= pool.spec().layers {
            return Err(shape(op, "layer", format!("below {}", pool.spec().layers), layer.to_string()));
        }
        Ok((pool, plan))
    }

    /// Queues a kernel on elements, 1,024 a block.
    pub(super) fn elementwise(&self, name: &str, len: usize, args: &[Arg]) -> Result<(), KernelError> {
        // SAFETY: the callers have checked that every buffer is as long as the kernel reads and writes.
        unsafe {
            self.kernels.launch(
                Unit::Elementwise,
                name,
                Extent::line(len.div_ceil(1024), 256),
                args,
                &self.order.enter(),
            )
        }
    }

    /// Queues one block a row of 256 threads.
    pub(super) fn norm(&self, name: &str, rows: usize, args: &[Arg]) -> Result<(), KernelError> {
        // SAFETY: as in `elementwise`.
        unsafe { self.kernels.launch(Unit::Norm, name, Extent::line(rows, 256), args, &self.order.enter()) }
    }

    /// Queues numbers to the device, to be used by what is queued before the block is dropped.
    pub(super) fn send_words(&self, op: &'static str, words: &[u32], queue: &Queue) -> Result<Block, KernelError> {
        let block = self.blocks.numbers(words.len() * 4, "row numbers")?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        // SAFETY: the block is as long as the words, and all of its uses are ordered by the queue.
        unsafe { self.uploads.send(&bytes, block.at(), queue, op)? };
        Ok(block)
    }
}

/// Rows up to which a product is bound by the weights alone.
pub(super) const FEW_ROWS: usize = 8;

pub(super) fn shape(op: &'static str, what: &'static str, expected: String, found: String) -> KernelError {
    KernelError::Shape { op, what, expected, found }
}

/// The product of sizes, or an error if it overflows.
pub(super) fn product(op: &'static str, sizes: &[usize]) -> Result<usize, KernelError> {
    sizes
        .iter()
        .try_fold(1usize, |a, b| a.checked_mul(*b))
        .ok_or_else(|| shape(op, "the size", "a product that fits the address space".into(), format!("{sizes:?}")))
}

/// A size as a kernel takes it.
pub(super) fn size(op: &'static str, what: &'static str, value: usize) -> Result<Arg, KernelError> {
    u32::try_from(value).map(Arg::U32).map_err(|_| shape(op, what, "at most 32 bits".into(), value.to_string()))
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Errors here are those of operations whose callers are told when they read; what is dropped next must not be in use.
        let _ = self.order.synchronize("the end of the device");
        self.graphs.get_mut().clear(&self.driver);
        self.clear_replays();
    }
}
