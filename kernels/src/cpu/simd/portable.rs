//! Sixteen lanes in plain Rust: the reference for the others, and the fallback.

use half::f16;

use super::{Kernel, LANES, Lanes};

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
    fn to_array(self, v: F) -> [f32; LANES] {
        v
    }
}
