//! Weight formats: plain floats and GGUF's quantised blocks.

use crate::error::KernelError;

/// Element or block format of a weight matrix, as in safetensors and GGUF files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, non_camel_case_types)]
pub enum WeightFormat {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl WeightFormat {
    /// Elements of a block; a row is a whole number of blocks.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => 32,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// Bytes of a row of `cols` elements, or `None` if `cols` is no whole number of blocks or
    /// the size overflows.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if cols.is_multiple_of(self.block_elements()) {
            (cols / self.block_elements()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }

    /// The format's usual name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }
}

/// Dequantises whole blocks of `format` into f32. `bytes` must be exactly the blocks of
/// `out.len()` elements.
pub fn dequantize(format: WeightFormat, bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    if format.row_bytes(out.len()) != Some(bytes.len()) {
        return Err(KernelError::Shape {
            op: "dequantize",
            what: "length of bytes",
            expected: match format.row_bytes(out.len()) {
                Some(n) => format!("{n} ({} elements of {})", out.len(), format.name()),
                None => format!(
                    "blocks of {} elements of {}, but out has {}",
                    format.block_elements(),
                    format.name(),
                    out.len()
                ),
            },
            found: bytes.len().to_string(),
        });
    }
    blocks::dequantize(format, bytes, out);
    Ok(())
}

pub(crate) mod blocks;

#[cfg(test)]
mod tests;
