//! Values and strings as Python has them.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value};

/// Nested values deeper than this are refused.
const MAX_DEPTH: usize = 64;

/// Methods of Python's strings, lists and dicts.
pub(super) fn method(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let (Some(text), [argument]) = (value.as_str(), args)
        && let Some(argument) = argument.as_str()
    {
        match method {
            "removeprefix" => return Ok(text.strip_prefix(argument).unwrap_or(text).into()),
            "removesuffix" => return Ok(text.strip_suffix(argument).unwrap_or(text).into()),
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// Prints a value as Python's `str` does.
pub(super) fn print(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        return out.write_str(text).map_err(write_error);
    }
    if value.is_undefined() {
        return Ok(());
    }
    let mut text = String::new();
    repr(&mut text, value, 0)?;
    out.write_str(&text).map_err(write_error)
}

fn write_error(_: std::fmt::Error) -> Error {
    Error::new(ErrorKind::WriteFailure, "cannot write the rendered text")
}

fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value is nested deeper than {MAX_DEPTH}"))
}

/// Python's `repr`.
fn repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => number(out, value),
        ValueKind::String => quote(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            out.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                repr(out, &item, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                repr(out, &key, depth + 1)?;
                out.push_str(": ");
                repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// A number as Python prints it: a float always shows that it is one.
fn number(out: &mut String, value: &Value) {
    if value.is_integer() {
        out.push_str(&value.to_string());
        return;
    }
    match f64::try_from(value.clone()) {
        Ok(float) => out.push_str(&float_text(float)),
        Err(_) => out.push_str(&value.to_string()),
    }
}

fn float_text(float: f64) -> String {
    if !float.is_finite() {
        return match (float.is_nan(), float > 0.0) {
            (true, _) => "nan",
            (_, true) => "inf",
            (_, false) => "-inf",
        }
        .to_owned();
    }
    let magnitude = float.abs();
    if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) {
        return format!("{float:?}");
    }
    // Rust writes 1e-5 and 1e16 where Python writes 1e-05 and 1e+16.
    let text = format!("{float:e}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text,
    }
}

fn quote(out: &mut String, text: &str) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == mark => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(mark);
}

/// The filter `tojson`: Python's `json.dumps` with `ensure_ascii=False`.
pub(super) fn to_json(value: &Value, indent: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent.first() {
        Some(value) => Some(value.clone()),
        None => options.get::<Option<Value>>("indent")?,
    };
    let separators: Option<(String, String)> = options
        .get::<Option<Vec<String>>>("separators")?
        .and_then(|pair| <[String; 2]>::try_from(pair).ok())
        .map(|[item, key]| (item, key));
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let _ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let indent = match indent.filter(|value| !value.is_none() && !value.is_undefined()) {
        None => None,
        Some(width) => Some(usize::try_from(width)?.min(16)),
    };
    let (item, key) = separators.unwrap_or_else(|| {
        let item = if indent.is_some() { "," } else { ", " };
        (item.to_owned(), ": ".to_owned())
    });
    let style = JsonStyle { indent, item, key, sort_keys };
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(Value::from_safe_string(out))
}

struct JsonStyle {
    indent: Option<usize>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl JsonStyle {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => number(out, value),
            ValueKind::String => json_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list(out, depth, ('[', ']'), &items, |out, item| self.write(out, item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.list(out, depth, ('{', '}'), &keys, |out, key| {
                    match key.as_str() {
                        Some(text) => json_string(out, text),
                        None => json_string(out, &key.to_string()),
                    }
                    out.push_str(&self.key);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            other => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: a value of kind {other} has no JSON form"),
                ));
            }
        }
        Ok(())
    }

    fn list(
        &self,
        out: &mut String,
        depth: usize,
        (open, close): (char, char),
        items: &[Value],
        mut write: impl FnMut(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item);
            }
            self.line_break(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            self.line_break(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn line_break(&self, out: &mut String, depth: usize) {
        if let Some(width) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    }
}

fn json_string(out: &mut String, text: &str) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if u32::from(c) < 0x20 => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
}
