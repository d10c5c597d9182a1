//! Rows as integers: blocks of 32 elements with a scale, and where their digits lie.

use std::marker::PhantomData;

use super::BLOCK;
use crate::cpu::memory::FloatArray;
use crate::cpu::simd::{DIGITS, GROUPS, Kernel, LANES, Lanes, Machine};
use crate::cpu::threads::ThreadPool;
use crate::error::KernelError;

/// Rows of a group.
pub(super) const GROUP: usize = 16;

/// Where a block of a row goes.
pub(super) trait Layout: Sync + 'static {
    /// Rows that lie together.
    const ROWS: usize;
    /// Floats that a block of so many rows takes.
    const FLOATS: usize;

    /// Stores integers (in the order of [`Lanes::nibble_sums`]), scale, and scaled sum of a block of row `row` of a group.
    ///
    /// # Safety
    /// `FLOATS` floats at `block` are writable, and `row` is below `ROWS`.
    unsafe fn put<S: Lanes>(s: S, block: *mut f32, row: usize, integers: [S::I; 2], scale: f32, sum: f32);
}

/// `[row][block]`: three digits to the base of 256 (see [`Lanes::nibble_sums`]), then scale and sum.
pub(super) struct DigitLayout;

impl DigitLayout {
    /// Where the scale is; the sum follows.
    pub(super) const SCALE: usize = DIGITS / 4;
}

impl Layout for DigitLayout {
    const ROWS: usize = 1;
    const FLOATS: usize = Self::SCALE + 2;

    #[inline(always)]
    unsafe fn put<S: Lanes>(s: S, block: *mut f32, _row: usize, integers: [S::I; 2], scale: f32, sum: f32) {
        let bytes = block.cast::<u8>();
        let round = s.splat_int(128);
        for (half, low) in integers.into_iter().enumerate() {
            // What is left above a signed digit, which is the lowest byte as it stands.
            let middle = s.shift_right(s.add_int(low, round), 8);
            let high = s.shift_right(s.add_int(middle, round), 8);
            for (place, digit) in [high, middle, low].into_iter().enumerate() {
                // SAFETY: 96 bytes of digits, 16 of each place a half.
                unsafe { s.store_bytes(bytes.add(place * 4 * GROUPS + half * LANES), digit) };
            }
        }
        // SAFETY: two floats follow the digits.
        unsafe {
            block.add(Self::SCALE).write(scale);
            block.add(Self::SCALE + 1).write(sum);
        }
    }
}

/// `[row / 16][block]`: two tiles `[16][64]` of bytes, the upper digits of 16 rows and their lower ones, each row's 32 higher
/// ones first; then 16 scales and 16 sums. `q = 4096 a + b`, `a = 16 a1 + a0`, `b = 16 b1 + b0`; all digits fit in signed bytes.
pub(super) struct TileLayout;

impl TileLayout {
    /// Floats of a tile.
    pub(super) const TILE: usize = GROUP * 2 * BLOCK / 4;
    /// Where the scales are; the sums follow.
    pub(super) const SCALES: usize = 2 * Self::TILE;
}

impl Layout for TileLayout {
    const ROWS: usize = GROUP;
    const FLOATS: usize = Self::SCALES + 2 * GROUP;

    #[inline(always)]
    unsafe fn put<S: Lanes>(s: S, block: *mut f32, row: usize, integers: [S::I; 2], scale: f32, sum: f32) {
        let (digit, eight) = (s.splat_int(15), s.splat_int(-8));
        // Adds half a digit at the places of b0, b1 and a0, so that cutting digits off rounds to the nearest one.
        let halves = s.splat_int(8 + 128 * 16 + 8 * 4096);
        for (half, q) in integers.into_iter().enumerate() {
            let q = s.add_int(q, halves);
            let b0 = s.add_int(s.and_int(q, digit), eight);
            let b1 = s.add_int(s.shift_right(q, 4), s.splat_int(-128));
            let a0 = s.add_int(s.and_int(s.shift_right(q, 12), digit), eight);
            let a1 = s.shift_right(q, 16);
            // SAFETY: each tile has 64 bytes of the row: 32 higher digits, 32 lower ones, 16 of them a half.
            unsafe {
                let a = block.cast::<u8>().add(row * 2 * BLOCK + half * LANES);
                let b = a.add(4 * Self::TILE);
                s.store_bytes(a, a1);
                s.store_bytes(a.add(BLOCK), a0);
                s.store_bytes(b, b1);
                s.store_bytes(b.add(BLOCK), b0);
            }
        }
        // SAFETY: 16 scales and 16 sums follow the tiles.
        unsafe {
            block.add(Self::SCALES + row).write(scale);
            block.add(Self::SCALES + GROUP + row).write(sum);
        }
    }
}

/// Turns `x` (`[rows, cols]`, `cols` in whole blocks) into integers in `out`. Rows that fill a last group up are zero.
pub(super) fn quantize<L: Layout>(
    machine: Machine,
    pool: &ThreadPool,
    out: &mut FloatArray,
    x: &[f32],
    rows: usize,
    cols: usize,
) -> Result<(), KernelError> {
    let blocks = cols / BLOCK;
    let groups = rows.div_ceil(L::ROWS);
    out.reserve(groups * blocks * L::FLOATS, "the integers of a product")?;
    let out = Out(out.as_mut_slice().as_mut_ptr());
    let each = GROUP / L::ROWS;
    pool.run("linear", groups.div_ceil(each), &|task| {
        let first = task * each;
        let groups = each.min(groups - first);
        let from = first * L::ROWS;
        let rows = (groups * L::ROWS).min(rows - from);
        machine.run(Quantize::<L> {
            x: &x[from * cols..][..rows * cols],
            rows,
            cols,
            // Each task has groups of its own.
            out: out.at(first * blocks * L::FLOATS),
            groups,
            layout: PhantomData,
        });
    })
}

#[derive(Clone, Copy)]
struct Out(*mut f32);
// SAFETY: tasks use disjoint parts of an array that outlives them.
unsafe impl Sync for Out {}

impl Out {
    fn at(self, index: usize) -> *mut f32 {
        self.0.wrapping_add(index)
    }
}

struct Quantize<'a, L> {
    x: &'a [f32],
    rows: usize,
    cols: usize,
    /// `groups` groups of blocks, this task's alone.
    out: *mut f32,
    groups: usize,
    layout: PhantomData<L>,
}

impl<L: Layout> Kernel for Quantize<'_, L> {
    type Output = ();

    #[inline(always)]
    fn call<S: Lanes>(self, s: S) {
        let blocks = self.cols / BLOCK;
        assert!(self.x.len() >= self.rows * self.cols && self.rows <= self.groups * L::ROWS);
        for row in 0..self.groups * L::ROWS {
            for b in 0..blocks {
                // SAFETY: the row's blocks lie in `x`, and its group's in `out`.
                unsafe {
                    let out = self.out.add((row / L::ROWS * blocks + b) * L::FLOATS);
                    let (integers, scale, sum) = if row < self.rows {
                        integers(s, self.x.as_ptr().add(row * self.cols + b * BLOCK))
                    } else {
                        ([s.splat_int(0); 2], 0.0, 0.0)
                    };
                    L::put(s, out, row % L::ROWS, integers, scale, sum);
                }
            }
        }
    }
}

/// A block as integers of at most 2^22 in size with their scale, and the scaled sum. Even elements of each eight come before the
/// odd ones. If an element is not finite, the integers are zero and the others NaN.
///
/// # Safety
/// 32 floats at `x` are readable.
#[inline(always)]
unsafe fn integers<S: Lanes>(s: S, x: *const f32) -> ([S::I; 2], f32, f32) {
    const EXPONENT: u32 = 23;
    // SAFETY: as promised by the caller.
    let x = unsafe { [s.load(x), s.load(x.add(LANES))] };
    let size = s.splat_int(i32::MAX);
    let most = s.greatest_int(s.max_int(s.and_int(s.bits(x[0]), size), s.and_int(s.bits(x[1]), size))) as u32;
    if most >= f32::INFINITY.to_bits() {
        return ([s.splat_int(0); 2], f32::NAN, f32::NAN);
    }
    // With the exponent e of the greatest element, biased, all are below 2^(e - 126), and the scale is 2^(e - 148).
    let exponent = (most >> EXPONENT).max(22);
    let scale = f32::from_bits((exponent - 21) << EXPONENT);
    let inverse = s.splat(f32::from_bits((275 - exponent) << EXPONENT));
    let q = [s.part_lanes(s.to_int(s.mul(x[0], inverse))), s.part_lanes(s.to_int(s.mul(x[1], inverse)))];
    let sum = s.sum_int(s.add_int(q[0], q[1]));
    (q, scale, sum as f32 * scale)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::Isa;

    /// The floats that the digits of a block stand for, in both layouts.
    fn both(isa: Isa, x: &[f32; BLOCK]) -> [(Vec<f64>, f32, f32); 2] {
        let machine = Machine::new(isa).unwrap();
        let pool = ThreadPool::new(1).unwrap();
        let mut out = FloatArray::empty();
        let element = |group: usize, j: usize| 8 * (group / 2) + group % 2 + 2 * j;

        quantize::<DigitLayout>(machine, &pool, &mut out, x, 1, BLOCK).unwrap();
        let bytes: Vec<i8> =
            out.as_slice()[..DIGITS / 4].iter().flat_map(|x| x.to_ne_bytes()).map(|b| b as i8).collect();
        let [scale, sum] = [out.as_slice()[DigitLayout::SCALE], out.as_slice()[DigitLayout::SCALE + 1]];
        let mut values = vec![0.0; BLOCK];
        for (i, value) in (0..BLOCK).map(|p| element(p / 4, p % 4)).enumerate() {
            let q = [0, 1, 2].iter().fold(0.0, |q, place| 256.0 * q + f64::from(bytes[place * BLOCK + i]));
            values[value] = q * f64::from(scale);
        }
        let digits = (values, scale, sum);

        quantize::<TileLayout>(machine, &pool, &mut out, x, 1, BLOCK).unwrap();
        let floats = out.as_slice();
        let bytes: Vec<i8> =
            floats[..TileLayout::SCALES].iter().flat_map(|x| x.to_ne_bytes()).map(|b| b as i8).collect();
        let (scale, sum) = (floats[TileLayout::SCALES], floats[TileLayout::SCALES + GROUP]);
        assert!(floats[TileLayout::SCALES + 1..][..15].iter().all(|x| *x == 0.0));
        let mut values = vec![0.0; BLOCK];
        for (i, value) in (0..BLOCK).map(|p| element(p / 4, p % 4)).enumerate() {
            let digit = |tile: usize, low: usize| f64::from(bytes[tile * 4 * TileLayout::TILE + low * BLOCK + i]);
            let q = 4096.0 * (16.0 * digit(0, 0) + digit(0, 1)) + 16.0 * digit(1, 0) + digit(1, 1);
            values[value] = q * f64::from(scale);
        }
        [digits, (values, scale, sum)]
    }

    fn block(seed: u64, size: f32) -> [f32; BLOCK] {
        let mut random = fastrand::Rng::with_seed(seed);
        std::array::from_fn(|_| (random.f32() - 0.5) * size * if random.bool() { 1.0 } else { 1e-3 })
    }

    #[test]
    fn integers_are_the_row_within_half_a_step() {
        for isa in Isa::available() {
            for (seed, size) in (0..200).zip([1.0, 1e-3, 3e5, 1e-30, 1e38].iter().cycle()) {
                let x = block(seed, *size);
                for (values, scale, sum) in both(isa, &x) {
                    let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    assert!(scale <= (most / 2_097_152.0).max(f32::MIN_POSITIVE), "{scale:e} for {most:e}");
                    let exact: f64 = values.iter().sum();
                    assert_eq!(sum, exact as f32, "{isa:?}");
                    for (value, x) in values.iter().zip(&x) {
                        let error = (value - f64::from(*x)).abs();
                        assert!(error <= 0.5 * f64::from(scale), "{isa:?}: {value:e} is not {x:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn greatest_elements_fit() {
        // Just below and at powers of two, where rounding gives 2^22 itself, and the least and greatest numbers.
        for x in [1.0f32, 1.0f32.next_down(), -(2.0f32.next_down()), f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45, 0.0]
        {
            for isa in Isa::available() {
                for (values, scale, _) in both(isa, &[x; BLOCK]) {
                    for value in values {
                        assert!(
                            (value - f64::from(x)).abs() <= 0.5 * f64::from(scale),
                            "{isa:?}: {value:e} is not {x:e}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_nan() {
        for isa in Isa::available() {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, 17, 31] {
                    let mut x = block(7, 1.0);
                    x[at] = bad;
                    for (values, scale, sum) in both(isa, &x) {
                        assert!(scale.is_nan() && sum.is_nan() && values.iter().all(|x| x.is_nan()));
                    }
                }
            }
        }
    }
}
