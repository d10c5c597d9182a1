//! `kvdock-bench`: kvdock beside its peers and the machine's limits, side by side in one run.
//!
//! `cargo xtask bench` fetches the peers and starts it. Each row alternates between the two sides and
//! compares medians, so that whatever else the machine does meets both.

mod boundary;
mod compute;
mod disk;
mod fio;
#[path = "../plugin/keys.rs"]
mod keys;
mod llama;
mod memory;
mod mooncake;
mod restart;
mod row;
mod sample;
mod store;
mod swaps;
mod tree;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use crate::row::Report;

/// Measures kvdock beside its peers and the machine's limits.
#[derive(Parser)]
#[command(name = "kvdock-bench")]
struct Arguments {
    /// The model, a GGUF file.
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// The folder with llama.cpp in its `node_modules`.
    #[arg(long, value_name = "DIR")]
    peers: PathBuf,
    /// Where the disk rows write; a folder below the current one when not given.
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Compute threads of both sides.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Fewer repetitions.
    #[arg(long)]
    quick: bool,
    /// Also write the rows to this file, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only the rows whose names contain one of these.
    rows: Vec<String>,
}

/// What the rows are measured with.
pub struct Bench {
    /// The model, a GGUF file.
    pub model: PathBuf,
    /// The folder with llama.cpp in its `node_modules`.
    pub peers: PathBuf,
    /// A fresh folder on the disk that is measured.
    pub scratch: PathBuf,
    /// Compute threads of both sides.
    pub threads: usize,
    /// How often each side is measured.
    pub rounds: usize,
    filters: Vec<String>,
}

impl Bench {
    /// Whether the row `name` is wanted.
    pub fn wants(&self, name: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|filter| name.contains(filter.as_str()))
    }
}

fn run(arguments: Arguments) -> Result<ExitCode> {
    let below = match arguments.scratch {
        Some(folder) => folder,
        None => std::env::current_dir().context("can't find the current folder")?.join(".cache"),
    };
    std::fs::create_dir_all(&below).with_context(|| format!("can't create {}", below.display()))?;
    let scratch = tempfile::Builder::new()
        .prefix("bench-")
        .tempdir_in(&below)
        .with_context(|| format!("can't create a folder in {}", below.display()))?;
    let bench = Bench {
        model: arguments.model,
        peers: arguments.peers,
        scratch: scratch.path().to_path_buf(),
        threads: arguments.threads,
        rounds: if arguments.quick { 3 } else { 7 },
        filters: arguments.rows,
    };
    warn_if_busy();
    let mut report = Report::new(arguments.json.as_deref())?;
    for rows in [
        compute::rows,
        restart::rows,
        boundary::rows,
        disk::rows,
        memory::rows,
        mooncake::rows,
        swaps::rows,
        tree::rows,
    ] {
        rows(&bench, &mut report)?;
    }
    report.print();
    Ok(ExitCode::SUCCESS)
}

/// Peers that wait for each other's threads suffer most from other work on the machine, which makes the ratios worthless.
fn warn_if_busy() {
    let load = std::fs::read_to_string("/proc/loadavg").ok();
    let load: Option<f64> = load.as_deref().and_then(|text| text.split(' ').next()).and_then(|text| text.parse().ok());
    let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get());
    if let Some(load) = load.filter(|load| *load > 0.5 * cpus as f64) {
        eprintln!("warning: this machine is busy (load {load} on {cpus} CPUs); the ratios mean little");
    }
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
