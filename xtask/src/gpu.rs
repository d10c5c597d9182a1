//! `cargo xtask gpu-check` and `gpu-bundle`: what has to be checked where there is a GPU.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::process::{cargo, command, run as run_command, show, succeeds};
use crate::{cuda, paths, setup};

/// Most bytes of a bundle.
const MOST: u64 = 60 << 20;
/// What a bundle runs.
const PROGRAMS: [&str; 3] = ["kvdock", "libkvdock_plugin_file.so", "kvdock-gpu-check"];
/// The folder with machine code, beside the programs; the server and the checks look there by themselves.
const CODE: &str = "cuda-code";

/// Options of `gpu-check`.
#[derive(Args)]
pub struct CheckOptions {
    /// Number of the GPU.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Write the table of timings here as well.
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
}

/// Options of `gpu-bundle`.
#[derive(Args)]
pub struct BundleOptions {
    /// The folder to make.
    #[arg(default_value = ".cache/gpu-bundle")]
    folder: PathBuf,
}

fn build() -> Result<()> {
    setup::ensure(&[setup::CC])?;
    let mut build = cargo();
    build.args(["build", "--release", "--lib", "--bins"]);
    for package in ["kvdock", "kvdock-plugin-file", "kvdock-gpu-check"] {
        build.args(["--package", package]);
    }
    run_command(&mut build)
}

/// Builds and runs the checks; under compute-sanitizer first, where it is installed.
///
/// # Errors
/// When the checks can't be built or started.
pub fn check(options: &CheckOptions) -> Result<ExitCode> {
    build()?;
    let program = paths::release()?.join("kvdock-gpu-check");
    let program = paths::text(&program)?;
    let device = options.device.to_string();
    if succeeds("compute-sanitizer", &["--version"]) {
        let mut checked = command("compute-sanitizer");
        checked.args(["--error-exitcode", "1", program, "--small", "--device", &device]);
        if !status(&mut checked)? {
            return Ok(ExitCode::FAILURE);
        }
    } else {
        println!("compute-sanitizer is not installed: the kernels are checked without it");
    }
    let mut all = command(program);
    all.args(["--device", &device]);
    if let Some(file) = &options.table {
        all.arg("--table").arg(std::env::current_dir().context("can't find the current folder")?.join(file));
    }
    Ok(if status(&mut all)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn status(command: &mut Command) -> Result<bool> {
    let line = show(command);
    Ok(command.status().with_context(|| format!("can't start `{line}`"))?.success())
}

/// What is run on the machine with the GPU.
const RUN: &str = r#"#!/bin/sh
# Checks kvdock on this machine's GPU. Takes the options of kvdock-gpu-check.
set -eu
cd "$(dirname "$0")"
if command -v compute-sanitizer >/dev/null; then
    compute-sanitizer --error-exitcode 1 ./kvdock-gpu-check --small
fi
exec ./kvdock-gpu-check "$@"
"#;

/// Makes a folder that needs neither Rust nor a compiler of CUDA.
///
/// # Errors
/// When something can't be built or fetched, or the folder becomes too large.
pub fn bundle(options: &BundleOptions) -> Result<ExitCode> {
    build()?;
    let folder = paths::root().join(&options.folder);
    if folder.exists() {
        // Only what this command has made is made anew.
        if !folder.join("run").is_file() {
            bail!("{} is there, and no bundle: name another folder", folder.display());
        }
        fs::remove_dir_all(&folder).with_context(|| format!("can't remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder.join(CODE)).with_context(|| format!("can't make {}", folder.display()))?;
    let release = paths::release()?;
    for name in PROGRAMS {
        let (from, to) = (release.join(name), folder.join(name));
        run_command(command("strip").arg("-o").arg(&to).arg(&from))?;
    }
    let nvrtc = cuda::fetch()?;
    let mut compile = command(paths::text(&release.join("kvdock-gpu-check"))?);
    compile.env("KVDOCK_CUDA_PATH", nvrtc).arg("--make-code").arg(folder.join(CODE));
    compile.stdout(std::process::Stdio::null());
    run_command(&mut compile)?;
    let script = folder.join("run");
    fs::write(&script, RUN).with_context(|| format!("can't write {}", script.display()))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let bytes = size(&folder)?;
    println!(
        "{}: {:.1} MiB; copy it to a machine with a GPU and call `./run`",
        folder.display(),
        bytes as f64 / 1048576.0
    );
    if bytes > MOST {
        bail!("the bundle is larger than {} MiB", MOST >> 20);
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes of the files below a folder.
fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let about = entry.metadata()?;
        bytes += if about.is_dir() { size(&entry.path())? } else { about.len() };
    }
    Ok(bytes)
}
