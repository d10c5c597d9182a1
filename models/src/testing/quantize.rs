//! Values into GGUF's block formats: simple, for tests, not the best that can be had.

use std::io;

use half::{bf16, f16};
use kvdock_kernels::WeightFormat;

/// Encodes rows of `columns` values.
pub(super) fn encode(format: WeightFormat, values: &[f32], columns: usize) -> io::Result<Vec<u8>> {
    if format.row_bytes(columns).is_none() {
        return Err(io::Error::other(format!("rows of {columns} are no whole number of blocks of {}", format.name())));
    }
    let block: fn(&[f32]) -> Vec<u8> = match format {
        WeightFormat::F32 => |x| x[0].to_le_bytes().to_vec(),
        WeightFormat::F16 => |x| f16::from_f32(x[0]).to_le_bytes().to_vec(),
        WeightFormat::BF16 => |x| bf16::from_f32(x[0]).to_le_bytes().to_vec(),
        WeightFormat::Q8_0 => q8_0,
        WeightFormat::Q4_0 => q4_0,
        WeightFormat::Q4_1 => q4_1,
        WeightFormat::Q4_K => |x| k_block(x, 15.0),
        WeightFormat::Q5_K => |x| k_block(x, 31.0),
        WeightFormat::Q6_K => q6_k,
    };
    Ok(values.chunks_exact(format.block_elements()).flat_map(block).collect())
}

fn f16_bytes(value: f32) -> [u8; 2] {
    f16::from_f32(value).to_le_bytes()
}

/// As the reader will see it.
fn rounded(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, value| most.max(value.abs()))
}

/// `value / step`, rounded, inside `low..=high`; 0 where there is no step.
fn quant(value: f32, step: f32, low: f32, high: f32) -> i32 {
    if step == 0.0 {
        return 0;
    }
    (value / step).round().clamp(low, high) as i32
}

/// Packs 32 quants: element j low, element j + 16 high.
fn nibbles(quants: &[i32]) -> impl Iterator<Item = u8> {
    (0..16).map(|j| (quants[j] | quants[j + 16] << 4) as u8)
}

fn q8_0(x: &[f32]) -> Vec<u8> {
    let d = rounded(largest(x) / 127.0);
    let quants = x.iter().map(|value| quant(*value, d, -127.0, 127.0) as u8);
    f16_bytes(d).into_iter().chain(quants).collect()
}

fn q4_0(x: &[f32]) -> Vec<u8> {
    let d = rounded(largest(x) / 7.0);
    let quants: Vec<i32> = x.iter().map(|value| quant(*value, d, -8.0, 7.0) + 8).collect();
    f16_bytes(d).into_iter().chain(nibbles(&quants)).collect()
}

fn q4_1(x: &[f32]) -> Vec<u8> {
    let low = x.iter().copied().fold(f32::INFINITY, f32::min);
    let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (m, d) = (rounded(low), rounded((high - low) / 15.0));
    let quants: Vec<i32> = x.iter().map(|value| quant(*value - m, d, 0.0, 15.0)).collect();
    f16_bytes(d).into_iter().chain(f16_bytes(m)).chain(nibbles(&quants)).collect()
}

/// Q4_K (`levels` 15) and Q5_K (31).
fn k_block(x: &[f32], levels: f32) -> Vec<u8> {
    // Each sub-block spans from -min (at most 0) to min's distance plus the range.
    let spans: Vec<(f32, f32)> = x
        .chunks_exact(32)
        .map(|sub| {
            let low = sub.iter().copied().fold(0.0, f32::min);
            let high = sub.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            ((high - low).max(0.0) / levels, -low)
        })
        .collect();
    let d = rounded(spans.iter().fold(0.0f32, |most, span| most.max(span.0)) / 63.0);
    let dmin = rounded(spans.iter().fold(0.0f32, |most, span| most.max(span.1)) / 63.0);
    let scales: Vec<u8> = spans.iter().map(|span| quant(span.0, d, 0.0, 63.0) as u8).collect();
    let mins: Vec<u8> = spans.iter().map(|span| quant(span.1, dmin, 0.0, 63.0) as u8).collect();
    let mut packed = [0u8; 12];
    for j in 0..4 {
        packed[j] = scales[j] | (scales[j + 4] >> 4) << 6;
        packed[j + 4] = mins[j] | (mins[j + 4] >> 4) << 6;
        packed[j + 8] = (scales[j + 4] & 15) | (mins[j + 4] & 15) << 4;
    }
    let quants: Vec<i32> = x
        .iter()
        .enumerate()
        .map(|(e, value)| {
            let step = d * f32::from(scales[e / 32]);
            quant(value + dmin * f32::from(mins[e / 32]), step, 0.0, levels)
        })
        .collect();
    let mut out = [f16_bytes(d), f16_bytes(dmin)].concat();
    out.extend(packed);
    if levels > 15.0 {
        out.extend((0..32).map(|l| (0..8).fold(0u8, |byte, j| byte | ((quants[32 * j + l] >> 4 & 1) as u8) << j)));
    }
    for group in quants.chunks_exact(64) {
        out.extend((0..32).map(|l| ((group[l] & 15) | (group[l + 32] & 15) << 4) as u8));
    }
    out
}

fn q6_k(x: &[f32]) -> Vec<u8> {
    let steps: Vec<f32> = x.chunks_exact(16).map(|sub| largest(sub) / 31.0).collect();
    let d = rounded(largest(&steps) / 127.0);
    let scales: Vec<i32> = steps.iter().map(|step| quant(*step, d, 0.0, 127.0)).collect();
    let quants: Vec<i32> =
        x.iter().enumerate().map(|(e, value)| quant(*value, d * scales[e / 16] as f32, -32.0, 31.0) + 32).collect();
    let mut out = Vec::with_capacity(210);
    for half in quants.chunks_exact(128) {
        out.extend((0..64).map(|l| ((half[l] & 15) | (half[l + 64] & 15) << 4) as u8));
    }
    for half in quants.chunks_exact(128) {
        out.extend((0..32).map(|l| (0..4).fold(0u8, |byte, q| byte | ((half[l + 32 * q] >> 4) as u8) << (2 * q))));
    }
    out.extend(scales.iter().map(|scale| *scale as i8 as u8));
    out.extend(f16_bytes(d));
    out
}

#[cfg(test)]
mod tests {
    use kvdock_kernels::dequantize;

    use super::*;
    use crate::testing::fill;

    #[test]
    fn every_format_gives_back_nearly_what_it_took() {
        let values = fill("quantize", 512, -1.0, 1.0);
        let formats = [
            (WeightFormat::F32, 0.0),
            (WeightFormat::F16, 5e-4),
            (WeightFormat::BF16, 4e-3),
            (WeightFormat::Q8_0, 5e-3),
            (WeightFormat::Q4_0, 0.08),
            (WeightFormat::Q4_1, 0.07),
            (WeightFormat::Q4_K, 0.09),
            (WeightFormat::Q5_K, 0.05),
            (WeightFormat::Q6_K, 0.03),
        ];
        for (format, bound) in formats {
            let bytes = encode(format, &values, 256).unwrap();
            let mut back = vec![0.0; values.len()];
            dequantize(format, &bytes, &mut back).unwrap();
            let worst = values.iter().zip(&back).fold(0.0f32, |worst, (a, b)| worst.max((a - b).abs()));
            assert!(worst <= bound, "{}: {worst}", format.name());
        }
    }
}
