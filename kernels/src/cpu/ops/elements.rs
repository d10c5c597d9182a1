//! Operations on elements and rows.

use super::super::device::{CpuDevice, Shared, product, shape};
use super::super::elementwise::rotate;
use super::super::linear::{self, Product};
use super::super::packed::PackedWeight;
use super::super::rope_table::RopeTable;
use crate::device::{Buf, Device, MatrixShape, Rope, WeightData};
use crate::error::KernelError;
use crate::ops::{Activation, Columns, ElementOps, GroupedWeight, Indices, Turn};
use crate::rowmath::{layer_norm, rms_norm, sigmoid, silu};

impl CpuDevice {
    /// The numbers behind a handle.
    pub(super) fn indices<'a>(
        &self,
        op: &'static str,
        what: &'static str,
        of: &'a Indices,
    ) -> Result<&'a [u32], KernelError> {
        let numbers: &Vec<u32> = of.downcast_ref().ok_or_else(|| self.foreign(op, what))?;
        Ok(numbers)
    }

    /// Calls `body` with each of `rows` rows of `width` elements of `x`, in any order.
    pub(super) fn each_row(
        &self,
        op: &'static str,
        x: &mut [f32],
        width: usize,
        rows: usize,
        body: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Result<(), KernelError> {
        debug_assert!(x.len() >= rows * width);
        let x = Shared(x.as_mut_ptr());
        self.each(op, rows, width, &|part| {
            for row in part {
                // SAFETY: row `row` of `x`, which this task alone has.
                body(row, unsafe { x.part(row * width, width) });
            }
        })
    }

    /// `of` of each element of `x` and of `y`, into `x`.
    fn zip(
        &self,
        op: &'static str,
        x: &mut Buf,
        y: &Buf,
        len: usize,
        of: fn(f32, f32) -> f32,
    ) -> Result<(), KernelError> {
        self.zip_with(op, x, y, len, &of)
    }

    fn zip_with(
        &self,
        op: &'static str,
        x: &mut Buf,
        y: &Buf,
        len: usize,
        of: &(dyn Fn(f32, f32) -> f32 + Sync),
    ) -> Result<(), KernelError> {
        let y = self.floats(op, "the second", y, len)?;
        let x = Shared(self.floats_mut(op, "the first", x, len)?.as_mut_ptr());
        self.each(op, len, 4, &|part| {
            // SAFETY: this part of `x` belongs to this task alone.
            let x = unsafe { x.part(part.start, part.len()) };
            x.iter_mut().zip(&y[part]).for_each(|(x, y)| *x = of(*x, *y));
        })
    }
}

/// Elements from the first of a part to its last, over all rows.
fn extent(op: &'static str, columns: Columns, width: usize, rows: usize) -> Result<usize, KernelError> {
    if columns.at.checked_add(width).is_none_or(|end| end > columns.stride) {
        let found = format!("{width} elements from {} on", columns.at);
        return Err(shape(op, "a part", format!("within {} elements", columns.stride), found));
    }
    product(op, &[columns.stride, rows])
}

impl ElementOps for CpuDevice {
    fn scratch(&self, len: usize) -> Result<Buf, KernelError> {
        self.alloc(len)
    }

    fn upload_indices(&self, values: &[u32]) -> Result<Indices, KernelError> {
        Ok(Indices::from_parts(values.len(), Box::new(values.to_vec())))
    }

    fn activate(&self, activation: Activation, gate: &mut Buf, up: &Buf, len: usize) -> Result<(), KernelError> {
        match activation {
            Activation::Silu => self.silu_mul(gate, up, len),
            Activation::ClampedSilu { limit } => {
                self.zip_with("activate", gate, up, len, &|gate, up| silu(gate.min(limit)) * up.clamp(-limit, limit))
            }
            Activation::GptOss { alpha, limit } => self.zip_with("activate", gate, up, len, &|gate, up| {
                let gate = gate.min(limit);
                (up.clamp(-limit, limit) + 1.0) * (gate * sigmoid(gate * alpha))
            }),
        }
    }

    fn scale(&self, x: &mut Buf, factor: f32, len: usize) -> Result<(), KernelError> {
        self.floats_mut("scale", "x", x, len)?.iter_mut().for_each(|x| *x *= factor);
        Ok(())
    }

    fn sigmoid_mul(&self, x: &mut Buf, gate: &Buf, len: usize) -> Result<(), KernelError> {
        self.zip("sigmoid_mul", x, gate, len, |x, gate| x * sigmoid(gate))
    }

    fn copy_columns(
        &self,
        from: &Buf,
        source: Columns,
        to: &mut Buf,
        target: Columns,
        width: usize,
        rows: usize,
    ) -> Result<(), KernelError> {
        let op = "copy_columns";
        let from = self.floats(op, "from", from, extent(op, source, width, rows)?)?;
        let to = self.floats_mut(op, "to", to, extent(op, target, width, rows)?)?;
        for row in 0..rows {
            let part = &from[row * source.stride + source.at..][..width];
            to[row * target.stride + target.at..][..width].copy_from_slice(part);
        }
        Ok(())
    }

    fn norm_rows(
        &self,
        x: &mut Buf,
        weight: Option<&Buf>,
        width: usize,
        eps: f32,
        rows: usize,
    ) -> Result<(), KernelError> {
        let op = "norm_rows";
        let weight = match weight {
            Some(weight) => Some(self.floats(op, "weight", weight, width)?),
            None => None,
        };
        let x = self.floats_mut(op, "x", x, product(op, &[rows, width])?)?;
        self.each_row(op, x, width, rows, &|_, row| rms_norm(row, weight, eps))
    }

    fn layer_norm(&self, x: &mut Buf, weight: &Buf, bias: &Buf, eps: f32, rows: usize) -> Result<(), KernelError> {
        let op = "layer_norm";
        let width = weight.len();
        let (weight, bias) = (self.floats(op, "weight", weight, width)?, self.floats(op, "bias", bias, width)?);
        let x = self.floats_mut(op, "x", x, product(op, &[rows, width])?)?;
        self.each_row(op, x, width, rows, &|_, row| layer_norm(row, weight, bias, eps))
    }

    fn rotate(
        &self,
        rope: &Rope,
        positions: &Indices,
        x: &mut Buf,
        heads: usize,
        head_dim: usize,
        turn: Turn,
    ) -> Result<(), KernelError> {
        let op = "rotate";
        let table: &RopeTable = rope.downcast_ref().ok_or_else(|| self.foreign(op, "rope"))?;
        let positions = self.indices(op, "positions", positions)?;
        table.check(op, positions, head_dim)?;
        let width = product(op, &[heads, head_dim])?;
        let x = self.floats_mut(op, "x", x, product(op, &[positions.len(), width])?)?;
        self.each_row(op, x, width, positions.len(), &|row, x| {
            let (cos, sin) = table.at(positions[row] as usize);
            let back: Vec<f32>;
            let sin = match turn {
                Turn::Forth => sin,
                Turn::Back => {
                    back = sin.iter().map(|sin| -sin).collect();
                    &back
                }
            };
            for head in x.chunks_exact_mut(head_dim) {
                rotate(table.style, &mut head[table.offset..][..table.dim], cos, sin);
            }
        })
    }

    fn upload_groups(&self, weight: &WeightData<'_>, groups: usize) -> Result<GroupedWeight, KernelError> {
        let row_bytes = weight.checked_row_bytes()?;
        let MatrixShape { rows: all, cols } = weight.shape;
        weight.check_groups(groups)?;
        let rows = all / groups;
        let parts = weight.bytes.chunks_exact(rows * row_bytes).map(|bytes| {
            let shape = MatrixShape { rows, cols };
            PackedWeight::new(&WeightData { shape, bytes, ..*weight }, &self.threads)
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        Ok(GroupedWeight::from_parts(groups, rows, cols, Box::new(parts)))
    }

    fn linear_groups(&self, x: &Buf, weight: &GroupedWeight, rows: usize, out: &mut Buf) -> Result<(), KernelError> {
        let op = "linear_groups";
        let parts: &Vec<PackedWeight> = weight.downcast_ref().ok_or_else(|| self.foreign(op, "weight"))?;
        let (groups, width, cols) = (weight.groups(), weight.rows(), weight.cols());
        let x = self.floats(op, "x", x, product(op, &[rows, groups, cols])?)?;
        let out = self.floats_mut(op, "out", out, product(op, &[rows, groups, width])?)?;
        let mut scratch = self.rows.lock();
        let (mut input, mut result) = (vec![0.0; rows * cols], vec![0.0; rows * width]);
        for (group, weight) in parts.iter().enumerate() {
            for (row, input) in input.chunks_exact_mut(cols).enumerate() {
                input.copy_from_slice(&x[(row * groups + group) * cols..][..cols]);
            }
            let product = Product { weight, bias: None, out: &mut result };
            linear::run(self.machine, &self.threads, &mut scratch, &input, rows, &mut [product])?;
            for (row, result) in result.chunks_exact(width).enumerate() {
                out[(row * groups + group) * width..][..width].copy_from_slice(result);
            }
        }
        Ok(())
    }
}
