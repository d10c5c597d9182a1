//! Kernel files and the shim, compiled by the C++ compiler into programs, which are kept by the hash of what went in.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

/// A kernel file that can be run.
#[derive(Debug, Clone)]
pub struct Program {
    pub path: PathBuf,
}

/// A program that is made once.
type Made = Arc<OnceLock<Result<Program, String>>>;

const FLAGS: [&str; 12] = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-ffp-contract=off",
    "-fsanitize=address",
    "-fsanitize=alignment,bounds,shift",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-DKVDOCK_EMULATION",
];

fn room(below: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(below)
}

/// Everything that any program is made of, but for the kernel file itself.
fn common() -> &'static (Vec<u8>, String) {
    static COMMON: LazyLock<(Vec<u8>, String)> = LazyLock::new(|| {
        let mut bytes = Vec::new();
        for folder in ["cuda", "tests/cuda/emulation"] {
            let mut paths: Vec<_> =
                std::fs::read_dir(room(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
            paths.sort();
            let text = |path: &&PathBuf| {
                path.extension().is_some_and(|e| ["cuh", "h", "cpp"].iter().any(|known| e.eq_ignore_ascii_case(known)))
            };
            for path in paths.iter().filter(text) {
                bytes.extend(std::fs::read(path).unwrap());
            }
        }
        let version = Command::new("c++").arg("--version").output().unwrap_or_else(|e| {
            panic!("can't run the C++ compiler `c++`, which the tests of the CUDA kernels need (`cargo xtask setup` installs it): {e}")
        });
        (bytes, String::from_utf8_lossy(&version.stdout).into_owned())
    });
    &COMMON
}

impl Program {
    /// `file` of `kernels/cuda`, with these macros.
    pub fn of(file: &str, macros: &[&str]) -> Self {
        let source = std::fs::read_to_string(room("cuda").join(file)).unwrap();
        Self::from_source(file, &source, macros).unwrap_or_else(|e| panic!("{file} {macros:?}: {e}"))
    }

    /// The same with a fault in it: `from`, which the file, or a header of the same name's first word, has once, is replaced.
    pub fn with_fault(file: &str, macros: &[&str], from: &str, to: &str) -> Self {
        let mut source = std::fs::read_to_string(room("cuda").join(file)).unwrap();
        let header = format!("{}.cuh", file.trim_end_matches(".cu").split('_').next().unwrap());
        let include = format!("#include \"{header}\"");
        if !source.contains(from) && source.contains(&include) {
            let text = std::fs::read_to_string(room("cuda").join(&header)).unwrap().replace("#pragma once", "");
            source = source.replace(&include, &text);
        }
        assert_eq!(source.matches(from).count(), 1, "{file} does not have {from:?} exactly once");
        let source = source.replace(from, to);
        Self::from_source(file, &source, macros).unwrap_or_else(|e| panic!("{file} with {to:?}: {e}"))
    }

    fn from_source(file: &str, source: &str, macros: &[&str]) -> Result<Self, String> {
        let (common, version) = common();
        let mut hasher = DefaultHasher::new();
        (common, version, file, source, macros, FLAGS).hash(&mut hasher);
        let name = format!("{}-{:016x}", file.trim_end_matches(".cu"), hasher.finish());
        // One test compiles a program, the others that want it wait for it.
        static MADE: LazyLock<Mutex<HashMap<String, Made>>> = LazyLock::new(Default::default);
        let cell = MADE.lock().unwrap().entry(name.clone()).or_default().clone();
        cell.get_or_init(|| compile(&name, source, macros)).clone()
    }
}

/// Runs the compiler on `input`, and puts what it makes at `path`.
fn build(path: &Path, input: &Path, more: &[String]) -> Result<(), String> {
    // Another process may do the same at the same time: each has its own file, and the last one to finish wins.
    let made = path.with_extension(format!("{}.made", std::process::id()));
    let mut compiler = Command::new("c++");
    compiler.args(FLAGS).arg("-I").arg(room("cuda")).arg("-I").arg(room("tests/cuda/emulation"));
    compiler.arg("-o").arg(&made).args(more).arg(input);
    let output = compiler.output().map_err(|e| format!("{compiler:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{compiler:?}:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    std::fs::rename(&made, path).map_err(|e| format!("{}: {e}", path.display()))
}

/// What runs kernels, as an object that every program is linked with.
fn runner(folder: &Path) -> Result<PathBuf, String> {
    static RUNNER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let make = || {
        let mut hasher = DefaultHasher::new();
        (common(), FLAGS).hash(&mut hasher);
        let path = folder.join(format!("runner-{:016x}.o", hasher.finish()));
        if !path.is_file() {
            build(&path, &room("tests/cuda/emulation/runner.cpp"), &["-c".to_owned()])?;
        }
        Ok(path)
    };
    RUNNER.get_or_init(make).clone()
}

fn compile(name: &str, source: &str, macros: &[&str]) -> Result<Program, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-emulation");
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let path = folder.join(name);
    if path.is_file() {
        return Ok(Program { path });
    }
    // The text stays: the sanitizer's reports name its lines.
    let text = folder.join(format!("{name}.{}.cpp", std::process::id()));
    std::fs::write(&text, source).map_err(|e| format!("{}: {e}", text.display()))?;
    let mut more: Vec<String> = macros.iter().map(|set| (*set).to_owned()).collect();
    more.push(runner(&folder)?.display().to_string());
    build(&path, &text, &more)?;
    Ok(Program { path })
}
