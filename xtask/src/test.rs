//! `cargo xtask test`: everything the tests need, then every test.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};
use clap::Args;

use crate::process::{Stages, cargo, run as run_command, show};
use crate::{cuda, model, mooncake, setup, umbp};

/// Options of `test`.
#[derive(Args)]
pub struct Options {
    /// Only the tests whose names contain one of these.
    filters: Vec<String>,
    /// Only the tests of these crates.
    #[arg(long, short, value_name = "CRATE")]
    package: Vec<String>,
    /// More arguments for the test programs, such as `--nocapture`.
    #[arg(last = true)]
    arguments: Vec<String>,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let mut stages = Stages::default();
    set_up(&mut stages)?;
    stages.stage("build", build)?;
    let closing = stages.stage("test", || tests(options))?;
    closing.print(&stages);
    Ok(if closing.succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Installs what the tests need, fetches the model, and compiles the CUDA kernels.
pub fn set_up(stages: &mut Stages) -> Result<()> {
    stages.stage("tools", || setup::ensure(&[setup::CC, setup::CXX, setup::MAKE, setup::PIP]))?;
    stages.stage("model", model::fetch)?;
    if let Err(error) = stages.stage("mooncake", || mooncake::fetch().and_then(|_| mooncake::fetch_etcd())) {
        // Everything else can be tested without; the tests of this plugin that need them fail, and say so.
        eprintln!(
            "warning: the real Mooncake services and etcd can't be had, the tests that need them will fail: {error:#}"
        );
    }
    match stages.stage("nvrtc", cuda::fetch) {
        // What does not compile is an error; that the compiler can't be had is none, as nothing else needs it.
        Ok(libraries) => stages.stage("cuda-compile", || cuda::check(&libraries))?,
        Err(error) => eprintln!("warning: NVRTC can't be had, the CUDA kernels are not compiled: {error:#}"),
    }
    if let Err(error) = stages.stage("umbp", umbp::fetch) {
        eprintln!("warning: the real UMBP services can't be had, the tests that need them will fail: {error:#}");
    }
    Ok(())
}

/// Builds the server, the plugins and the tests. All targets at once: cargo then picks one set of
/// features for all of them, and nothing is built twice.
pub fn build() -> Result<()> {
    run_command(cargo().args(["build", "--release", "--workspace", "--lib", "--bins", "--tests", "--examples"]))
}

/// What the run ended with.
pub struct Closing {
    /// Whether cargo was satisfied.
    pub succeeded: bool,
    passed: u64,
    failed: u64,
    ignored: u64,
    failures: Vec<String>,
    error: Option<String>,
}

impl Closing {
    /// Prints the totals, the names of the tests that failed, and how long each stage took.
    pub fn print(&self, stages: &Stages) {
        for name in &self.failures {
            println!("failed: {name}");
        }
        println!("{}", stages.summary());
        if let Some(error) = &self.error {
            println!("{error}");
        }
        let word = if self.succeeded { "ok" } else { "FAILED" };
        println!("test result: {word}. {} passed; {} failed; {} ignored", self.passed, self.failed, self.ignored);
    }

    fn read(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("test result: ") {
            self.passed += count(rest, " passed");
            self.failed += count(rest, " failed");
            self.ignored += count(rest, " ignored");
        } else if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            self.failures.push(name.to_owned());
        }
    }
}

/// The number right before `word`.
fn count(text: &str, word: &str) -> u64 {
    text.split(word)
        .next()
        .and_then(|before| before.rsplit([' ', '.']).next())
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

fn tests(options: &Options) -> Result<Closing> {
    let mut cargo = cargo();
    cargo.args(["test", "--release", "--no-fail-fast"]);
    if options.package.is_empty() {
        cargo.arg("--workspace");
    }
    for package in &options.package {
        cargo.args(["--package", package]);
    }
    cargo.arg("--").args(&options.filters).args(&options.arguments);
    follow(&mut cargo)
}

/// Runs cargo's tests, passes their output on as it comes, and reads the results from it.
pub fn follow(cargo: &mut Command) -> Result<Closing> {
    let line = show(cargo);
    let mut child = cargo.stdout(Stdio::piped()).spawn().with_context(|| format!("can't start `{line}`"))?;
    let stdout = child.stdout.take().context("cargo has no standard output")?;
    let mut closing = Closing { succeeded: false, passed: 0, failed: 0, ignored: 0, failures: Vec::new(), error: None };
    let mut out = std::io::stdout();
    for bytes in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
        out.write_all(&bytes).and_then(|()| out.write_all(b"\n")).context("can't write to standard output")?;
        closing.read(&String::from_utf8_lossy(&bytes));
    }
    let status = child.wait().context("can't wait for cargo")?;
    closing.succeeded = status.success();
    if !status.success() {
        closing.error = Some(format!("error: `{line}` failed: {status}"));
    }
    Ok(closing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_summed_and_failures_named() {
        let mut closing =
            Closing { succeeded: false, passed: 0, failed: 0, ignored: 0, failures: Vec::new(), error: None };
        closing.read("test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.1s");
        closing.read("test cache::evicts ... FAILED");
        closing.read("test cache::fills ... ok");
        closing.read("test result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!((closing.passed, closing.failed, closing.ignored), (16, 1, 1));
        assert_eq!(closing.failures, ["cache::evicts"]);
    }
}
