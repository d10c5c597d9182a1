//! Values as configurations and environment variables hold them.

use std::path::PathBuf;

use serde_json::Value;

/// What a size is.
pub const SIZE: &str = "a number of bytes such as 1073741824 or \"4GiB\"";

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

/// True and false, also as the texts that environment variables hold.
pub fn flag(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(value) => Some(*value),
        Value::String(text) => match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Some(true),
            "0" | "false" | "no" | "off" => Some(false),
            _ => None,
        },
        _ => None,
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

/// A size: an integer, or digits with a unit (`k`, `M`, `G`, `T`; with `i` for powers of 1024), with or without `B`.
pub fn size(value: &Value) -> Option<u64> {
    if let Some(number) = value.as_u64() {
        return Some(number);
    }
    let text = value.as_str()?.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(digits)?;
    let unit = unit.trim_start();
    let unit = unit.strip_suffix('B').unwrap_or(unit);
    let factor: u64 = match unit {
        "" => 1,
        "k" | "K" => 1000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "ki" | "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}
