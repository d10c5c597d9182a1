//! `storage.<name>.*`: the host's keys and the backend's own.

use std::time::Duration;

use serde_json::{Map, Value as Json};
use toml::Value;

use super::error::{ConfigError, Origin};
use super::home::expanded_in;
use super::keys::{BACKEND_KEYS, Key};
use super::name::check_name;
use super::source::{Leaf, Leaves, join};
use super::value::{parse_size, show};
use crate::plugin::backend::BackendSettings;

/// How pages are named in a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyScheme {
    /// With the identity of model, weights, dtype and layout.
    Kvdock,
    /// Byte for byte the names that SGLang builds.
    Sglang,
}

impl KeyScheme {
    /// As the configuration has it.
    pub fn as_str(self) -> &'static str {
        match self {
            KeyScheme::Kvdock => "kvdock",
            KeyScheme::Sglang => "sglang",
        }
    }
}

/// One backend's table, with the host's keys taken out of it.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendTable {
    /// The backend's name.
    pub name: String,
    /// The plugin that runs it.
    pub plugin: String,
    /// How the host treats it.
    pub settings: BackendSettings,
    /// How pages are named.
    pub key_scheme: KeyScheme,
    /// The SHA-256 that the plugin's file must have, in lower-case hex.
    pub sha256: Option<String>,
    /// The backend's own keys, not yet checked against its schema.
    pub own: Map<String, Json>,
}

impl BackendTable {
    /// The defaults for a backend that the config doesn't mention.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            plugin: name.to_owned(),
            settings: BackendSettings::default(),
            key_scheme: KeyScheme::Kvdock,
            sha256: None,
            own: Map::new(),
        }
    }

    /// This table with the keys of `over` laid over it, as an admin request gives them. The
    /// host's keys are checked here; the rest is left to the plugin's schema.
    ///
    /// # Errors
    /// A host key with a value it does not take.
    pub fn overlaid(&self, over: &Map<String, Json>) -> Result<Self, String> {
        let mut table = self.clone();
        for (key, value) in over {
            match BACKEND_KEYS.iter().find(|known| known.path == key) {
                Some(known) => {
                    let path = format!("storage.{}.{key}", self.name);
                    let value = json_to_toml(value).ok_or_else(|| format!("{path}: null is no value"))?;
                    table.set_host_key(known, &path, &value)?;
                }
                None => {
                    table.own.insert(key.clone(), value.clone());
                }
            }
        }
        Ok(table)
    }

    /// Refuses a way of naming pages that a plugin does not know, or does not know for pages of the host's `layout`. A plugin whose configuration
    /// schema says nothing of it (`x-key-schemes`) names pages by kvdock's scheme; one that does not say for which layouts (`x-host-layouts`)
    /// names those of all. `alike`: all ranks hold the same bytes in the pool of all tokens; there it may know fewer layouts
    /// (`x-host-layouts-replicated`).
    ///
    /// # Errors
    /// Names the key and what to set instead.
    pub fn check_key_scheme(&self, schema: &Json, layout: &str, alike: bool) -> Result<(), String> {
        if self.key_scheme == KeyScheme::Kvdock {
            return Ok(());
        }
        let word = self.key_scheme.as_str();
        let listed = schema.get("x-key-schemes").and_then(Json::as_array);
        if !listed.is_some_and(|list| list.iter().any(|known| known == word)) {
            return Err(format!(
                "storage.{}.key_scheme = \"{word}\": plugin {} names pages by kvdock's own scheme only; set \"kvdock\"",
                self.name, self.plugin
            ));
        }
        let known = |list: &str| schema.get(list).and_then(|of| of.get(word)).and_then(Json::as_array);
        let lists = [known("x-host-layouts"), known("x-host-layouts-replicated").filter(|_| alike)];
        if lists.iter().flatten().all(|list| list.iter().any(|known| known == layout)) {
            return Ok(());
        }
        let (first, second) = match lists {
            [Some(first), second] => (first, second),
            [None, Some(second)] => (second, None),
            [None, None] => return Ok(()),
        };
        let right = first.iter().filter(|layout| second.is_none_or(|list| list.contains(layout)));
        let whose = if second.is_some() { " that are the same on all ranks" } else { "" };
        Err(format!(
            "storage.{}.key_scheme = \"{word}\": pages{whose} of cache.host_layout = \"{layout}\" have no names there; set one of {}, or \
             key_scheme = \"kvdock\"",
            self.name,
            right.map(Json::to_string).collect::<Vec<_>>().join(", ")
        ))
    }

    /// The backend's own config as its plugin reads it: where `schema` (JSON Schema) wants an
    /// integer and the config says a size such as `"10GiB"`, the number of bytes; where a text begins with `~/`, the home folder.
    ///
    /// # Errors
    /// Names the key that needs the home folder where there is none.
    pub fn for_schema(&self, schema: &Json) -> Result<Map<String, Json>, String> {
        let mut own = expanded_in(&format!("storage.{}", self.name), schema, &self.own)?;
        for (key, value) in &mut own {
            let declared = schema
                .get("properties")
                .and_then(|properties| properties.get(key))
                .and_then(|property| property.get("type"));
            let wants_integer = match declared {
                Some(Json::String(word)) => word == "integer",
                Some(Json::Array(words)) => {
                    words.iter().any(|word| word == "integer") && !words.iter().any(|word| word == "string")
                }
                _ => false,
            };
            if let (true, Some(bytes)) = (wants_integer, value.as_str().and_then(parse_size)) {
                *value = Json::from(bytes);
            }
        }
        Ok(own)
    }

    fn set_host_key(&mut self, key: &Key, path: &str, value: &Value) -> Result<(), String> {
        let checked = key.kind.check(value).map_err(|takes| format!("{path} = {}: takes {takes}", show(value)))?;
        let text = || checked.as_str().unwrap_or_default().to_owned();
        match key.path {
            "plugin" => {
                check_name(&text()).map_err(|wrong| format!("{path}: {wrong}"))?;
                self.plugin = text();
            }
            "write_policy" => self.settings.write_policy = Some(text()),
            "timeout" => self.settings.timeout = seconds(&checked, path)?,
            "drain_timeout" => self.settings.drain_timeout = seconds(&checked, path)?,
            "promote" => self.settings.promote = checked.as_bool().unwrap_or_default(),
            "retries" => self.settings.retries = whole(&checked) as u32,
            "concurrency" => self.settings.concurrency = Some(whole(&checked) as usize),
            "read_bandwidth" => self.settings.read_bandwidth = Some(whole(&checked)),
            "write_bandwidth" => self.settings.write_bandwidth = Some(whole(&checked)),
            "key_scheme" => {
                self.key_scheme = match checked.as_str() {
                    Some("sglang") => KeyScheme::Sglang,
                    _ => KeyScheme::Kvdock,
                };
                self.settings.sealed = self.key_scheme == KeyScheme::Kvdock;
            }
            "sha256" => {
                let hex = text().to_ascii_lowercase();
                if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
                    return Err(format!("{path} = {}: takes the 64 hex digits of a SHA-256", show(value)));
                }
                self.sha256 = Some(hex);
            }
            other => return Err(format!("{path}: the host does not read {other}")),
        }
        Ok(())
    }

    /// Reads the leaves below `storage.<name>`.
    pub(crate) fn read(name: &str, leaves: &Leaves, errors: &mut Vec<ConfigError>) -> Self {
        let mut table = Self::new(name);
        for (path, Leaf { value, origin }) in leaves.iter() {
            let [section, owner, rest @ ..] = path.as_slice() else {
                continue;
            };
            if section != "storage" || owner != name {
                continue;
            }
            let shown = join(path);
            let known = match rest {
                [key] => BACKEND_KEYS.iter().find(|known| known.path == key),
                [key, ..] => {
                    // A table where the host wants a plain value.
                    if let Some(known) = BACKEND_KEYS.iter().find(|known| known.path == key) {
                        let takes = known.kind.describe();
                        errors
                            .push(ConfigError::new(origin, format!("storage.{name}.{key} is a table: takes {takes}")));
                        continue;
                    }
                    None
                }
                [] => continue,
            };
            match known {
                Some(key) => {
                    if let Err(message) = table.set_host_key(key, &shown, value) {
                        errors.push(ConfigError::new(origin, message));
                    }
                }
                None => insert_at(&mut table.own, rest, &shown, value, origin, errors),
            }
        }
        table
    }
}

/// Keys that `schema`, the config schema of a plugin, declares though the host takes them out of every backend's table. The plugin
/// never sees their values.
pub fn host_keys_in(schema: &Json) -> Vec<&'static str> {
    let declared = schema.get("properties").and_then(Json::as_object);
    let is_declared = |key: &&Key| declared.is_some_and(|properties| properties.contains_key(key.path));
    BACKEND_KEYS.iter().filter(is_declared).map(|key| key.path).collect()
}

/// A number that its key's kind let pass.
fn whole(checked: &Value) -> u64 {
    checked.as_integer().and_then(|number| u64::try_from(number).ok()).unwrap_or_default()
}

fn seconds(checked: &Value, path: &str) -> Result<Duration, String> {
    let seconds = checked.as_float().unwrap_or_default();
    Duration::try_from_secs_f64(seconds).map_err(|error| format!("{path} = {}: {error}", show(checked)))
}

fn insert_at(
    map: &mut Map<String, Json>,
    parts: &[String],
    path: &str,
    value: &Value,
    origin: &Origin,
    errors: &mut Vec<ConfigError>,
) {
    match parts {
        [] => {}
        [last] => match toml_to_json(value) {
            Some(json) => {
                map.insert(last.clone(), json);
            }
            None => errors.push(ConfigError::new(origin, format!("{path} = {}: takes a finite number", show(value)))),
        },
        [first, rest @ ..] => {
            let slot = map.entry(first.clone()).or_insert_with(|| Json::Object(Map::new()));
            if let Json::Object(inner) = slot {
                insert_at(inner, rest, path, value, origin, errors);
            }
        }
    }
}

/// `None` for numbers that JSON can't hold.
fn toml_to_json(value: &Value) -> Option<Json> {
    Some(match value {
        Value::String(text) => Json::from(text.as_str()),
        Value::Integer(n) => Json::from(*n),
        Value::Float(number) => Json::Number(serde_json::Number::from_f64(*number)?),
        Value::Boolean(b) => Json::from(*b),
        Value::Datetime(when) => Json::from(when.to_string()),
        Value::Array(items) => Json::Array(items.iter().map(toml_to_json).collect::<Option<_>>()?),
        Value::Table(table) => Json::Object(
            table.iter().map(|(key, value)| Some((key.clone(), toml_to_json(value)?))).collect::<Option<_>>()?,
        ),
    })
}

/// `None` for null and for integers that TOML can't hold.
fn json_to_toml(value: &Json) -> Option<Value> {
    Some(match value {
        Json::Null => return None,
        Json::Bool(b) => Value::Boolean(*b),
        Json::Number(n) => match n.as_i64() {
            Some(n) => Value::Integer(n),
            None => Value::Float(n.as_f64()?),
        },
        Json::String(text) => Value::String(text.clone()),
        Json::Array(items) => Value::Array(items.iter().map(json_to_toml).collect::<Option<_>>()?),
        Json::Object(map) => Value::Table(
            map.iter().map(|(key, value)| Some((key.clone(), json_to_toml(value)?))).collect::<Option<_>>()?,
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(value: Json) -> Map<String, Json> {
        value.as_object().cloned().expect("an object")
    }

    #[test]
    fn declared_defaults_are_the_ones_used() {
        let mut table = BackendTable::new("file");
        for key in BACKEND_KEYS {
            if let Some(text) = key.default {
                let value: Value = text.parse().unwrap();
                table.set_host_key(key, key.path, &value).unwrap();
            }
        }
        assert_eq!(table, BackendTable::new("file"));
    }

    #[test]
    fn every_host_key_is_read() {
        for key in BACKEND_KEYS {
            let value = match key.path {
                "timeout" | "drain_timeout" => Value::Float(1.0),
                "promote" => Value::Boolean(true),
                "retries" | "concurrency" | "read_bandwidth" | "write_bandwidth" => Value::Integer(7),
                "sha256" => Value::String("ab".repeat(32)),
                "write_policy" => Value::String("write_back".into()),
                "key_scheme" => Value::String("sglang".into()),
                _ => Value::String("other".into()),
            };
            let mut table = BackendTable::new("file");
            table.set_host_key(key, key.path, &value).unwrap();
            assert_ne!(table, BackendTable::new("file"), "{}", key.path);
        }
    }

    #[test]
    fn host_keys_in_a_plugins_schema_are_found() {
        let schema = json!({"properties": {"dir": {}, "timeout": {}, "retries": {"type": "integer"}}});
        assert_eq!(host_keys_in(&schema), ["timeout", "retries"]);
        assert_eq!(host_keys_in(&json!({})), Vec::<&str>::new());
    }

    #[test]
    fn sizes_become_bytes_where_the_schema_wants_integers() {
        let mut table = BackendTable::new("file");
        table.own = object(json!({"max_bytes": "10GiB", "dir": "1GiB", "n": "x"}));
        let schema = json!({"properties": {
            "max_bytes": {"type": ["integer", "null"]}, "dir": {"type": "string"},
            "n": {"type": "integer"}}});
        assert_eq!(
            Json::Object(table.for_schema(&schema).unwrap()),
            json!({"max_bytes": 10_u64 << 30, "dir": "1GiB", "n": "x"})
        );
    }

    #[test]
    fn an_admin_config_lies_over_the_file() {
        let mut table = BackendTable::new("file");
        table.own = object(json!({"dir": "/a", "ttl": 5}));
        let over = object(json!({"dir": "/b", "timeout": 2}));
        let merged = table.overlaid(&over).unwrap();
        assert_eq!(Json::Object(merged.own), json!({"dir": "/b", "ttl": 5}));
        assert_eq!(merged.settings.timeout, Duration::from_secs(2));
        let error = table.overlaid(&object(json!({"timeout": "soon"}))).unwrap_err();
        assert!(error.starts_with("storage.file.timeout = \"soon\": takes a number"), "{error}");
        assert!(table.overlaid(&object(json!({"sha256": "00"}))).is_err());
        let foreign = table.overlaid(&object(json!({"key_scheme": "sglang"}))).unwrap();
        assert_eq!(foreign.key_scheme, KeyScheme::Sglang);
        let error = foreign.check_key_scheme(&json!({}), "page_first", false).unwrap_err();
        assert!(error.contains("kvdock's own scheme"), "{error}");
        let mut schema = json!({"x-key-schemes": ["kvdock", "sglang"]});
        foreign.check_key_scheme(&schema, "layer_first", false).unwrap();
        table.check_key_scheme(&json!({}), "page_first", false).unwrap();
        schema["x-host-layouts"] = json!({"sglang": ["page_first", "page_head"]});
        foreign.check_key_scheme(&schema, "page_head", false).unwrap();
        table.check_key_scheme(&schema, "layer_first", false).unwrap();
        let error = foreign.check_key_scheme(&schema, "layer_first", false).unwrap_err();
        assert!(error.contains("cache.host_layout = \"layer_first\"") && error.contains("\"page_head\""), "{error}");
        // Where all ranks hold the same it may know fewer.
        schema["x-host-layouts-replicated"] = json!({"sglang": ["page_first"]});
        foreign.check_key_scheme(&schema, "page_head", false).unwrap();
        foreign.check_key_scheme(&schema, "page_first", true).unwrap();
        let error = foreign.check_key_scheme(&schema, "page_head", true).unwrap_err();
        assert!(error.contains("the same on all ranks") && error.contains("set one of \"page_first\", or"), "{error}");
        table.check_key_scheme(&schema, "page_head", true).unwrap();
    }
}
