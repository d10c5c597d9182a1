//! `kvdock plugin list` and `kvdock plugin info`

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use serde_json::Value;

use super::{Failure, Settings, print};
use crate::config::host_keys_in;
use crate::plugin::{Found, PluginInfo, discover, find, inspect, search_path};

/// Lists the plugins in the search path.
pub(super) fn list(settings: Settings) -> Result<ExitCode, Failure> {
    let config = settings.load()?.config;
    let folders = search_path(&config.storage.plugin_path);
    print(&table(&discover(&folders), &folders))?;
    Ok(ExitCode::SUCCESS)
}

/// What a search found, a line each.
pub(super) fn table(found: &Found, folders: &[std::path::PathBuf]) -> String {
    let mut text = String::new();
    if found.plugins.is_empty() {
        let searched: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        let _ = writeln!(text, "no plugins in {}", searched.join(", "));
    }
    for plugin in &found.plugins {
        let info = &plugin.info;
        let _ = write!(
            text,
            "{} {}  abi {}  {}  {}",
            info.note.name,
            info.note.version,
            info.note.abi.join(","),
            info.note.license,
            info.path.display()
        );
        if let Some(first) = &plugin.shadowed_by {
            let _ = write!(text, "  (shadowed by {})", first.display());
        }
        text.push('\n');
    }
    for refusal in &found.refused {
        let _ = writeln!(text, "refused: {refusal}");
    }
    text
}

/// Shows one plugin's note.
pub(super) fn info(name_or_path: &str, settings: Settings) -> Result<ExitCode, Failure> {
    let is_path = name_or_path.contains('/') || name_or_path.ends_with(".so");
    let info = if is_path {
        inspect(Path::new(name_or_path)).map_err(Failure::new)?
    } else {
        let config = settings.load()?.config;
        find(name_or_path, &search_path(&config.storage.plugin_path)).map_err(Failure::new)?
    };
    print(&describe(&info))?;
    Ok(ExitCode::SUCCESS)
}

fn describe(info: &PluginInfo) -> String {
    let note = &info.note;
    let mut text = String::new();
    let rows = [
        ("name", note.name.clone()),
        ("version", note.version.clone()),
        ("description", note.description.clone()),
        ("license", note.license.clone()),
        ("file", info.path.display().to_string()),
        ("sha256", info.sha256_hex()),
        ("abi", format!("{}; this host uses {}", note.abi.join(", "), info.abi)),
        ("panic", note.panic.clone()),
        ("capabilities", capabilities(info)),
    ];
    for (name, value) in rows {
        let _ = writeln!(text, "{name:<14}{value}");
    }
    text.push_str("config keys\n");
    text.push_str(&keys(&note.config_schema));
    for key in host_keys_in(&note.config_schema) {
        let _ = writeln!(
            text,
            "warning: {key} is a key of the host, see `kvdock config reference`; the plugin never sees its value"
        );
    }
    text
}

fn capabilities(info: &PluginInfo) -> String {
    let Ok(Value::Object(map)) = serde_json::to_value(info.note.capabilities) else {
        return String::new();
    };
    let shown: Vec<_> = map
        .into_iter()
        .filter_map(|(name, value)| match value {
            Value::Bool(true) => Some(name),
            Value::Bool(false) => None,
            other => Some(format!("{name} {other}")),
        })
        .collect();
    shown.join(", ")
}

/// The properties of a JSON Schema, a line each.
fn keys(schema: &Value) -> String {
    let mut text = String::new();
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        return "  none\n".to_owned();
    };
    let required: Vec<_> = schema
        .get("required")
        .and_then(Value::as_array)
        .map(|names| names.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    for (name, property) in properties {
        let kind = kind_of(property);
        let _ = write!(text, "  {name}: {kind}");
        if let Some(default) = property.get("default") {
            let _ = write!(text, " = {default}");
        }
        if required.contains(&name.as_str()) {
            text.push_str(", required");
        }
        if let Some(description) = property.get("description").and_then(Value::as_str) {
            let _ = write!(text, "  {}", description.split_whitespace().collect::<Vec<_>>().join(" "));
        }
        text.push('\n');
    }
    text
}

/// What a property takes, in words.
fn kind_of(property: &Value) -> String {
    let list = |name: &str| property.get(name).and_then(Value::as_array);
    match property.get("type") {
        Some(Value::String(kind)) => return kind.clone(),
        Some(Value::Array(kinds)) => {
            return kinds.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or ");
        }
        _ => {}
    }
    if let Some(words) = list("enum") {
        return words.iter().map(Value::to_string).collect::<Vec<_>>().join(" or ");
    }
    match list("anyOf").or_else(|| list("oneOf")) {
        Some(kinds) => kinds.iter().map(kind_of).collect::<Vec<_>>().join(" or "),
        None => "any".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_of_a_schema() {
        let schema = json!({
            "required": ["dir"],
            "properties": {
                "dir": {"type": "string", "description": "Where\n  pages lie."},
                "max": {"type": ["integer", "null"], "default": 3},
                "mode": {"enum": ["a", "b"]},
                "size": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            },
        });
        assert_eq!(
            keys(&schema),
            "  dir: string, required  Where pages lie.\n  max: integer or null = 3\n  mode: \"a\" or \"b\"\n  size: integer or string\n"
        );
        assert_eq!(keys(&json!({})), "  none\n");
    }
}
