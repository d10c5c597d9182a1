//! Machine code for a GPU: from a folder that comes with the program, from a cache on disk, or from the compiler.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::nvrtc::Nvrtc;
use super::units::{Unit, headers};
use kvdock_kernels::KernelError;

/// Where machine code comes from.
pub trait CodeSource: Send + Sync {
    /// The module of a unit, as the driver takes it.
    ///
    /// # Errors
    /// Code that is not there and can't be made, with the compiler's log.
    fn code(&self, unit: Unit) -> Result<Vec<u8>, KernelError>;
}

/// Machine code for one architecture, kept on disk.
///
/// A file's name says what the code was made from: source and options, and, in the cache, the compiler's version. A file holds a
/// mark, the digest of the code, and the code; it is written elsewhere and renamed, so that it is there whole or not at all. A file that
/// is not what it says is made anew.
#[derive(Debug)]
pub struct Cubins {
    architecture: String,
    nvrtc: Result<Nvrtc, String>,
    cache: Option<PathBuf>,
    ready_made: Option<PathBuf>,
}

const MARK: &[u8; 16] = b"kvdock cubin 1\r\n";
const HEAD: usize = 16 + 32;

/// The folder beside a program with ready-made machine code, as `cargo xtask gpu-bundle` makes one.
const READY_MADE: &str = "cuda-code";

impl Cubins {
    /// For an architecture (`sm_90a`), with the compiler that was found. `cache` is the folder of the cache, if there is to be one; `ready_made`
    /// one with code that needs no compiler.
    pub fn new(
        architecture: &str,
        nvrtc: Result<Nvrtc, String>,
        cache: Option<PathBuf>,
        ready_made: Option<PathBuf>,
    ) -> Self {
        Self { architecture: architecture.to_owned(), nvrtc, cache, ready_made }
    }

    /// The folder of the cache where nobody names another: `$XDG_CACHE_HOME/kvdock/cuda`, or in `~/.cache`.
    pub fn usual_cache() -> Option<PathBuf> {
        let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
        Some(base.join("kvdock/cuda"))
    }

    /// The folder of ready-made code beside this program, if there is one.
    pub fn beside_program() -> Option<PathBuf> {
        let folder = std::env::current_exe().ok()?.parent()?.join(READY_MADE);
        folder.is_dir().then_some(folder)
    }

    /// The architectures whose code the GPU runs: its own, and the first one of its generation, but for code that is one GPU's alone.
    fn runs(&self) -> impl Iterator<Item = &str> {
        let first = match self.architecture.as_str() {
            "sm_86" | "sm_87" | "sm_89" => Some("sm_80"),
            "sm_103" => Some("sm_100"),
            _ => None,
        };
        std::iter::once(self.architecture.as_str()).chain(first)
    }

    /// Compiles a unit and writes its code into `folder`, under a name that says nothing of the compiler: as ready-made code.
    ///
    /// # Errors
    /// No compiler, source that does not compile, a folder that can't be written.
    pub fn make_ready(&self, unit: Unit, folder: &Path) -> Result<PathBuf, KernelError> {
        let code = self.compile(unit)?;
        let path = folder.join(file_name(unit, &self.architecture, None));
        store(&path, &code).map_err(|error| failed(format!("{}: {error}", path.display())))?;
        Ok(path)
    }

    fn compile(&self, unit: Unit) -> Result<Vec<u8>, KernelError> {
        let nvrtc = self.nvrtc.as_ref().map_err(|reason| failed(format!("{}: {reason}", unit.name())))?;
        let source = unit.source().ok_or_else(|| failed(format!("this build has no {}", unit.file())))?;
        nvrtc
            .compile(unit.file(), source, &headers(), &self.architecture, &unit.options())
            .map_err(|error| failed(error.to_string()))
    }
}

/// The name of a unit's file; without a compiler that of ready-made code.
fn file_name(unit: Unit, architecture: &str, compiler: Option<(i32, i32)>) -> String {
    let digest: String = unit.digest()[..12].iter().map(|byte| format!("{byte:02x}")).collect();
    let compiler = compiler.map(|(major, minor)| format!("-nvrtc{major}.{minor}")).unwrap_or_default();
    format!("{}-{architecture}{compiler}-{digest}.cubin", unit.name())
}

fn failed(reason: String) -> KernelError {
    KernelError::Device { op: "machine code", reason }
}

impl CodeSource for Cubins {
    fn code(&self, unit: Unit) -> Result<Vec<u8>, KernelError> {
        if let Some(folder) = &self.ready_made {
            let names = self.runs().map(|architecture| file_name(unit, architecture, None));
            if let Some(code) = names.filter_map(|name| fetch(&folder.join(name))).next() {
                return Ok(code);
            }
        }
        let compiler = self.nvrtc.as_ref().ok().map(Nvrtc::version);
        let cached = self.cache.as_ref().zip(compiler).map(|(folder, version)| {
            let path = folder.join(file_name(unit, &self.architecture, Some(version)));
            let code = fetch(&path);
            (path, code)
        });
        match cached {
            Some((_, Some(code))) => Ok(code),
            Some((path, None)) => {
                let code = self.compile(unit)?;
                if let Err(error) = store(&path, &code) {
                    tracing::warn!(%error, path = %path.display(), "machine code is not kept, and compiled again next time");
                }
                Ok(code)
            }
            None => self.compile(unit),
        }
    }
}

/// The code in a file; `None` where there is none that is whole.
fn fetch(path: &Path) -> Option<Vec<u8>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "machine code can't be read, and is made anew");
            return None;
        }
    };
    let whole = bytes.len() > HEAD && bytes[..16] == *MARK && bytes[16..HEAD] == Sha256::digest(&bytes[HEAD..])[..];
    if !whole {
        tracing::warn!(path = %path.display(), bytes = bytes.len(), "machine code is damaged, and made anew");
        return None;
    }
    Some(bytes[HEAD..].to_vec())
}

/// Writes a file so that it is there whole or not at all.
fn store(path: &Path, code: &[u8]) -> std::io::Result<()> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let own = path.with_extension(format!("{}-{}.tmp", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed)));
    let write = || {
        let mut file = fs::File::create(&own)?;
        file.write_all(MARK)?;
        file.write_all(&Sha256::digest(code))?;
        file.write_all(code)?;
        file.sync_all()?;
        fs::rename(&own, path)
    };
    let result = write();
    if result.is_err() {
        // What is left of a failed attempt is in nobody's way.
        let _ = fs::remove_file(&own);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kvdock-cubins-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn code_comes_back_whole_or_not_at_all() {
        let folder = Folder::new("whole");
        let path = folder.0.join("below/a.cubin");
        assert_eq!(fetch(&path), None);
        store(&path, b"machine code").unwrap();
        assert_eq!(fetch(&path).unwrap(), b"machine code");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
        let good = fs::read(&path).unwrap();
        for length in [0, 10, HEAD, good.len() - 1] {
            fs::write(&path, &good[..length]).unwrap();
            assert_eq!(fetch(&path), None, "{length} bytes");
        }
        for at in [0, 20, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert_eq!(fetch(&path), None, "byte {at} changed");
        }
        store(&path, b"other code").unwrap();
        assert_eq!(fetch(&path).unwrap(), b"other code");
    }

    #[test]
    fn many_writers_of_one_file_leave_a_whole_one() {
        let folder = Folder::new("many");
        let path = folder.0.join("a.cubin");
        std::thread::scope(|scope| {
            for writer in 0..4_u8 {
                let path = &path;
                scope.spawn(move || (0..20).for_each(|_| store(path, &[writer; 5000]).unwrap()));
            }
        });
        let code = fetch(&path).unwrap();
        assert!(code.len() == 5000 && code.iter().all(|byte| *byte == code[0]));
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1);
    }

    #[test]
    fn ready_made_code_needs_no_compiler_and_other_code_says_that_there_is_none() {
        let folder = Folder::new("ready");
        let none = || Cubins::new("sm_90a", Err("no NVRTC here".into()), None, Some(folder.0.clone()));
        let cubins = none();
        let name = file_name(Unit::Norm, "sm_90a", None);
        assert!(name.starts_with("norm-sm_90a-") && name.ends_with(".cubin"), "{name}");
        store(&folder.0.join(&name), b"ready").unwrap();
        assert_eq!(cubins.code(Unit::Norm).unwrap(), b"ready");
        let error = cubins.code(Unit::Rope).unwrap_err().to_string();
        assert!(error.contains("rope") && error.contains("no NVRTC here"), "{error}");
        let with = |compiler| file_name(Unit::Norm, "sm_90a", Some(compiler));
        assert_ne!(with((12, 4)), with((13, 0)));
        // Code of the first GPU of a generation runs on the later ones, and not the other way round.
        store(&folder.0.join(file_name(Unit::Rope, "sm_80", None)), b"first").unwrap();
        let of = |architecture| Cubins::new(architecture, Err("no NVRTC here".into()), None, Some(folder.0.clone()));
        assert_eq!(of("sm_89").code(Unit::Rope).unwrap(), b"first");
        assert!(of("sm_90a").code(Unit::Rope).is_err());
    }
}
