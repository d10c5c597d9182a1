//! Where values come from: each source becomes a set of leaves with their origin.

use std::collections::BTreeMap;
use std::ffi::OsString;

use toml::Value;
use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, Origin};
use super::keys;

/// Path of a key, a segment each.
pub(crate) type Path = Vec<String>;

/// A value and where it came from.
#[derive(Clone, Debug)]
pub(crate) struct Leaf {
    pub value: Value,
    pub origin: Origin,
}

/// Values by path. No path is a prefix of another.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leaves(BTreeMap<Path, Leaf>);

impl Leaves {
    /// Sets `path`; what stood there, below it or above it gives way. An empty table adds nothing to what
    /// is in it already.
    pub(crate) fn put(&mut self, path: Path, leaf: Leaf) {
        let is_empty = leaf.value.as_table().is_some_and(toml::Table::is_empty);
        if is_empty && self.0.keys().any(|old| old.len() > path.len() && old.starts_with(&path)) {
            return;
        }
        self.0.retain(|old, _| !old.starts_with(&path) && !path.starts_with(old));
        self.0.insert(path, leaf);
    }

    /// Lays `over` over these.
    pub(crate) fn overlay(&mut self, over: Leaves) {
        for (path, leaf) in over.0 {
            self.put(path, leaf);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Path, &Leaf)> {
        self.0.iter()
    }

    pub(crate) fn get(&self, path: &str) -> Option<&Leaf> {
        self.0.get(&split(path))
    }
}

/// `path` as it would stand in TOML.
pub(crate) fn join(path: &[String]) -> String {
    let bare =
        |part: &String| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
    let parts: Vec<_> = path
        .iter()
        .map(|part| if bare(part) { part.clone() } else { Value::String(part.clone()).to_string() })
        .collect();
    parts.join(".")
}

pub(crate) fn split(path: &str) -> Path {
    path.split('.').map(str::to_owned).collect()
}

/// Reads a config file's text.
pub(crate) fn from_file(name: &str, text: &str) -> Result<Leaves, ConfigError> {
    let at = |offset: Option<usize>| Origin::File {
        path: name.to_owned(),
        line: offset.map(|offset| line_of(text, offset)),
    };
    let table = DeTable::parse(text).map_err(|error| {
        let line = error.span().map(|span| span.start);
        ConfigError::new(&at(line), error.message().trim().replace('\n', "; "))
    })?;
    let mut leaves = Leaves::default();
    let mut errors = Vec::new();
    walk(table.get_ref(), &mut Vec::new(), &mut |path, value, offset| {
        let origin = at(Some(offset));
        match owned(value) {
            Ok(value) => leaves.put(path.to_vec(), Leaf { value, origin }),
            Err(message) => errors.push(ConfigError::new(&origin, format!("{}: {message}", join(path)))),
        }
    });
    match errors.into_iter().next() {
        Some(error) => Err(error),
        None => Ok(leaves),
    }
}

fn walk(table: &DeTable<'_>, path: &mut Path, found: &mut dyn FnMut(&[String], &DeValue<'_>, usize)) {
    for (key, value) in table.iter() {
        path.push(key.get_ref().to_string());
        match value.get_ref() {
            DeValue::Table(inner) if !inner.is_empty() => walk(inner, path, found),
            other => found(path, other, key.span().start),
        }
        path.pop();
    }
}

fn owned(value: &DeValue<'_>) -> Result<Value, String> {
    Ok(match value {
        DeValue::String(text) => Value::String(text.to_string()),
        DeValue::Integer(n) => {
            Value::Integer(i64::from_str_radix(n.as_str(), n.radix()).map_err(|_| format!("{n} does not fit 64 bits"))?)
        }
        DeValue::Float(number) => Value::Float(number.as_str().parse().map_err(|_| format!("{number} is no number"))?),
        DeValue::Boolean(b) => Value::Boolean(*b),
        DeValue::Datetime(when) => Value::Datetime(*when),
        DeValue::Array(items) => {
            Value::Array(items.iter().map(|item| owned(item.get_ref())).collect::<Result<_, _>>()?)
        }
        DeValue::Table(table) => Value::Table(
            table
                .iter()
                .map(|(key, value)| Ok((key.get_ref().to_string(), owned(value.get_ref())?)))
                .collect::<Result<_, String>>()?,
        ),
    })
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count()
}

/// Reads one `KEY=VALUE` of `--set`.
pub(crate) fn from_set(argument: &str) -> Result<Leaves, ConfigError> {
    let Some((key, text)) = argument.split_once('=') else {
        return Err(ConfigError::new(
            &Origin::Set,
            format!("{argument:?} has no \"=\"; write KEY=VALUE, such as server.port=8080"),
        ));
    };
    let mut leaves = Leaves::default();
    put_text(&mut leaves, split(key.trim()), text, &Origin::Set);
    Ok(leaves)
}

/// Whether an environment variable of this name is for tests and tools, not a key.
fn is_for_tests(name: &str) -> bool {
    matches!(name, "KVDOCK_SOAK" | "KVDOCK_BLESS")
        || name.starts_with("KVDOCK_TEST_")
        || name.starts_with("KVDOCK_BENCH_")
}

/// Reads the `KVDOCK_*` variables among `vars`. Those that match no key are warnings.
pub(crate) fn from_env(vars: impl IntoIterator<Item = (OsString, OsString)>, warnings: &mut Vec<String>) -> Leaves {
    let mut named: Vec<(String, OsString)> = vars
        .into_iter()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .filter(|(name, _)| name.starts_with("KVDOCK_") && !is_for_tests(name))
        .collect();
    named.sort();
    let mut leaves = Leaves::default();
    for (name, value) in named {
        let path: Path =
            name.trim_start_matches("KVDOCK_").to_ascii_lowercase().split("__").map(str::to_owned).collect();
        let dotted = path.join(".");
        let known = keys::find(&dotted).is_some() || is_backend_path(&path);
        if !known {
            let hint = match nearest_key(&dotted) {
                Some(near) => format!("did you mean {}?", variable_of(near)),
                None => "`kvdock config reference` lists the keys".to_owned(),
            };
            warnings.push(format!("environment variable {name} matches no config key; {hint}"));
            continue;
        }
        match value.into_string() {
            Ok(text) => put_text(&mut leaves, path, &text, &Origin::Env(name)),
            Err(_) => warnings.push(format!("environment variable {name} is not UTF-8 and is ignored")),
        }
    }
    leaves
}

fn variable_of(key: &str) -> String {
    format!("KVDOCK_{}", key.replace('.', "__").to_ascii_uppercase())
}

/// The key nearest to `path` over the whole table.
pub(crate) fn nearest_key(path: &str) -> Option<&'static str> {
    super::value::nearest(path, keys::KEYS.iter().map(|key| key.path))
}

/// Whether `path` lies in a backend's table, `storage.<name>.<key>`.
pub(crate) fn is_backend_path(path: &[String]) -> bool {
    match path {
        [section, name, key, ..] => {
            section == "storage"
                && !key.is_empty()
                && keys::find(&format!("storage.{name}")).is_none()
                && !name.is_empty()
        }
        _ => false,
    }
}

/// A value given as bare text is TOML; what is not TOML is a string, and so is what is given to
/// a key that takes text (a numeric API key needs no quotes).
fn put_text(leaves: &mut Leaves, path: Path, text: &str, origin: &Origin) {
    let takes_text = match path.as_slice() {
        [section, _, key] if section == "storage" && is_backend_path(&path) => {
            keys::BACKEND_KEYS.iter().find(|known| known.path == key)
        }
        _ => keys::find(&join(&path)),
    }
    .is_some_and(|key| key.kind.is_text());
    let as_text = || Value::String(text.to_owned());
    let value = match text.trim().parse::<Value>() {
        Ok(value) if takes_text && !value.is_str() => as_text(),
        Ok(value) => value,
        Err(_) => as_text(),
    };
    put_value(leaves, path, value, origin);
}

fn put_value(leaves: &mut Leaves, path: Path, value: Value, origin: &Origin) {
    match value {
        Value::Table(table) if !table.is_empty() => {
            for (key, value) in table {
                let mut inner = path.clone();
                inner.push(key);
                put_value(leaves, inner, value, origin);
            }
        }
        value => leaves.put(path, Leaf { value, origin: origin.clone() }),
    }
}
