//! The same dense products by cuBLASLt, where it is found: whether both agree, and how long each takes.
//!
//! kvdock serves with its own kernels: cuBLASLt picks a kernel by shape, so a row's bits would depend on how many rows are computed with it.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::ptr;
use std::time::Instant;

use half::bf16;
use kvdock_cuda::driver::{DevicePtr, Driver, DriverError, Stream};
use kvdock_cuda::{CudaDriver, Library, Search};
use kvdock_kernels::{Device, Projection, WeightFormat};
use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

use super::kernels::{numbers, weight, weight_bytes};
use super::table::Table;

type Handle = *mut c_void;
type Status = c_int;

/// `CUDA_R_32F`, `CUDA_R_16BF`, `CUBLAS_COMPUTE_32F`, `CUBLAS_OP_T`.
const R_32F: c_int = 0;
const R_16BF: c_int = 14;
const COMPUTE_32F: c_int = 68;
const TRANSPOSED: c_int = 1;
/// `CUBLASLT_MATMUL_DESC_TRANSA`, `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`.
const DESC_TRANSA: c_int = 3;
const PREF_MAX_WORKSPACE: c_int = 1;

/// Bytes of work space that it may take.
const WORKSPACE: usize = 32 << 20;

/// `cublasLtMatmulHeuristicResult_t`: a kernel that was chosen.
#[repr(C)]
#[derive(Clone, Copy)]
struct Chosen {
    algo: [u64; 8],
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($arg:ty),* $(,)?);)*) => {
        /// The functions that are called.
        struct Functions {
            $($field: unsafe extern "C" fn($($arg),*) -> Status,)*
        }

        impl Functions {
            fn of(library: &Loaded) -> Result<Self, String> {
                // SAFETY: the types are those of cublasLt.h.
                Ok(Self { $($field: unsafe {
                    *library.get($name.as_bytes()).map_err(|_| format!("it lacks {}", $name))?
                },)* })
            }
        }
    };
}

functions! {
    create = "cublasLtCreate": fn(*mut Handle);
    destroy = "cublasLtDestroy": fn(Handle);
    desc_create = "cublasLtMatmulDescCreate": fn(*mut Handle, c_int, c_int);
    desc_set = "cublasLtMatmulDescSetAttribute": fn(Handle, c_int, *const c_void, usize);
    desc_destroy = "cublasLtMatmulDescDestroy": fn(Handle);
    layout_create = "cublasLtMatrixLayoutCreate": fn(*mut Handle, c_int, u64, u64, i64);
    layout_destroy = "cublasLtMatrixLayoutDestroy": fn(Handle);
    pref_create = "cublasLtMatmulPreferenceCreate": fn(*mut Handle);
    pref_set = "cublasLtMatmulPreferenceSetAttribute": fn(Handle, c_int, *const c_void, usize);
    pref_destroy = "cublasLtMatmulPreferenceDestroy": fn(Handle);
    choose = "cublasLtMatmulAlgoGetHeuristic":
        fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Chosen, *mut c_int);
    matmul = "cublasLtMatmul": fn(
        Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void, Handle,
        *mut c_void, Handle, *const u64, *mut c_void, usize, *mut c_void,
    );
}

fn checked(what: &str, status: Status) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("cublasLt{what} answers status {status}")) }
}

/// A product `[rows, cols] · [out_rows, cols]ᵀ` of bf16 into f32, prepared. What it consists of lives as long as the program: it is made a
/// few times.
struct Product {
    functions: Functions,
    handle: Handle,
    desc: Handle,
    layouts: [Handle; 3],
    chosen: Chosen,
}

impl Product {
    fn new(path: &Path, (rows, cols, out_rows): (u64, u64, u64)) -> Result<Self, String> {
        // SAFETY: the file bears the library's name; its initialisers are what NVIDIA ships.
        let library = unsafe { Loaded::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| format!("{}: {error}", path.display()))?;
        let functions = Functions::of(&library)?;
        // The functions stay good.
        std::mem::forget(library);
        let made = |what: &str, make: &dyn Fn(*mut Handle) -> Status| {
            let mut handle = ptr::null_mut();
            checked(what, make(&raw mut handle))?;
            Ok::<Handle, String>(handle)
        };
        // SAFETY: handles are the library's own, pointers are to locals of the right size.
        let handle = made("Create", &|to| unsafe { (functions.create)(to) })?;
        // SAFETY: as above.
        let desc = made("MatmulDescCreate", &|to| unsafe { (functions.desc_create)(to, COMPUTE_32F, R_32F) })?;
        // Matrices are by columns there: a row-major one is its own transpose.
        let layout = |kind, height, width| {
            // SAFETY: as above.
            made("MatrixLayoutCreate", &|to| unsafe {
                (functions.layout_create)(to, kind, height, width, height as i64)
            })
        };
        let layouts = [layout(R_16BF, cols, out_rows)?, layout(R_16BF, cols, rows)?, layout(R_32F, out_rows, rows)?];
        let (transposed, most) = (TRANSPOSED, WORKSPACE);
        // SAFETY: as above.
        let set =
            unsafe { (functions.desc_set)(desc, DESC_TRANSA, (&raw const transposed).cast(), size_of::<c_int>()) };
        checked("MatmulDescSetAttribute", set)?;
        // SAFETY: as above.
        let preference = made("MatmulPreferenceCreate", &|to| unsafe { (functions.pref_create)(to) })?;
        // SAFETY: as above.
        let set = unsafe {
            (functions.pref_set)(preference, PREF_MAX_WORKSPACE, (&raw const most).cast(), size_of::<usize>())
        };
        checked("MatmulPreferenceSetAttribute", set)?;
        let mut chosen = Chosen { algo: [0; 8], workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let mut count = 0;
        let [a, b, d] = layouts;
        // SAFETY: as above; there is room for the one kernel that is asked for.
        let status =
            unsafe { (functions.choose)(handle, desc, a, b, d, d, preference, 1, &raw mut chosen, &raw mut count) };
        checked("MatmulAlgoGetHeuristic", status)?;
        // SAFETY: as above; it is not used again.
        checked("MatmulPreferenceDestroy", unsafe { (functions.pref_destroy)(preference) })?;
        if count == 0 {
            return Err("it has no kernel for this product".to_owned());
        }
        Ok(Self { functions, handle, desc, layouts, chosen })
    }

    /// Queues it.
    ///
    /// # Safety
    /// The addresses are of memory as large as the product says; nothing that is not ordered with the stream uses it.
    unsafe fn queue(
        &self,
        (weight, x, out, workspace): (DevicePtr, DevicePtr, DevicePtr, DevicePtr),
        stream: Stream,
    ) -> Result<(), String> {
        let at = |address: u64| ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        let (one, zero) = (1.0_f32, 0.0_f32);
        let [a, b, d] = self.layouts;
        // SAFETY: the caller's promise; the factors are locals, which are read in the call.
        let status = unsafe {
            (self.functions.matmul)(
                self.handle,
                self.desc,
                (&raw const one).cast(),
                at(weight),
                a,
                at(x),
                b,
                (&raw const zero).cast(),
                at(out),
                d,
                at(out),
                d,
                self.chosen.algo.as_ptr(),
                at(workspace),
                WORKSPACE,
                at(stream.0),
            )
        };
        checked("Matmul", status)
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: its own handles, which are not used again; what was queued has run. There is nobody to tell of a failure.
        unsafe {
            self.layouts.iter().for_each(|layout| {
                (self.functions.layout_destroy)(*layout);
            });
            (self.functions.desc_destroy)(self.desc);
            (self.functions.destroy)(self.handle);
        }
    }
}

/// Adds a row for it, or why there is none; an error where it and the kernels disagree.
///
/// # Errors
/// Results that differ, a failure of the GPU.
pub fn measure(device: &dyn Device, ordinal: usize, table: &mut Table) -> Result<(), String> {
    let Some(found) = Search::usual().find(Library::CublasLt).into_iter().next() else {
        table.note("cuBLASLt: not found");
        return Ok(());
    };
    let (rows, cols, out_rows) = (4096, 4096, 4096);
    let product = match Product::new(&found.path, (rows as u64, cols as u64, out_rows as u64)) {
        Ok(product) => product,
        Err(reason) => {
            table.note(&format!("cuBLASLt: {reason}"));
            return Ok(());
        }
    };
    let x: Vec<f32> = numbers(21, rows * cols).iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    let driver = CudaDriver::open(&Search::usual(), ordinal)?;
    let (seconds, theirs) = run(&driver, &product, &x, (rows, cols, out_rows))?;
    let told = format!("cuBLASLt: product, {rows} x {cols} by {out_rows} in BF16");
    let done = 2.0 * (rows * cols * out_rows) as f64 / seconds;
    table.row(&told, seconds, format!("{:.1} TFLOP/s", done / 1e12), None, "");
    let error = |error: kvdock_kernels::KernelError| error.to_string();
    let weight = weight(device, WeightFormat::BF16, out_rows, cols).map_err(error)?;
    let x = device.upload(&x).map_err(error)?;
    let mut out = device.alloc(rows * out_rows).map_err(error)?;
    device.linear(&x, rows, &mut [Projection { weight: &weight, bias: None, out: &mut out }]).map_err(error)?;
    let mut ours = vec![0.0; rows * out_rows];
    device.read(&out, 0, &mut ours).map_err(error)?;
    agree(&ours, &theirs)
}

/// Both round nothing but sums of f32, in different orders.
fn agree(ours: &[f32], theirs: &[f32]) -> Result<(), String> {
    let size = theirs.iter().fold(1e-6_f32, |most, x| most.max(x.abs()));
    let far = |(a, b): (&f32, &f32)| (a - b).is_nan() || (a - b).abs() > 1e-3 * size;
    match ours.iter().zip(theirs).position(far) {
        _ if ours.len() != theirs.len() => Err(format!("{} values and {} of cuBLASLt", ours.len(), theirs.len())),
        Some(at) => Err(format!("value {at} of a product is {}, by cuBLASLt {}", ours[at], theirs[at])),
        None => Ok(()),
    }
}

/// Seconds of a product, and what comes of it.
fn run(
    driver: &CudaDriver,
    product: &Product,
    x: &[f32],
    (rows, cols, out_rows): (usize, usize, usize),
) -> Result<(f64, Vec<f32>), String> {
    let told = |error: DriverError| error.to_string();
    let stream = driver.stream(false).map_err(told)?;
    let halves: Vec<u8> = x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
    let weights = weight_bytes(WeightFormat::BF16, out_rows * cols);
    let upload = |bytes: &[u8]| {
        let at = driver.alloc(bytes.len()).map_err(told)?;
        // SAFETY: the memory is new and as long as the bytes, which stay until the stream has run below.
        unsafe { driver.to_device(at, bytes.as_ptr(), bytes.len(), stream) }.map_err(told)?;
        driver.synchronize(stream).map_err(told)?;
        Ok::<DevicePtr, String>(at)
    };
    let (weight, x) = (upload(&weights)?, upload(&halves)?);
    let bytes = 4 * rows * out_rows;
    let (out, workspace) = (driver.alloc(bytes).map_err(told)?, driver.alloc(WORKSPACE).map_err(told)?);
    // SAFETY: the memory is as large as the product needs it, and this stream alone uses it.
    let queue = || unsafe { product.queue((weight, x, out, workspace), stream) };
    queue()?;
    driver.synchronize(stream).map_err(told)?;
    let began = Instant::now();
    (0..20).try_for_each(|_| queue())?;
    driver.synchronize(stream).map_err(told)?;
    let seconds = began.elapsed().as_secs_f64() / 20.0;
    let mut result = vec![0_u8; bytes];
    // SAFETY: the result is as long as the memory, and stays until the stream has run.
    unsafe { driver.to_host(result.as_mut_ptr(), out, bytes, stream) }.map_err(told)?;
    driver.synchronize(stream).map_err(told)?;
    for at in [weight, x, out, workspace] {
        // SAFETY: everything that was queued has run.
        unsafe { driver.free(at) }.map_err(told)?;
    }
    // SAFETY: as above.
    unsafe { driver.destroy_stream(stream) }.map_err(told)?;
    Ok((seconds, result.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_chooses_is_as_large_as_it_writes() {
        assert_eq!((size_of::<Chosen>(), std::mem::offset_of!(Chosen, state)), (96, 72));
    }

    #[test]
    fn results_that_differ_are_told() {
        assert_eq!(agree(&[1.0, 2.0], &[1.0005, 2.0]), Ok(()));
        assert!(agree(&[1.0, 2.0], &[1.0, 2.1]).unwrap_err().contains("value 1"));
        assert!(agree(&[1.0, f32::NAN], &[1.0, 2.0]).is_err());
        assert!(agree(&[1.0], &[1.0, 2.0]).is_err());
    }

    #[test]
    fn a_file_that_is_no_library_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcublasLt.so.13");
        std::fs::write(&path, "no library").unwrap();
        let error = Product::new(&path, (1, 1, 1)).err().unwrap();
        assert!(error.contains("libcublasLt.so.13"), "{error}");
    }
}
