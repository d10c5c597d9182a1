//! Number formats of eight and fewer bits, as checkpoints store weights.

use half::bf16;
pub(crate) use kvdock_kernels::from_e4m3 as e4m3;

/// The value of a ue8m0 scale: `2^(byte - 127)`; 255 is NaN.
pub(crate) fn e8m0(byte: u8) -> f32 {
    if byte == 255 { f32::NAN } else { power_of_two(i32::from(byte) - 127) }
}

/// The value of a four-bit e2m1 code.
pub(crate) fn e2m1(code: u8) -> f32 {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let value = MAGNITUDES[usize::from(code & 7)];
    if code & 8 == 0 { value } else { -value }
}

/// Exact from 2^-149 to 2^127.
fn power_of_two(exponent: i32) -> f32 {
    2f64.powi(exponent) as f32
}

/// Rows of mxfp4: `packed` holds two values a byte, the low nibble first; a scale for each 32 of them. Appends to `out`.
pub(crate) fn mxfp4(packed: &[u8], scales: &[u8], out: &mut Vec<f32>) {
    for (bytes, scale) in packed.chunks(16).zip(scales) {
        let scale = e8m0(*scale);
        for byte in bytes {
            out.push(e2m1(byte & 15) * scale);
            out.push(e2m1(byte >> 4) * scale);
        }
    }
}

/// Bytes of bf16 for values that bf16 holds exactly.
pub(crate) fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_has_its_known_values() {
        let cases = [
            (0x00, 0.0),
            (0x01, 1.0 / 512.0),
            (0x08, 1.0 / 64.0),
            (0x38, 1.0),
            (0x7E, 448.0),
            (0xC0, -2.0),
            (0x3C, 1.5),
        ];
        for (byte, value) in cases {
            assert_eq!(e4m3(byte), value, "{byte:#x}");
        }
        assert!(e4m3(0x7F).is_nan() && e4m3(0xFF).is_nan());
        assert_eq!((e8m0(127), e8m0(121), e8m0(130), e8m0(0)), (1.0, 1.0 / 64.0, 8.0, 2f32.powi(-127)));
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn every_fp8_value_with_a_power_of_two_is_exact_in_bf16() {
        for byte in (0..=255u8).filter(|byte| byte & 0x7F != 0x7F) {
            for scale in [100, 121, 127, 140] {
                let value = e4m3(byte) * e8m0(scale);
                assert_eq!(bf16::from_f32(value).to_f32(), value);
            }
        }
    }

    #[test]
    fn the_low_nibble_of_mxfp4_comes_first() {
        let mut out = Vec::new();
        mxfp4(&[0x21; 16], &[128], &mut out);
        assert_eq!(out.len(), 32);
        assert_eq!(out[..4], [1.0, 2.0, 1.0, 2.0]);
        assert_eq!((e2m1(15), e2m1(8)), (-6.0, 0.0));
    }
}
