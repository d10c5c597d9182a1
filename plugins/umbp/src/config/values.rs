//! Values as configurations and environment variables hold them.

use std::path::PathBuf;

use serde_json::Value;

/// Where segments lie when nothing is said.
pub fn default_dir(variable: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let folder = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("kvdock").join("umbp"))
}

/// A path, in the home folder where it begins with `~`.
pub fn expand(dir: &str, variable: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    match (dir.strip_prefix("~/"), variable("HOME")) {
        (Some(rest), Some(home)) => PathBuf::from(home).join(rest),
        _ => PathBuf::from(dir),
    }
}

/// A list of texts, or one text with commas.
pub fn texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(list) => {
            Some(list.split(',').map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()).collect())
        }
        Value::Array(list) => list.iter().map(|item| item.as_str().map(str::to_owned)).collect(),
        _ => None,
    }
}

/// A list of numbers: an array, or a text with commas.
pub fn numbers(value: &Value) -> Option<Vec<u32>> {
    match value {
        Value::Array(list) => list.iter().map(|item| u32::try_from(item.as_u64()?).ok()).collect(),
        Value::String(list) => {
            list.split(',').map(str::trim).filter(|text| !text.is_empty()).map(|text| text.parse().ok()).collect()
        }
        _ => None,
    }
}
