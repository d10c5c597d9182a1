//! Block layouts of GGUF, read one block at a time.
//!
//! Scales have 11 significant bits and quants at most 8, so each product of them is exact in
//! f32 and a dequantised value has at most one rounding. The packed kernels compute the same
//! products in another order and so give the same values.

use half::{bf16, f16};

use super::WeightFormat;

/// Little-endian f16 at `at`, as f32.
#[inline]
pub(crate) fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Scale and minimum (6 bits each) of sub-block `j` of a Q4_K or Q5_K block's 12 scale bytes.
#[inline]
pub(crate) fn k_scale_min(s: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        ((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4))
    }
}

/// Unsigned quant (0..64) of element `e` of a Q6_K block; its value is this minus 32.
#[inline]
pub(crate) fn q6_quant(block: &[u8], e: usize) -> u8 {
    let (half, r) = (e / 128, e % 128);
    let (quarter, l) = (r / 32, r % 32);
    let ql = block[half * 64 + (quarter & 1) * 32 + l];
    let qh = block[128 + half * 32 + l];
    let low = if quarter < 2 { ql & 15 } else { ql >> 4 };
    low | (((qh >> (2 * quarter)) & 3) << 4)
}

/// Quant (0..16) of element `e` of the 128 nibble bytes of a Q4_K or Q5_K block.
#[inline]
pub(crate) fn k_nibble(qs: &[u8], e: usize) -> u8 {
    let byte = qs[(e / 64) * 32 + e % 32];
    if e % 64 < 32 { byte & 15 } else { byte >> 4 }
}

/// Quant (0..16) of element `e` of the 16 nibble bytes of a Q4_0 or Q4_1 block.
#[inline]
pub(crate) fn nibble(qs: &[u8], e: usize) -> u8 {
    if e < 16 { qs[e] & 15 } else { qs[e - 16] >> 4 }
}

/// Lengths have been checked by the caller.
pub(super) fn dequantize(format: WeightFormat, bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.chunks_exact(format.block_bytes());
    for (b, x) in blocks.zip(out.chunks_exact_mut(format.block_elements())) {
        match format {
            WeightFormat::F32 => x[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            WeightFormat::F16 => x[0] = f16_at(b, 0),
            WeightFormat::BF16 => x[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            WeightFormat::Q4_0 => {
                let d = f16_at(b, 0);
                for (e, x) in x.iter_mut().enumerate() {
                    *x = d * (f32::from(nibble(&b[2..], e)) - 8.0);
                }
            }
            WeightFormat::Q4_1 => {
                let (d, m) = (f16_at(b, 0), f16_at(b, 2));
                for (e, x) in x.iter_mut().enumerate() {
                    *x = d * f32::from(nibble(&b[4..], e)) + m;
                }
            }
            WeightFormat::Q8_0 => {
                let d = f16_at(b, 0);
                for (x, q) in x.iter_mut().zip(&b[2..]) {
                    *x = d * f32::from(*q as i8);
                }
            }
            WeightFormat::Q4_K => {
                let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
                for (e, x) in x.iter_mut().enumerate() {
                    let (sc, m) = k_scale_min(&b[4..16], e / 32);
                    let q = f32::from(k_nibble(&b[16..], e));
                    *x = d * f32::from(sc) * q - dmin * f32::from(m);
                }
            }
            WeightFormat::Q5_K => {
                let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
                for (e, x) in x.iter_mut().enumerate() {
                    let (sc, m) = k_scale_min(&b[4..16], e / 32);
                    let high = (b[16 + e % 32] >> (e / 32)) & 1;
                    let q = f32::from(k_nibble(&b[48..], e) | (high << 4));
                    *x = d * f32::from(sc) * q - dmin * f32::from(m);
                }
            }
            WeightFormat::Q6_K => {
                let d = f16_at(b, 208);
                for (e, x) in x.iter_mut().enumerate() {
                    let scale = d * f32::from(b[192 + e / 16] as i8);
                    *x = scale * (f32::from(q6_quant(b, e)) - 32.0);
                }
            }
        }
    }
}
