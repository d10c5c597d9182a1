//! `kvdock config check` and `kvdock config reference`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use kvdock_models::ModelError;

use super::{Failure, Settings, print, say};
use crate::config::{Config, check_served, host_keys_in};
use crate::plugin::schema::validate;
use crate::plugin::{Reason, find, search_path};

/// Checks a file as `serve` would, as far as that goes without loading weights or taking a port: keys and what they exclude, the model's header,
/// the device, the sizes of the pools in pages, and the plugins of all backends. Whether the pools fit in memory is seen by `serve` alone.
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
        Some(path) => check_model(path, loaded.config.engine.tp_size.max(1) as usize)
            .map_err(|problem| Failure(format!("{name}: {problem}")))?,
    }
    super::start::check_machine(&loaded.config).map_err(|problem| Failure(format!("{name}: {problem}")))?;
    let problems = check_backends(&loaded.config);
    if loaded.config.storage.required && !problems.is_empty() {
        let lines: Vec<String> = problems.iter().map(|problem| format!("{name}: {problem}")).collect();
        return Err(Failure(lines.join("\n")));
    }
    for problem in problems {
        say(&format!("warning: serving would start without this backend: {problem}"));
    }
    print(&format!("{name}: ok\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Looks at the model's header, and whether so many ranks can share it.
fn check_model(path: &Path, ranks: usize) -> Result<(), String> {
    kvdock_models::check_header(path, ranks).map(drop).map_err(|error| match error {
        ModelError::Ranks { .. } => format!("engine.tp_size = {ranks}: {error}"),
        _ => format!("model.path: {error}"),
    })
}

/// Finds the plugins of all backends that the file selects, and checks their keys against what the plugins take. Gives a line for each
/// backend that could not be attached.
fn check_backends(config: &Config) -> Vec<String> {
    let folders = search_path(&config.storage.plugin_path);
    let check = |backend: &str| -> Result<(), String> {
        let table = config.storage.table(backend);
        let plugin = find(&table.plugin, &folders).map_err(|problem| format!("storage.{backend}: {problem}"))?;
        check_pin(table.sha256.as_deref(), &plugin.path, plugin.sha256_hex())
            .map_err(|problem| format!("storage.{backend}.sha256: {problem}"))?;
        let schema = &plugin.note.config_schema;
        for key in host_keys_in(schema) {
            let plugin = &table.plugin;
            say(&format!(
                "warning: storage.{backend}.{key} is the host's: plugin {plugin} declares it too, and never sees its value"
            ));
        }
        table.check_key_scheme(schema, config.cache.layout(), super::start::alike(config))?;
        validate(backend, schema, &table.for_schema(schema)?).map(drop)
    };
    config.storage.selected().into_iter().filter_map(|backend| check(backend).err()).collect()
}

/// Whether the plugin's file is the one that the configuration demands.
fn check_pin(expected: Option<&str>, plugin: &Path, found: String) -> Result<(), String> {
    match expected {
        Some(expected) if !expected.eq_ignore_ascii_case(&found) => {
            Err(Reason::OtherDigest { expected: expected.to_owned(), found }.of(plugin).to_string())
        }
        _ => Ok(()),
    }
}

/// Prints all keys.
pub(super) fn reference() -> Result<ExitCode, Failure> {
    print(&crate::config::reference())?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use kvdock_models::testing::{TinyKind, TinyModel};

    use super::*;

    #[test]
    fn ranks_that_serve_refuses_passed_the_check() {
        let dir = tempfile::tempdir().unwrap();
        let model = TinyModel::new(TinyKind::Llama);
        model.write_hf(dir.path()).unwrap();
        check_model(dir.path(), 1).unwrap();
        check_model(dir.path(), 2).unwrap();
        let error = check_model(dir.path(), 7).unwrap_err();
        assert!(
            error.starts_with("engine.tp_size = 7: ") && error.contains("query heads, which 7 does not divide (1, 2"),
            "{error}"
        );
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        assert!(check_model(dir.path(), 1).unwrap_err().starts_with("model.path: "));
    }

    #[test]
    fn a_pin_that_serve_refuses_passed_the_check() {
        let plugin = Path::new("/plugins/libkvdock_plugin_file.so");
        let found = "ab".repeat(32);
        let error = check_pin(Some(&"00".repeat(32)), plugin, found.clone()).unwrap_err();
        assert!(error.contains(&found) && error.contains("libkvdock_plugin_file.so"), "{error}");
        check_pin(Some(&found.to_uppercase()), plugin, found.clone()).unwrap();
        check_pin(None, plugin, found).unwrap();
    }
}
