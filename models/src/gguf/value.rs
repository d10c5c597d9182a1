//! Metadata values.

use super::cursor::Cursor;

/// Arrays inside arrays deeper than this are refused.
const MAX_DEPTH: usize = 4;

/// A metadata value. Text and arrays stay in the file and are read when asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// Types 0, 2, 4 and 10.
    Unsigned(u64),
    /// Types 1, 3, 5 and 11.
    Signed(i64),
    /// Types 6 and 12.
    Float(f64),
    /// Type 7.
    Bool(bool),
    /// Type 8.
    Text(&'a str),
    /// Type 9.
    Array(Array<'a>),
}

/// An array value: elements of one type, checked once when the file was opened.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: u32,
    count: u64,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        // Every element takes at least a byte of the file, so the count fits.
        usize::try_from(self.count).unwrap_or(usize::MAX)
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (element, count) = (self.element, self.count);
        let mut cursor = Cursor::new(self.bytes);
        (0..count).map_while(move |_| read(&mut cursor, element, 0).ok())
    }
}

impl<'a> Value<'a> {
    /// The value as a count or an id, where it is an integer that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::Unsigned(value) => Some(value),
            Value::Signed(value) => u64::try_from(value).ok(),
            _ => None,
        }
    }

    /// The value as a number, integers included.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::Float(value) => Some(value),
            Value::Unsigned(value) => Some(value as f64),
            Value::Signed(value) => Some(value as f64),
            _ => None,
        }
    }

    /// The text, where the value is one.
    pub fn as_str(&self) -> Option<&'a str> {
        match *self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The truth value, where the value is one.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// The array, where the value is one.
    pub fn as_array(&self) -> Option<Array<'a>> {
        match *self {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }

    /// What the value is, for a message: its kind and, where short, itself.
    pub fn describe(&self) -> String {
        match self {
            Value::Unsigned(value) => format!("the integer {value}"),
            Value::Signed(value) => format!("the integer {value}"),
            Value::Float(value) => format!("the number {value}"),
            Value::Bool(value) => format!("{value}"),
            Value::Text(text) => {
                let mut short: String = text.chars().take(40).collect();
                if short.len() < text.len() {
                    short.push('…');
                }
                format!("the text {short:?}")
            }
            Value::Array(array) => format!("an array of {} elements", array.count),
        }
    }
}

/// Reads a value of type `kind`. `depth` counts the arrays around it.
pub(super) fn read<'a>(cursor: &mut Cursor<'a>, kind: u32, depth: usize) -> Result<Value<'a>, String> {
    const WHAT: &str = "value";
    Ok(match kind {
        0 => Value::Unsigned(cursor.u8(WHAT)?.into()),
        1 => Value::Signed((cursor.u8(WHAT)? as i8).into()),
        2 => Value::Unsigned(cursor.u16(WHAT)?.into()),
        3 => Value::Signed((cursor.u16(WHAT)? as i16).into()),
        4 => Value::Unsigned(cursor.u32(WHAT)?.into()),
        5 => Value::Signed((cursor.u32(WHAT)? as i32).into()),
        6 => Value::Float(f32::from_bits(cursor.u32(WHAT)?).into()),
        7 => match cursor.u8(WHAT)? {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            other => return Err(format!("value: expected a truth value of 0 or 1, found {other}")),
        },
        8 => Value::Text(cursor.string(WHAT)?),
        9 => read_array(cursor, depth)?,
        10 => Value::Unsigned(cursor.u64(WHAT)?),
        11 => Value::Signed(cursor.u64(WHAT)? as i64),
        12 => Value::Float(f64::from_bits(cursor.u64(WHAT)?)),
        other => return Err(format!("value: expected a type from 0 to 12, found {other}")),
    })
}

fn read_array<'a>(cursor: &mut Cursor<'a>, depth: usize) -> Result<Value<'a>, String> {
    if depth >= MAX_DEPTH {
        return Err(format!("value: arrays are nested deeper than {MAX_DEPTH}"));
    }
    let element = cursor.u32("array element type")?;
    let count = cursor.u64("array length")?;
    let rest = cursor.rest();
    match fixed_size(element) {
        Some(size) => {
            // A product past u64 is past the end of any file too.
            let bytes = cursor.take(count.saturating_mul(size), "array elements")?;
            if element == 7 && bytes.iter().any(|&byte| byte > 1) {
                return Err("array: expected truth values of 0 or 1, found others".to_owned());
            }
        }
        None => {
            for index in 0..count {
                read(cursor, element, depth + 1).map_err(|why| format!("array element {index} of {count}: {why}"))?;
            }
        }
    }
    let used = rest.len() - cursor.remaining();
    let bytes = rest.get(..used).unwrap_or_default();
    Ok(Value::Array(Array { element, count, bytes }))
}

/// Bytes of an element of type `kind`, where all have the same.
fn fixed_size(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
