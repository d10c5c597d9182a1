//! Where things lie in the tree.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The root of the workspace.
pub fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// The folder of everything that is fetched; git does not track it.
pub fn cache() -> PathBuf {
    root().join(".cache")
}

/// The folder of the release build this command itself was started from.
///
/// # Errors
/// When the system can't say where this program lies.
pub fn release() -> Result<PathBuf> {
    let program = std::env::current_exe().context("can't find the folder of the release build")?;
    let folder = program.parent().context("the folder of the release build has no name")?;
    Ok(folder.to_path_buf())
}

/// `path` as text for a command line.
///
/// # Errors
/// When it is not UTF-8.
pub fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8; move the tree to a folder whose name is", path.display()))
}
