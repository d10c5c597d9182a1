//! Products against f64, and their bits against each other.

use super::*;
use crate::cpu::packed::tests::{FORMATS, random_rows};
use crate::cpu::simd::Isa;
use crate::device::{MatrixShape, WeightData};
use crate::format::{WeightFormat, dequantize};

fn packed(format: WeightFormat, rows: usize, cols: usize, bytes: &[u8], pool: &ThreadPool) -> PackedWeight {
    let shape = MatrixShape { rows, cols };
    let data = WeightData { name: "w", shape, format, bytes, row_order: None };
    PackedWeight::new(&data, pool).unwrap()
}

fn floats(n: usize, seed: u64) -> Vec<f32> {
    let mut bytes = vec![0.0; n];
    dequantize(WeightFormat::F32, &random_rows(WeightFormat::F32, 1, n, seed), &mut bytes).unwrap();
    bytes.iter().map(|x| x * 16.0).collect()
}

fn product(
    isa: Isa,
    pool: &ThreadPool,
    weight: &PackedWeight,
    bias: Option<&[f32]>,
    x: &[f32],
    rows: usize,
) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * weight.shape.rows];
    let mut scratch = FloatArray::empty();
    let mut products = [Product { weight, bias, out: &mut out }];
    run(Machine::new(isa).unwrap(), pool, &mut scratch, x, rows, &mut products).unwrap();
    out
}

/// Shapes with and without a rest in rows (tiles) and columns (blocks, chunks of k).
fn shapes(format: WeightFormat) -> Vec<(usize, usize)> {
    match format.block_elements() {
        1 => vec![(1, 1), (5, 13), (70, 300), (128, 64)],
        32 => vec![(3, 32), (70, 288), (128, 576)],
        _ => vec![(3, 256), (70, 512)],
    }
}

#[test]
fn products_are_near_f64() {
    let pool = ThreadPool::new(2).unwrap();
    let isa = Isa::available()[0];
    for format in FORMATS {
        for (n, k) in shapes(format) {
            let bytes = random_rows(format, n, k, 3);
            let weight = packed(format, n, k, &bytes, &pool);
            let mut w = vec![0.0; n * k];
            dequantize(format, &bytes, &mut w).unwrap();
            let bias = floats(n, 5);
            for rows in [1, 9] {
                let x = floats(rows * k, 7);
                let got = product(isa, &pool, &weight, Some(&bias), &x, rows);
                for r in 0..rows {
                    for o in 0..n {
                        let terms = (0..k).map(|i| f64::from(x[r * k + i]) * f64::from(w[o * k + i]));
                        let (sum, size) = terms.fold((0.0, 0.0), |(s, z), t| (s + t, z + t * t));
                        let expected = sum + f64::from(bias[o]);
                        let error = (f64::from(got[r * n + o]) - expected).abs();
                        let bound = 2e-7 * (k as f64).sqrt() * f64::sqrt(size) + 2e-7 * expected.abs();
                        assert!(error <= bound, "{format:?} {n}x{k} [{r},{o}]: {error:e} > {bound:e}");
                    }
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_rows_threads_or_instruction_set() {
    let pools = [1, 2, 5].map(|n| ThreadPool::new(n).unwrap());
    for format in FORMATS {
        for (n, k) in shapes(format) {
            let weight = packed(format, n, k, &random_rows(format, n, k, 11), &pools[1]);
            let bias = floats(n, 12);
            let x = floats(133 * k, 13);
            let alone: Vec<f32> = (0..133)
                .flat_map(|r| product(Isa::available()[0], &pools[0], &weight, Some(&bias), &x[r * k..][..k], 1))
                .collect();
            for isa in Isa::available() {
                for pool in &pools {
                    for rows in [1, 2, 3, 5, 6, 7, 8, 16, 33, 128, 133] {
                        if isa == Isa::Portable && rows * n * k > 500_000 {
                            continue;
                        }
                        // Rows from the middle, so that a row changes its place in a group.
                        let first = (133 - rows) / 2;
                        let x = &x[first * k..];
                        let got = product(isa, pool, &weight, Some(&bias), x, rows);
                        let expected = &alone[first * n..][..rows * n];
                        let differs = got.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
                        assert_eq!(
                            differs,
                            None,
                            "{format:?} {n}x{k}, {rows} rows, {} threads, {isa:?}",
                            pool.threads()
                        );
                    }
                }
            }
        }
    }
}

/// Rows that go through all tasks of a large step, each as if alone.
#[test]
fn thousands_of_rows_give_the_bits_of_one() {
    let pool = ThreadPool::new(2).unwrap();
    let rows = 2_077;
    for (format, n, k) in [(WeightFormat::Q4_1, 50, 96), (WeightFormat::Q4_K, 17, 256), (WeightFormat::Q4_0, 16, 32)] {
        let weight = packed(format, n, k, &random_rows(format, n, k, 31), &pool);
        let mut x = floats(rows * k, 32);
        // Rows of other sizes, one of zeros, and one that is not a number.
        for (r, row) in x.chunks_exact_mut(k).enumerate() {
            let size = [1.0, 1e-20, 3e15, 0.0][r % 4];
            row.iter_mut().for_each(|x| *x *= size);
        }
        x[1_000 * k + 5] = f32::NAN;
        for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Portable) {
            let got = product(isa, &pool, &weight, None, &x, rows);
            for r in (0..rows).step_by(13).chain([1_000, rows - 1]) {
                let alone = product(isa, &pool, &weight, None, &x[r * k..][..k], 1);
                let row = &got[r * n..][..n];
                if r == 1_000 {
                    assert!(row.iter().chain(&alone).all(|y| y.is_nan()), "{isa:?} {format:?}");
                    continue;
                }
                assert!(row.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?} {format:?} row {r}");
            }
        }
    }
}

#[test]
fn products_in_one_call_equal_products_alone() {
    let pool = ThreadPool::new(2).unwrap();
    let isa = Isa::available()[0];
    let k = 64;
    let weights: Vec<PackedWeight> = [(40, WeightFormat::Q4_1), (16, WeightFormat::Q8_0), (7, WeightFormat::F16)]
        .into_iter()
        .map(|(n, format)| packed(format, n, k, &random_rows(format, n, k, n as u64), &pool))
        .collect();
    for rows in [1, 20] {
        let x = floats(rows * k, 21);
        let mut outs: Vec<Vec<f32>> = weights.iter().map(|w| vec![0.0; rows * w.shape.rows]).collect();
        let mut products: Vec<Product<'_>> =
            weights.iter().zip(&mut outs).map(|(weight, out)| Product { weight, bias: None, out }).collect();
        let mut scratch = FloatArray::empty();
        run(Machine::new(isa).unwrap(), &pool, &mut scratch, &x, rows, &mut products).unwrap();
        for (weight, out) in weights.iter().zip(&outs) {
            assert_eq!(*out, product(isa, &pool, weight, None, &x, rows));
        }
    }
}
