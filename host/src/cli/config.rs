//! `kvdock config check` and `kvdock config reference`

use std::path::PathBuf;
use std::process::ExitCode;

use super::{Failure, Settings, print, say};
use crate::config::check_served;

/// Checks a file as `serve` would.
pub(super) fn check(file: PathBuf) -> Result<ExitCode, Failure> {
    let name = file.display().to_string();
    let settings = Settings { config: Some(file), set: Vec::new() };
    let loaded = settings.load()?;
    for warning in &loaded.warnings {
        say(&format!("warning: {warning}"));
    }
    check_served(&loaded.config).map_err(|lines| Failure(lines.join("\n")))?;
    print(&format!("{name}: ok\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints all keys.
pub(super) fn reference() -> Result<ExitCode, Failure> {
    print(&crate::config::reference())?;
    Ok(ExitCode::SUCCESS)
}
