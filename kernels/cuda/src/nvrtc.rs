//! The compiler of CUDA sources, loaded when it is asked for.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

use super::find::Found;

type Program = *mut c_void;

/// The functions that are used, of a library that stays loaded.
pub struct Nvrtc {
    path: PathBuf,
    version: (i32, i32),
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    architectures: Vec<i32>,
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nvrtc").field("path", &self.path).field("version", &self.version).finish_non_exhaustive()
    }
}

/// Why there is no machine code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompileError {
    /// What was compiled.
    pub name: String,
    /// For which architecture.
    pub architecture: String,
    /// What the compiler says in a word.
    pub reason: String,
    /// What the compiler says line by line; may be empty.
    pub log: String,
}

impl std::fmt::Display for CompileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, architecture, reason, log } = self;
        write!(f, "{name} does not compile for {architecture}: {reason}")?;
        if log.is_empty() { Ok(()) } else { write!(f, "\n{log}") }
    }
}

impl std::error::Error for CompileError {}

/// The function `name` of a library.
///
/// # Safety
/// `T` is the type of that function.
unsafe fn function<T: Copy>(library: &Loaded, path: &Path, name: &str) -> Result<T, String> {
    // SAFETY: as promised by the caller; the copy is used only while the library is loaded, which is for ever.
    let symbol = unsafe { library.get::<T>(name) };
    Ok(*symbol.map_err(|error| format!("{}: no function {name}: {error}", path.display()))?)
}

impl Nvrtc {
    /// Loads the library, which then stays.
    ///
    /// # Errors
    /// What the loader says, a function that is missing.
    pub fn load(found: &Found) -> Result<Self, String> {
        let path = found.path.as_path();
        // SAFETY: the file bears NVRTC's name and lies where NVRTC is installed; its initialisers are what NVIDIA ships.
        let library = unsafe { Loaded::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| format!("{}: {error}", path.display()))?;
        // SAFETY: the types of all functions are those of nvrtc.h, which have not changed since CUDA 11.1.
        let loaded = unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                function(&library, path, "nvrtcVersion")?;
            let count: unsafe extern "C" fn(*mut c_int) -> c_int =
                function(&library, path, "nvrtcGetNumSupportedArchs")?;
            let list: unsafe extern "C" fn(*mut c_int) -> c_int = function(&library, path, "nvrtcGetSupportedArchs")?;
            let (mut major, mut minor, mut number) = (0, 0, 0);
            let mut architectures = Vec::new();
            if version(&raw mut major, &raw mut minor) != 0 || count(&raw mut number) != 0 {
                return Err(format!("{}: it does not tell its version", path.display()));
            }
            architectures.resize(usize::try_from(number).unwrap_or_default(), 0);
            if !architectures.is_empty() && list(architectures.as_mut_ptr()) != 0 {
                return Err(format!("{}: it does not tell its architectures", path.display()));
            }
            Self {
                path: path.to_path_buf(),
                version: (major, minor),
                create: function(&library, path, "nvrtcCreateProgram")?,
                destroy: function(&library, path, "nvrtcDestroyProgram")?,
                compile: function(&library, path, "nvrtcCompileProgram")?,
                cubin_size: function(&library, path, "nvrtcGetCUBINSize")?,
                cubin: function(&library, path, "nvrtcGetCUBIN")?,
                log_size: function(&library, path, "nvrtcGetProgramLogSize")?,
                log: function(&library, path, "nvrtcGetProgramLog")?,
                error: function(&library, path, "nvrtcGetErrorString")?,
                architectures,
            }
        };
        // It keeps threads and caches of its own; unloading it under them is what nobody tests.
        std::mem::forget(library);
        Ok(loaded)
    }

    /// The file it came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Major and minor version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The architectures that it compiles for, as `80`, `90`, ...
    pub fn architectures(&self) -> &[i32] {
        &self.architectures
    }

    /// Compiles `source` to machine code for `architecture` (`sm_90a`). `headers` are files that it may include, by name.
    ///
    /// # Errors
    /// What the compiler says, with its log.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[(&str, &str)],
        architecture: &str,
        options: &[String],
    ) -> Result<Vec<u8>, CompileError> {
        let fail = |reason: String, log: String| CompileError {
            name: name.to_owned(),
            architecture: architecture.to_owned(),
            reason,
            log,
        };
        let text =
            |text: &str| CString::new(text).map_err(|_| fail(format!("{text:?} holds a zero byte"), String::new()));
        let (c_source, c_name) = (text(source)?, text(name)?);
        let header_names = headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
        let header_texts = headers.iter().map(|(_, source)| text(source)).collect::<Result<Vec<_>, _>>()?;
        let mut all = vec![text(&format!("--gpu-architecture={architecture}"))?];
        for option in options {
            all.push(text(option)?);
        }
        let pointers = |list: &[CString]| list.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (names, texts, options) = (pointers(&header_names), pointers(&header_texts), pointers(&all));
        let count = |len: usize| c_int::try_from(len).unwrap_or(c_int::MAX);
        let mut program = Job { nvrtc: self, program: std::ptr::null_mut() };
        // SAFETY: all texts end with a zero and outlive the call; names and texts are equally many.
        let made = unsafe {
            (self.create)(
                &raw mut program.program,
                c_source.as_ptr(),
                c_name.as_ptr(),
                count(names.len()),
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        if made != 0 {
            return Err(fail(self.text_of(made), String::new()));
        }
        // SAFETY: the program was made above; the options end with zeros and outlive the call.
        let compiled = unsafe { (self.compile)(program.program, count(options.len()), options.as_ptr()) };
        if compiled != 0 {
            return Err(fail(self.text_of(compiled), program.log()));
        }
        program.cubin().map_err(|code| fail(self.text_of(code), program.log()))
    }

    fn text_of(&self, code: c_int) -> String {
        // SAFETY: the function takes any number and returns a text that lives for ever.
        let text = unsafe { (self.error)(code) };
        if text.is_null() {
            return format!("NVRTC's error {code}");
        }
        // SAFETY: not null, ends with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// A program that is destroyed whatever becomes of it.
struct Job<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Job<'_> {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program lives.
        if unsafe { (self.nvrtc.log_size)(self.program, &raw mut size) } != 0 || size == 0 {
            return String::new();
        }
        let mut bytes = vec![0_u8; size];
        // SAFETY: the buffer is as long as the library has said.
        if unsafe { (self.nvrtc.log)(self.program, bytes.as_mut_ptr().cast()) } != 0 {
            return String::new();
        }
        String::from_utf8_lossy(&bytes).trim_end_matches(['\0', '\n']).to_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>, c_int> {
        let mut size = 0;
        // SAFETY: the program lives and has been compiled.
        let code = unsafe { (self.nvrtc.cubin_size)(self.program, &raw mut size) };
        if code != 0 {
            return Err(code);
        }
        let mut bytes = vec![0_u8; size];
        // SAFETY: the buffer is as long as the library has said.
        let code = unsafe { (self.nvrtc.cubin)(self.program, bytes.as_mut_ptr().cast()) };
        if code == 0 { Ok(bytes) } else { Err(code) }
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: the program was made by this library and is not used any more.
            unsafe { (self.nvrtc.destroy)(&raw mut self.program) };
        }
    }
}
