//! The real Mooncake services, for the tests of the Mooncake plugin: published programs from the Python package index.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::paths;
use crate::process::{command, run, succeeds};
use crate::setup;

const PACKAGE: &str = "mooncake-transfer-engine-non-cuda";
const RELEASE: &str = "0.3.13.post1";

/// Fetches the programs once and answers the folder they lie in.
///
/// # Errors
/// When they can't be fetched, or do not run here.
pub fn fetch() -> Result<PathBuf> {
    let folder = paths::cache().join(format!("mooncake-{RELEASE}"));
    let master = folder.join("mooncake/mooncake_master");
    let master = paths::text(&master)?;
    if succeeds(master, &["--version"]) {
        return Ok(folder);
    }
    setup::ensure(&[setup::PIP, setup::MOONCAKE_LIBRARIES])?;
    if !folder.join("mooncake").exists() {
        std::fs::create_dir_all(paths::cache()).context("can't create the folder of what is fetched")?;
        // Beside its last place, so that the move at the end is a rename on one file system.
        let scratch = tempfile::Builder::new().prefix("fetch-").tempdir_in(paths::cache())?;
        eprintln!("fetching the Python package {PACKAGE} {RELEASE} (44 MiB)");
        run(command("python3")
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--root-user-action=ignore"])
            .arg("--target")
            .arg(scratch.path())
            .arg(format!("{PACKAGE}=={RELEASE}")))?;
        let fetched = scratch.keep();
        std::fs::rename(&fetched, &folder)
            .with_context(|| format!("can't move {} to {}", fetched.display(), folder.display()))?;
    }
    run(command(master).arg("--version")).with_context(|| format!("Mooncake {RELEASE} does not run here"))?;
    Ok(folder)
}
