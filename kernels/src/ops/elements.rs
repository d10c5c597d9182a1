//! Operations on elements and rows of buffers.

use crate::device::{Buf, Rope, WeightData};
use crate::error::KernelError;
use crate::handle::handle;

handle! {
    /// Numbers (row numbers, positions, places) in the memory of a device.
    Indices {
        /// How many.
        len: usize,
    }
}

handle! {
    /// Several matrices of one shape, each for columns of its own of the input.
    GroupedWeight {
        /// How many.
        groups: usize,
        /// Output features of each.
        rows: usize,
        /// Input features of each.
        cols: usize,
    }
}

impl Indices {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How gate and up are put together in a gated MLP.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `silu(gate) · up`.
    Silu,
    /// `silu(min(gate, limit)) · clamp(up, -limit, limit)`.
    ClampedSilu {
        /// Where values are cut off.
        limit: f32,
    },
    /// `gate · sigmoid(alpha · gate) · (up + 1)`, gate at most `limit`, up within ±`limit`.
    GptOss {
        /// Factor within the sigmoid.
        alpha: f32,
        /// Where values are cut off.
        limit: f32,
    },
}

/// A part of each row of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// Elements from one row to the next.
    pub stride: usize,
    /// First element of the part in its row.
    pub at: usize,
}

/// Which way heads are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// By the angle.
    Forth,
    /// By its negative.
    Back,
}

/// Operations on elements and rows.
pub trait ElementOps {
    /// A buffer of `len` f32 with any content, for what is written before it is read.
    fn scratch(&self, len: usize) -> Result<Buf, KernelError>;

    /// Numbers that later operations read.
    fn upload_indices(&self, values: &[u32]) -> Result<Indices, KernelError>;

    /// `gate` and `up` put together into `gate`, for `len` elements.
    fn activate(&self, activation: Activation, gate: &mut Buf, up: &Buf, len: usize) -> Result<(), KernelError>;

    /// `x *= factor`, for `len` elements.
    fn scale(&self, x: &mut Buf, factor: f32, len: usize) -> Result<(), KernelError>;

    /// `x *= sigmoid(gate)`, for `len` elements.
    fn sigmoid_mul(&self, x: &mut Buf, gate: &Buf, len: usize) -> Result<(), KernelError>;

    /// Copies `width` elements of each of `rows` rows. Parts lie within their strides.
    fn copy_columns(
        &self,
        from: &Buf,
        source: Columns,
        to: &mut Buf,
        target: Columns,
        width: usize,
        rows: usize,
    ) -> Result<(), KernelError>;

    /// RMS norm in place of `rows` rows of `width` elements, times `weight` if given.
    ///
    /// On the CPU its sum is in another order than that of [`crate::Device::rms_norm`].
    fn norm_rows(
        &self,
        x: &mut Buf,
        weight: Option<&Buf>,
        width: usize,
        eps: f32,
        rows: usize,
    ) -> Result<(), KernelError>;

    /// LayerNorm in place of `rows` rows of `weight.len()` elements.
    fn layer_norm(&self, x: &mut Buf, weight: &Buf, bias: &Buf, eps: f32, rows: usize) -> Result<(), KernelError>;

    /// Rotates `heads` heads of `head_dim` elements of each row, in place; row r is at position `positions[r]`.
    fn rotate(
        &self,
        rope: &Rope,
        positions: &Indices,
        x: &mut Buf,
        heads: usize,
        head_dim: usize,
        turn: Turn,
    ) -> Result<(), KernelError>;

    /// Checks and packs `groups` matrices that `weight` has one after another: `weight.shape.rows / groups` rows each.
    fn upload_groups(&self, weight: &WeightData<'_>, groups: usize) -> Result<GroupedWeight, KernelError>;

    /// For each group g: `out[r, g, :] = x[r, g, :] · weight[g]ᵀ`. `x` is `[rows, groups, cols]`, `out`
    /// `[rows, groups, weight.rows]`.
    fn linear_groups(&self, x: &Buf, weight: &GroupedWeight, rows: usize, out: &mut Buf) -> Result<(), KernelError>;
}
