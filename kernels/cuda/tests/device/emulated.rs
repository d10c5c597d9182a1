//! Kernels that run on the CPU: their files and the shim of the kernels' own tests, compiled by the C++ compiler into libraries.

use std::collections::hash_map::DefaultHasher;
use std::ffi::{CString, c_char, c_int};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use kvdock_cuda::driver::{Arg, Launch};
use kvdock_cuda::{CodeSource, Unit};
use kvdock_kernels::KernelError;
use libloading::Library;

/// Fibers and the place in the grid are the process's own, so one kernel runs at a time.
static RUNNING: Mutex<()> = Mutex::new(());

const FLAGS: [&str; 9] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-ffp-contract=off",
    "-DKVDOCK_EMULATION",
    "-Wno-attributes",
];

/// "Machine code" for [`Kernels`]: the path of a library.
pub struct Compiler;

fn room(below: &str) -> PathBuf {
    // From the crate of these kernels, whichever crate's tests this is part of.
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .map(|folder| folder.join("kernels"))
        .find(|folder| folder.is_dir())
        .unwrap()
        .join(below)
}

impl CodeSource for Compiler {
    fn code(&self, unit: Unit) -> Result<Vec<u8>, KernelError> {
        // One at a time, so that no two make the same library.
        static COMPILING: Mutex<()> = Mutex::new(());
        let _one = COMPILING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let fail = |reason: String| KernelError::Device { op: "emulation", reason };
        let mut hasher = DefaultHasher::new();
        (unit.digest(), FLAGS).hash(&mut hasher);
        for folder in ["tests/cuda/emulation", "cuda/tests/device"] {
            let mut files: Vec<PathBuf> = std::fs::read_dir(room(folder))
                .map_err(|e| fail(e.to_string()))?
                .filter_map(|entry| Some(entry.ok()?.path()))
                .filter(|path| path.extension().is_some_and(|end| end == "h" || end == "cpp"))
                .collect();
            files.sort();
            for file in files {
                std::fs::read(&file).map_err(|e| fail(e.to_string()))?.hash(&mut hasher);
            }
        }
        let folder =
            option_env!("CARGO_TARGET_TMPDIR").map_or_else(std::env::temp_dir, PathBuf::from).join("cuda-libraries");
        std::fs::create_dir_all(&folder).map_err(|e| fail(e.to_string()))?;
        let path = folder.join(format!("{}-{:016x}.so", unit.name(), hasher.finish()));
        if !path.is_file() {
            let own = path.with_extension(format!("{}.tmp", std::process::id()));
            let mut compiler = Command::new("c++");
            compiler.args(FLAGS).args(unit.macros()).arg("-I").arg(room("cuda"));
            compiler.arg("-I").arg(room("tests/cuda/emulation"));
            compiler.arg(format!("-DKERNEL_FILE=\"{}\"", room("cuda").join(unit.file()).display()));
            compiler.arg("-o").arg(&own).arg(room("cuda/tests/device/library.cpp"));
            let output = compiler.output().map_err(|e| fail(format!("can't run the C++ compiler `c++`: {e}")))?;
            if !output.status.success() {
                return Err(fail(format!("{compiler:?}:\n{}", String::from_utf8_lossy(&output.stderr))));
            }
            std::fs::rename(&own, &path).map_err(|e| fail(e.to_string()))?;
        }
        Ok(path.display().to_string().into_bytes())
    }
}

/// "Machine code" for drivers that only look at what is launched.
pub struct Nothing;

impl CodeSource for Nothing {
    fn code(&self, _: Unit) -> Result<Vec<u8>, KernelError> {
        Ok(Vec::new())
    }
}

/// The library of a unit.
pub struct Emulated {
    library: Library,
}

type Has = unsafe extern "C" fn(*const c_char) -> c_int;
type Run = unsafe extern "C" fn(*const c_char, *const u32, *const u32, u32, u64, u32, *const u32, *const u64);

impl Emulated {
    /// Loads what [`Compiler`] has made; `None` for [`Nothing`].
    pub fn load(image: &[u8]) -> Option<Self> {
        let path = std::str::from_utf8(image).ok().filter(|path| !path.is_empty())?;
        // SAFETY: a library made of the kernels of this tree.
        Some(Self { library: unsafe { Library::new(path) }.unwrap() })
    }

    pub fn has(&self, name: &str) -> bool {
        let name = CString::new(name).unwrap();
        // SAFETY: the function of `library.cpp`.
        unsafe { self.library.get::<Has>("kvdock_has").unwrap()(name.as_ptr()) != 0 }
    }

    /// Runs a kernel.
    ///
    /// # Safety
    /// The addresses among the arguments are as valid as the kernel needs them.
    pub unsafe fn run(&self, name: &str, launch: &Launch<'_>, seed: u64) {
        let _one = RUNNING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let name = CString::new(name).unwrap();
        let mut sizes = Vec::new();
        let mut values = Vec::new();
        for arg in launch.args {
            let (size, bytes) = arg.bytes();
            let is_address = matches!(arg, Arg::Memory(_) | Arg::Address(_));
            sizes.push(if is_address { 0 } else { size as u32 });
            values.push(u64::from_ne_bytes(bytes));
        }
        // SAFETY: the function of `library.cpp`; the arguments are the caller's promise.
        unsafe {
            self.library.get::<Run>("kvdock_launch").unwrap()(
                name.as_ptr(),
                launch.grid.as_ptr(),
                launch.block.as_ptr(),
                launch.shared,
                seed,
                sizes.len() as u32,
                sizes.as_ptr(),
                values.as_ptr(),
            );
        }
    }
}
