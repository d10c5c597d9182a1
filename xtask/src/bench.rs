//! `cargo xtask bench`: kvdock beside its peers and the machine's limits, in one run.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;

use crate::process::{cargo, command, run as run_command, show};
use crate::{model, mooncake, paths, setup};

/// Options of `bench`.
#[derive(Args)]
pub struct Options {
    /// Fewer repetitions.
    #[arg(long)]
    quick: bool,
    /// Also write the rows to this file, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only the rows whose names contain one of these.
    rows: Vec<String>,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    setup::ensure(&[setup::CC, setup::PIP, setup::NPM, setup::FIO])?;
    let model = model::fetch()?;
    let peers = fetch_llama()?;
    if let Err(error) = mooncake::fetch() {
        eprintln!("warning: the real Mooncake services can't be had, their rows are skipped: {error:#}");
    }
    let packages = ["kvdock", "kvdock-plugin-file", "kvdock-plugin-mooncake", "kvdock-benches"];
    let mut build = cargo();
    build.args(["build", "--release", "--lib", "--bins", "--examples"]);
    for package in packages {
        build.args(["--package", package]);
    }
    run_command(&mut build)?;
    let program = paths::release()?.join("kvdock-bench");
    let mut bench = command(paths::text(&program)?);
    bench.arg("--model").arg(&model).arg("--peers").arg(&peers);
    if options.quick {
        bench.arg("--quick");
    }
    if let Some(file) = &options.json {
        let here = std::env::current_dir().context("can't find the current folder")?;
        bench.arg("--json").arg(here.join(file));
    }
    bench.args(&options.rows);
    let status = bench.status().with_context(|| format!("can't start `{}`", show(&bench)))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Fetches llama.cpp, prebuilt, through npm; answers the folder of `node_modules`.
fn fetch_llama() -> Result<PathBuf> {
    const VERSION: &str = "3.22.1";
    let folder = paths::cache().join("peers").join(format!("llama-{VERSION}"));
    let mark = folder.join("complete");
    if mark.exists() {
        return Ok(folder);
    }
    std::fs::create_dir_all(&folder).with_context(|| format!("can't create {}", folder.display()))?;
    std::fs::write(folder.join("package.json"), "{\"name\": \"peers\", \"private\": true}\n")
        .with_context(|| format!("can't write to {}", folder.display()))?;
    eprintln!("fetching llama.cpp (npm packages node-llama-cpp and @node-llama-cpp/linux-x64 {VERSION})");
    run_command(
        command("npm")
            .current_dir(&folder)
            .args(["install", "--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"])
            .args([format!("node-llama-cpp@{VERSION}"), format!("@node-llama-cpp/linux-x64@{VERSION}")]),
    )?;
    std::fs::write(&mark, VERSION).with_context(|| format!("can't write {}", mark.display()))?;
    Ok(folder)
}
