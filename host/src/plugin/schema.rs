//! Checks a backend's configuration against the schema in its plugin's note.

use jsonschema::ValidationError;
use jsonschema::error::ValidationErrorKind;
use serde_json::{Map, Value};

use crate::config::{nearest, show};

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
        let line = problem(backend, schema, &error);
        // Alternatives of a schema may find the same.
        if !wrong.contains(&line) {
            wrong.push(line);
        }
    }
    if wrong.is_empty() { Ok(redacted(schema, config)) } else { Err(wrong.join("; ")) }
}

/// What is wrong, and what would be right.
fn problem(backend: &str, schema: &Value, error: &ValidationError<'_>) -> String {
    let at = error.instance_path().as_str().trim_start_matches('/').replace('/', ".");
    let table = format!("storage.{backend}");
    let key = if at.is_empty() { table.clone() } else { format!("{table}.{at}") };
    let described = |key: &str| description(schema, key).map(|text| format!(" ({text})")).unwrap_or_default();
    let meaning = described(&at);
    match error.kind() {
        ValidationErrorKind::AdditionalProperties { unexpected } if at.is_empty() => {
            unknown(&table, unexpected, schema)
        }
        ValidationErrorKind::Required { property } => {
            let missing = property.as_str().map_or_else(|| property.to_string(), str::to_owned);
            let meaning = if at.is_empty() { described(&missing) } else { meaning };
            format!("{key}.{missing} is missing, and has to be set{meaning}")
        }
        _ if is_secret(schema, &at) => format!("{key}: has a wrong value{meaning}"),
        ValidationErrorKind::FalseSchema => {
            format!("{key} = {}: can't be set beside the other keys{meaning}", show(error.instance()))
        }
        // It may depend on other keys, so it stands in no place of its own.
        ValidationErrorKind::Constant { expected_value } => {
            format!("{key} = {}: takes {expected_value} beside the other keys{meaning}", show(error.instance()))
        }
        _ => {
            let right = property(schema, &at).and_then(|property| takes(property, !meaning.is_empty()));
            match right {
                Some(right) => format!("{key} = {}: takes {right}{meaning}", show(error.instance())),
                None => format!("{key}: {error}{meaning}"),
            }
        }
    }
}

/// Keys that there are not: each with the one that was probably meant, or else all that there are.
fn unknown(table: &str, unexpected: &[String], schema: &Value) -> String {
    let known: Vec<&str> = properties(schema).map(|p| p.keys().map(String::as_str).collect()).unwrap_or_default();
    let mut list = false;
    let each = unexpected.iter().map(|key| match nearest(key, known.iter().copied()) {
        Some(near) => format!("{table} has no key {key}; did you mean {near}?"),
        None => {
            list = true;
            format!("{table} has no key {key}")
        }
    });
    let each = each.collect::<Vec<_>>().join("; ");
    match (list, known.is_empty()) {
        (false, _) => each,
        (true, true) => format!("{each} (it takes no keys)"),
        (true, false) => format!("{each} (its keys are {})", known.join(", ")),
    }
}

/// What a value may be, in words; none where the schema says it in another way. `described`: a description follows.
fn takes(schema: &Value, described: bool) -> Option<String> {
    let either = |list: &Vec<Value>| {
        let each: Option<Vec<String>> = list.iter().map(|one| takes(one, described)).collect();
        each.map(|each| each.join(", or "))
    };
    if let Some(list) = ["anyOf", "oneOf"].iter().find_map(|word| schema.get(word)?.as_array()) {
        return either(list);
    }
    if let Some(list) = schema.get("enum").and_then(Value::as_array) {
        return Some(list.iter().map(Value::to_string).collect::<Vec<_>>().join(" or "));
    }
    if let Some(value) = schema.get("const") {
        return Some(value.to_string());
    }
    match schema.get("type")? {
        Value::String(word) => of_type(schema, word, described),
        Value::Array(words) => {
            let each: Option<Vec<String>> =
                words.iter().map(|word| of_type(schema, word.as_str()?, described)).collect();
            each.map(|each| each.join(", or "))
        }
        _ => None,
    }
}

fn of_type(schema: &Value, word: &str, described: bool) -> Option<String> {
    let of = |key: &str| schema.get(key);
    let range = |what: &str| {
        let bound = |key: &str, word: &str| of(key).map(|end| format!("{word} {end}"));
        let least = bound("minimum", "at least").or_else(|| bound("exclusiveMinimum", "above"));
        let most = bound("maximum", "at most").or_else(|| bound("exclusiveMaximum", "below"));
        match (of("minimum"), of("maximum"), least, most) {
            (Some(least), Some(most), ..) => format!("{what} from {least} to {most}"),
            (_, _, Some(least), Some(most)) => format!("{what}, {least} and {most}"),
            (_, _, Some(end), None) | (_, _, None, Some(end)) => format!("{what}, {end}"),
            (_, _, None, None) => what.to_owned(),
        }
    };
    Some(match word {
        "integer" => range("a whole number"),
        "number" => range("a number"),
        "boolean" => "true or false".to_owned(),
        "null" => "null".to_owned(),
        "object" => "a table".to_owned(),
        "array" => match of("items").and_then(|items| takes(items, described)) {
            Some(each) => format!("a list, of which each is {each}"),
            None => "a list".to_owned(),
        },
        "string" => match (of("pattern").and_then(Value::as_str), of("minLength"), of("maxLength")) {
            // The words behind say it better than a pattern.
            (Some(_), _, _) if described => "a text of another form".to_owned(),
            (Some(pattern), _, _) => format!("a text that matches {pattern}"),
            (None, Some(least), Some(most)) => format!("a text of {least} to {most} characters"),
            (None, Some(least), None) => format!("a text of at least {least} characters"),
            (None, None, Some(most)) => format!("a text of at most {most} characters"),
            (None, None, None) => "a text".to_owned(),
        },
        _ => return None,
    })
}

fn properties(schema: &Value) -> Option<&Map<String, Value>> {
    schema.get("properties").and_then(Value::as_object)
}

/// What the schema says of the key.
fn description<'a>(schema: &'a Value, key: &str) -> Option<&'a str> {
    property(schema, key)?.get("description")?.as_str()
}

/// The schema of a key, or of the one that it lies in.
fn property<'a>(schema: &'a Value, key: &str) -> Option<&'a Value> {
    properties(schema)?.get(key.split('.').next()?)
}

fn is_secret(schema: &Value, key: &str) -> bool {
    property(schema, key).and_then(|property| property.get("writeOnly")).and_then(Value::as_bool).unwrap_or(false)
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
        for part in [
            "storage.file.dir = 3: takes a text",
            "storage.file.max_bytes = -1: takes a whole number, at least 0",
            "storage.file has no key colour (its keys are dir, max_bytes, token)",
        ] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }

    #[test]
    fn a_wrong_value_was_answered_by_the_list_of_all_keys() {
        for config in [json!({"dir": 3}), json!({"dir": "d", "max_byte": 3}), json!({})] {
            let text = check(config).unwrap_err();
            assert!(!text.contains("its keys are"), "{text}");
        }
    }

    #[test]
    fn what_would_be_right_is_said_in_words() {
        let says = |schema: Value, right: &str| assert_eq!(takes(&schema, false).as_deref(), Some(right), "{schema}");
        says(json!({"type": "integer", "minimum": 1, "maximum": 16}), "a whole number from 1 to 16");
        says(json!({"type": "number", "exclusiveMinimum": 0, "maximum": 1}), "a number, above 0 and at most 1");
        says(json!({"type": "number", "maximum": 1}), "a number, at most 1");
        says(json!({"type": ["boolean", "string"]}), "true or false, or a text");
        says(json!({"enum": ["tcp", "rdma"]}), r#""tcp" or "rdma""#);
        says(
            json!({"type": "array", "items": {"type": "string", "minLength": 1}}),
            "a list, of which each is a text of at least 1 characters",
        );
        says(
            json!({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^x$"}]}),
            "a whole number, or a text that matches ^x$",
        );
        assert_eq!(takes(&json!({"$ref": "#/x"}), false), None);
    }

    #[test]
    fn keys_that_do_not_go_together_are_told_of_without_the_words_of_the_schema() {
        let schema = json!({
            "type": "object",
            "properties": {"pin": {"type": "boolean"}, "ttl": {"type": "integer"}, "role": {"type": "string"}},
            "if": {"properties": {"pin": {"const": true}}, "required": ["pin"]},
            "then": {"properties": {"role": {"const": "one"}}},
            "else": {"properties": {"ttl": false}},
        });
        let text = |config: Value| validate("b", &schema, config.as_object().unwrap()).unwrap_err();
        assert_eq!(text(json!({"ttl": 5})), "storage.b.ttl = 5: can't be set beside the other keys");
        assert_eq!(
            text(json!({"pin": true, "role": "two"})),
            "storage.b.role = \"two\": takes \"one\" beside the other keys"
        );
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
        assert_eq!(
            text,
            "storage.file.max = \"ten\": takes a whole number, or a text of another form (bytes, or such as 10GiB)"
        );
        let address = json!({"type": "string", "pattern": "^[^:]+:[0-9]+$", "description": "host:port"});
        let schema = json!({"type": "object", "properties": {"at": address}});
        let text = validate("file", &schema, json!({"at": "here"}).as_object().unwrap()).unwrap_err();
        assert_eq!(text, "storage.file.at = \"here\": takes a text of another form (host:port)");
    }

    #[test]
    fn a_missing_key_is_named() {
        assert_eq!(check(json!({})).unwrap_err(), "storage.file.dir is missing, and has to be set");
    }

    #[test]
    fn secrets_are_shown_nowhere() {
        let shown = check(json!({"dir": "d", "token": "abcdef"})).unwrap();
        assert_eq!(shown["token"], HIDDEN);
        let text = check(json!({"dir": "d", "token": "ab"})).unwrap_err();
        assert!(text.contains("storage.file.token") && !text.contains("\"ab\""), "{text}");
    }
}
