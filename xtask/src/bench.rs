//! `cargo xtask bench`: kvdock beside its peers and the machine's limits, in one run.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::process::{cargo, command, run as run_command, show};
use crate::{model, mooncake, paths, setup, umbp};

/// Options of `bench`.
#[derive(Args)]
pub struct Options {
    /// Fewer repetitions, and an end within ten minutes.
    #[arg(long)]
    quick: bool,
    /// Where the pictures of curves go; `.cache/pictures` when not given.
    #[arg(long, value_name = "DIR")]
    pictures: Option<PathBuf>,
    /// Also write the rows to this file, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write what each turn of each row gave to this file, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    turns: Option<PathBuf>,
    /// Also fetch SGLang, 5 GB with torch, and measure its tree core and its file backend.
    #[arg(long)]
    sglang: bool,
    /// Only the rows whose names contain one of these. The word `growth` alone measures how costs grow with the cache, in place of rows.
    rows: Vec<String>,
}

/// What measures growth in place of rows.
const GROWTH: &str = "growth";

pub fn run(options: &Options) -> Result<ExitCode> {
    match options.rows.as_slice() {
        [only] if only == GROWTH => growth(options),
        rows if rows.iter().any(|row| row == GROWTH) => bail!("`{GROWTH}` stands for no row: ask for it alone"),
        _ => rows(options),
    }
}

/// Neither a model nor a peer is needed.
fn growth(options: &Options) -> Result<ExitCode> {
    setup::ensure(&[setup::CC])?;
    let program = "kvdock-bench-growth";
    run_command(cargo().args(["build", "--release", "--package", "kvdock-benches", "--bin", program]))?;
    start(program, options, |_| {})
}

fn rows(options: &Options) -> Result<ExitCode> {
    setup::ensure(&[setup::CC, setup::PIP, setup::NPM, setup::FIO])?;
    let model = model::fetch()?;
    let peers = fetch_llama()?;
    if let Err(error) = mooncake::fetch() {
        eprintln!("warning: the real Mooncake services can't be had, their rows are skipped: {error:#}");
    }
    if let Err(error) = umbp::fetch() {
        eprintln!("warning: the real UMBP client can't be had, rows beside it are skipped: {error:#}");
    }
    if options.sglang {
        fetch_sglang()?;
    }
    let packages = ["kvdock", "kvdock-plugin-file", "kvdock-plugin-mooncake", "kvdock-plugin-umbp", "kvdock-benches"];
    let mut build = cargo();
    build.args(["build", "--release", "--lib", "--bins", "--examples"]);
    for package in packages {
        build.args(["--package", package]);
    }
    run_command(&mut build)?;
    start("kvdock-bench", options, |bench| {
        if let Some(file) = &options.turns {
            bench.arg("--turns").arg(file);
        }
        bench.arg("--model").arg(&model).arg("--peers").arg(&peers).args(&options.rows);
    })
}

/// Runs a program of the benches with what all of them take.
fn start(program: &str, options: &Options, more: impl FnOnce(&mut Command)) -> Result<ExitCode> {
    let program = paths::release()?.join(program);
    let mut bench = command(paths::text(&program)?);
    // Names are meant from where the command was given.
    let here = std::env::current_dir().context("can't find the current folder")?;
    match &options.pictures {
        Some(folder) => bench.arg("--pictures").arg(here.join(folder)),
        None => bench.arg("--pictures").arg(paths::cache().join("pictures")),
    };
    if options.quick {
        bench.arg("--quick");
    }
    if let Some(file) = &options.json {
        bench.arg("--json").arg(here.join(file));
    }
    more(&mut bench);
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

/// Fetches SGLang, and those of the packages it needs that its tree core and file backend import.
fn fetch_sglang() -> Result<()> {
    let folder = paths::cache().join("peers").join("sglang-0.5.23");
    let mark = folder.join("complete");
    if mark.exists() {
        return Ok(());
    }
    eprintln!("fetching SGLang 0.5.23 and torch (Python packages, 5 GB)");
    let packages = ["numpy", "pydantic", "xxhash", "psutil", "pybase64", "packaging", "pillow", "starlette", "msgspec"];
    let more = ["torch==2.14.1", "pyzmq", "tqdm", "aiohttp"];
    let parts: [(&[&str], &[&str]); 2] = [(&["--no-deps"], &["sglang==0.5.23"]), (&packages, &more)];
    for (first, second) in parts {
        run_command(
            command("python3")
                .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--root-user-action=ignore"])
                .args(["--upgrade", "--target", paths::text(&folder)?])
                .args(first)
                .args(second),
        )?;
    }
    std::fs::write(&mark, "0.5.23").with_context(|| format!("can't write {}", mark.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_asked_for_alone() {
        let rows = vec!["growth".to_owned(), "decode".to_owned()];
        let error =
            run(&Options { quick: true, pictures: None, json: None, turns: None, sglang: false, rows }).unwrap_err();
        assert!(error.to_string().contains("alone"), "{error}");
    }
}
