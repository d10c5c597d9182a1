//! One safetensors file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Metadata, SafeTensorError};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::ModelError;
use crate::load::map_file;
use crate::weights::{RawTensor, WeightFormat};

/// Bytes of the length in front of the header.
const LENGTH_BYTES: usize = 8;

/// A mapped safetensors file whose header has been checked.
pub(super) struct Shard {
    pub(super) path: PathBuf,
    map: Mmap,
    metadata: Metadata,
    /// First byte of the data.
    data: usize,
}

impl Shard {
    pub(super) fn open(path: PathBuf) -> Result<Self, ModelError> {
        let map = map_file(&path)?;
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(|error| explain(&path, &map, &error))?;
        Ok(Self { path, data: LENGTH_BYTES + header, map, metadata })
    }

    /// The whole file.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.metadata.tensors().into_keys().collect()
    }

    /// The tensor `name` as it is stored; `None` where the file has none of that name.
    pub(super) fn stored(&self, name: &str) -> Result<Option<StoredTensor<'_>>, ModelError> {
        let Some(info) = self.metadata.info(name) else {
            return Ok(None);
        };
        let (begin, end) = info.data_offsets;
        let data =
            self.map.get(self.data..).and_then(|data| data.get(begin..end)).ok_or_else(|| ModelError::Tensor {
                path: self.path.clone(),
                tensor: name.to_owned(),
                expected: "data inside the file".to_owned(),
                found: format!("bytes {begin} to {end} of {}", self.map.len()),
            })?;
        let shape = info.shape.clone();
        Ok(Some(StoredTensor { name: name.to_owned(), file: &self.path, dtype: info.dtype, shape, data }))
    }

    /// The tensor `name`; `None` where the file has none of that name.
    pub(super) fn tensor(&self, name: &str) -> Result<Option<RawTensor<'_>>, ModelError> {
        self.stored(name)?.map(StoredTensor::plain).transpose()
    }
}

/// A tensor of any type that safetensors know.
pub(crate) struct StoredTensor<'a> {
    pub(crate) name: String,
    pub(crate) file: &'a Path,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: &'a [u8],
}

impl<'a> StoredTensor<'a> {
    /// The tensor, if its elements are plain floats.
    pub(crate) fn plain(self) -> Result<RawTensor<'a>, ModelError> {
        let format = match self.dtype {
            Dtype::F32 => WeightFormat::F32,
            Dtype::F16 => WeightFormat::F16,
            Dtype::BF16 => WeightFormat::BF16,
            other => return Err(self.error("one of the types F32, F16, BF16", format!("type {other:?}"))),
        };
        Ok(RawTensor { name: self.name, file: self.file, format, shape: self.shape, data: self.data })
    }

    /// An error about this tensor.
    pub(crate) fn error(&self, expected: impl Into<String>, found: impl Into<String>) -> ModelError {
        ModelError::Tensor {
            path: self.file.to_path_buf(),
            tensor: self.name.clone(),
            expected: expected.into(),
            found: found.into(),
        }
    }

    /// Fails unless the shape is `expected`.
    pub(crate) fn expect_shape(&self, expected: &[usize]) -> Result<(), ModelError> {
        if self.shape == expected {
            return Ok(());
        }
        Err(self.error(format!("shape {expected:?} by the model's configuration"), format!("shape {:?}", self.shape)))
    }
}

/// What a header says of a tensor.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Finds the tensor behind an error that names none.
fn explain(path: &Path, bytes: &[u8], error: &SafeTensorError) -> ModelError {
    let fallback = ModelError::Damaged {
        path: path.to_path_buf(),
        what: format!("no sound safetensors file of {} bytes: {error}", bytes.len()),
    };
    let Some((header, data_start)) = header(bytes) else {
        return fallback;
    };
    let Ok(entries) = serde_json::from_slice::<BTreeMap<String, serde_json::Value>>(header) else {
        return fallback;
    };
    let data_bytes = (bytes.len() - data_start) as u64;
    let mut furthest = 0;
    for (name, value) in entries.into_iter().filter(|(name, _)| name != "__metadata__") {
        let tensor_error = |expected: String, found: String| ModelError::Tensor {
            path: path.to_path_buf(),
            tensor: name.clone(),
            expected,
            found,
        };
        let entry: Entry = match serde_json::from_value(value) {
            Ok(entry) => entry,
            Err(error) => {
                return tensor_error("dtype, shape and data_offsets".to_owned(), error.to_string());
            }
        };
        let (begin, end) = entry.data_offsets;
        if end > data_bytes || begin > end {
            return tensor_error(
                format!("data at bytes {begin} to {end} after the header"),
                format!("a file with {data_bytes} bytes after the header"),
            );
        }
        if let Some(size) = element_bytes(&entry.dtype) {
            let expected = entry.shape.iter().try_fold(size, |bytes, &extent| bytes.checked_mul(extent));
            if expected != Some(end - begin) {
                return tensor_error(
                    match expected {
                        Some(bytes) => format!("{bytes} bytes for {} {:?}", entry.dtype, entry.shape),
                        None => format!("a size that fits in memory for {:?}", entry.shape),
                    },
                    format!("{} bytes", end - begin),
                );
            }
        }
        furthest = furthest.max(end);
    }
    if furthest != data_bytes {
        return ModelError::Damaged {
            path: path.to_path_buf(),
            what: format!("expected {} bytes by its header, found {}", data_start as u64 + furthest, bytes.len()),
        };
    }
    fallback
}

/// The header's text and the place where the data begins, where the length is sound.
fn header(bytes: &[u8]) -> Option<(&[u8], usize)> {
    let length: [u8; LENGTH_BYTES] = bytes.get(..LENGTH_BYTES)?.try_into().ok()?;
    let end = usize::try_from(u64::from_le_bytes(length)).ok()?.checked_add(LENGTH_BYTES)?;
    Some((bytes.get(LENGTH_BYTES..end)?, end))
}

fn element_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F64" | "I64" | "U64" => 8,
        "F32" | "I32" | "U32" => 4,
        "F16" | "BF16" | "I16" | "U16" => 2,
        "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 1,
        _ => return None,
    })
}
