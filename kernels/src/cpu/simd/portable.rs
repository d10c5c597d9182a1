//! Sixteen lanes in plain Rust: the reference for the others, and the fallback.

use half::f16;

use super::{DIGITS, GROUPS, Kernel, LANES, Lanes};

/// Needs nothing from the machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

type F = [f32; LANES];
type I = [i32; LANES];

#[inline(always)]
fn map2(a: F, b: F, f: impl Fn(f32, f32) -> f32) -> F {
    std::array::from_fn(|l| f(a[l], b[l]))
}

impl Lanes for Portable {
    type F = F;
    type I = I;

    const WIDE: bool = false;

    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.call(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        // SAFETY: the caller promises 16 readable f32.
        unsafe { p.cast::<F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F) {
        // SAFETY: the caller promises 16 writable f32.
        unsafe { p.cast::<F>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> F {
        // SAFETY: the caller promises 16 readable u16.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|b| f16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> F {
        // SAFETY: the caller promises 16 readable u16.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|b| f32::from_bits(u32::from(b) << 16))
    }
    #[inline(always)]
    unsafe fn load_u32(self, p: *const u32) -> I {
        // SAFETY: the caller promises 16 readable u32.
        unsafe { p.cast::<I>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> I {
        // SAFETY: the caller promises 16 readable bytes.
        unsafe { p.cast::<[u8; LANES]>().read_unaligned() }.map(i32::from)
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> I {
        // SAFETY: the caller promises 16 readable bytes.
        unsafe { p.cast::<[i8; LANES]>().read_unaligned() }.map(i32::from)
    }

    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        std::array::from_fn(|l| a[l].mul_add(b[l], c[l]))
    }
    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn first(self, n: usize, a: F, b: F) -> F {
        std::array::from_fn(|l| if l < n { a[l] } else { b[l] })
    }

    #[inline(always)]
    fn to_float(self, v: I) -> F {
        v.map(|x| x as f32)
    }
    #[inline(always)]
    fn nibble(self, v: I, shift: u32) -> F {
        v.map(|x| ((x as u32 >> shift) & 15) as f32)
    }
    #[inline(always)]
    fn nibble_and_1(self, v: I, shift: u32, high: I, high_shift: u32) -> F {
        std::array::from_fn(|l| {
            let q = (v[l] as u32 >> shift) & 15;
            (q | (((high[l] as u32 >> high_shift) & 1) << 4)) as f32
        })
    }
    #[inline(always)]
    fn nibble_and_2(self, v: I, shift: u32, high: I, high_shift: u32) -> F {
        std::array::from_fn(|l| {
            let q = (v[l] as u32 >> shift) & 15;
            (q | (((high[l] as u32 >> high_shift) & 3) << 4)) as f32
        })
    }
    #[inline(always)]
    fn pow2_of_rounded(self, magic: F) -> F {
        magic.map(|m| f32::from_bits((m.to_bits() << 23).wrapping_add(0x3f80_0000)))
    }

    #[inline(always)]
    fn splat_int(self, x: i32) -> I {
        [x; LANES]
    }
    #[inline(always)]
    fn add_int(self, a: I, b: I) -> I {
        std::array::from_fn(|l| a[l].wrapping_add(b[l]))
    }
    #[inline(always)]
    fn and_int(self, a: I, b: I) -> I {
        std::array::from_fn(|l| a[l] & b[l])
    }
    #[inline(always)]
    fn max_int(self, a: I, b: I) -> I {
        std::array::from_fn(|l| a[l].max(b[l]))
    }
    #[inline(always)]
    fn shift_left(self, v: I, shift: u32) -> I {
        v.map(|x| x << shift)
    }
    #[inline(always)]
    fn shift_right(self, v: I, shift: u32) -> I {
        v.map(|x| x >> shift)
    }
    #[inline(always)]
    fn bits(self, v: F) -> I {
        v.map(|x| x.to_bits() as i32)
    }
    #[inline(always)]
    fn to_int(self, v: F) -> I {
        v.map(|x| x.round_ties_even() as i32)
    }
    #[inline(always)]
    fn part_lanes(self, v: I) -> I {
        std::array::from_fn(|l| v[l / 8 * 8 + l % 4 * 2 + l % 8 / 4])
    }
    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, v: I) {
        // SAFETY: the caller promises 16 writable bytes.
        unsafe { p.cast::<[u8; LANES]>().write_unaligned(v.map(|x| x as u8)) };
    }
    #[inline(always)]
    unsafe fn store_int(self, p: *mut u32, v: I) {
        // SAFETY: the caller promises 16 writable u32.
        unsafe { p.cast::<I>().write_unaligned(v) };
    }
    #[inline(always)]
    fn sum_int(self, v: I) -> i32 {
        v.iter().fold(0, |sum, x| sum.wrapping_add(*x))
    }
    #[inline(always)]
    fn greatest_int(self, v: I) -> i32 {
        v.iter().fold(i32::MIN, |most, x| most.max(*x))
    }

    #[inline(always)]
    unsafe fn nibble_sums<const R: usize>(self, words: *const u8, rows: [*const u8; R]) -> [I; R] {
        // SAFETY: the caller promises four vectors of words.
        let words = unsafe { words.cast::<[[u32; LANES]; 4]>().read_unaligned() };
        rows.map(|row| {
            // SAFETY: the caller promises the digits of a block.
            let digits = unsafe { row.cast::<[i8; DIGITS]>().read_unaligned() };
            let mut sums = [0i32; LANES];
            for group in 0..GROUPS {
                for j in 0..4 {
                    let digit = |place: usize| i32::from(digits[(place * GROUPS + group) * 4 + j]);
                    let q = digit(0) * 65_536 + digit(1) * 256 + digit(2);
                    let shift = 4 * (group % 2 + 2 * j);
                    for (sum, word) in sums.iter_mut().zip(&words[group / 2]) {
                        *sum = sum.wrapping_add(((word >> shift) & 15) as i32 * q);
                    }
                }
            }
            sums
        })
    }

    #[inline(always)]
    fn to_array(self, v: F) -> [f32; LANES] {
        v
    }
}
