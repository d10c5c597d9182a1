//! What a plugin says of itself, for the suite.

use serde_json::Value;

use crate::Capabilities;
use crate::note::NoteSource;

/// What stands for the scratch folder in a configuration.
const SCRATCH: &str = "{scratch}";

/// What a note says, as far as the suite asks.
#[derive(Debug, Clone)]
pub struct Declared {
    /// Name of the plugin.
    pub name: String,
    /// What its instances may be able to do.
    pub capabilities: Capabilities,
    /// JSON Schema of its configuration.
    pub config_schema: Value,
    /// The configuration for the suite; `{scratch}` stands for a fresh folder.
    pub check_config: Value,
}

impl From<&NoteSource> for Declared {
    fn from(note: &NoteSource) -> Declared {
        // Text that is no JSON is a finding of the rules, and stays what it is until then.
        let json = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()));
        Declared {
            name: note.name.to_owned(),
            capabilities: note.capabilities,
            config_schema: json(note.config_schema),
            check_config: json(note.check_config),
        }
    }
}

/// The configuration with a folder in place of `{scratch}`, in every text of it.
pub(crate) fn with_scratch(config: &Value, folder: &str) -> Value {
    match config {
        Value::String(text) => Value::String(text.replace(SCRATCH, folder)),
        Value::Array(items) => items.iter().map(|item| with_scratch(item, folder)).collect(),
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), with_scratch(value, folder))).collect(),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_scratch_folder_is_put_into_every_text() {
        let config = json!({"dir": "{scratch}/a", "more": ["{scratch}", 3, {"x": "y{scratch}{scratch}"}]});
        let expected = json!({"dir": "/s/a", "more": ["/s", 3, {"x": "y/s/s"}]});
        assert_eq!(with_scratch(&config, "/s"), expected);
    }
}
