//! Checks a backend's configuration against the schema in its plugin's note.

use jsonschema::ValidationError;
use jsonschema::error::ValidationErrorKind;
use serde_json::{Map, Value};

use crate::config::nearest;

/// What stands in place of a secret.
const HIDDEN: &str = "(hidden)";

/// Checks `config`, and gives it back as it may be shown: values that the schema marks as `writeOnly` are replaced.
///
/// # Errors
/// One line that names each wrong key, what was found, and what would be right.
pub fn validate(backend: &str, schema: &Value, config: &Map<String, Value>) -> Result<Map<String, Value>, String> {
    let validator = jsonschema::validator_for(schema)
        .map_err(|e| format!("the config schema of its plugin is no JSON Schema: {e}"))?;
    let value = Value::Object(config.clone());
    let mut wrong: Vec<String> = Vec::new();
    for error in validator.iter_errors(&value) {
        let at = error.instance_path().as_str().trim_start_matches('/').replace('/', ".");
        let key = if at.is_empty() { format!("storage.{backend}") } else { format!("storage.{backend}.{at}") };
        let described = description(schema, &at);
        let problem = match error.kind() {
            _ if is_secret(schema, &at) => "has a wrong value".to_owned(),
            // The schema's own words say it better than a pattern.
            ValidationErrorKind::Pattern { .. } | ValidationErrorKind::AnyOf { .. } if described.is_some() => {
                format!("{} is not what it takes", error.instance())
            }
            _ => error.to_string(),
        };
        let near = meant_key(&error, schema).map(|key| format!("; did you mean {key}?")).unwrap_or_default();
        let meant = described.map(|text| format!(" ({text})")).unwrap_or_default();
        wrong.push(format!("{key}: {problem}{near}{meant}"));
    }
    if !wrong.is_empty() {
        let known: Vec<&str> = properties(schema).map(|p| p.keys().map(String::as_str).collect()).unwrap_or_default();
        let keys =
            if known.is_empty() { "it takes no keys".to_owned() } else { format!("its keys are {}", known.join(", ")) };
        return Err(format!("{} ({keys})", wrong.join("; ")));
    }
    Ok(redacted(schema, config))
}

fn properties(schema: &Value) -> Option<&Map<String, Value>> {
    schema.get("properties").and_then(Value::as_object)
}

/// The key that an unknown one at the top was probably meant to be.
fn meant_key<'a>(error: &ValidationError<'_>, schema: &'a Value) -> Option<&'a str> {
    let ValidationErrorKind::AdditionalProperties { unexpected } = error.kind() else { return None };
    let known = properties(schema).filter(|_| error.instance_path().as_str().is_empty())?;
    unexpected.iter().find_map(|key| nearest(key, known.keys().map(String::as_str)))
}

/// What the schema says of the key.
fn description<'a>(schema: &'a Value, key: &str) -> Option<&'a str> {
    properties(schema)?.get(key.split('.').next()?)?.get("description")?.as_str()
}

fn is_secret(schema: &Value, key: &str) -> bool {
    let top = key.split('.').next().unwrap_or_default();
    properties(schema)
        .and_then(|p| p.get(top))
        .and_then(|property| property.get("writeOnly"))
        .and_then(Value::as_bool)
        .unwrap_or(false)
}

fn redacted(schema: &Value, config: &Map<String, Value>) -> Map<String, Value> {
    let show = |(key, value): (&String, &Value)| {
        let value = if is_secret(schema, key) { Value::from(HIDDEN) } else { value.clone() };
        (key.clone(), value)
    };
    config.iter().map(show).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn schema() -> Value {
        json!({
            "type": "object",
            "additionalProperties": false,
            "properties": {
                "dir": {"type": "string"},
                "max_bytes": {"type": "integer", "minimum": 0},
                "token": {"type": "string", "writeOnly": true, "minLength": 3},
            },
            "required": ["dir"],
        })
    }

    fn check(config: Value) -> Result<Map<String, Value>, String> {
        validate("file", &schema(), config.as_object().unwrap())
    }

    #[test]
    fn wrong_keys_and_values_are_named() {
        let text = check(json!({"dir": 3, "max_bytes": -1, "colour": "red"})).unwrap_err();
        for part in ["storage.file.dir", "storage.file.max_bytes", "colour", "its keys are dir, max_bytes, token"] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }

    #[test]
    fn a_key_with_a_slip_is_answered_by_the_one_that_was_meant() {
        let text = check(json!({"dir": "d", "max_byte": 3})).unwrap_err();
        assert!(text.contains("did you mean max_bytes?"), "{text}");
        assert!(!check(json!({"dir": "d", "colour": 3})).unwrap_err().contains("did you mean"));
    }

    #[test]
    fn the_schemas_own_words_say_what_a_key_takes() {
        let size = json!({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[0-9]+GiB$"}], "description": "bytes, or such as 10GiB"});
        let schema = json!({"type": "object", "properties": {"max": size}});
        let text = validate("file", &schema, json!({"max": "ten"}).as_object().unwrap()).unwrap_err();
        assert!(text.starts_with("storage.file.max: \"ten\" is not what it takes (bytes, or such as 10GiB)"), "{text}");
        let address = json!({"type": "string", "pattern": "^[^:]+:[0-9]+$", "description": "host:port"});
        let schema = json!({"type": "object", "properties": {"at": address}});
        let text = validate("file", &schema, json!({"at": "here"}).as_object().unwrap()).unwrap_err();
        assert!(text.starts_with("storage.file.at: \"here\" is not what it takes (host:port)"), "{text}");
    }

    #[test]
    fn a_missing_key_is_named() {
        assert!(check(json!({})).unwrap_err().contains("dir"));
    }

    #[test]
    fn secrets_are_shown_nowhere() {
        let shown = check(json!({"dir": "d", "token": "abcdef"})).unwrap();
        assert_eq!(shown["token"], HIDDEN);
        let text = check(json!({"dir": "d", "token": "ab"})).unwrap_err();
        assert!(text.contains("storage.file.token") && !text.contains("\"ab\""), "{text}");
    }
}
