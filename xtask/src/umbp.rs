//! The real UMBP services, for the tests of the UMBP plugin: published programs from the Python package index.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::paths;
use crate::process::{command, run};
use crate::setup;

const RELEASE: &str = "1.2.4";

/// Fetches the programs once, builds what they need to run without a GPU, and answers the folder they lie in.
///
/// # Errors
/// When they can't be fetched, or do not run here.
pub fn fetch() -> Result<PathBuf> {
    setup::ensure(&[setup::CC, setup::CXX, setup::PIP])?;
    let folder = paths::cache().join(format!("umbp-{RELEASE}"));
    let script = paths::root().join("plugins/umbp/tests/peer/setup.sh");
    run(command("bash").arg(script).arg(&folder)).with_context(|| format!("UMBP {RELEASE} can't be set up"))?;
    Ok(folder)
}
