//! `cargo xtask soak`: the tests that run for a while, at their full length.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::process::{Stages, cargo};
use crate::test;

/// Options of `soak`.
#[derive(Args)]
pub struct Options {
    /// How many times longer than in `cargo xtask test`; 7 gives at least 20 kills, 60 seconds of load, 3 minutes of
    /// swaps under load, ten minutes of random operations on a Mooncake store, and 50 kills and a million operations
    /// of a UMBP store.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    factor: u32,
    /// Only the soak tests whose names contain one of these.
    filters: Vec<String>,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    let mut stages = Stages::default();
    test::set_up(&mut stages)?;
    stages.stage("build", test::build)?;
    let mut cargo = cargo();
    cargo.args(["test", "--release", "--no-fail-fast", "--workspace", "--lib", "--bins", "--tests", "--"]);
    if options.filters.is_empty() {
        cargo.arg("soak");
    }
    // One after the other: each of them is meant to load the machine by itself.
    cargo.args(&options.filters).arg("--test-threads=1").env("KVDOCK_SOAK", options.factor.to_string());
    let closing = stages.stage("soak", || test::follow(&mut cargo))?;
    closing.print(&stages);
    Ok(if closing.succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
