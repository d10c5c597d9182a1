//! Dequantisation against hand-made blocks and against arithmetic written another way.

use super::*;
use half::f16;
use proptest::prelude::*;

/// The block whose byte `i` is `(37 i + 11) mod 256`, with f16 numbers put at some offsets.
fn block(format: WeightFormat, scales: &[(usize, f32)]) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..format.block_bytes()).map(|i| ((37 * i + 11) % 256) as u8).collect();
    for (at, x) in scales {
        bytes[*at..at + 2].copy_from_slice(&f16::from_f32(*x).to_le_bytes());
    }
    bytes
}

fn values(format: WeightFormat, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / format.block_bytes() * format.block_elements()];
    dequantize(format, bytes, &mut out).unwrap();
    out
}

#[test]
fn known_blocks_have_known_values() {
    type Case<'a> = (WeightFormat, &'a [(usize, f32)], &'a [(usize, f64)], f64);
    let cases: [Case<'_>; 6] = [
        (
            WeightFormat::Q4_0,
            &[(0, 0.1)],
            &[(0, -0.29993), (1, 0.19995), (15, -0.7998), (16, -0.29993), (31, 0.0)],
            -2.0995,
        ),
        (
            WeightFormat::Q4_1,
            &[(0, 0.1), (2, -0.5)],
            &[(0, 0.99963), (1, -0.1001), (15, 0.49976), (16, 0.39978), (31, 0.69971)],
            8.494,
        ),
        (
            WeightFormat::Q8_0,
            &[(0, 0.1)],
            &[(0, 8.49792), (1, 12.19702), (15, -12.79688), (16, -9.09778), (31, -4.79883)],
            -17.5957,
        ),
        (
            WeightFormat::Q4_K,
            &[(0, 0.01), (2, 0.02)],
            &[
                (0, 2.39051),
                (1, -1.02022),
                (31, 0.84018),
                (32, -0.28006),
                (63, 0.04001),
                (128, 4.05087),
                (255, -0.04001),
            ],
            417.7692,
        ),
        (
            WeightFormat::Q5_K,
            &[(0, 0.01), (2, 0.02)],
            &[(0, 7.35157), (1, -1.02022), (32, 0.76016), (63, 0.44009), (128, 10.2922), (255, 0.56012)],
            1035.6612,
        ),
        (
            WeightFormat::Q6_K,
            &[(208, 0.01)],
            &[
                (0, -14.31306),
                (1, 16.96362),
                (31, -0.96021),
                (32, 2.31049),
                (64, -30.40649),
                (128, -3.51075),
                (255, -0.60013),
            ],
            46.1299,
        ),
    ];
    for (format, scales, expected, sum) in cases {
        let x = values(format, &block(format, scales));
        for (i, e) in expected {
            assert!((f64::from(x[*i]) - e).abs() < 6e-6, "{format:?} element {i} is {}, not {e}", x[*i]);
        }
        let total: f64 = x.iter().map(|x| f64::from(*x)).sum();
        assert!((total - sum).abs() < 6e-5 * sum.abs().max(1.0), "{format:?} sums to {total}, not {sum}");
    }
}

#[test]
fn floats_are_read_as_they_are() {
    assert_eq!(values(WeightFormat::F32, &1.25f32.to_le_bytes()), [1.25]);
    assert_eq!(values(WeightFormat::F16, &f16::from_f32(-3.5).to_le_bytes()), [-3.5]);
    assert_eq!(values(WeightFormat::BF16, &[0x40, 0xC0]), [-3.0]);
}

#[test]
fn wrong_lengths_are_refused() {
    let e = dequantize(WeightFormat::Q4_0, &[0; 18], &mut [0.0; 31]).unwrap_err().to_string();
    assert!(e.contains("blocks of 32 elements of Q4_0, but out has 31"), "{e}");
    let e = dequantize(WeightFormat::Q6_K, &[0; 209], &mut [0.0; 256]).unwrap_err().to_string();
    assert!(e.contains("209") && e.contains("210"), "{e}");
}

/// The value of element `e` of a block, read bit by bit: a second writing of the layouts.
fn by_bits(format: WeightFormat, b: &[u8], e: usize) -> f64 {
    let half = |at: usize| f16::from_bits(u16::from(b[at]) | u16::from(b[at + 1]) << 8).to_f64();
    let bit = |index: usize| f64::from(b[index / 8] >> (index % 8) & 1);
    // A number of `n` bits whose lowest is bit `index` of the block.
    let field = |index: usize, n: usize| (0..n).map(|i| bit(index + i) * f64::from(1 << i)).sum::<f64>();
    match format {
        WeightFormat::Q4_0 => half(0) * (field(8 * (2 + e % 16) + 4 * (e / 16), 4) - 8.0),
        WeightFormat::Q4_1 => half(0) * field(8 * (4 + e % 16) + 4 * (e / 16), 4) + half(2),
        WeightFormat::Q8_0 => {
            let q = field(8 * (2 + e), 8);
            half(0) * if q > 127.0 { q - 256.0 } else { q }
        }
        WeightFormat::Q4_K | WeightFormat::Q5_K => {
            let j = e / 32;
            let (scale, min) = if j < 4 {
                (field(8 * (4 + j), 6), field(8 * (8 + j), 6))
            } else {
                (
                    field(8 * (8 + j), 4) + 16.0 * field(8 * j + 6, 2),
                    field(8 * (8 + j) + 4, 4) + 16.0 * field(8 * (4 + j) + 6, 2),
                )
            };
            let five = format == WeightFormat::Q5_K;
            let nibbles = if five { 48 } else { 16 };
            let mut q = field(8 * (nibbles + 32 * (j / 2) + e % 32) + 4 * (j % 2), 4);
            if five {
                q += 16.0 * bit(8 * (16 + e % 32) + j);
            }
            half(0) * scale * q - half(2) * min
        }
        WeightFormat::Q6_K => {
            let (n, r) = (e / 128, e % 128);
            let low = field(8 * (64 * n + r % 64) + 4 * (r / 64), 4);
            let high = field(8 * (128 + 32 * n + r % 32) + 2 * (r / 32), 2);
            let scale = field(8 * (192 + e / 16), 8);
            let scale = if scale > 127.0 { scale - 256.0 } else { scale };
            half(208) * scale * (low + 16.0 * high - 32.0)
        }
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => f64::NAN,
    }
}

proptest! {
    #[test]
    fn any_block_has_the_correctly_rounded_value(
        bytes in prop::collection::vec(any::<u8>(), 210),
        d in -4.0f32..4.0,
        m in -4.0f32..4.0,
    ) {
        for format in [
            WeightFormat::Q4_0,
            WeightFormat::Q4_1,
            WeightFormat::Q8_0,
            WeightFormat::Q4_K,
            WeightFormat::Q5_K,
            WeightFormat::Q6_K,
        ] {
            let mut b = bytes[..format.block_bytes()].to_vec();
            let at = if format == WeightFormat::Q6_K { 208 } else { 0 };
            if matches!(format, WeightFormat::Q4_1 | WeightFormat::Q4_K | WeightFormat::Q5_K) {
                b[2..4].copy_from_slice(&f16::from_f32(m).to_le_bytes());
            }
            b[at..at + 2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
            for (e, x) in values(format, &b).into_iter().enumerate() {
                prop_assert_eq!(x, by_bits(format, &b, e) as f32, "{:?} element {}", format, e);
            }
        }
    }
}
