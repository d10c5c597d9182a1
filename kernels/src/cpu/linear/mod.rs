//! Matrix products `y = x · Wᵀ` over packed weights.
//!
//! Weights of four bits (Q4_0, Q4_1, Q4_K) are multiplied as integers, see [`integer`]; the others as f32, as follows.
//!
//! # Order of accumulation
//!
//! `y[r, n]` starts at +0 and takes `fma(x[r, k], w[n, k], y)` for k = 0, 1, 2, ...; the bias is
//! added last. `w[n, k]` is the dequantised weight, correctly rounded. Nothing else: rows,
//! tiles, chunks of k and threads only decide when a step is done, never in which order the
//! steps of one element are. Lanes are output features, so no sum crosses lanes.
//!
//! # What it must cost
//!
//! One row (decode): every weight byte is read once, so at least `bytes / bandwidth`. The 30 MB of SmolLM2-135M's output matrix
//! (Q8_0) at 16 GB/s take 1.9 ms. Instructions on 16 weights: load and widen, convert, FMA (scale), FMA (product), about 2 cycles
//! on a core that starts two 512-bit operations a cycle. So memory rules, and weights are decoded in registers, never stored.
//!
//! Many rows (prefill): `2 · rows · weights` operations at 64 a cycle and core. Decoding costs 2 to 3 cycles for 16 weights and is
//! shared by all rows of a block (192), a few percent; so weights are decoded to
//! a scratch of 32 KiB and used from there, by a kernel that holds 6 rows x 4 vectors in
//! registers and issues 24 FMAs for 10 loads.

mod integer;
mod matrix;
mod vector;

use super::memory::FloatArray;
use super::packed::PackedWeight;
use super::simd::{LANES, Machine};
use super::threads::ThreadPool;
use crate::error::KernelError;

/// One product: a weight, its bias, and where the result goes.
pub(super) struct Product<'a> {
    pub(super) weight: &'a PackedWeight,
    /// As long as the weight has rows.
    pub(super) bias: Option<&'a [f32]>,
    /// `rows * weight rows` elements.
    pub(super) out: &'a mut [f32],
}

/// Where a product's tasks write. Tasks write disjoint elements.
struct Target<'a> {
    weight: &'a PackedWeight,
    bias: Option<&'a [f32]>,
    out: *mut f32,
}

// SAFETY: `out` points into a slice that `run` borrows mutably for as long as tasks run, and
// tasks write disjoint elements of it.
unsafe impl Send for Target<'_> {}
// SAFETY: as above.
unsafe impl Sync for Target<'_> {}

impl Target<'_> {
    /// Writes the sums of one row for the outputs of one tile, plus the bias. Lanes beyond the
    /// weight's last row are dropped.
    ///
    /// # Safety
    ///
    /// `row` is below the row count of the step and `tile` below the weight's tile count; no
    /// other thread writes these outputs.
    unsafe fn put(&self, row: usize, tile: usize, sums: &[f32; LANES]) {
        let width = self.weight.shape.rows;
        let first = tile * LANES;
        let count = LANES.min(width - first);
        // SAFETY: `out` has a row of `width` elements for each row of the step.
        let out = unsafe { std::slice::from_raw_parts_mut(self.out.add(row * width + first), count) };
        match self.bias {
            Some(bias) => {
                let sums = sums.iter().zip(&bias[first..]);
                for (out, (sum, bias)) in out.iter_mut().zip(sums) {
                    *out = sum + bias;
                }
            }
            // A whole tile is copied as what it is, not as so many floats.
            None => match out.first_chunk_mut() {
                Some(out) => *out = *sums,
                None => out.copy_from_slice(&sums[..count]),
            },
        }
    }
}

/// Computes all products of the same `x` (`[rows, cols]`). Lengths and shapes have been checked.
/// `scratch` is work space that the caller keeps between calls.
pub(super) fn run(
    machine: Machine,
    pool: &ThreadPool,
    scratch: &mut FloatArray,
    x: &[f32],
    rows: usize,
    products: &mut [Product<'_>],
) -> Result<(), KernelError> {
    if rows == 0 {
        return Ok(());
    }
    let targets = products.iter_mut().map(|p| Target { weight: p.weight, bias: p.bias, out: p.out.as_mut_ptr() });
    let (integer, float): (Vec<_>, Vec<_>) = targets.partition(|t| integer::takes(t.weight.format));
    integer::run(machine, pool, scratch, x, rows, &integer)?;
    match rows {
        1..=vector::MAX_ROWS => vector::run(machine, pool, x, rows, &float),
        _ => matrix::run(machine, pool, scratch, x, rows, &float),
    }
}

#[cfg(test)]
mod tests;
