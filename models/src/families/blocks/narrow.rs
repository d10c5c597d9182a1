//! Number formats of eight and fewer bits, as checkpoints store weights.

use std::ops::Range;

use half::bf16;
pub(crate) use kvdock_kernels::from_e4m3 as e4m3;
use kvdock_kernels::{MatrixShape, NarrowData, NarrowFormat, NarrowScales};

use super::share::Cut;

/// A part of a matrix of eight or four bits.
pub(crate) struct NarrowPart {
    shape: MatrixShape,
    format: NarrowFormat,
    bytes: Vec<u8>,
    scales: PartScales,
}

enum PartScales {
    Floats(Vec<f32>),
    Powers(Vec<u8>),
}

impl NarrowPart {
    /// What `cut` keeps of `whole`, whose sizes have been checked; `None` where that begins within a block of values with one scale.
    pub(crate) fn of(whole: &NarrowData<'_>, cut: &Cut) -> Option<Self> {
        let (rows, cols) = cut.of(whole.shape.rows, whole.shape.cols);
        let (block_rows, block_cols) = match whole.format {
            NarrowFormat::Fp8 => (128, 128),
            NarrowFormat::Mxfp4 => (1, 32),
        };
        let starts_on = |part: &Range<usize>, block: usize| part.start.is_multiple_of(block);
        let whole_blocks = whole.format == NarrowFormat::Fp8 || cols.len().is_multiple_of(block_cols);
        if !starts_on(&rows, block_rows) || !starts_on(&cols, block_cols) || !whole_blocks {
            return None;
        }
        let of_blocks = |part: &Range<usize>, block: usize| part.start / block..part.end.div_ceil(block);
        let (scale_rows, scale_cols) = (of_blocks(&rows, block_rows), of_blocks(&cols, block_cols));
        let across = whole.shape.cols.div_ceil(block_cols);
        let values_a_byte = if whole.format == NarrowFormat::Mxfp4 { 2 } else { 1 };
        let in_bytes = cols.start / values_a_byte..cols.end / values_a_byte;
        Some(Self {
            shape: MatrixShape { rows: rows.len(), cols: cols.len() },
            format: whole.format,
            bytes: picked(whole.bytes, whole.shape.cols / values_a_byte, rows, &in_bytes),
            scales: match whole.scales {
                NarrowScales::Floats(scales) => PartScales::Floats(picked(scales, across, scale_rows, &scale_cols)),
                NarrowScales::Powers(scales) => PartScales::Powers(picked(scales, across, scale_rows, &scale_cols)),
            },
        })
    }

    /// For a device.
    pub(crate) fn as_data<'a>(&'a self, name: &'a str) -> NarrowData<'a> {
        NarrowData {
            name,
            shape: self.shape,
            format: self.format,
            bytes: &self.bytes,
            scales: match &self.scales {
                PartScales::Floats(scales) => NarrowScales::Floats(scales),
                PartScales::Powers(scales) => NarrowScales::Powers(scales),
            },
        }
    }
}

/// Columns `cols` of rows `rows` of a matrix with `width` columns.
fn picked<T: Copy>(all: &[T], width: usize, rows: Range<usize>, cols: &Range<usize>) -> Vec<T> {
    rows.flat_map(|row| all[row * width..][cols.clone()].iter().copied()).collect()
}

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
    fn parts_have_the_values_of_the_whole() {
        let (rows, cols) = (4, 128);
        let bytes: Vec<u8> = (0..rows * cols / 2).map(|at| (at * 37) as u8).collect();
        let scales: Vec<u8> = (0..rows * cols / 32).map(|at| 120 + at as u8).collect();
        let whole = NarrowData {
            name: "m",
            shape: MatrixShape { rows, cols },
            format: NarrowFormat::Mxfp4,
            bytes: &bytes,
            scales: NarrowScales::Powers(&scales),
        };
        let values = |data: &NarrowData<'_>| {
            let NarrowScales::Powers(scales) = data.scales else { panic!("scales in bytes") };
            let mut out = Vec::new();
            mxfp4(data.bytes, scales, &mut out);
            out
        };
        let all = values(&whole);
        for cut in [Cut::Rows(1..3), Cut::Cols(32..96)] {
            let part = NarrowPart::of(&whole, &cut).unwrap();
            part.as_data("m").check().unwrap();
            let (rows, columns) = cut.of(rows, cols);
            assert_eq!(values(&part.as_data("m")), picked(&all, cols, rows, &columns), "{cut:?}");
        }
        assert!(NarrowPart::of(&whole, &Cut::Cols(16..48)).is_none());
    }

    #[test]
    fn parts_of_eight_bits_have_the_scales_of_their_blocks() {
        let (rows, cols) = (300, 260);
        let bytes: Vec<u8> = (0..rows * cols).map(|at| at as u8).collect();
        let scales: Vec<f32> = (0..9).map(|at| at as f32).collect();
        let whole = NarrowData {
            name: "m",
            shape: MatrixShape { rows, cols },
            format: NarrowFormat::Fp8,
            bytes: &bytes,
            scales: NarrowScales::Floats(&scales),
        };
        let part = NarrowPart::of(&whole, &Cut::Rows(128..300)).unwrap();
        let data = part.as_data("m");
        data.check().unwrap();
        assert_eq!(data.bytes, &bytes[128 * cols..]);
        assert!(matches!(data.scales, NarrowScales::Floats(scales) if scales == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]));
        let part = NarrowPart::of(&whole, &Cut::Cols(128..256)).unwrap();
        let data = part.as_data("m");
        data.check().unwrap();
        assert_eq!(data.bytes[..128], bytes[128..256]);
        assert!(matches!(data.scales, NarrowScales::Floats(scales) if scales == [1.0, 4.0, 7.0]));
        assert!(NarrowPart::of(&whole, &Cut::Rows(100..200)).is_none());
    }

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
