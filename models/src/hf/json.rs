//! JSON files of a Hugging Face folder, read key by key.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::ModelError;
use crate::load::read_if_there;

/// A JSON object and the file it came from.
#[derive(Debug)]
pub struct JsonFile {
    path: PathBuf,
    object: Map<String, Value>,
}

impl JsonFile {
    /// Reads the file; `None` when it does not exist.
    ///
    /// # Errors
    /// A file that cannot be read or is no JSON object.
    pub fn open(path: &Path) -> Result<Option<Self>, ModelError> {
        let Some(text) = read_if_there(path)? else { return Ok(None) };
        let object = serde_json::from_slice(&text).map_err(|error| ModelError::Damaged {
            path: path.to_path_buf(),
            what: format!("expected a JSON object, found {error}"),
        })?;
        Ok(Some(Self { path: path.to_path_buf(), object }))
    }

    /// The object under `key` as a file of its own; messages name the same path.
    pub fn section(&self, key: &str) -> Option<Self> {
        Some(Self { path: self.path.clone(), object: self.get(key)?.as_object()?.clone() })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The value of `key`, dots leading into objects. Null counts as missing.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let mut parts = key.split('.');
        let mut value = self.object.get(parts.next()?)?;
        for part in parts {
            value = value.get(part)?;
        }
        (!value.is_null()).then_some(value)
    }

    /// The value of `key` as `convert` reads it; `expected` says what that is, for the message.
    ///
    /// # Errors
    /// [`ModelError::Key`] when the value is something else.
    pub fn optional<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match convert(value) {
                Some(converted) => Ok(Some(converted)),
                None => Err(self.key_error(key, expected, short(value))),
            },
        }
    }

    /// As [`JsonFile::optional`], but the key must be there.
    ///
    /// # Errors
    /// [`ModelError::Key`] when the key is missing or its value is something else.
    pub fn required<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, ModelError> {
        self.optional(key, expected, convert)?.ok_or_else(|| self.key_error(key, expected, "no such key"))
    }

    /// An error about `key`.
    pub fn key_error(&self, key: &str, expected: &str, found: impl Into<String>) -> ModelError {
        ModelError::Key {
            path: self.path.clone(),
            key: key.to_owned(),
            expected: expected.to_owned(),
            found: found.into(),
        }
    }
}

/// A value for a message: its JSON, cut where long.
fn short(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 {
        return text;
    }
    text.chars().take(60).chain(['…']).collect()
}
