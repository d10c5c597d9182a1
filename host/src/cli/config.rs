//! `kvdock config check` and `kvdock config reference`

use std::path::PathBuf;
use std::process::ExitCode;

use super::{Failure, Settings, print, say};
use crate::config::{Config, check_served};
use crate::plugin::schema::validate;
use crate::plugin::{find, search_path};

/// Checks a file as `serve` would.
pub(super) fn check(file: PathBuf) -> Result<ExitCode, Failure> {
    let name = file.display().to_string();
    let settings = Settings { config: Some(file), set: Vec::new() };
    let loaded = settings.load()?;
    for warning in &loaded.warnings {
        say(&format!("warning: {warning}"));
    }
    check_served(&loaded.config).map_err(|lines| Failure(lines.join("\n")))?;
    match &loaded.config.model.path {
        None => say("warning: model.path is not set; serving needs it, in the file or as --set model.path=FILE"),
        Some(path) if !path.exists() => {
            return Err(Failure(format!("{name}: model.path = {:?}: there is no such file or folder", path.display())));
        }
        Some(_) => {}
    }
    if let Err(problem) = check_backends(&loaded.config) {
        if loaded.config.storage.required {
            return Err(Failure(format!("{name}: {problem}")));
        }
        say(&format!("warning: serving would start without storage: {problem}"));
    }
    print(&format!("{name}: ok\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Finds the plugins of the backends that the file selects, and checks their keys against what the plugins take.
fn check_backends(config: &Config) -> Result<(), String> {
    let folders = search_path(&config.storage.plugin_path);
    for backend in config.storage.selected() {
        let table = config.storage.table(backend);
        let plugin = find(&table.plugin, &folders).map_err(|problem| format!("storage.{backend}: {problem}"))?;
        let schema = &plugin.note.config_schema;
        validate(backend, schema, &table.for_schema(schema))?;
    }
    Ok(())
}

/// Prints all keys.
pub(super) fn reference() -> Result<ExitCode, Failure> {
    print(&crate::config::reference())?;
    Ok(ExitCode::SUCCESS)
}
