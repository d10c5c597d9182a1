//! `kvdock-bench`: kvdock beside its peers and the machine's limits, side by side in one run.
//!
//! `cargo xtask bench` fetches the peers and starts it. Each row alternates between the two sides and
//! compares medians, so that whatever else the machine does meets both.

mod asked;
mod boundary;
mod break_even;
mod burst;
mod caller;
mod canvas;
mod compute;
mod disk;
mod fio;
#[path = "../plugin/keys.rs"]
mod keys;
mod limit;
mod llama;
mod lookup;
mod memory;
mod mooncake;
mod outside;
mod overlap;
mod plot;
mod restart;
mod row;
mod sample;
mod sglang;
mod start;
mod store;
mod stored;
mod swaps;
mod tier;
mod tree;
mod umbp;

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;

use crate::row::Report;
use crate::sample::Rounds;
use crate::stored::Stored;

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
    /// Fewer repetitions, and an end within ten minutes.
    #[arg(long)]
    quick: bool,
    /// Where the pictures of curves go; the folder `pictures` below that of the disk rows when not given.
    #[arg(long, value_name = "DIR")]
    pictures: Option<PathBuf>,
    /// Also write the rows to this file, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write what each turn of each row gave to this file, a JSON object a line: `{name, turns: [[ours, peer], ...]}`.
    #[arg(long, value_name = "FILE")]
    turns: Option<PathBuf>,
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
    pub rounds: Rounds,
    /// Whether the run has to end within ten minutes.
    pub quick: bool,
    /// Where pictures of curves go.
    pub pictures: PathBuf,
    filters: Vec<String>,
    /// After this moment no row begins.
    end: Option<Instant>,
    /// Rows that did not begin because of it.
    late: RefCell<BTreeSet<String>>,
    stored: OnceCell<Stored>,
}

/// A turn of a row is short enough for what began before this to end within ten minutes.
const QUICK: Duration = Duration::from_secs(530);

impl Bench {
    /// Whether the row `name` is wanted, and there is time for it.
    pub fn wants(&self, name: &str) -> bool {
        let wanted = self.filters.is_empty() || self.filters.iter().any(|filter| name.contains(filter.as_str()));
        let late = wanted && self.end.is_some_and(|end| Instant::now() >= end);
        if late {
            self.late.borrow_mut().insert(name.to_owned());
        }
        wanted && !late
    }

    /// A long prompt whose pages lie in storage; it is computed when it is asked for the first time.
    ///
    /// # Errors
    /// When it can't be computed or stored.
    pub fn stored(&self) -> Result<&Stored> {
        if let Some(stored) = self.stored.get() {
            return Ok(stored);
        }
        let made = Stored::make(self)?;
        Ok(self.stored.get_or_init(|| made))
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
    let quick = arguments.quick;
    let rounds = match quick {
        true => Rounds { count: 50, budget: Duration::from_secs(2) },
        false => Rounds { count: 200, budget: Duration::from_secs(10) },
    };
    let bench = Bench {
        model: arguments.model,
        peers: arguments.peers,
        scratch: scratch.path().to_path_buf(),
        threads: arguments.threads,
        rounds,
        quick,
        pictures: arguments.pictures.unwrap_or_else(|| below.join("pictures")),
        filters: arguments.rows,
        end: quick.then(|| Instant::now() + QUICK),
        late: RefCell::default(),
        stored: OnceCell::new(),
    };
    warn_if_busy();
    let mut report = Report::new(arguments.json.as_deref(), arguments.turns.as_deref())?;
    let mut failed = false;
    // What has a goal of the project's comes first.
    for rows in [
        compute::rows,
        start::rows,
        restart::rows,
        burst::rows,
        break_even::rows,
        overlap::rows,
        tier::rows,
        outside::rows,
        boundary::rows,
        disk::rows,
        lookup::rows,
        tree::rows,
        mooncake::rows,
        umbp::rows,
        memory::rows,
        swaps::rows,
    ] {
        // The others can be measured all the same. What starts servers for tests panics where a test would fail.
        match catch_unwind(AssertUnwindSafe(|| rows(&bench, &mut report))) {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => eprintln!("error: {error:#}"),
            Err(_) => eprintln!("error: a row panicked, as said above"),
        }
        failed = true;
    }
    for name in bench.late.take() {
        report.skip(&name, "there was no time left for it; without --quick there is")?;
    }
    report.print();
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
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
