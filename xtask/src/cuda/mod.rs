//! `cargo xtask cuda-compile`: every CUDA kernel, compiled for the architectures that are served, without a GPU.

mod nvrtc;
mod table;
mod variants;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use clap::Args;
use sha2::{Digest, Sha256};

use crate::process::{command, run as run_command};
use crate::{paths, setup};
use nvrtc::{Header, Nvrtc};
use variants::Variant;

const PACKAGE: &str = "nvidia-cuda-nvrtc";
const RELEASE: &str = "13.5.37";
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

/// How the names of attention kernels begin: they must not spill registers.
const ATTENTION: [&str; 3] = ["paged_", "latent_", "index_tiles"];

/// Options of `cuda-compile`.
#[derive(Args)]
pub struct Options {
    /// Write the table of kernels to `kernels/cuda/TABLE.md`.
    #[arg(long)]
    table: bool,
    /// Only files whose names contain this.
    filter: Option<String>,
}

/// What the compiler says of one kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Usage {
    registers: u32,
    shared: u32,
    stack: u32,
    spills: u32,
}

/// One kernel of one variant for one architecture.
struct Compiled {
    variant: Variant,
    architecture: &'static str,
    kernel: String,
    usage: Usage,
}

/// Fetches NVRTC once and answers the folder of its libraries.
///
/// # Errors
/// When it can't be fetched.
pub fn fetch() -> Result<PathBuf> {
    let folder = paths::cache().join(format!("nvrtc-{RELEASE}"));
    let libraries = folder.join("nvidia/cu13/lib");
    if libraries.is_dir() {
        return Ok(libraries);
    }
    setup::ensure(&[setup::PIP])?;
    std::fs::create_dir_all(paths::cache()).context("can't create the folder of what is fetched")?;
    let scratch = tempfile::Builder::new().prefix("fetch-").tempdir_in(paths::cache())?;
    eprintln!("fetching the Python package {PACKAGE} {RELEASE} (58 MiB)");
    run_command(
        command("python3")
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--root-user-action=ignore"])
            .args(["--no-deps", "--target"])
            .arg(scratch.path())
            .arg(format!("{PACKAGE}=={RELEASE}")),
    )?;
    let fetched = scratch.keep();
    std::fs::rename(&fetched, &folder)
        .with_context(|| format!("can't move {} to {}", fetched.display(), folder.display()))?;
    Ok(libraries)
}

/// Compiles everything and prints what each kernel takes.
///
/// # Errors
/// When a kernel does not compile or compiles with a warning, or an attention kernel spills registers.
pub fn run(options: &Options) -> Result<ExitCode> {
    let libraries = fetch()?;
    let compiled = compile(&libraries, options.filter.as_deref())?;
    for one in &compiled {
        let Usage { registers, shared, stack, spills } = one.usage;
        println!(
            "{:8} {:14} {:22} {:44} {registers:3} registers {shared:6} B shared {stack:3} B stack {spills:3} B spilled",
            one.architecture,
            one.variant.file,
            one.kernel,
            one.variant.macros.join(" "),
        );
    }
    if options.table {
        let path = folder().join("TABLE.md");
        std::fs::write(&path, table::markdown(&compiled)).with_context(|| format!("can't write {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The check that the tests begin with; what has not changed since it was compiled is not compiled again.
///
/// # Errors
/// As [`run`].
pub fn check(libraries: &Path) -> Result<()> {
    let compiled = compile(libraries, None)?;
    // All of them are for this one.
    let count = compiled.iter().filter(|one| one.architecture == "sm_90a").count();
    eprintln!("{count} CUDA kernels compile for {}", ARCHITECTURES.join(", "));
    Ok(())
}

fn folder() -> PathBuf {
    paths::root().join("kernels/cuda")
}

fn sources() -> Result<BTreeMap<String, String>> {
    let folder = folder();
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(&folder).with_context(|| format!("can't read {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if name.ends_with(".cu") || name.ends_with(".cuh") {
            let text = std::fs::read_to_string(&path).with_context(|| format!("can't read {}", path.display()))?;
            all.insert(name, text);
        }
    }
    Ok(all)
}

fn compile(libraries: &Path, filter: Option<&str>) -> Result<Vec<Compiled>> {
    let sources = sources()?;
    let headers: Vec<Header<'_>> =
        sources.iter().filter(|(name, _)| name.ends_with(".cuh")).map(|(name, text)| Header { name, text }).collect();
    let mut jobs = Vec::new();
    for (name, text) in sources.iter().filter(|(name, _)| name.ends_with(".cu")) {
        if filter.is_some_and(|filter| !name.contains(filter)) {
            continue;
        }
        for variant in variants::of(name) {
            for architecture in ARCHITECTURES.into_iter().filter(|architecture| variants::is_for(name, architecture)) {
                jobs.push((text.as_str(), variant.clone(), architecture));
            }
        }
    }
    let nvrtc = Nvrtc::load(libraries)?;
    let kept = paths::cache().join("cuda-compile");
    std::fs::create_dir_all(&kept).with_context(|| format!("can't create {}", kept.display()))?;
    let next = Mutex::new(jobs.iter().enumerate());
    let done = Mutex::new(BTreeMap::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let job = lock(&next).next();
                    let Some((index, (text, variant, architecture))) = job else { break };
                    let log = log_of(&nvrtc, &kept, text, &headers, variant, architecture);
                    lock(&done).insert(index, log);
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (mut all, mut faults) = (Vec::new(), String::new());
    for (index, (text, variant, architecture)) in jobs.into_iter().enumerate() {
        let what = format!("{} {} for {architecture}", variant.file, variant.macros.join(" "));
        let log = done.remove(&index).context("a kernel was not compiled")?;
        match log.and_then(|log| judge(&log, text)) {
            Ok(kernels) => all.extend(kernels.into_iter().map(|(kernel, usage)| Compiled {
                variant: variant.clone(),
                architecture,
                kernel,
                usage,
            })),
            Err(error) => {
                let _ = writeln!(faults, "{what}: {error:#}");
            }
        }
    }
    if !faults.is_empty() {
        bail!("{faults}");
    }
    Ok(all)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The compiler's log; a log of the same inputs is taken from where it was kept.
fn log_of(
    nvrtc: &Nvrtc,
    kept: &Path,
    text: &str,
    headers: &[Header<'_>],
    variant: &Variant,
    architecture: &str,
) -> Result<String> {
    let mut options: Vec<String> = ["--std=c++17", "--fmad=false", "--ptxas-options=-v"].map(str::to_owned).into();
    options.push(format!("--gpu-architecture={architecture}"));
    options.extend(variant.macros.iter().cloned());
    let mut hash = Sha256::new();
    hash.update(RELEASE);
    for part in options.iter().map(String::as_str).chain(headers.iter().map(|header| header.text)).chain([text]) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let name: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let path = kept.join(name);
    if let Ok(log) = std::fs::read_to_string(&path) {
        return Ok(log);
    }
    let log = nvrtc.compile(&variant.file, text, headers, &options)?;
    // Beside its last place first: another run may read meanwhile.
    let scratch = tempfile::NamedTempFile::new_in(kept)?;
    std::fs::write(scratch.path(), &log)?;
    scratch.persist(&path).with_context(|| format!("can't write {}", path.display()))?;
    Ok(log)
}

/// What the log of a good compilation says of each kernel; an error for warnings, and for attention that spills registers.
fn judge(log: &str, text: &str) -> Result<Vec<(String, Usage)>> {
    if let Some(line) = log.lines().find(|line| line.contains("warning")) {
        bail!("compiles with a warning: {line}");
    }
    let mut kernels: Vec<(String, Usage)> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            kernels.push((rest.split('\'').next().unwrap_or_default().to_owned(), Usage::default()));
        }
        let Some((kernel, usage)) = kernels.last_mut() else { continue };
        let before = |word: &str| {
            let number = line.split(word).next().and_then(|before| before.rsplit([' ', ',']).next());
            number.filter(|_| line.contains(word)).and_then(|number| number.parse::<u32>().ok())
        };
        if let Some(registers) = before(" registers") {
            usage.registers = registers;
        }
        usage.shared = before(" bytes smem").unwrap_or(usage.shared);
        usage.stack = before(" bytes stack frame").unwrap_or(usage.stack);
        usage.spills = before(" bytes spill stores").unwrap_or(usage.spills);
        if usage.spills > 0 && ATTENTION.iter().any(|begin| kernel.starts_with(begin)) {
            bail!("{kernel} spills {} bytes of registers", usage.spills);
        }
    }
    if kernels.is_empty() || kernels.iter().any(|(_, usage)| usage.registers == 0) {
        bail!("the compiler's log does not say what the kernels take:\n{log}");
    }
    if text.contains("FORMAT(") || text.contains("EXPORT(name)") {
        return Ok(kernels);
    }
    let exported = text.lines().filter_map(|line| line.strip_prefix("EXPORT(")?.strip_suffix(')'));
    for name in exported {
        if !kernels.iter().any(|(kernel, _)| kernel == name) {
            bail!("there is no kernel {name} in the compiler's log");
        }
    }
    Ok(kernels)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "ptxas info    : Compiling entry function 'add' for 'sm_90a'\n\
        ptxas info    : Function properties for add\n\
        ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
        ptxas info    : Used 25 registers, used 1 barriers, 8 bytes cumulative stack size, 128 bytes smem\n";

    #[test]
    fn the_log_is_read() {
        let usage = Usage { registers: 25, shared: 128, stack: 8, spills: 0 };
        assert_eq!(judge(LOG, "EXPORT(add)\n").unwrap(), [("add".to_owned(), usage)]);
        assert!(judge(LOG, "EXPORT(sub)\n").unwrap_err().to_string().contains("no kernel sub"));
    }

    #[test]
    fn warnings_and_spills_of_attention_are_errors() {
        let spilled = LOG.replace("0 bytes spill stores", "16 bytes spill stores");
        assert_eq!(judge(&spilled, "").unwrap()[0].1.spills, 16);
        let attention = spilled.replace("'add'", "'paged_decode'");
        assert!(judge(&attention, "").unwrap_err().to_string().contains("paged_decode spills 16 bytes"));
        let warned = format!("{LOG}a.cu(3): warning #177-D: variable \"x\" was declared but never referenced\n");
        assert!(judge(&warned, "").unwrap_err().to_string().contains("#177-D"));
        assert!(judge("", "").is_err());
    }
}
