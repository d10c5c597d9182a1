//! Rows of eight-bit floats with scales, as published checkpoints were trained to keep them.

use half::bf16;

/// Values that share a scale in a packed row.
pub const PACKED_GROUP: usize = 64;

/// Largest value of e4m3.
const LARGEST: f32 = 448.0;

/// Scales take so many bytes beside a packed row, whatever of them is used.
pub const PACKED_SCALES: usize = 8;

/// Rounds to e4m3fn: to nearest, halves to even; what is larger than the largest value becomes that.
pub fn to_e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let size = x.abs();
    if size.is_nan() {
        return sign | 0x7F;
    }
    if size >= LARGEST {
        return sign | 0x7E;
    }
    // Below 2^-6 steps are 2^-9; eight of them are the code of 2^-6.
    if size < 1.0 / 64.0 {
        return sign | (size * 512.0).round_ties_even() as u8;
    }
    let exponent = (size.to_bits() >> 23) as i32 - 127;
    let mantissa = (size * exponent_bits(-exponent) * 8.0).round_ties_even() as i32;
    sign | (((exponent + 7) << 3) + mantissa - 8) as u8
}

/// The value of an e4m3fn byte.
pub fn from_e4m3(byte: u8) -> f32 {
    let magnitude = byte & 0x7F;
    let value = match (magnitude >> 3, magnitude & 7) {
        (15, 7) => f32::NAN,
        (0, fraction) => f32::from(fraction) / 512.0,
        (exponent, fraction) => (1.0 + f32::from(fraction) / 8.0) * exponent_bits(i32::from(exponent) - 7),
    };
    if byte & 0x80 == 0 { value } else { -value }
}

/// `2^exponent` for exponents of normal numbers.
fn exponent_bits(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

fn largest(x: &[f32]) -> f32 {
    x.iter().fold(1e-4f32, |most, x| most.max(x.abs()))
}

/// Packs a row: all but the last `rope` elements in e4m3 with a power of two for each [`PACKED_GROUP`] of them, the last in
/// bf16. The row is first rounded to bf16. `data` takes
/// `row.len() + rope` bytes, `scales` [`PACKED_SCALES`].
pub fn pack_row(row: &[f32], rope: usize, data: &mut [u8], scales: &mut [u8]) {
    let (plain, rotated) = row.split_at(row.len() - rope);
    let (bytes, halves) = data.split_at_mut(plain.len());
    scales.fill(0);
    for ((group, bytes), scale) in plain.chunks(PACKED_GROUP).zip(bytes.chunks_mut(PACKED_GROUP)).zip(scales.iter_mut())
    {
        let rounded: Vec<f32> = group.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
        let bits = (largest(&rounded) / LARGEST).to_bits();
        // The power of two at or above.
        let exponent = (bits >> 23) as i32 - 127 + i32::from(bits & 0x7F_FFFF != 0);
        *scale = (exponent + 127) as u8;
        let factor = exponent_bits(-exponent);
        rounded.iter().zip(bytes).for_each(|(x, byte)| *byte = to_e4m3(x * factor));
    }
    for (x, bytes) in rotated.iter().zip(halves.chunks_exact_mut(2)) {
        bytes.copy_from_slice(&bf16::from_f32(*x).to_le_bytes());
    }
}

/// Reads what [`pack_row`] has written.
pub fn unpack_row(data: &[u8], scales: &[u8], rope: usize, row: &mut [f32]) {
    let (plain, rotated) = row.split_at_mut(row.len() - rope);
    let (bytes, halves) = data.split_at(plain.len());
    for ((group, bytes), scale) in plain.chunks_mut(PACKED_GROUP).zip(bytes.chunks(PACKED_GROUP)).zip(scales) {
        let factor = exponent_bits(i32::from(*scale) - 127);
        group.iter_mut().zip(bytes).for_each(|(x, byte)| *x = from_e4m3(*byte) * factor);
    }
    for (x, bytes) in rotated.iter_mut().zip(halves.as_chunks::<2>().0) {
        *x = bf16::from_le_bytes(*bytes).to_f32();
    }
}

/// Packs an index key: e4m3 with one scale in f32, which is not rounded to a power of two. The key is first rounded to
/// bf16. `scale` takes 4 bytes.
pub fn pack_key(key: &[f32], data: &mut [u8], scale: &mut [u8]) {
    let rounded: Vec<f32> = key.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    let factor = largest(&rounded) / LARGEST;
    rounded.iter().zip(data).for_each(|(x, byte)| *byte = to_e4m3(x / factor));
    scale.copy_from_slice(&factor.to_le_bytes());
}

/// Reads what [`pack_key`] has written.
pub fn unpack_key(data: &[u8], scale: &[u8], key: &mut [f32]) {
    let factor = scale.first_chunk().map_or(0.0, |bytes| f32::from_le_bytes(*bytes));
    key.iter_mut().zip(data).for_each(|(x, byte)| *x = from_e4m3(*byte) * factor);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers from `low` to `high` that follow from a name, as the models' tests make them.
    fn fill(name: &str, count: u64, low: f64, high: f64) -> Vec<f32> {
        let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, mix);
        let uniform = |index: u64| {
            let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^= z >> 31;
            (z >> 40) as f64 / f64::from(1u32 << 24)
        };
        (0..count).map(|index| (low + (high - low) * uniform(index)) as f32).collect()
    }

    #[test]
    fn every_value_of_e4m3_comes_back_and_halves_go_to_even() {
        for byte in (0..=255u8).filter(|byte| byte & 0x7F != 0x7F) {
            assert_eq!(to_e4m3(from_e4m3(byte)), byte, "{byte:#x}");
        }
        for (x, expected) in [(1000.0, 0x7E), (-f32::INFINITY, 0xFE), (17.0, 0x58), (19.0, 0x5A), (1e-9, 0)] {
            assert_eq!(to_e4m3(x), expected, "{x}");
        }
        // Between two subnormals, and between the largest one and the least normal number.
        assert_eq!((to_e4m3(0.5 / 512.0), to_e4m3(1.5 / 512.0), to_e4m3(7.5 / 512.0)), (0, 2, 8));
        assert_eq!(to_e4m3(f32::NAN), 0x7F);
    }

    #[test]
    fn a_packed_row_has_the_published_bytes() {
        let row: Vec<f32> = fill("kvpack.row", 512, -4.0, 4.0)
            .iter()
            .enumerate()
            .map(|(i, x)| x * 2f32.powi(i as i32 / 64 - 3))
            .collect();
        let (mut data, mut scales) = ([0; 576], [9; 8]);
        pack_row(&row, 64, &mut data, &mut scales);
        assert_eq!(scales, [118, 119, 120, 121, 122, 123, 124, 0]);
        assert_eq!(data[..8], [0xe7, 0xec, 0xe3, 0xf2, 0xe2, 0x67, 0xd9, 0xd8]);
        assert_eq!(data[440..448], [0x72, 0xed, 0xf4, 0xe9, 0x55, 0x72, 0x60, 0x6d]);
        assert_eq!(data[..448].iter().map(|byte| u32::from(*byte)).sum::<u32>(), 76_419);
        let halves: Vec<u16> =
            data[448..456].as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
        assert_eq!(halves, [0x4273, 0x421e, 0x427d, 0xc247]);
        let mut back = [0.0; 512];
        unpack_row(&data, &scales, 64, &mut back);
        for (got, x) in back.iter().zip(&row) {
            assert!((got - x).abs() <= 0.07 * x.abs() + 0.02, "{got} is not {x}");
        }
    }

    #[test]
    fn a_packed_index_key_has_the_published_bytes() {
        let key = fill("idxpack.row", 128, -4.0, 4.0);
        let (mut data, mut scale) = ([0; 128], [0; 4]);
        pack_key(&key, &mut data, &mut scale);
        assert_eq!(f32::from_le_bytes(scale), 0.008_893_694);
        assert_eq!(data[..8], [0xf3, 0x7d, 0xf9, 0x65, 0xd6, 0xfc, 0x7c, 0xfc]);
        assert_eq!(data.iter().map(|byte| u32::from(*byte)).sum::<u32>(), 22_520);
        let mut back = [0.0; 128];
        unpack_key(&data, &scale, &mut back);
        assert!(back.iter().zip(&key).all(|(got, x)| (got - x).abs() <= 0.07 * x.abs() + 0.01));
    }
}
