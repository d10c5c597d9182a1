//! A leading `~/` in paths, which no shell has expanded.

use std::path::Path;

use serde_json::{Map, Value};

use super::value::show;

/// `text` with the home folder in place of a leading `~`, where it stands alone or before a slash. None where the home folder is not known.
pub(crate) fn expanded(text: &str) -> Option<String> {
    in_home(text, std::env::home_dir().as_deref())
}

fn in_home(text: &str, home: Option<&Path>) -> Option<String> {
    let Some(rest) = text.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/')) else {
        return Some(text.to_owned());
    };
    let home = home?.to_str().filter(|home| !home.is_empty())?;
    Some(format!("{}{rest}", home.trim_end_matches('/')))
}

/// The texts of a backend's own configuration likewise, but for those that its `schema` marks as secrets: whatever else begins with `~/` is a path.
/// `table` is its path, for errors.
///
/// # Errors
/// Names the key where the home folder is not known.
pub(crate) fn expanded_in(table: &str, schema: &Value, own: &Map<String, Value>) -> Result<Map<String, Value>, String> {
    let is_secret = |key: &str| {
        let property = schema.get("properties").and_then(|properties| properties.get(key));
        property.and_then(|property| property.get("writeOnly")).and_then(Value::as_bool).unwrap_or(false)
    };
    let each = own.iter().map(|(key, value)| {
        let value = if is_secret(key) { value.clone() } else { expanded_value(&format!("{table}.{key}"), value)? };
        Ok((key.clone(), value))
    });
    each.collect()
}

fn expanded_value(path: &str, value: &Value) -> Result<Value, String> {
    Ok(match value {
        Value::String(text) => Value::String(
            expanded(text)
                .ok_or_else(|| format!("{path} = {}: there is no home folder; write the whole path", show(value)))?,
        ),
        Value::Array(items) => items.iter().map(|item| expanded_value(path, item)).collect::<Result<_, _>>()?,
        Value::Object(map) => {
            let each = map.iter().map(|(key, item)| Ok((key.clone(), expanded_value(&format!("{path}.{key}"), item)?)));
            Value::Object(each.collect::<Result<_, String>>()?)
        }
        other => other.clone(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_leading_tilde_made_a_folder_of_that_name() {
        let in_home = |text| in_home(text, Some(Path::new("/home/me")));
        assert_eq!(in_home("~/pages/x").unwrap(), "/home/me/pages/x");
        assert_eq!(in_home("~").unwrap(), "/home/me");
        for other in ["/a/~/b", "~backup/x", "./~/x", "x~", ""] {
            assert_eq!(in_home(other).unwrap(), other);
        }
        assert_eq!(super::in_home("~/x", Some(Path::new("/"))).unwrap(), "/x");
        assert_eq!(super::in_home("~/x", None), None);
        assert_eq!(super::in_home("/x", None).unwrap(), "/x");
    }

    #[test]
    fn every_path_of_a_backend_is_expanded_and_no_secret() {
        let home = |rest: &str| expanded(&format!("~{rest}")).unwrap();
        let schema = json!({"properties": {"token": {"type": "string", "writeOnly": true}}});
        let own =
            json!({"dir": "~/a", "dirs": ["~/b", "/c", 3], "deep": {"path": "~"}, "token": "~/secret", "name": "a~/b"});
        let expected = json!({"dir": home("/a"), "dirs": [home("/b"), "/c", 3], "deep": {"path": home("")}, "token": "~/secret", "name": "a~/b"});
        assert_eq!(Value::Object(expanded_in("storage.x", &schema, own.as_object().unwrap()).unwrap()), expected);
    }
}
