//! Sixteen lanes on x86-64: one AVX-512 register, or two AVX2 registers.

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::*;

use super::{Kernel, LANES, Lanes};

/// Proof that the machine has AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

/// Proof that the machine has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        (Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl"))
        .then_some(Self(()))
    }
}

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"))
            .then_some(Self(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn run_avx512<K: Kernel>(s: Avx512, kernel: K) -> K::Output {
    kernel.call(s)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(s: Avx2, kernel: K) -> K::Output {
    kernel.call(s)
}

/// Intrinsics on values alone, callable because a proof of their instruction set is at hand.
macro_rules! have {
    ($e:expr) => {
        // SAFETY: `self` exists, so `detect` found the instruction set of these intrinsics.
        unsafe { $e }
    };
}

impl Lanes for Avx512 {
    type F = __m512;
    type I = __m512i;

    const WIDE: bool = true;

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        have!(run_avx512(self, kernel))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        have!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: the caller promises 16 readable f32; the instruction set is there.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        // SAFETY: the caller promises 16 writable f32; the instruction set is there.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        // SAFETY: the caller promises 16 readable u16; the instruction set is there.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        // SAFETY: the caller promises 16 readable u16; the instruction set is there.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_u32(self, p: *const u32) -> __m512i {
        // SAFETY: the caller promises 16 readable u32; the instruction set is there.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> __m512i {
        // SAFETY: the caller promises 16 readable bytes; the instruction set is there.
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> __m512i {
        // SAFETY: the caller promises 16 readable bytes; the instruction set is there.
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        have!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        have!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        have!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        have!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        have!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        have!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        have!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn first(self, n: usize, a: __m512, b: __m512) -> __m512 {
        let mask = if n >= LANES { u16::MAX } else { (1u16 << n) - 1 };
        have!(_mm512_mask_blend_ps(mask, b, a))
    }

    #[inline(always)]
    fn to_float(self, v: __m512i) -> __m512 {
        have!(_mm512_cvtepi32_ps(v))
    }
    #[inline(always)]
    fn nibble(self, v: __m512i, shift: u32) -> __m512 {
        // The permutation looks at the low four bits of an index only, so it masks and converts
        // in one step.
        have!({
            let table = _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.);
            _mm512_permutexvar_ps(_mm512_srl_epi32(v, _mm_cvtsi32_si128(shift as i32)), table)
        })
    }
    #[inline(always)]
    fn nibble_and_1(self, v: __m512i, shift: u32, high: __m512i, high_shift: u32) -> __m512 {
        have!({
            let bit = _mm512_test_epi32_mask(high, _mm512_set1_epi32((1u32 << high_shift) as i32));
            let low = self.nibble(v, shift);
            _mm512_mask_add_ps(low, bit, low, _mm512_set1_ps(16.0))
        })
    }
    #[inline(always)]
    fn nibble_and_2(self, v: __m512i, shift: u32, high: __m512i, high_shift: u32) -> __m512 {
        have!({
            let low = _mm512_srl_epi32(v, _mm_cvtsi32_si128(shift as i32));
            let high = if high_shift >= 4 {
                _mm512_srl_epi32(high, _mm_cvtsi32_si128(high_shift as i32 - 4))
            } else {
                _mm512_sll_epi32(high, _mm_cvtsi32_si128(4 - high_shift as i32))
            };
            // Bits of `low` where the mask is set, of `high` elsewhere; then six bits of that.
            let mask = _mm512_set1_epi32(15);
            let mixed = _mm512_ternarylogic_epi32::<0xCA>(mask, low, high);
            _mm512_cvtepi32_ps(_mm512_and_si512(mixed, _mm512_set1_epi32(63)))
        })
    }
    #[inline(always)]
    fn pow2_of_rounded(self, magic: __m512) -> __m512 {
        have!({
            let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(magic));
            _mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(0x3f80_0000)))
        })
    }

    #[inline(always)]
    fn to_array(self, v: __m512) -> [f32; LANES] {
        let mut a = [0.0; LANES];
        // SAFETY: the array has 16 f32.
        unsafe { self.store(a.as_mut_ptr(), v) };
        a
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        have!({
            let a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            sum8(a)
        })
    }
    #[inline(always)]
    fn greatest(self, v: __m512) -> f32 {
        have!({
            let a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            greatest8(a)
        })
    }
}

/// Sum of 8 lanes: lane `l` and `l + 4` first, then 2 and 1 apart.
#[inline]
#[target_feature(enable = "avx2")]
fn sum8(a: __m256) -> f32 {
    let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
    let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    let a = _mm_add_ss(a, _mm_shuffle_ps::<1>(a, a));
    _mm_cvtss_f32(a)
}

/// Greatest of 8 lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn greatest8(a: __m256) -> f32 {
    let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
    let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    let a = _mm_max_ss(a, _mm_shuffle_ps::<1>(a, a));
    _mm_cvtss_f32(a)
}

impl Lanes for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];

    const WIDE: bool = false;

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        have!(run_avx2(self, kernel))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        have!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::F {
        // SAFETY: the caller promises 16 readable f32; the instruction set is there.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::F) {
        // SAFETY: the caller promises 16 writable f32; the instruction set is there.
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::F {
        // SAFETY: the caller promises 16 readable u16; the instruction set is there.
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))] }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::F {
        // SAFETY: the caller promises 16 readable u16; the instruction set is there.
        let wide = unsafe {
            [_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())), _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()))]
        };
        have!([
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide[0])),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide[1])),
        ])
    }
    #[inline(always)]
    unsafe fn load_u32(self, p: *const u32) -> Self::I {
        // SAFETY: the caller promises 16 readable u32; the instruction set is there.
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast())] }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> Self::I {
        // SAFETY: the caller promises 16 readable bytes; the instruction set is there.
        unsafe {
            [_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())), _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast()))]
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> Self::I {
        // SAFETY: the caller promises 16 readable bytes; the instruction set is there.
        unsafe {
            [_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())), _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()))]
        }
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        have!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1]),])
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        have!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        have!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        have!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        have!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        have!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        have!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn first(self, n: usize, a: Self::F, b: Self::F) -> Self::F {
        have!({
            let n = _mm256_set1_epi32(n.min(LANES) as i32);
            let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
            [
                _mm256_blendv_ps(b[0], a[0], _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, low))),
                _mm256_blendv_ps(b[1], a[1], _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, high))),
            ]
        })
    }

    #[inline(always)]
    fn to_float(self, v: Self::I) -> Self::F {
        have!([_mm256_cvtepi32_ps(v[0]), _mm256_cvtepi32_ps(v[1])])
    }
    #[inline(always)]
    fn nibble(self, v: Self::I, shift: u32) -> Self::F {
        have!({
            let mask = _mm256_set1_epi32(15);
            let shift = _mm_cvtsi32_si128(shift as i32);
            [
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(v[0], shift), mask)),
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(v[1], shift), mask)),
            ]
        })
    }
    #[inline(always)]
    fn nibble_and_1(self, v: Self::I, shift: u32, high: Self::I, high_shift: u32) -> Self::F {
        [
            nibble_and_high(self, v[0], shift, high[0], high_shift, 1),
            nibble_and_high(self, v[1], shift, high[1], high_shift, 1),
        ]
    }
    #[inline(always)]
    fn nibble_and_2(self, v: Self::I, shift: u32, high: Self::I, high_shift: u32) -> Self::F {
        [
            nibble_and_high(self, v[0], shift, high[0], high_shift, 3),
            nibble_and_high(self, v[1], shift, high[1], high_shift, 3),
        ]
    }
    #[inline(always)]
    fn pow2_of_rounded(self, magic: Self::F) -> Self::F {
        have!({
            let one = _mm256_set1_epi32(0x3f80_0000);
            let low = _mm256_slli_epi32::<23>(_mm256_castps_si256(magic[0]));
            let high = _mm256_slli_epi32::<23>(_mm256_castps_si256(magic[1]));
            [_mm256_castsi256_ps(_mm256_add_epi32(low, one)), _mm256_castsi256_ps(_mm256_add_epi32(high, one))]
        })
    }

    #[inline(always)]
    fn to_array(self, v: Self::F) -> [f32; LANES] {
        let mut a = [0.0; LANES];
        // SAFETY: the array has 16 f32.
        unsafe { self.store(a.as_mut_ptr(), v) };
        a
    }
    #[inline(always)]
    fn sum(self, v: Self::F) -> f32 {
        have!(sum8(_mm256_add_ps(v[0], v[1])))
    }
    #[inline(always)]
    fn greatest(self, v: Self::F) -> f32 {
        have!(greatest8(_mm256_max_ps(v[0], v[1])))
    }
}

/// One half of `nibble_and_1` and `nibble_and_2`; `mask` says which high bits count.
#[inline(always)]
fn nibble_and_high(_proof: Avx2, v: __m256i, shift: u32, high: __m256i, high_shift: u32, mask: i32) -> __m256 {
    have!({
        let low = _mm256_srl_epi32(v, _mm_cvtsi32_si128(shift as i32));
        let low = _mm256_and_si256(low, _mm256_set1_epi32(15));
        let high = _mm256_srl_epi32(high, _mm_cvtsi32_si128(high_shift as i32));
        let high = _mm256_and_si256(high, _mm256_set1_epi32(mask));
        _mm256_cvtepi32_ps(_mm256_or_si256(low, _mm256_slli_epi32::<4>(high)))
    })
}
