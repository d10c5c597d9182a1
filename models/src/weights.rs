//! Tensors as they lie in a checkpoint, whatever its format.

use std::borrow::Cow;
use std::ops::Range;
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

impl<'a> RawTensor<'a> {
    /// The bytes of `rows` and `cols` of this matrix.
    ///
    /// # Errors
    /// When the columns do not begin and end between blocks.
    pub(crate) fn cut(&self, rows: Range<usize>, cols: Range<usize>) -> Result<Cow<'a, [u8]>, ModelError> {
        let width = self.shape.last().copied().unwrap_or_default();
        let bytes = |cols: usize| {
            self.format.row_bytes(cols).ok_or_else(|| {
                let (name, block) = (self.format.name(), self.format.block_elements());
                self.error(
                    format!("columns that ranks can share in whole {name} blocks of {block}"),
                    format!("a share that ends at column {cols} of {width}"),
                )
            })
        };
        let (row, from, to) = (bytes(width)?, bytes(cols.start)?, bytes(cols.end)?);
        let all = self.data.get(rows.start * row..rows.end * row).unwrap_or_default();
        if (from, to) == (0, row) {
            return Ok(Cow::Borrowed(all));
        }
        Ok(Cow::Owned(all.chunks_exact(row.max(1)).flat_map(|row| row[from..to].iter().copied()).collect()))
    }

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
