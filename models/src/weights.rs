//! Tensors as they lie in a checkpoint, whatever its format.

use std::path::Path;

pub use kvdock_kernels::WeightFormat;

use crate::ModelError;

/// A tensor in the mapped file.
#[derive(Debug, Clone)]
pub struct RawTensor<'a> {
    /// The name in the file.
    pub name: String,
    /// The file it lies in, for messages.
    pub file: &'a Path,
    /// How its values are stored.
    pub format: WeightFormat,
    /// Extents, slowest axis first: a matrix is `[outputs, inputs]`, rows one after the other.
    pub shape: Vec<usize>,
    /// Exactly the bytes of its blocks.
    pub data: &'a [u8],
}

impl RawTensor<'_> {
    /// Fails unless the shape is `expected`.
    ///
    /// # Errors
    /// [`ModelError::Tensor`] with both shapes.
    pub fn expect_shape(&self, expected: &[usize]) -> Result<(), ModelError> {
        if self.shape == expected {
            return Ok(());
        }
        Err(self.error(format!("shape {expected:?} by the model's configuration"), format!("shape {:?}", self.shape)))
    }

    /// An error about this tensor.
    pub fn error(&self, expected: impl Into<String>, found: impl Into<String>) -> ModelError {
        ModelError::Tensor {
            path: self.file.to_path_buf(),
            tensor: self.name.clone(),
            expected: expected.into(),
            found: found.into(),
        }
    }
}
