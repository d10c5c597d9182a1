//! Weight matrices in the CPU's packed form.

mod pack;
pub(super) mod tile;

use super::memory::Region;
use super::simd::{Kernel, LANES, Lanes, Machine};
use super::threads::ThreadPool;
use crate::device::{MatrixShape, WeightData};
use crate::error::KernelError;
use crate::format::WeightFormat;
use tile::{STEP, TileFormat, tile_bytes};

/// Calls `$body` with the type `$T` bound to the [`TileFormat`] of `$format`.
macro_rules! with_tile_format {
    ($format:expr, $T:ident => $body:expr) => {{
        use $crate::cpu::packed::tile;
        use $crate::format::WeightFormat;
        macro_rules! arm {
            ($name:ident) => {{
                type $T = tile::$name;
                $body
            }};
        }
        match $format {
            WeightFormat::F32 => arm!(F32),
            WeightFormat::F16 => arm!(F16),
            WeightFormat::BF16 => arm!(BF16),
            WeightFormat::Q4_0 => arm!(Q4_0),
            WeightFormat::Q4_1 => arm!(Q4_1),
            WeightFormat::Q8_0 => arm!(Q8_0),
            WeightFormat::Q4_K => arm!(Q4_K),
            WeightFormat::Q5_K => arm!(Q5_K),
            WeightFormat::Q6_K => arm!(Q6_K),
        }
    }};
}
pub(super) use with_tile_format;

/// As `with_tile_format`, for the formats that products take as f32; the others are multiplied as integers.
macro_rules! with_float_format {
    ($format:expr, $T:ident => $body:expr) => {{
        use $crate::cpu::packed::tile;
        use $crate::format::WeightFormat;
        macro_rules! arm {
            ($name:ident) => {{
                type $T = tile::$name;
                $body
            }};
        }
        match $format {
            WeightFormat::F32 => arm!(F32),
            WeightFormat::F16 => arm!(F16),
            WeightFormat::BF16 => arm!(BF16),
            WeightFormat::Q8_0 => arm!(Q8_0),
            WeightFormat::Q5_K => arm!(Q5_K),
            WeightFormat::Q6_K => arm!(Q6_K),
            WeightFormat::Q4_0 | WeightFormat::Q4_1 | WeightFormat::Q4_K => {
                unreachable!("products with {} are of integers", $format.name())
            }
        }
    }};
}
pub(super) use with_float_format;

/// A weight matrix in tiles of 16 rows; see [`tile`].
pub(super) struct PackedWeight {
    pub(super) shape: MatrixShape,
    pub(super) format: WeightFormat,
    tile_bytes: usize,
    region: Region,
}

impl PackedWeight {
    /// Checks `weight` against its shape and format, and packs it.
    pub(super) fn new(weight: &WeightData<'_>, pool: &ThreadPool) -> Result<Self, KernelError> {
        let MatrixShape { rows, cols } = weight.shape;
        let format = weight.format;
        let row_bytes = weight.checked_row_bytes()?;
        let tile_bytes = with_tile_format!(format, T => tile_bytes::<T>(cols));
        let tiles = rows.div_ceil(LANES);
        let mut region = Region::zeroed(tiles * tile_bytes, "a weight matrix")?;
        region.prefer_large_pages();
        pack::pack(weight, tile_bytes, row_bytes, &mut region, pool)?;
        Ok(Self { shape: weight.shape, format, tile_bytes, region })
    }

    /// Tiles of 16 rows; lanes of the last that have no row are zero weights.
    pub(super) fn tiles(&self) -> usize {
        self.shape.rows.div_ceil(LANES)
    }

    /// The bytes of a tile.
    pub(super) fn tile(&self, index: usize) -> &[u8] {
        &self.region.as_slice()[index * self.tile_bytes..][..self.tile_bytes]
    }

    /// Bytes of a tile, padding included.
    pub(super) fn tile_bytes(&self) -> usize {
        self.tile_bytes
    }

    /// Dequantises one row into `out`, which is `cols` long. `row` is below the row count.
    pub(super) fn row(&self, machine: Machine, row: usize, out: &mut [f32]) {
        let tile = self.tile(row / LANES);
        let lane = row % LANES;
        with_tile_format!(self.format, T => machine.run(Row::<T> {
            tile,
            lane,
            out,
            format: std::marker::PhantomData,
        }));
    }
}

struct Row<'a, T> {
    tile: &'a [u8],
    lane: usize,
    out: &'a mut [f32],
    format: std::marker::PhantomData<T>,
}

impl<T: TileFormat> Kernel for Row<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call<S: Lanes>(self, s: S) {
        let cols = self.out.len();
        assert_eq!(self.tile.len(), tile_bytes::<T>(cols));
        let mut weights = [0.0; STEP * LANES];
        let mut k = 0;
        while k < cols {
            let n = (cols - k).min(STEP);
            // SAFETY: the tile holds `cols` elements, and the array has room for STEP.
            unsafe { decode::<S, T>(s, self.tile.as_ptr(), cols, k, n, weights.as_mut_ptr(), LANES) };
            for j in 0..n {
                self.out[k + j] = weights[j * LANES + self.lane];
            }
            k += n;
        }
    }
}

/// Dequantises elements `k..k + n` of a tile: 16 lanes to `out`, the next element's to
/// `out + stride`, and so on.
///
/// # Safety
///
/// `tile` points at a tile of `cols` elements, `k` is a multiple of [`STEP`], `k + n` is at most
/// `cols` and, if less, a multiple of [`STEP`]; `out` is writable for 16 floats at each stride.
#[inline(always)]
pub(super) unsafe fn decode<S: Lanes, T: TileFormat>(
    s: S,
    tile: *const u8,
    cols: usize,
    k: usize,
    n: usize,
    out: *mut f32,
    stride: usize,
) {
    let whole = cols / T::BLOCK * T::BLOCK;
    let end = k + n;
    let mut k = k;
    let mut out = out;
    while k < end.min(whole) {
        // SAFETY: block and sub-block lie within the tile; `out` as promised.
        unsafe {
            let block = tile.add(k / T::BLOCK * T::BLOCK_BYTES);
            let header = T::header(s, block);
            let block_end = (k / T::BLOCK + 1) * T::BLOCK;
            while k < end.min(block_end) {
                let within = k % T::BLOCK;
                let sub = block.add(T::HEADER + within / T::SUB * T::SUB_BYTES);
                let scales = T::scales(s, header, sub);
                let mut step = within % T::SUB / STEP;
                while step < T::SUB / STEP && k < end {
                    let w = T::weights(s, scales, sub, step);
                    let mut j = 0;
                    while j < STEP {
                        s.store(out.add(j * stride), w[j]);
                        j += 1;
                    }
                    out = out.add(STEP * stride);
                    step += 1;
                    k += STEP;
                }
            }
        }
    }
    while k < end {
        // SAFETY: elements after the last whole block lie one after another.
        unsafe {
            let rest = tile.add(whole / T::BLOCK * T::BLOCK_BYTES);
            s.store(out, T::element(s, rest.add((k - whole) * T::ELEMENT_BYTES)));
            out = out.add(stride);
        }
        k += 1;
    }
}

#[cfg(test)]
pub(super) mod tests;
