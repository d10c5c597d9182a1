//! Reading request bodies field by field: wrong types are errors that name the field, fields that
//! ask for what is not served are refused, and fields nobody knows are logged once.

use std::collections::HashSet;

use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode, header};
use parking_lot::Mutex;
use serde_json::{Map, Value};

use super::error::ApiError;
use crate::config::nearest;

/// Most bytes of the name that a client gives a request, a session or a tenant. It is kept with what it names, and told in answers and the log.
const LONGEST_NAME: usize = 4096;
/// Most names of unknown fields that are remembered; a client can invent any number.
const MAX_UNKNOWN_NAMES: usize = 256;

/// Names of unknown fields that were logged already.
#[derive(Debug, Default)]
pub struct UnknownFields {
    seen: Mutex<HashSet<String>>,
}

impl UnknownFields {
    /// Logs `name`, the first time it is seen. Returns whether it was logged.
    fn note(&self, name: &str) -> bool {
        let shown: String = name.chars().take(100).collect();
        let mut seen = self.seen.lock();
        if seen.len() >= MAX_UNKNOWN_NAMES || !seen.insert(shown.clone()) {
            return false;
        }
        tracing::warn!(field = %shown, "request field is not known and is ignored");
        true
    }
}

/// A field that is known and not served.
#[derive(Clone, Copy, Debug)]
pub struct Unserved {
    /// The field.
    pub name: &'static str,
    /// Values that ask for nothing and pass.
    pub harmless: Harmless,
}

/// Which values of an unserved field ask for nothing. Null and a missing field always do.
#[derive(Clone, Copy, Debug)]
pub enum Harmless {
    /// `false`, `""`, `[]`, `{}`.
    Empty,
    /// Empty values, and these words.
    Words(&'static [&'static str]),
    /// Empty values, and an object whose `type` is this word.
    Type(&'static str),
    /// Empty values, and this number.
    Number(i64),
    /// Any value: the field is a hint.
    Any,
}

impl Harmless {
    fn covers(&self, value: &Value) -> bool {
        let empty = match value {
            Value::Null | Value::Bool(false) => true,
            Value::String(text) => text.is_empty(),
            Value::Array(items) => items.iter().all(Value::is_null),
            Value::Object(map) => map.is_empty(),
            _ => false,
        };
        match self {
            Self::Empty => empty,
            Self::Words(words) => empty || value.as_str().is_some_and(|text| words.contains(&text)),
            Self::Type(word) => empty || value.get("type").and_then(Value::as_str) == Some(*word),
            Self::Number(number) => empty || value.as_i64() == Some(*number),
            Self::Any => true,
        }
    }
}

/// Checks the headers and parses the body as one JSON object.
///
/// # Errors
/// 415 for another content type; 400 with the position for wrong JSON.
pub fn parse_body(headers: &HeaderMap, body: &Bytes) -> Result<Fields, ApiError> {
    if let Some(content_type) = headers.get(header::CONTENT_TYPE) {
        let essence =
            content_type.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        let json = essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"));
        if !json {
            return Err(ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                format!("Unsupported Media Type: {essence:?}; send Content-Type: application/json"),
            ));
        }
    }
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING).filter(|encoding| *encoding != "identity") {
        return Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!("Content-Encoding {encoding:?} is not read by this server; send the body as it is"),
        ));
    }
    let value: Value = serde_json::from_slice(body).map_err(|error| {
        ApiError::bad_request(format!("the body is not valid JSON: {error}")).with_code("invalid_json")
    })?;
    match value {
        Value::Object(map) => Ok(Fields { bytes: body.len(), ..Fields::new(map) }),
        other => Err(ApiError::bad_request(format!("the body is {}, but a JSON object is wanted", name_of(&other)))),
    }
}

/// The fields of one JSON object. Each is taken out as it is read.
#[derive(Debug, Default)]
pub struct Fields {
    map: Map<String, Value>,
    /// Path in front of the names in messages, ending in a dot unless empty.
    prefix: String,
    /// Bytes of the body they came in.
    bytes: usize,
}

impl Fields {
    /// The fields of `map` at the top of the body.
    pub fn new(map: Map<String, Value>) -> Self {
        Self { map, prefix: String::new(), bytes: 0 }
    }

    /// Bytes of the body that they came in; 0 if they came in none.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The same fields, named below `parent` in messages.
    pub fn under(mut self, parent: &str) -> Self {
        self.prefix = format!("{parent}.");
        self
    }

    /// `name` with the path in front of it, as messages have it.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn wrong<T>(&self, name: &str, value: &Value, wanted: &str) -> Result<T, ApiError> {
        Err(ApiError::field(self.path(name), format!("takes {wanted}; found {}", show(value))))
    }

    /// Whether all fields have been taken.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Whether `name` is there and not null.
    pub fn has(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(|value| !value.is_null())
    }

    /// Whether `name` is there and is null.
    pub fn is_null(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(Value::is_null)
    }

    /// Takes any value; null counts as missing.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.map.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Takes a boolean.
    pub fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => self.wrong(name, &other, "true or false"),
        }
    }

    /// Takes a text.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => self.wrong(name, &other, "a text"),
        }
    }

    /// Takes the name that a client gives something, a text that is not too long.
    pub fn name(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let path = self.path(name);
        let text = self.text(name)?;
        text.iter().try_for_each(|text| check_name(&path, text))?;
        Ok(text)
    }

    /// Takes an integer. `3.0` is one too: some clients send every number as a float.
    pub fn integer(&mut self, name: &str) -> Result<Option<i64>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => match as_integer(&value) {
                Some(number) => Ok(Some(number)),
                None => self.wrong(name, &value, "an integer"),
            },
        }
    }

    /// Takes an integer from `low` to `high`.
    pub fn integer_in(&mut self, name: &str, low: i64, high: i64) -> Result<Option<i64>, ApiError> {
        match self.integer(name)? {
            Some(number) if !(low..=high).contains(&number) => {
                let wanted = if high >= i64::from(u32::MAX) {
                    format!("an integer of at least {low}")
                } else {
                    format!("an integer from {low} to {high}")
                };
                self.wrong(name, &Value::from(number), &wanted)
            }
            other => Ok(other),
        }
    }

    /// Takes a count that fits 32 bits.
    pub fn count(&mut self, name: &str, low: u32) -> Result<Option<u32>, ApiError> {
        let number = self.integer_in(name, i64::from(low), i64::from(u32::MAX))?;
        Ok(number.and_then(|number| u32::try_from(number).ok()))
    }

    /// Takes a number.
    pub fn number(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) if (number as f32).is_finite() => Ok(Some(number as f32)),
                _ => self.wrong(name, &value, "a number"),
            },
        }
    }

    /// Takes a text or a list of texts.
    pub fn texts(&mut self, name: &str) -> Result<Option<Vec<String>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(vec![text])),
            Some(value) => match as_texts(&value) {
                Some(texts) => Ok(Some(texts)),
                None => self.wrong(name, &value, "a text or a list of texts"),
            },
        }
    }

    /// Takes a list of token ids.
    pub fn tokens(&mut self, name: &str) -> Result<Option<Vec<u32>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => match as_tokens(&value) {
                Some(tokens) => Ok(Some(tokens)),
                None => self.wrong(name, &value, "a list of token ids"),
            },
        }
    }

    /// Takes an object.
    pub fn object(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Fields { map, prefix: format!("{}.", self.path(name)), bytes: self.bytes }))
            }
            Some(other) => self.wrong(name, &other, "an object"),
        }
    }

    /// All that is left, as plain JSON.
    pub fn into_map(self) -> Map<String, Value> {
        self.map
    }

    /// Refuses anything that is left; `known` are the fields there are. For requests that change the server, where a misspelled field does
    /// something else than was meant.
    ///
    /// # Errors
    /// 400 that names the field, the nearest known one, and all of them.
    pub fn finish_strictly(self, known: &[&str]) -> Result<(), ApiError> {
        let Some(name) = self.map.keys().next() else { return Ok(()) };
        let shown: String = name.chars().take(100).collect();
        let all = known.join(", ");
        let message = match nearest(&shown, known.iter().copied()) {
            Some(near) => format!("is no field of this request; did you mean {near}? There are: {all}"),
            None => format!("is no field of this request; there are: {all}"),
        };
        Err(ApiError::field(self.path(&shown), message))
    }

    /// Refuses what is left and asks for something that is not served; logs what nobody knows.
    pub fn finish(mut self, unserved: &[Unserved], unknown: &UnknownFields) -> Result<(), ApiError> {
        for field in unserved {
            match self.map.shift_remove(field.name) {
                Some(value) if !field.harmless.covers(&value) => {
                    let path = self.path(field.name);
                    let shown = show(&value);
                    return Err(ApiError::field(
                        path,
                        format!("{shown} is not served by this build; leave the field out"),
                    )
                    .with_code("unsupported_field"));
                }
                _ => {}
            }
        }
        for name in self.map.keys() {
            unknown.note(&format!("{}{name}", self.prefix));
        }
        Ok(())
    }
}

/// An integer, also where it is written as `3.0`.
pub fn as_integer(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        // Beyond 2^53 a float does not say which integer is meant.
        (number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0).then_some(number as i64)
    })
}

/// A list of token ids.
pub fn as_tokens(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|item| as_integer(item).and_then(|id| u32::try_from(id).ok())).collect()
}

/// A list of texts.
pub fn as_texts(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
}

/// What kind of JSON value it is, for messages.
pub fn name_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// `value` as JSON, shortened when it is long.
pub fn show(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

/// Whether `text`, in the field `name`, may name something.
pub(super) fn check_name(name: &str, text: &str) -> Result<(), ApiError> {
    match text.len() {
        0..=LONGEST_NAME => Ok(()),
        long => Err(ApiError::field(name, format!("has {long} bytes; at most {LONGEST_NAME} are taken"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields::new(value.as_object().cloned().expect("an object"))
    }

    fn parse(body: &str) -> Result<Fields, ApiError> {
        parse_body(&HeaderMap::new(), &Bytes::copy_from_slice(body.as_bytes()))
    }

    #[test]
    fn wrong_json_names_the_position() {
        let error = parse("{\"a\": 1,\n \"b\": }").unwrap_err();
        assert_eq!(error.status, StatusCode::BAD_REQUEST);
        assert!(error.message.ends_with("at line 2 column 7"), "{}", error.message);
        assert!(parse("[1]").unwrap_err().message.contains("is a list"));
        assert!(parse("").is_err());
        assert!(parse("{} x").is_err());
    }

    #[test]
    fn a_packed_body_was_taken_for_broken_json() {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
        let error = parse_body(&headers, &Bytes::from_static(b"\x1f\x8b")).unwrap_err();
        assert_eq!(error.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
        assert!(error.message.contains("gzip"), "{}", error.message);
        headers.insert(header::CONTENT_ENCODING, "identity".parse().unwrap());
        assert!(parse_body(&headers, &Bytes::from_static(b"{}")).is_ok());
    }

    #[test]
    fn other_content_types_are_415() {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, "text/plain".parse().unwrap());
        let error = parse_body(&headers, &Bytes::from_static(b"{}")).unwrap_err();
        assert_eq!(error.status.as_u16(), 415);
        headers.insert(header::CONTENT_TYPE, "Application/JSON; charset=utf-8".parse().unwrap());
        assert!(parse_body(&headers, &Bytes::from_static(b"{}")).is_ok());
    }

    #[test]
    fn wrong_types_name_field_and_value() {
        let mut fields = fields(json!({"n": "two", "t": true, "x": 1.5, "stop": [1], "ids": [-1]}));
        assert_eq!(fields.integer("n").unwrap_err().message, "n: takes an integer; found \"two\"");
        assert_eq!(fields.number("t").unwrap_err().message, "t: takes a number; found true");
        assert!(fields.integer("x").is_err());
        assert!(fields.texts("stop").is_err());
        assert!(fields.tokens("ids").is_err());
    }

    #[test]
    fn names_were_as_long_as_a_body() {
        let mut all = fields(json!({"rid": "x".repeat(4096), "cache_salt": "x".repeat(4097)}));
        assert_eq!(all.name("rid").unwrap().map(|rid| rid.len()), Some(4096));
        let error = all.name("cache_salt").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("cache_salt"));
        assert!(error.message.contains("4097 bytes; at most 4096"), "{}", error.message);
        assert_eq!(all.name("session_id"), Ok(None));
    }

    #[test]
    fn nested_objects_name_their_path() {
        let mut fields = fields(json!({"stream_options": {"include_usage": 1}}));
        let mut inner = fields.object("stream_options").unwrap().unwrap();
        assert_eq!(inner.bool("include_usage").unwrap_err().param.as_deref(), Some("stream_options.include_usage"));
    }

    #[test]
    fn null_is_missing_and_whole_floats_are_integers() {
        let mut fields = fields(json!({"a": null, "b": 3.0}));
        assert_eq!(fields.integer("a").unwrap(), None);
        assert_eq!(fields.integer("b").unwrap(), Some(3));
        assert_eq!(as_integer(&json!(1e300)), None);
    }

    #[test]
    fn unserved_fields_are_refused_only_when_they_ask_for_something() {
        let table = [
            Unserved { name: "tools", harmless: Harmless::Empty },
            Unserved { name: "response_format", harmless: Harmless::Type("text") },
            Unserved { name: "best_of", harmless: Harmless::Number(1) },
            Unserved { name: "tool_choice", harmless: Harmless::Words(&["none", "auto"]) },
        ];
        let unknown = UnknownFields::default();
        for passes in [
            json!({"tools": []}),
            json!({"tools": null, "response_format": {"type": "text"}, "best_of": 1}),
            json!({"tool_choice": "auto"}),
            json!({"something": 1}),
        ] {
            assert!(fields(passes).finish(&table, &unknown).is_ok());
        }
        for (refused, param) in [
            (json!({"tools": [{"type": "function"}]}), "tools"),
            (json!({"response_format": {"type": "json_object"}}), "response_format"),
            (json!({"best_of": 2}), "best_of"),
            (json!({"tool_choice": "required"}), "tool_choice"),
        ] {
            let error = fields(refused).finish(&table, &unknown).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param));
            assert_eq!(error.code, Some("unsupported_field"));
        }
    }

    #[test]
    fn unknown_names_are_noted_once_and_boundedly() {
        let unknown = UnknownFields::default();
        assert!(unknown.note("x"));
        assert!(!unknown.note("x"));
        for i in 0..2 * MAX_UNKNOWN_NAMES {
            unknown.note(&i.to_string());
        }
        assert_eq!(unknown.seen.lock().len(), MAX_UNKNOWN_NAMES);
    }

    proptest::proptest! {
        /// Whatever a client sends is answered, and an error names a field that was sent.
        #[test]
        fn no_body_is_too_odd(body in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200)) {
            let _ = parse_body(&HeaderMap::new(), &Bytes::from(body));
        }
    }
}
