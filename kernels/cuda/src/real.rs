//! The driver of the machine.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW};

use super::driver::{
    BOX_ELEMENTS, DevicePtr, Driver, DriverError, DriverResult, Event, Function, GpuInfo, Graph, Launch, MAP_BYTES,
    Module, RowMap, Stream,
};
use super::find::{Library, Search};

/// Calls a function of the driver; what it returns is an error with the function's name.
macro_rules! call {
    ($name:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the library is loaded (a driver exists only then), pointers to results are to locals or buffers of the right
        // size, and handles are the driver's own; what else the function asks for is the caller's promise.
        let result = unsafe { sys::$name($($arg),*) };
        check(stringify!($name), result)
    }};
}

fn check(call: &'static str, result: sys::CUresult) -> DriverResult<()> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(DriverError { call, code: result as u32, reason: text_of(result) })
}

fn text_of(result: sys::CUresult) -> String {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: the pointer is to a local; the library is loaded.
    let told = unsafe { sys::cuGetErrorString(result, &raw mut text) };
    if told != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{result:?}");
    }
    // SAFETY: a constant text of the driver.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Loads the driver's library and starts it, once for the process.
fn start(search: &Search) -> Result<(), String> {
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    STARTED.get_or_init(|| load(search)).clone()
}

const NAME: &str = "libcuda.so.1";

/// Every function that is called.
const NEEDED: [&str; 47] = [
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
];

fn load(search: &Search) -> Result<(), String> {
    let open = |path: &std::ffi::OsStr| {
        // SAFETY: the file bears the driver's name; its initialisers are what NVIDIA ships.
        unsafe { Loaded::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
    };
    let by_loader = open(NAME.as_ref());
    let loaded = match by_loader {
        Ok(library) => library,
        Err(error) => {
            // What has been loaded by its path is found by its name afterwards.
            let found = search.find(Library::Driver);
            let tried = found.iter().map(|found| open(found.path.as_os_str()));
            match tried.filter_map(Result::ok).next() {
                Some(library) => library,
                None if found.is_empty() => return Err(format!("no {NAME}: the NVIDIA driver is not installed")),
                None => return Err(format!("{}: can't be loaded: {error}", found[0].path.display())),
            }
        }
    };
    // The bindings end in a panic where the library lacks a function that is called.
    for name in NEEDED {
        // SAFETY: the function is only looked up.
        if unsafe { loaded.get::<unsafe extern "C" fn()>(name) }.is_err() {
            return Err(format!("{NAME} lacks {name}; the NVIDIA driver must be 525 or later"));
        }
    }
    std::mem::forget(loaded);
    // SAFETY: the library has been loaded above; the bindings look it up by its name.
    if !unsafe { sys::is_culib_present() } {
        return Err(format!("{NAME} is loaded, but not found by its name"));
    }
    call!(cuInit(0)).map_err(|error| match error.code {
        100 => "the NVIDIA driver is installed, but shows no GPU to this process".to_owned(),
        _ => format!("the NVIDIA driver does not start: {error}"),
    })
}

/// The version of CUDA that the driver knows, and the GPUs that it shows to this process.
///
/// # Errors
/// No driver, one that does not start.
pub fn gpus(search: &Search) -> Result<((i32, i32), Vec<GpuInfo>), String> {
    start(search)?;
    let mut version: c_int = 0;
    call!(cuDriverGetVersion(&raw mut version)).map_err(|error| error.to_string())?;
    let version = (version / 1000, version % 1000 / 10);
    let mut count: c_int = 0;
    call!(cuDeviceGetCount(&raw mut count)).map_err(|error| error.to_string())?;
    let all = (0..count).map(|ordinal| describe(ordinal, version)).collect::<DriverResult<Vec<_>>>();
    Ok((version, all.map_err(|error| error.to_string())?))
}

fn describe(ordinal: c_int, driver: (i32, i32)) -> DriverResult<GpuInfo> {
    let device = device(ordinal)?;
    let mut name = [0; 256];
    call!(cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
    let mut memory = 0;
    call!(cuDeviceTotalMem_v2(&raw mut memory, device))?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    call!(cuDeviceGetUuid_v2(&raw mut uuid, device))?;
    let attribute = |which| {
        let mut value: c_int = 0;
        call!(cuDeviceGetAttribute(&raw mut value, which, device)).map(|()| value)
    };
    use sys::CUdevice_attribute as A;
    let size = |value: c_int| usize::try_from(value).unwrap_or_default();
    // SAFETY: the buffer's last byte was never written and is zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    Ok(GpuInfo {
        ordinal: size(ordinal),
        name,
        compute: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: size(attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?),
        shared_bytes: size(attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?),
        memory: memory as u64,
        uuid: uuid.bytes.map(|byte| byte as u8),
        driver,
    })
}

fn device(ordinal: c_int) -> DriverResult<sys::CUdevice> {
    let mut device = 0;
    call!(cuDeviceGet(&raw mut device, ordinal))?;
    Ok(device)
}

/// A GPU with its primary context.
pub struct CudaDriver {
    gpu: GpuInfo,
    context: sys::CUcontext,
    /// The lowest and the highest priority of a stream.
    priorities: (c_int, c_int),
}

// SAFETY: a context may be current on any number of threads, and the driver's functions lock for themselves.
unsafe impl Send for CudaDriver {}
// SAFETY: as above.
unsafe impl Sync for CudaDriver {}

impl CudaDriver {
    /// The GPU of this number. Its primary context is kept until the process ends.
    ///
    /// # Errors
    /// No driver, no such GPU, a context that can't be made.
    pub fn open(search: &Search, ordinal: usize) -> Result<Self, String> {
        let (_, gpus) = gpus(search)?;
        let count = gpus.len();
        let gpu = gpus.into_iter().nth(ordinal).ok_or_else(|| match count {
            0 => "the NVIDIA driver is installed, but shows no GPU to this process".to_owned(),
            _ => format!("there is no GPU {ordinal}; the driver shows {count}, numbered from 0"),
        })?;
        let mut context = std::ptr::null_mut();
        let mut priorities = (0, 0);
        let mut make = || {
            call!(cuDevicePrimaryCtxRetain(&raw mut context, device(ordinal as c_int)?))?;
            call!(cuCtxSetCurrent(context))?;
            call!(cuCtxGetStreamPriorityRange(&raw mut priorities.0, &raw mut priorities.1))
        };
        make().map_err(|error| format!("GPU {ordinal} ({}) can't be used: {error}", gpu.name))?;
        Ok(Self { gpu, context, priorities })
    }

    /// Makes the context current on this thread.
    fn enter(&self) -> DriverResult<()> {
        call!(cuCtxSetCurrent(self.context))
    }
}

fn stream_of(stream: Stream) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(stream.0 as usize)
}

fn event_of(event: Event) -> sys::CUevent {
    std::ptr::with_exposed_provenance_mut(event.0 as usize)
}

fn number<T>(pointer: *mut T) -> u64 {
    pointer.expose_provenance() as u64
}

impl Driver for CudaDriver {
    fn gpu(&self) -> &GpuInfo {
        &self.gpu
    }

    fn memory(&self) -> DriverResult<(u64, u64)> {
        self.enter()?;
        let (mut free, mut all) = (0, 0);
        call!(cuMemGetInfo_v2(&raw mut free, &raw mut all))?;
        Ok((free as u64, all as u64))
    }

    fn alloc(&self, bytes: usize) -> DriverResult<DevicePtr> {
        self.enter()?;
        let mut at = 0;
        call!(cuMemAlloc_v2(&raw mut at, bytes.max(1)))?;
        Ok(at)
    }

    unsafe fn free(&self, at: DevicePtr) -> DriverResult<()> {
        self.enter()?;
        call!(cuMemFree_v2(at))
    }

    fn alloc_host(&self, bytes: usize) -> DriverResult<*mut u8> {
        self.enter()?;
        let mut at: *mut c_void = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        call!(cuMemHostAlloc(&raw mut at, bytes.max(1), flags))?;
        Ok(at.cast())
    }

    unsafe fn free_host(&self, at: *mut u8) -> DriverResult<()> {
        self.enter()?;
        call!(cuMemFreeHost(at.cast()))
    }

    unsafe fn pin_host(&self, at: *mut u8, bytes: usize) -> DriverResult<DevicePtr> {
        self.enter()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        call!(cuMemHostRegister_v2(at.cast(), bytes, flags))?;
        let mut address = 0;
        let told = call!(cuMemHostGetDevicePointer_v2(&raw mut address, at.cast(), 0));
        if let Err(error) = told {
            // The first error is the one to be told.
            let _ = call!(cuMemHostUnregister(at.cast()));
            return Err(error);
        }
        Ok(address)
    }

    unsafe fn unpin_host(&self, at: *mut u8) -> DriverResult<()> {
        self.enter()?;
        call!(cuMemHostUnregister(at.cast()))
    }

    fn stream(&self, urgent: bool) -> DriverResult<Stream> {
        self.enter()?;
        let priority = if urgent { self.priorities.1 } else { self.priorities.0 };
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        call!(cuStreamCreateWithPriority(&raw mut stream, flags, priority))?;
        Ok(Stream(number(stream)))
    }

    unsafe fn destroy_stream(&self, stream: Stream) -> DriverResult<()> {
        self.enter()?;
        call!(cuStreamDestroy_v2(stream_of(stream)))
    }

    fn event(&self, timing: bool) -> DriverResult<Event> {
        self.enter()?;
        let flags = match timing {
            true => sys::CUevent_flags::CU_EVENT_DEFAULT,
            false => sys::CUevent_flags::CU_EVENT_DISABLE_TIMING,
        };
        let mut event = std::ptr::null_mut();
        call!(cuEventCreate(&raw mut event, flags as u32))?;
        Ok(Event(number(event)))
    }

    unsafe fn destroy_event(&self, event: Event) -> DriverResult<()> {
        self.enter()?;
        call!(cuEventDestroy_v2(event_of(event)))
    }

    fn record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        self.enter()?;
        call!(cuEventRecord(event_of(event), stream_of(stream)))
    }

    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()> {
        self.enter()?;
        call!(cuStreamWaitEvent(stream_of(stream), event_of(event), 0))
    }

    fn is_done(&self, event: Event) -> DriverResult<bool> {
        self.enter()?;
        match call!(cuEventQuery(event_of(event))) {
            Ok(()) => Ok(true),
            // Not ready.
            Err(error) if error.code == 600 => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn wait_here(&self, event: Event) -> DriverResult<()> {
        self.enter()?;
        call!(cuEventSynchronize(event_of(event)))
    }

    fn elapsed(&self, from: Event, to: Event) -> DriverResult<f32> {
        self.enter()?;
        let mut milliseconds = 0.0;
        call!(cuEventElapsedTime(&raw mut milliseconds, event_of(from), event_of(to)))?;
        Ok(milliseconds)
    }

    fn synchronize(&self, stream: Stream) -> DriverResult<()> {
        self.enter()?;
        call!(cuStreamSynchronize(stream_of(stream)))
    }

    unsafe fn to_device(&self, to: DevicePtr, from: *const u8, bytes: usize, stream: Stream) -> DriverResult<()> {
        self.enter()?;
        call!(cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream_of(stream)))
    }

    unsafe fn to_host(&self, to: *mut u8, from: DevicePtr, bytes: usize, stream: Stream) -> DriverResult<()> {
        self.enter()?;
        call!(cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream_of(stream)))
    }

    unsafe fn on_device(&self, to: DevicePtr, from: DevicePtr, bytes: usize, stream: Stream) -> DriverResult<()> {
        self.enter()?;
        call!(cuMemcpyDtoDAsync_v2(to, from, bytes, stream_of(stream)))
    }

    unsafe fn fill(&self, at: DevicePtr, value: u8, bytes: usize, stream: Stream) -> DriverResult<()> {
        self.enter()?;
        call!(cuMemsetD8Async(at, value, bytes, stream_of(stream)))
    }

    fn row_map(&self, map: RowMap) -> DriverResult<[u8; MAP_BYTES]> {
        self.enter()?;
        let mut made = sys::CUtensorMap { opaque: [0; 16] };
        let sizes = [u64::from(map.row_elements), map.rows];
        let strides = [2 * u64::from(map.row_elements)];
        let (of_box, steps) = ([BOX_ELEMENTS as u32, map.box_rows], [1, 1]);
        call!(cuTensorMapEncodeTiled(
            &raw mut made,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            2,
            std::ptr::with_exposed_provenance_mut(map.at as usize),
            sizes.as_ptr(),
            strides.as_ptr(),
            of_box.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ))?;
        let mut bytes = [0; MAP_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(made.opaque) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        Ok(bytes)
    }

    fn load(&self, image: &[u8]) -> DriverResult<Module> {
        self.enter()?;
        let mut module = std::ptr::null_mut();
        call!(cuModuleLoadData(&raw mut module, image.as_ptr().cast()))?;
        Ok(Module(number(module)))
    }

    unsafe fn unload(&self, module: Module) -> DriverResult<()> {
        self.enter()?;
        call!(cuModuleUnload(std::ptr::with_exposed_provenance_mut(module.0 as usize)))
    }

    fn function(&self, module: Module, name: &str) -> DriverResult<Function> {
        self.enter()?;
        let no_name =
            |_| DriverError { call: "cuModuleGetFunction", code: 500, reason: format!("{name:?} is no name") };
        let name = CString::new(name).map_err(no_name)?;
        let mut function = std::ptr::null_mut();
        let module: sys::CUmodule = std::ptr::with_exposed_provenance_mut(module.0 as usize);
        call!(cuModuleGetFunction(&raw mut function, module, name.as_ptr()))?;
        // Part of what the GPU has may be taken by the kernel's own arrays; then a launch says what is too much.
        let mut fixed: c_int = 0;
        use sys::CUfunction_attribute as A;
        call!(cuFuncGetAttribute(&raw mut fixed, A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))?;
        let dynamic = (self.gpu.shared_bytes as c_int).saturating_sub(fixed).max(0);
        call!(cuFuncSetAttribute(function, A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic))?;
        Ok(Function(number(function)))
    }

    unsafe fn launch(&self, function: Function, launch: &Launch<'_>, stream: Stream) -> DriverResult<()> {
        self.enter()?;
        let mut values: Vec<u64> = launch.args.iter().map(|arg| u64::from_ne_bytes(arg.bytes().1)).collect();
        // The driver reads as many bytes from each as the kernel's parameter has; on a little-endian machine a smaller number lies
        // in the first of the eight.
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        call!(cuLaunchKernel(
            std::ptr::with_exposed_provenance_mut(function.0 as usize),
            gx,
            gy,
            gz,
            bx,
            by,
            bz,
            launch.shared,
            stream_of(stream),
            pointers.as_mut_ptr(),
            std::ptr::null_mut(),
        ))
    }

    fn begin_capture(&self, stream: Stream) -> DriverResult<()> {
        self.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        call!(cuStreamBeginCapture_v2(stream_of(stream), mode))
    }

    fn end_capture(&self, stream: Stream) -> DriverResult<Graph> {
        self.enter()?;
        let mut graph = std::ptr::null_mut();
        call!(cuStreamEndCapture(stream_of(stream), &raw mut graph))?;
        let mut ready = std::ptr::null_mut();
        let made = call!(cuGraphInstantiateWithFlags(&raw mut ready, graph, 0));
        // What is ready to run keeps nothing of what it was made from.
        call!(cuGraphDestroy(graph))?;
        made?;
        Ok(Graph(number(ready)))
    }

    unsafe fn launch_graph(&self, graph: Graph, stream: Stream) -> DriverResult<()> {
        self.enter()?;
        call!(cuGraphLaunch(std::ptr::with_exposed_provenance_mut(graph.0 as usize), stream_of(stream)))
    }

    unsafe fn destroy_graph(&self, graph: Graph) -> DriverResult<()> {
        self.enter()?;
        call!(cuGraphExecDestroy(std::ptr::with_exposed_provenance_mut(graph.0 as usize)))
    }
}
