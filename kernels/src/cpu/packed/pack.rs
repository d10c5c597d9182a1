//! From the rows of a file to tiles of 16 rows.

use super::tile::{self, STEP, TileFormat};
use super::with_tile_format;
use crate::cpu::memory::Region;
use crate::cpu::simd::LANES;
use crate::cpu::threads::ThreadPool;
use crate::device::WeightData;
use crate::error::KernelError;
use crate::format::WeightFormat;
use crate::format::blocks::{k_nibble, k_scale_min, nibble, q6_quant};

/// A pointer that tasks may share, each writing its own tile.
#[derive(Clone, Copy)]
struct Tiles(*mut u8);
// SAFETY: tasks write disjoint tiles of a region that outlives them.
unsafe impl Send for Tiles {}
// SAFETY: as above.
unsafe impl Sync for Tiles {}

impl Tiles {
    /// # Safety
    /// The tile lies within the region, and no other task uses it.
    unsafe fn tile<'a>(self, index: usize, bytes: usize) -> &'a mut [u8] {
        // SAFETY: as promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(index * bytes), bytes) }
    }
}

/// Packs a weight whose size and row order have been checked. `region` is zero and holds all
/// tiles.
pub(super) fn pack(
    weight: &WeightData<'_>,
    tile_bytes: usize,
    row_bytes: usize,
    region: &mut Region,
    pool: &ThreadPool,
) -> Result<(), KernelError> {
    let rows = weight.shape.rows;
    let tiles = rows.div_ceil(LANES);
    let base = Tiles(region.as_mut_slice().as_mut_ptr());
    pool.run("upload_weight", tiles, &|index| {
        // SAFETY: the region holds `tiles` tiles, and each task has its own.
        let tile = unsafe { base.tile(index, tile_bytes) };
        for lane in 0..LANES.min(rows - index * LANES) {
            let row = index * LANES + lane;
            let source = weight.row_order.map_or(row, |order| order[row] as usize);
            let bytes = &weight.bytes[source * row_bytes..][..row_bytes];
            pack_row(weight.format, bytes, lane, tile);
        }
    })
}

fn pack_row(format: WeightFormat, row: &[u8], lane: usize, tile: &mut [u8]) {
    match format {
        // Elements of floats lie one after another in the tile, blocks or not.
        WeightFormat::F32 => {
            for (e, bytes) in row.chunks_exact(4).enumerate() {
                tile[(e * LANES + lane) * 4..][..4].copy_from_slice(bytes);
            }
        }
        WeightFormat::F16 | WeightFormat::BF16 => {
            for (e, bytes) in row.chunks_exact(2).enumerate() {
                tile[(e * LANES + lane) * 2..][..2].copy_from_slice(bytes);
            }
        }
        _ => {
            let packed_bytes = with_tile_format!(format, T => <T as TileFormat>::BLOCK_BYTES);
            let blocks = row.chunks_exact(format.block_bytes());
            for (block, packed) in blocks.zip(tile.chunks_exact_mut(packed_bytes)) {
                pack_block(format, block, lane, packed);
            }
        }
    }
}

/// Stores the two bytes of an f16 as lane `lane` of the `index`th group of 16.
fn put_half(packed: &mut [u8], index: usize, lane: usize, bytes: &[u8]) {
    packed[(index * LANES + lane) * 2..][..2].copy_from_slice(&bytes[..2]);
}

/// Stores `value` as lane `lane` of the word at `at`.
fn put_word(packed: &mut [u8], at: usize, lane: usize, value: u32) {
    packed[at + 4 * lane..][..4].copy_from_slice(&value.to_le_bytes());
}

/// Stores words of nibbles from `at` on; `quant(e)` is the quant of element `e` of `count`.
fn put_nibbles(packed: &mut [u8], at: usize, lane: usize, count: usize, quant: impl Fn(usize) -> u8) {
    for i in 0..count / STEP {
        let word = (0..STEP).fold(0, |w, j| w | (u32::from(quant(i * STEP + j) & 15) << (4 * j)));
        put_word(packed, at + i * 4 * LANES, lane, word);
    }
}

fn pack_block(format: WeightFormat, block: &[u8], lane: usize, packed: &mut [u8]) {
    match format {
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {}
        WeightFormat::Q4_0 => {
            put_half(packed, 0, lane, block);
            put_nibbles(packed, tile::Q4_0::HEADER, lane, 32, |e| nibble(&block[2..], e));
        }
        WeightFormat::Q4_1 => {
            put_half(packed, 0, lane, block);
            put_half(packed, 1, lane, &block[2..]);
            put_nibbles(packed, tile::Q4_1::HEADER, lane, 32, |e| nibble(&block[4..], e));
        }
        WeightFormat::Q8_0 => {
            put_half(packed, 0, lane, block);
            for (e, q) in block[2..].iter().enumerate() {
                packed[tile::Q8_0::HEADER + e * LANES + lane] = *q;
            }
        }
        WeightFormat::Q4_K | WeightFormat::Q5_K => {
            put_half(packed, 0, lane, block);
            put_half(packed, 1, lane, &block[2..]);
            let five = format == WeightFormat::Q5_K;
            let (header, sub_bytes) = if five {
                (tile::Q5_K::HEADER, tile::Q5_K::SUB_BYTES)
            } else {
                (tile::Q4_K::HEADER, tile::Q4_K::SUB_BYTES)
            };
            let nibbles = if five { &block[48..] } else { &block[16..] };
            for j in 0..8 {
                let sub = &mut packed[header + j * sub_bytes..][..sub_bytes];
                let (scale, min) = k_scale_min(&block[4..16], j);
                sub[lane] = scale;
                sub[LANES + lane] = min;
                let mut words = 2 * LANES;
                if five {
                    let high = (0..32).fold(0, |w, l| w | (u32::from((block[16 + l] >> j) & 1) << l));
                    put_word(sub, words, lane, high);
                    words += 4 * LANES;
                }
                put_nibbles(sub, words, lane, 32, |e| k_nibble(nibbles, 32 * j + e));
            }
        }
        WeightFormat::Q6_K => {
            put_half(packed, 0, lane, &block[208..]);
            let sub_bytes = tile::Q6_K::SUB_BYTES;
            for j in 0..16 {
                let sub = &mut packed[tile::Q6_K::HEADER + j * sub_bytes..][..sub_bytes];
                let quant = |e: usize| q6_quant(block, 16 * j + e);
                sub[lane] = block[192 + j];
                let high = (0..16).fold(0, |w, e| w | (u32::from(quant(e) >> 4) << (2 * e)));
                put_word(sub, LANES, lane, high);
                put_nibbles(sub, 5 * LANES, lane, 16, quant);
            }
        }
    }
}
