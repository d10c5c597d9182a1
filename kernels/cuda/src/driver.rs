//! The face of a CUDA driver: what the device needs of it, and no more.
//!
//! [`crate::CudaDriver`] is the driver of the machine. Tests have another one that records every call, keeps track of what is ordered
//! before what, and finds uses of memory that are not.
//!
//! Work is queued on streams. What is queued on one stream runs in order; between streams, and between a stream and this process,
//! only events and waits order anything.

use std::fmt;

/// An address in device memory.
pub type DevicePtr = u64;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);
    )*};
}

handles! {
    /// A queue of work.
    Stream,
    /// A mark in a queue.
    Event,
    /// Machine code on the device.
    Module,
    /// A kernel.
    Function,
    /// Recorded work, ready to be queued as one.
    Graph,
}

/// What is known of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    /// Its number among those that the driver shows to this process.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability: 9.0 is `(9, 0)`.
    pub compute: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of shared memory that one block may have.
    pub shared_bytes: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// UUID.
    pub uuid: [u8; 16],
    /// The version of CUDA that the driver knows: 12.4 is `(12, 4)`.
    pub driver: (i32, i32),
}

impl GpuInfo {
    /// What the compiler is told to compile for. Kernels for compute capability 9.0 use its own instructions.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.compute;
        let own = if self.compute == (9, 0) { "a" } else { "" };
        format!("sm_{major}{minor}{own}")
    }
}

/// A call of the driver that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverError {
    /// The call, by the driver's name for it.
    pub call: &'static str,
    /// The driver's number for the error.
    pub code: u32,
    /// What the driver says.
    pub reason: String,
}

impl DriverError {
    /// Whether there was not enough memory.
    pub fn is_out_of_memory(&self) -> bool {
        self.code == 2
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} (error {})", self.call, self.reason, self.code)
    }
}

impl std::error::Error for DriverError {}

/// What a call returns.
pub type DriverResult<T> = Result<T, DriverError>;

/// How a kernel uses memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// It only reads it.
    Read,
    /// It reads or writes it, or both.
    Write,
}

/// Memory that a kernel uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touch {
    /// First byte.
    pub at: DevicePtr,
    /// Bytes.
    pub len: usize,
    /// How.
    pub access: Access,
}

/// Bytes of what [`Driver::row_map`] makes.
pub const MAP_BYTES: usize = 128;
/// Elements of a row that a box of a [`RowMap`] is wide.
pub const BOX_ELEMENTS: usize = 64;

/// Rows of 16-bit elements, one after another, and the boxes that are copied of them: so many rows high, [`BOX_ELEMENTS`] elements wide, with
/// the 16 bytes at place c of a box's row r at place `c ^ (r % 8)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowMap {
    /// First byte, a multiple of 16.
    pub at: DevicePtr,
    /// Rows.
    pub rows: u64,
    /// Elements of a row, a multiple of [`BOX_ELEMENTS`].
    pub row_elements: u32,
    /// Rows of a box, 256 at most.
    pub box_rows: u32,
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// An address, with the memory that the kernel uses from there on.
    Memory(Touch),
    /// An address that may be null, or whose use is told by [`Launch::touches`].
    Address(DevicePtr),
    /// A number.
    U32(u32),
    /// A number.
    I32(i32),
    /// A number.
    U64(u64),
    /// A number.
    F32(f32),
    /// A number.
    F64(f64),
}

impl Arg {
    /// An address that the kernel reads `len` bytes from.
    pub fn read(at: DevicePtr, len: usize) -> Self {
        Self::Memory(Touch { at, len, access: Access::Read })
    }

    /// An address that the kernel writes (or reads and writes) `len` bytes at.
    pub fn write(at: DevicePtr, len: usize) -> Self {
        Self::Memory(Touch { at, len, access: Access::Write })
    }

    /// Size and alignment of the argument, and its bytes in the first places.
    pub fn bytes(&self) -> (usize, [u8; 8]) {
        let small = |bytes: [u8; 4]| {
            let [a, b, c, d] = bytes;
            (4, [a, b, c, d, 0, 0, 0, 0])
        };
        match self {
            Self::Memory(touch) => (8, touch.at.to_ne_bytes()),
            Self::Address(at) => (8, at.to_ne_bytes()),
            Self::U64(value) => (8, value.to_ne_bytes()),
            Self::F64(value) => (8, value.to_ne_bytes()),
            Self::U32(value) => small(value.to_ne_bytes()),
            Self::I32(value) => small(value.to_ne_bytes()),
            Self::F32(value) => small(value.to_ne_bytes()),
        }
    }
}

/// Tells the memory that a kernel touches, piece by piece.
pub type Touches<'a> = dyn Fn(&mut dyn FnMut(Touch)) + 'a;

/// A launch of a kernel.
pub struct Launch<'a> {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
    /// Arguments, in order.
    pub args: &'a [Arg],
    /// Tells what the kernel touches beside what the arguments say: pages that a table names, say. Called only by who wants to know.
    pub touches: &'a Touches<'a>,
}

/// A launch that touches nothing but what its arguments say.
pub fn nothing_more(_: &mut dyn FnMut(Touch)) {}

/// A driver with one GPU, whose context is current in every call.
///
/// Calls of several threads may run at the same time.
pub trait Driver: Send + Sync {
    /// The GPU.
    fn gpu(&self) -> &GpuInfo;

    /// Bytes of device memory that are free, and all.
    fn memory(&self) -> DriverResult<(u64, u64)>;

    /// Device memory; at least 1 byte, aligned to 256.
    fn alloc(&self, bytes: usize) -> DriverResult<DevicePtr>;

    /// Gives device memory back. Waits for work that uses it.
    ///
    /// # Safety
    /// `at` is from [`Driver::alloc`] and is not used any more, also not by work that is queued later.
    unsafe fn free(&self, at: DevicePtr) -> DriverResult<()>;

    /// Pinned host memory; at least 1 byte, aligned to a page. The device reaches it under the same address.
    fn alloc_host(&self, bytes: usize) -> DriverResult<*mut u8>;

    /// Gives pinned host memory back.
    ///
    /// # Safety
    /// `at` is from [`Driver::alloc_host`], no work that uses it is unfinished, and none is queued later.
    unsafe fn free_host(&self, at: *mut u8) -> DriverResult<()>;

    /// Pins host memory that is there already, and says under which address the device reaches it.
    ///
    /// # Safety
    /// The range is mapped and stays so until [`Driver::unpin_host`].
    unsafe fn pin_host(&self, at: *mut u8, bytes: usize) -> DriverResult<DevicePtr>;

    /// Undoes [`Driver::pin_host`].
    ///
    /// # Safety
    /// `at` was pinned, no work that uses it is unfinished, and none is queued later.
    unsafe fn unpin_host(&self, at: *mut u8) -> DriverResult<()>;

    /// A stream. An urgent one's work goes before that of others.
    fn stream(&self, urgent: bool) -> DriverResult<Stream>;

    /// Ends a stream; what is queued on it still runs.
    ///
    /// # Safety
    /// `stream` is from [`Driver::stream`] and not used any more.
    unsafe fn destroy_stream(&self, stream: Stream) -> DriverResult<()>;

    /// An event. Only one made with `timing` can be asked for times.
    fn event(&self, timing: bool) -> DriverResult<Event>;

    /// Ends an event.
    ///
    /// # Safety
    /// `event` is from [`Driver::event`] and not used any more.
    unsafe fn destroy_event(&self, event: Event) -> DriverResult<()>;

    /// Marks the place in the stream up to which work has been queued.
    fn record(&self, event: Event, stream: Stream) -> DriverResult<()>;

    /// Lets what is queued on the stream later run after what the event marks. An event that was never recorded marks nothing.
    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()>;

    /// Whether everything that the event marks has run.
    fn is_done(&self, event: Event) -> DriverResult<bool>;

    /// Blocks until everything that the event marks has run.
    fn wait_here(&self, event: Event) -> DriverResult<()>;

    /// Milliseconds between two events that have run.
    fn elapsed(&self, from: Event, to: Event) -> DriverResult<f32>;

    /// Blocks until everything that is queued on the stream has run.
    fn synchronize(&self, stream: Stream) -> DriverResult<()>;

    /// Queues a copy of host memory to the device.
    ///
    /// # Safety
    /// Both ranges are valid, and stay so until the copy has run. Nothing that is not ordered behind the copy writes to them.
    unsafe fn to_device(&self, to: DevicePtr, from: *const u8, bytes: usize, stream: Stream) -> DriverResult<()>;

    /// Queues a copy of device memory to the host.
    ///
    /// # Safety
    /// As [`Driver::to_device`]; nothing that is not ordered behind the copy reads the target.
    unsafe fn to_host(&self, to: *mut u8, from: DevicePtr, bytes: usize, stream: Stream) -> DriverResult<()>;

    /// Queues a copy on the device.
    ///
    /// # Safety
    /// As [`Driver::to_device`]; the ranges do not overlap.
    unsafe fn on_device(&self, to: DevicePtr, from: DevicePtr, bytes: usize, stream: Stream) -> DriverResult<()>;

    /// Queues that bytes become `value`.
    ///
    /// # Safety
    /// The range is valid and stays so until this has run; nothing that is not ordered uses it.
    unsafe fn fill(&self, at: DevicePtr, value: u8, bytes: usize, stream: Stream) -> DriverResult<()>;

    /// Describes rows of memory to kernels that copy boxes of them: [`MAP_BYTES`] bytes, which they read from the device's memory. For GPUs of
    /// compute capability 9.0 or later.
    fn row_map(&self, map: RowMap) -> DriverResult<[u8; MAP_BYTES]>;

    /// Loads machine code.
    fn load(&self, image: &[u8]) -> DriverResult<Module>;

    /// Unloads it.
    ///
    /// # Safety
    /// None of its kernels runs or is queued, now or later.
    unsafe fn unload(&self, module: Module) -> DriverResult<()>;

    /// A kernel of loaded code, which may ask for as much dynamic shared memory as the GPU has.
    fn function(&self, module: Module, name: &str) -> DriverResult<Function>;

    /// Queues a kernel.
    ///
    /// # Safety
    /// The arguments are those that the kernel takes; the memory that it uses is valid until it has run, and nothing that is not
    /// ordered uses it in conflict.
    unsafe fn launch(&self, function: Function, launch: &Launch<'_>, stream: Stream) -> DriverResult<()>;

    /// From now on what is queued on the stream is recorded and does not run. Only this thread queues on it until
    /// [`Driver::end_capture`].
    fn begin_capture(&self, stream: Stream) -> DriverResult<()>;

    /// Ends the recording and makes it ready to run.
    fn end_capture(&self, stream: Stream) -> DriverResult<Graph>;

    /// Queues what was recorded.
    ///
    /// # Safety
    /// All memory that the recorded work uses is still valid, and until this has run.
    unsafe fn launch_graph(&self, graph: Graph, stream: Stream) -> DriverResult<()>;

    /// Whether it wants to know what recorded kernels touch this time.
    fn wants_touches(&self) -> bool {
        false
    }

    /// As [`Driver::launch_graph`]. `touches` is what each kernel touches this time, in order of their recording; empty unless that is wanted.
    ///
    /// # Safety
    /// As [`Driver::launch_graph`].
    unsafe fn launch_graph_touching(&self, graph: Graph, touches: &[Vec<Touch>], stream: Stream) -> DriverResult<()> {
        let _ = touches;
        // SAFETY: the caller's promise.
        unsafe { self.launch_graph(graph, stream) }
    }

    /// Ends recorded work.
    ///
    /// # Safety
    /// `graph` is from [`Driver::end_capture`] and not used any more.
    unsafe fn destroy_graph(&self, graph: Graph) -> DriverResult<()>;

    /// Told before this process itself reads or writes pinned memory. The driver of the machine does nothing with it.
    fn host_access(&self, touch: Touch) {
        let _ = touch;
    }
}
