//! `cargo xtask tiny-models`: small checkpoints of every model family, to try things with and to make golden values from.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;

use crate::paths;
use crate::process::{cargo, run};

/// Options of `tiny-models`.
#[derive(Args)]
pub struct Options {
    /// The folder to write them into, one folder each.
    #[arg(default_value = ".cache/tiny-models")]
    folder: PathBuf,
}

pub fn write(options: &Options) -> Result<ExitCode> {
    let folder = std::path::absolute(&options.folder).context("the folder's name can't be made absolute")?;
    let mut cargo = cargo();
    cargo.args(["run", "--quiet", "--release", "-p", "kvdock-models", "--example", "tiny", "--", "all"]);
    run(cargo.arg(paths::text(&folder)?))?;
    Ok(ExitCode::SUCCESS)
}
