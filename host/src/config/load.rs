//! Merging the sources, checking every key, and reading the typed structs.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

use toml::Value;

use super::error::{ConfigError, ConfigErrors, Origin};
use super::file;
use super::keys::{self, KEYS};
use super::name::check_name;
use super::settings::Config;
use super::source::{self, Leaf, Leaves, join};
use super::storage::BackendTable;
use super::value::{nearest, show};
use crate::plugin::MOST_BACKENDS;

/// What a configuration is made of.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The TOML file, if one is given.
    pub file: Option<PathBuf>,
    /// Environment variables; those that don't begin with `KVDOCK_` are passed over.
    pub env: Vec<(OsString, OsString)>,
    /// `KEY=VALUE` of each `--set`, in order.
    pub set: Vec<String>,
}

impl Sources {
    /// A file, `--set` arguments, and the environment of this process.
    pub fn from_process(file: Option<PathBuf>, set: Vec<String>) -> Self {
        Self { file, env: std::env::vars_os().collect(), set }
    }
}

/// A configuration that passed its checks.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// What is odd but does not stop the start, one line each.
    pub warnings: Vec<String>,
}

/// Reads, merges and checks.
///
/// # Errors
/// Everything that is wrong, each with its place, key, the value found and the values allowed.
pub fn load(sources: &Sources) -> Result<Loaded, ConfigErrors> {
    let mut warnings = Vec::new();
    let mut errors = Vec::new();
    let mut leaves = defaults();
    if let Some(file) = &sources.file {
        let name = file.display().to_string();
        let origin = Origin::File { path: name.clone(), line: None };
        let text = file::text(file, file::PATIENCE).map_err(|message| ConfigError::new(&origin, message));
        match text.and_then(|text| source::from_file(&name, &text)) {
            Ok(over) => leaves.overlay(over),
            Err(error) => errors.push(error),
        }
    }
    leaves.overlay(source::from_env(sources.env.clone(), &mut warnings));
    for argument in &sources.set {
        match source::from_set(argument) {
            Ok(over) => leaves.overlay(over),
            Err(error) => errors.push(error),
        }
    }
    let config = check(&leaves, &mut errors);
    match config {
        Some(config) if errors.is_empty() => {
            warnings.extend(unselected(&config));
            Ok(Loaded { config, warnings })
        }
        _ => Err(ConfigErrors(errors)),
    }
}

fn defaults() -> Leaves {
    let mut leaves = Leaves::default();
    for key in KEYS {
        let parsed = key.default.and_then(|text| text.parse::<Value>().ok());
        if let Some(value) = parsed {
            leaves.put(source::split(key.path), Leaf { value, origin: Origin::Default });
        }
    }
    leaves
}

fn check(leaves: &Leaves, errors: &mut Vec<ConfigError>) -> Option<Config> {
    let before = errors.len();
    let mut root = toml::Table::new();
    let mut backends = BTreeSet::new();
    for section in sections() {
        root.insert(section.to_owned(), Value::Table(toml::Table::new()));
    }
    for (path, leaf) in leaves.iter() {
        let dotted = join(path);
        if let Some(key) = keys::find(&dotted) {
            match key.kind.check(&leaf.value) {
                Ok(value) => insert(&mut root, path, value),
                Err(takes) => {
                    let hint = key
                        .kind
                        .nearest_choice(&leaf.value)
                        .map(|word| format!("; did you mean \"{word}\"?"))
                        .unwrap_or_default();
                    let found = match key.kind {
                        super::value::Kind::Secret => "the value given".to_owned(),
                        _ => show(&leaf.value),
                    };
                    errors.push(ConfigError::new(&leaf.origin, format!("{dotted} = {found}: takes {takes}{hint}")));
                }
            }
        } else if source::is_backend_path(path) || (is_empty_table(&leaf.value) && is_backend_section(path)) {
            backends.extend(path.get(1).cloned());
        } else if !(is_empty_table(&leaf.value) && keys::is_section(&dotted)) {
            errors.push(unknown(path, leaf));
        }
    }
    if errors.len() > before {
        return None;
    }
    let mut config: Config = match Value::Table(root).try_into() {
        Ok(config) => config,
        Err(error) => {
            errors.push(ConfigError::new(&Origin::Default, error.to_string()));
            return None;
        }
    };
    for name in backends {
        if let Err(wrong) = check_name(&name) {
            let is_of_it = |path: &source::Path| {
                path.first().is_some_and(|section| section == "storage") && path.get(1) == Some(&name)
            };
            let origin =
                leaves.iter().find(|(path, _)| is_of_it(path)).map_or(&Origin::Default, |(_, leaf)| &leaf.origin);
            errors.push(ConfigError::new(origin, format!("the name of a backend's table [storage.NAME]: {wrong}")));
            continue;
        }
        let table = BackendTable::read(&name, leaves, errors);
        config.storage.tables.insert(name, table);
    }
    across(&mut config, leaves, errors);
    Some(config)
}

/// A line for each backend's table with keys that no list of backends names: it does nothing until the backend is attached by a request.
fn unselected(config: &Config) -> Vec<String> {
    let selected = config.storage.selected();
    let tables = config.storage.tables.values();
    tables
        .filter(|table| !selected.contains(&table.name.as_str()) && **table != BackendTable::new(&table.name))
        .map(|table| {
            let name = &table.name;
            let right = match (nearest(name, selected.iter().copied()), selected.as_slice()) {
                (Some(near), _) => format!("did you mean [storage.{near}]?"),
                (None, []) => format!("storage.backend = \"{name}\" would start with it"),
                (None, some) => {
                    let names: Vec<String> = some.iter().chain([&name.as_str()]).map(|name| format!("\"{name}\"")).collect();
                    format!("storage.backends = [{}] would start with it too", names.join(", "))
                }
            };
            format!(
                "[storage.{name}] has keys, but neither storage.backend nor storage.backends names {name:?}, so it is used only if that backend \
                 is attached later; {right}"
            )
        })
        .collect()
}

/// Rules that one key's kind can't express.
fn across(config: &mut Config, leaves: &Leaves, errors: &mut Vec<ConfigError>) {
    let mut wrong = |key: &str, message: String| {
        let origin = leaves.get(key).map_or(Origin::Default, |leaf| leaf.origin.clone());
        errors.push(ConfigError::new(&origin, format!("{key} {message}")));
    };
    if config.server.host.is_empty() {
        wrong("server.host", "= \"\": takes an address or host name, such as \"127.0.0.1\" or \"0.0.0.0\"".into());
    }
    for (key, secret) in [("server.api_key", &config.server.api_key), ("server.admin_key", &config.server.admin_key)] {
        let usable = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
        if secret.as_ref().is_some_and(|secret| !usable(secret.reveal())) {
            wrong(key, "takes printable ASCII without spaces, at least one character".into());
        }
    }
    for (key, text) in [
        ("model.name", config.model.name.as_deref()),
        ("model.path", config.model.path.as_ref().and_then(|path| path.to_str())),
    ] {
        if text == Some("") {
            wrong(key, "= \"\": takes text that is not empty; leave the key out to unset it".into());
        }
    }
    if let Err(error) = crate::telemetry::check_filter(&config.telemetry.log_level) {
        wrong(
            "telemetry.log_level",
            format!(
                "= {:?}: takes a level such as \"info\", or target=level with commas ({error})",
                config.telemetry.log_level
            ),
        );
    }
    if config.storage.backend.is_some() && !config.storage.backends.is_empty() {
        wrong("storage.backends", "and storage.backend exclude each other; keep one of them".into());
    }
    for (key, name) in [("storage.backend", &config.storage.backend)]
        .into_iter()
        .filter_map(|(key, name)| Some((key, name.as_ref()?)))
        .chain(config.storage.backends.iter().map(|name| ("storage.backends", name)))
    {
        if let Err(why) = check_name(name) {
            wrong(key, format!("names a backend: {why}"));
        } else if keys::find(&format!("storage.{name}")).is_some() {
            wrong(key, format!("names {name:?}, which is a key of [storage]: no table could configure it"));
        }
    }
    if config.storage.backends.len() > MOST_BACKENDS {
        let count = config.storage.backends.len();
        wrong("storage.backends", format!("names {count} backends: at most {MOST_BACKENDS} can be in use at a time"));
    }
    let mut seen = BTreeSet::new();
    for name in &config.storage.backends {
        if !seen.insert(name) {
            wrong("storage.backends", format!("names {name:?} twice"));
        }
    }
}

fn unknown(path: &[String], leaf: &Leaf) -> ConfigError {
    let dotted = join(path);
    let hint = match (source::nearest_key(&dotted), path) {
        (Some(near), _) => format!("did you mean {near}?"),
        (None, [section, _, ..]) if keys::is_section(section) => {
            format!("`kvdock config reference` lists the keys of [{section}]")
        }
        (None, [section, ..]) => match nearest(section, sections()) {
            Some(near) => format!("did you mean the section [{near}]?"),
            None => format!("the sections are {}", sections().join(", ")),
        },
        (None, []) => "`kvdock config reference` lists the keys".to_owned(),
    };
    ConfigError::new(&leaf.origin, format!("unknown key {dotted}; {hint}"))
}

fn sections() -> Vec<&'static str> {
    let mut sections: Vec<_> = KEYS.iter().filter_map(|key| key.path.split('.').next()).collect();
    sections.dedup();
    sections
}

fn is_empty_table(value: &Value) -> bool {
    value.as_table().is_some_and(toml::Table::is_empty)
}

fn is_backend_section(path: &[String]) -> bool {
    match path {
        [section, name] => section == "storage" && keys::find(&format!("storage.{name}")).is_none(),
        _ => false,
    }
}

fn insert(table: &mut toml::Table, path: &[String], value: Value) {
    match path {
        [] => {}
        [last] => {
            table.insert(last.clone(), value);
        }
        [first, rest @ ..] => {
            let slot = table.entry(first.clone()).or_insert_with(|| Value::Table(toml::Table::new()));
            if let Value::Table(inner) = slot {
                insert(inner, rest, value);
            }
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
