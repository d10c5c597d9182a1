//! Values as configurations hold them, for plugins that read theirs by hand.

use serde_json::Value;

/// What [`size`] takes, for the text of an error.
pub const SIZE: &str = "a number of bytes such as 1073741824 or \"4GiB\"";

/// A size in bytes: an integer, or digits with a unit (`k`, `M`, `G`, `T`; with `i` for powers of 1024), with or without `B`. None for anything else.
///
/// ```
/// use kvdock_plugin_api::values::size;
/// assert_eq!(size(&"10 GiB".into()), Some(10 << 30));
/// assert_eq!(size(&"3kB".into()), Some(3000));
/// assert_eq!(size(&"10 apples".into()), None);
/// ```
#[must_use]
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

/// True or false, also as the texts that environment variables hold: 1, true, yes, on, and their opposites, in any case. None for anything else.
#[must_use]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_integers_or_texts_with_units() {
        for (json, bytes) in [
            ("10", Some(10)),
            (r#""10GiB""#, Some(10 << 30)),
            (r#""10 GiB""#, Some(10 << 30)),
            (r#""200GB""#, Some(200_000_000_000)),
            (r#""64Mi""#, Some(64 << 20)),
            (r#""5""#, Some(5)),
            (r#"" 3kB ""#, Some(3000)),
            ("-1", None),
            ("1.5", None),
            (r#""1.5GiB""#, None),
            (r#""GiB""#, None),
            (r#""""#, None),
            (r#""5 BB""#, None),
            (r#""99999999999999TiB""#, None),
            ("[1]", None),
        ] {
            assert_eq!(size(&serde_json::from_str(json).unwrap()), bytes, "{json}");
        }
    }

    #[test]
    fn flags_are_booleans_or_their_texts() {
        for (json, value) in [
            ("true", Some(true)),
            (r#""Yes""#, Some(true)),
            (r#""off""#, Some(false)),
            (r#""0""#, Some(false)),
            ("1", None),
            (r#""""#, None),
            ("null", None),
        ] {
            assert_eq!(flag(&serde_json::from_str(json).unwrap()), value, "{json}");
        }
    }
}
