//! NVRTC, loaded from a folder.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use anyhow::{Context, Result, bail};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// A file that a program may include.
pub struct Header<'a> {
    pub name: &'a str,
    pub text: &'a str,
}

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type LogSize = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Log = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

/// The compiler's functions.
pub struct Nvrtc {
    create: Create,
    compile: Compile,
    log_size: LogSize,
    log: Log,
    destroy: Destroy,
}

impl Nvrtc {
    /// Loads `libnvrtc.so.13` and what it needs from `folder`.
    ///
    /// # Errors
    /// When a library or a function is missing.
    pub fn load(folder: &Path) -> Result<Self> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder).with_context(|| format!("can't read {}", folder.display()))? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc")) {
                names.push(path);
            }
        }
        // The compiler asks for its built-in functions by name alone, and finds them where they are loaded already: "libnvrtc-builtins" comes first.
        names.sort();
        let mut last = None;
        for path in &names {
            // SAFETY: NVIDIA's libraries, fetched by `fetch`; their constructors set up their own state only.
            let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
            let library = library.with_context(|| format!("can't load {}", path.display()))?;
            // They stay loaded to the end of the process, so that function pointers stay good.
            last = Some(&*Box::leak(Box::new(library)));
        }
        let library = last.with_context(|| format!("there is no libnvrtc in {}", folder.display()))?;
        // SAFETY: the types are those of nvrtc.h.
        unsafe {
            Ok(Self {
                create: *library.get(b"nvrtcCreateProgram")?,
                compile: *library.get(b"nvrtcCompileProgram")?,
                log_size: *library.get(b"nvrtcGetProgramLogSize")?,
                log: *library.get(b"nvrtcGetProgramLog")?,
                destroy: *library.get(b"nvrtcDestroyProgram")?,
            })
        }
    }

    /// Compiles a file, and gives the log.
    ///
    /// # Errors
    /// When it does not compile; the error has the log.
    pub fn compile(&self, name: &str, text: &str, headers: &[Header<'_>], options: &[String]) -> Result<String> {
        let (name, text) = (CString::new(name)?, CString::new(text)?);
        let strings = |all: &mut dyn Iterator<Item = &str>| all.map(CString::new).collect::<Result<Vec<_>, _>>();
        let texts = strings(&mut headers.iter().map(|header| header.text))?;
        let names = strings(&mut headers.iter().map(|header| header.name))?;
        let options = strings(&mut options.iter().map(String::as_str))?;
        let pointers = |all: &[CString]| all.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
        let (texts_at, names_at, options_at) = (pointers(&texts), pointers(&names), pointers(&options));
        let mut program = ptr::null_mut();
        // SAFETY: all strings end with a zero and live to the end of this function; the counts are those of the arrays.
        let made = unsafe {
            let count = headers.len() as c_int;
            (self.create)(&mut program, text.as_ptr(), name.as_ptr(), count, texts_at.as_ptr(), names_at.as_ptr())
        };
        if made != 0 {
            bail!("NVRTC refuses the program: error {made}");
        }
        // SAFETY: the program was made above; options as above.
        let outcome = unsafe { (self.compile)(program, options.len() as c_int, options_at.as_ptr()) };
        let log = self.log(program);
        // SAFETY: the program was made above and is not used again.
        unsafe { (self.destroy)(&mut program) };
        let log = log?;
        if outcome != 0 {
            bail!("does not compile (NVRTC error {outcome}):\n{log}");
        }
        Ok(log)
    }

    fn log(&self, program: Program) -> Result<String> {
        let mut size = 0;
        // SAFETY: the program is alive; the size is written.
        if unsafe { (self.log_size)(program, &mut size) } != 0 {
            bail!("NVRTC has no log");
        }
        let mut bytes = vec![0u8; size.max(1)];
        // SAFETY: the buffer is as long as was asked for, with the zero at its end.
        if unsafe { (self.log)(program, bytes.as_mut_ptr().cast()) } != 0 {
            bail!("NVRTC does not give its log");
        }
        let log = CStr::from_bytes_until_nul(&bytes).context("NVRTC's log does not end")?;
        Ok(log.to_string_lossy().into_owned())
    }
}
