//! GGUF files, versions 2 and 3, read over bytes in memory (a mapped file).
//!
//! [`Gguf::parse`] checks the whole header: every key and value, every tensor's type, shape and
//! place. After it no length in the file is trusted any more than it was checked.

mod cursor;
mod value;

use std::collections::HashMap;
use std::path::Path;

pub use value::{Array, Value};

use crate::ModelError;
use crate::weights::{RawTensor, WeightFormat};
use cursor::Cursor;

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const ALIGNMENT_KEY: &str = "general.alignment";
/// No format of the field has more axes.
const MAX_DIMS: u32 = 4;
/// Keys and tensor names longer than this are no names.
const MAX_NAME: usize = 65_535;

/// Where a tensor lies and what it is.
#[derive(Debug, Clone)]
struct TensorInfo {
    format: WeightFormat,
    /// Slowest axis first.
    shape: Vec<usize>,
    begin: usize,
    bytes: usize,
}

/// A checked GGUF file.
#[derive(Debug)]
pub struct Gguf<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    values: HashMap<&'a str, Value<'a>>,
    tensors: HashMap<&'a str, TensorInfo>,
}

impl<'a> Gguf<'a> {
    /// Reads and checks the header in `bytes`, the whole content of the file at `path`.
    ///
    /// # Errors
    /// [`ModelError::Damaged`], [`ModelError::Key`] or [`ModelError::Tensor`] with what was expected and
    /// found. Tensors of types that are not supported are errors too.
    pub fn parse(path: &'a Path, bytes: &'a [u8]) -> Result<Self, ModelError> {
        let damaged = |what: String| ModelError::Damaged { path: path.to_path_buf(), what };
        let mut cursor = Cursor::new(bytes);
        let magic = cursor.take(4, "file type").map_err(damaged)?;
        if magic != MAGIC {
            return Err(damaged(format!(
                "expected a GGUF file beginning with \"GGUF\", found {:?}",
                String::from_utf8_lossy(magic)
            )));
        }
        let version = cursor.u32("version").map_err(damaged)?;
        if !(2..=3).contains(&version) {
            return Err(damaged(format!("expected GGUF version 2 or 3 in little-endian order, found {version}")));
        }
        let tensor_count = cursor.u64("number of tensors").map_err(damaged)?;
        let key_count = cursor.u64("number of keys").map_err(damaged)?;

        let mut values = HashMap::new();
        for index in 0..key_count {
            let key = name(&mut cursor, &format!("key {index} of {key_count}")).map_err(damaged)?;
            let value = cursor
                .u32("type")
                .and_then(|kind| value::read(&mut cursor, kind, 0))
                .map_err(|why| damaged(format!("key \"{key}\": {why}")))?;
            if values.insert(key, value).is_some() {
                return Err(damaged(format!("key \"{key}\" is there twice")));
            }
        }
        let alignment = match values.get(ALIGNMENT_KEY) {
            None => DEFAULT_ALIGNMENT,
            Some(value) => value
                .as_u64()
                .filter(|alignment| alignment.is_power_of_two() && *alignment <= 1 << 30)
                .ok_or_else(|| ModelError::Key {
                    path: path.to_path_buf(),
                    key: ALIGNMENT_KEY.to_owned(),
                    expected: "a power of two up to 2^30".to_owned(),
                    found: value.describe(),
                })?,
        };

        let mut infos = Vec::new();
        for index in 0..tensor_count {
            let what = format!("description of tensor {index} of {tensor_count}");
            let name = name(&mut cursor, &what).map_err(damaged)?;
            infos.push((name, RawInfo::read(&mut cursor, path, name)?));
        }
        let header = cursor.position() as u64;
        let data = header.next_multiple_of(alignment);

        let mut tensors = HashMap::with_capacity(infos.len());
        for (name, raw) in infos {
            let info = raw.place(path, name, data, alignment, bytes.len())?;
            if tensors.insert(name, info).is_some() {
                return Err(damaged(format!("tensor \"{name}\" is there twice")));
            }
        }
        refuse_overlap(path, &tensors)?;
        Ok(Self { path, bytes, values, tensors })
    }

    /// The file.
    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        self.values.get(key).copied()
    }

    /// The value of `key` as `convert` reads it; `expected` says what that is, for the message.
    pub fn optional<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match convert(value) {
                Some(converted) => Ok(Some(converted)),
                None => Err(self.key_error(key, expected, value.describe())),
            },
        }
    }

    /// As [`Gguf::optional`], but the key must be there.
    pub fn required<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<T, ModelError> {
        self.optional(key, expected, convert)?.ok_or_else(|| self.key_error(key, expected, "no such key"))
    }

    /// An error about `key`.
    pub fn key_error(&self, key: &str, expected: &str, found: impl Into<String>) -> ModelError {
        ModelError::Key {
            path: self.path.to_path_buf(),
            key: key.to_owned(),
            expected: expected.to_owned(),
            found: found.into(),
        }
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<RawTensor<'a>> {
        let info = self.tensors.get(name)?;
        Some(RawTensor {
            name: name.to_owned(),
            file: self.path,
            format: info.format,
            shape: info.shape.clone(),
            data: self.bytes.get(info.begin..info.begin + info.bytes)?,
        })
    }

    /// Names of all tensors, in no order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &'a str> + '_ {
        self.tensors.keys().copied()
    }
}

/// Two tensors never share bytes: where they do, an offset or a shape is wrong.
fn refuse_overlap(path: &Path, tensors: &HashMap<&str, TensorInfo>) -> Result<(), ModelError> {
    let mut order: Vec<(&str, &TensorInfo)> = tensors.iter().map(|(name, info)| (*name, info)).collect();
    order.sort_unstable_by_key(|(_, info)| info.begin);
    for pair in order.windows(2) {
        if let [(before, first), (after, second)] = pair
            && first.begin + first.bytes > second.begin
        {
            return Err(ModelError::Tensor {
                path: path.to_path_buf(),
                tensor: (*after).to_owned(),
                expected: format!("data behind that of \"{before}\", from byte {} on", first.begin + first.bytes),
                found: format!("byte {}", second.begin),
            });
        }
    }
    Ok(())
}

/// A tensor's description as it stands in the file.
struct RawInfo {
    dims: Vec<u64>,
    kind: u32,
    offset: u64,
}

impl RawInfo {
    fn read(cursor: &mut Cursor<'_>, path: &Path, tensor: &str) -> Result<Self, ModelError> {
        let damaged = |what: String| ModelError::Damaged {
            path: path.to_path_buf(),
            what: format!("tensor \"{tensor}\": {what}"),
        };
        let count = cursor.u32("number of axes").map_err(damaged)?;
        if !(1..=MAX_DIMS).contains(&count) {
            return Err(damaged(format!("expected 1 to {MAX_DIMS} axes, found {count}")));
        }
        let mut dims = Vec::with_capacity(MAX_DIMS as usize);
        for _ in 0..count {
            dims.push(cursor.u64("extent").map_err(damaged)?);
        }
        let kind = cursor.u32("type").map_err(damaged)?;
        let offset = cursor.u64("offset").map_err(damaged)?;
        Ok(Self { dims, kind, offset })
    }

    /// Checks type, shape and place against the file of `file_bytes` bytes.
    fn place(
        self,
        path: &Path,
        tensor: &str,
        data: u64,
        alignment: u64,
        file_bytes: usize,
    ) -> Result<TensorInfo, ModelError> {
        let error = |expected: String, found: String| ModelError::Tensor {
            path: path.to_path_buf(),
            tensor: tensor.to_owned(),
            expected,
            found,
        };
        let format = tensor_type(self.kind).ok_or_else(|| {
            error(
                "one of the types F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K".to_owned(),
                format!("type {}", type_name(self.kind)),
            )
        })?;
        let shape: Option<Vec<usize>> =
            self.dims.iter().rev().map(|&extent| usize::try_from(extent).ok().filter(|&extent| extent > 0)).collect();
        let found_dims = || format!("extents {:?}", self.dims);
        let shape = shape.ok_or_else(|| error("extents of at least 1".to_owned(), found_dims()))?;
        let inputs = shape.last().copied().unwrap_or(1);
        let row = format.row_bytes(inputs).ok_or_else(|| {
            error(format!("rows of a multiple of {} for {}", format.block_elements(), format.name()), found_dims())
        })?;
        let bytes = shape
            .iter()
            .rev()
            .skip(1)
            .try_fold(row, |bytes, &extent| bytes.checked_mul(extent))
            .ok_or_else(|| error("a size that fits in memory".to_owned(), found_dims()))?;
        if !self.offset.is_multiple_of(alignment) {
            return Err(error(
                format!("an offset that is a multiple of {alignment}"),
                format!("offset {}", self.offset),
            ));
        }
        let begin = data.checked_add(self.offset).and_then(|begin| usize::try_from(begin).ok());
        let end = begin.and_then(|begin| begin.checked_add(bytes));
        match (begin, end) {
            (Some(begin), Some(end)) if end <= file_bytes => Ok(TensorInfo { format, shape, begin, bytes }),
            _ => Err(error(
                format!("{bytes} bytes from byte {data} + {} on", self.offset),
                format!("a file of {file_bytes} bytes"),
            )),
        }
    }
}

fn name<'a>(cursor: &mut Cursor<'a>, what: &str) -> Result<&'a str, String> {
    let name = cursor.string(what)?;
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(format!("{what}: expected a name of 1 to {MAX_NAME} bytes, found {}", name.len()));
    }
    Ok(name)
}

fn tensor_type(kind: u32) -> Option<WeightFormat> {
    Some(match kind {
        0 => WeightFormat::F32,
        1 => WeightFormat::F16,
        2 => WeightFormat::Q4_0,
        3 => WeightFormat::Q4_1,
        8 => WeightFormat::Q8_0,
        12 => WeightFormat::Q4_K,
        13 => WeightFormat::Q5_K,
        14 => WeightFormat::Q6_K,
        30 => WeightFormat::BF16,
        _ => return None,
    })
}

/// Names of the types that exist elsewhere, for messages.
fn type_name(kind: u32) -> String {
    let name = match kind {
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        39 => "MXFP4",
        other => return format!("{other}"),
    };
    format!("{name} ({kind})")
}
