//! Packed rows against the block-by-block dequantisation, for every format.

use super::*;
use crate::cpu::simd::Isa;
use crate::format::dequantize;

/// Bytes of `rows` rows with random quants and finite scales.
pub(in crate::cpu) fn random_rows(format: WeightFormat, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 24) as u32
    };
    let blocks = rows * cols / format.block_elements();
    let mut bytes = Vec::with_capacity(blocks * format.block_bytes());
    for _ in 0..blocks {
        let at = bytes.len();
        // A number of either sign between 2^-8 and 2^-3, as f32, f16 or bf16.
        let float = ((next() % 4096) as f32 / 4096.0 - 0.5) / 8.0;
        match format {
            WeightFormat::F32 => bytes.extend(float.to_le_bytes()),
            WeightFormat::F16 => bytes.extend(half::f16::from_f32(float).to_le_bytes()),
            WeightFormat::BF16 => bytes.extend(half::bf16::from_f32(float).to_le_bytes()),
            _ => {
                bytes.extend((0..format.block_bytes()).map(|_| next() as u8));
                let scales: &[(usize, f32)] = match format {
                    WeightFormat::Q4_1 => &[(0, 0.1), (2, 1.0)],
                    WeightFormat::Q4_K | WeightFormat::Q5_K => &[(0, 0.002), (2, 0.01)],
                    WeightFormat::Q6_K => &[(208, 0.0005)],
                    _ => &[(0, 0.1)],
                };
                for (offset, size) in scales {
                    let scale = half::f16::from_f32(float * 16.0 * size);
                    bytes[at + offset..][..2].copy_from_slice(&scale.to_le_bytes());
                }
            }
        }
    }
    bytes
}

pub(in crate::cpu) const FORMATS: [WeightFormat; 9] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::BF16,
    WeightFormat::Q4_0,
    WeightFormat::Q4_1,
    WeightFormat::Q8_0,
    WeightFormat::Q4_K,
    WeightFormat::Q5_K,
    WeightFormat::Q6_K,
];

#[test]
fn packed_rows_are_the_dequantised_rows() {
    let pool = ThreadPool::new(2).unwrap();
    for format in FORMATS {
        // Column counts with and without a rest after whole blocks.
        let step = format.block_elements();
        let all_cols = if step == 1 { vec![1, 7, 8, 45, 64] } else { vec![step, 3 * step] };
        for cols in all_cols {
            for rows in [1, 16, 37] {
                let bytes = random_rows(format, rows, cols, (rows * cols) as u64);
                let row_bytes = format.row_bytes(cols).unwrap();
                let reversed: Vec<u32> = (0..rows as u32).rev().collect();
                for row_order in [None, Some(&reversed[..])] {
                    let packed = PackedWeight::new(
                        &WeightData { name: "w", shape: MatrixShape { rows, cols }, format, bytes: &bytes, row_order },
                        &pool,
                    )
                    .unwrap();
                    for isa in Isa::available() {
                        let machine = Machine::new(isa).unwrap();
                        for r in 0..rows {
                            let source = row_order.map_or(r, |o| o[r] as usize);
                            let mut expected = vec![0.0; cols];
                            let row = &bytes[source * row_bytes..][..row_bytes];
                            dequantize(format, row, &mut expected).unwrap();
                            let mut got = vec![f32::NAN; cols];
                            packed.row(machine, r, &mut got);
                            assert_eq!(got, expected, "{format:?} {rows}x{cols} row {r} {isa:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn wrong_weights_are_refused() {
    let pool = ThreadPool::new(1).unwrap();
    let try_new = |rows, cols, format, bytes: &[u8], row_order: Option<&[u32]>| {
        let shape = MatrixShape { rows, cols };
        PackedWeight::new(&WeightData { name: "blk.0.w", shape, format, bytes, row_order }, &pool)
            .err()
            .map(|e| e.to_string())
            .unwrap()
    };
    let bytes = vec![0; 36];
    let e = try_new(2, 32, WeightFormat::Q4_0, &bytes[..35], None);
    assert!(e.contains("blk.0.w") && e.contains("35 bytes") && e.contains("2 rows of 18"), "{e}");
    let e = try_new(2, 31, WeightFormat::Q4_0, &bytes, None);
    assert!(e.contains("31 columns"), "{e}");
    let e = try_new(0, 32, WeightFormat::Q4_0, &[], None);
    assert!(e.contains("empty"), "{e}");
    let e = try_new(usize::MAX, 32, WeightFormat::Q4_0, &bytes, None);
    assert!(e.contains("36 bytes"), "{e}");
    let e = try_new(2, 32, WeightFormat::Q4_0, &bytes, Some(&[0]));
    assert!(e.contains("1 entries"), "{e}");
    let e = try_new(2, 32, WeightFormat::Q4_0, &bytes, Some(&[0, 0]));
    assert!(e.contains("twice"), "{e}");
    let e = try_new(2, 32, WeightFormat::Q4_0, &bytes, Some(&[0, 2]));
    assert!(e.contains("row 2 of 2"), "{e}");
}
