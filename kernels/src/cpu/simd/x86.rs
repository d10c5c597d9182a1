//! Sixteen lanes on x86-64: one AVX-512 register, or two AVX2 registers.

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::*;

use super::{GROUPS, Kernel, LANES, Lanes};

/// Proof that the machine has AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C, and AVX512-VNNI if `VNNI`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512<const VNNI: bool>(());

/// Proof that the machine has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

impl<const VNNI: bool> Avx512<VNNI> {
    pub(crate) fn detect() -> Option<Self> {
        (Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && (!VNNI || is_x86_feature_detected!("avx512vnni")))
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
fn run_avx512<K: Kernel>(s: Avx512<false>, kernel: K) -> K::Output {
    kernel.call(s)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run_avx512_vnni<K: Kernel>(s: Avx512<true>, kernel: K) -> K::Output {
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

impl<const VNNI: bool> Lanes for Avx512<VNNI> {
    type F = __m512;
    type I = __m512i;

    const WIDE: bool = true;

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // `self` is the proof of what is switched on.
        if VNNI { have!(run_avx512_vnni(Avx512(()), kernel)) } else { have!(run_avx512(Avx512(()), kernel)) }
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
    fn splat_int(self, x: i32) -> __m512i {
        have!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn add_int(self, a: __m512i, b: __m512i) -> __m512i {
        have!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn and_int(self, a: __m512i, b: __m512i) -> __m512i {
        have!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn max_int(self, a: __m512i, b: __m512i) -> __m512i {
        have!(_mm512_max_epi32(a, b))
    }
    #[inline(always)]
    fn shift_left(self, v: __m512i, shift: u32) -> __m512i {
        have!(_mm512_sll_epi32(v, _mm_cvtsi32_si128(shift as i32)))
    }
    #[inline(always)]
    fn shift_right(self, v: __m512i, shift: u32) -> __m512i {
        have!(_mm512_sra_epi32(v, _mm_cvtsi32_si128(shift as i32)))
    }
    #[inline(always)]
    fn bits(self, v: __m512) -> __m512i {
        have!(_mm512_castps_si512(v))
    }
    #[inline(always)]
    fn to_int(self, v: __m512) -> __m512i {
        have!(_mm512_cvtps_epi32(v))
    }
    #[inline(always)]
    fn part_lanes(self, v: __m512i) -> __m512i {
        have!(_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15), v))
    }
    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, v: __m512i) {
        // SAFETY: the caller promises 16 writable bytes; the instruction set is there.
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v)) };
    }
    #[inline(always)]
    unsafe fn store_int(self, p: *mut u32, v: __m512i) {
        // SAFETY: the caller promises 16 writable u32; the instruction set is there.
        unsafe { _mm512_storeu_si512(p.cast(), v) };
    }
    #[inline(always)]
    fn sum_int(self, v: __m512i) -> i32 {
        have!(_mm512_reduce_add_epi32(v))
    }
    #[inline(always)]
    fn greatest_int(self, v: __m512i) -> i32 {
        have!(_mm512_reduce_max_epi32(v))
    }

    #[inline(always)]
    unsafe fn nibble_sums<const R: usize>(self, words: *const u8, rows: [*const u8; R]) -> [__m512i; R] {
        // SAFETY: words and digits are as the caller promises; the instruction set is there.
        unsafe {
            let zero = _mm512_setzero_si512();
            let mask = _mm512_set1_epi8(15);
            let mut sums = [[zero; 3]; R];
            for i in 0..GROUPS / 2 {
                let word = _mm512_loadu_si512(words.add(64 * i).cast());
                let pair = [_mm512_and_si512(word, mask), _mm512_and_si512(_mm512_srli_epi32::<4>(word), mask)];
                for (odd, nibbles) in pair.into_iter().enumerate() {
                    for r in 0..R {
                        for place in 0..3 {
                            let group = rows[r].add((place * GROUPS + 2 * i + odd) * 4);
                            let digits = _mm512_set1_epi32(group.cast::<i32>().read_unaligned());
                            let sum = &mut sums[r][place];
                            if VNNI {
                                *sum = _mm512_dpbusd_epi32(*sum, nibbles, digits);
                            } else {
                                // Eight sums of two products of at most 15 x 128 fit in 16 bits.
                                *sum = _mm512_add_epi16(*sum, _mm512_maddubs_epi16(nibbles, digits));
                            }
                        }
                    }
                }
            }
            let mut out = [zero; R];
            for r in 0..R {
                if !VNNI {
                    for place in 0..3 {
                        sums[r][place] = _mm512_madd_epi16(sums[r][place], _mm512_set1_epi16(1));
                    }
                }
                let upper = _mm512_add_epi32(_mm512_slli_epi32::<8>(sums[r][0]), sums[r][1]);
                out[r] = _mm512_add_epi32(_mm512_slli_epi32::<8>(upper), sums[r][2]);
            }
            out
        }
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
    fn splat_int(self, x: i32) -> Self::I {
        have!([_mm256_set1_epi32(x); 2])
    }
    #[inline(always)]
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I {
        have!([_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])])
    }
    #[inline(always)]
    fn and_int(self, a: Self::I, b: Self::I) -> Self::I {
        have!([_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])])
    }
    #[inline(always)]
    fn max_int(self, a: Self::I, b: Self::I) -> Self::I {
        have!([_mm256_max_epi32(a[0], b[0]), _mm256_max_epi32(a[1], b[1])])
    }
    #[inline(always)]
    fn shift_left(self, v: Self::I, shift: u32) -> Self::I {
        have!({
            let shift = _mm_cvtsi32_si128(shift as i32);
            [_mm256_sll_epi32(v[0], shift), _mm256_sll_epi32(v[1], shift)]
        })
    }
    #[inline(always)]
    fn shift_right(self, v: Self::I, shift: u32) -> Self::I {
        have!({
            let shift = _mm_cvtsi32_si128(shift as i32);
            [_mm256_sra_epi32(v[0], shift), _mm256_sra_epi32(v[1], shift)]
        })
    }
    #[inline(always)]
    fn bits(self, v: Self::F) -> Self::I {
        have!([_mm256_castps_si256(v[0]), _mm256_castps_si256(v[1])])
    }
    #[inline(always)]
    fn to_int(self, v: Self::F) -> Self::I {
        have!([_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1])])
    }
    #[inline(always)]
    fn part_lanes(self, v: Self::I) -> Self::I {
        have!({
            let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
            [_mm256_permutevar8x32_epi32(v[0], order), _mm256_permutevar8x32_epi32(v[1], order)]
        })
    }
    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8, v: Self::I) {
        // SAFETY: the caller promises 16 writable bytes; the instruction set is there.
        unsafe {
            let lowest = _mm256_set1_epi32(255);
            let pairs = _mm256_packus_epi32(_mm256_and_si256(v[0], lowest), _mm256_and_si256(v[1], lowest));
            // The pack works on halves of 128 bits, so quarters come out as 0, 2, 1, 3.
            let pairs = _mm256_permute4x64_epi64::<0b11_01_10_00>(pairs);
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
            _mm_storeu_si128(p.cast(), bytes);
        }
    }
    #[inline(always)]
    unsafe fn store_int(self, p: *mut u32, v: Self::I) {
        // SAFETY: the caller promises 16 writable u32; the instruction set is there.
        unsafe {
            _mm256_storeu_si256(p.cast(), v[0]);
            _mm256_storeu_si256(p.add(8).cast(), v[1]);
        }
    }
    #[inline(always)]
    fn sum_int(self, v: Self::I) -> i32 {
        have!({
            let four = _mm256_add_epi32(v[0], v[1]);
            let four = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256::<1>(four));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)))
        })
    }
    #[inline(always)]
    fn greatest_int(self, v: Self::I) -> i32 {
        have!({
            let four = _mm256_max_epi32(v[0], v[1]);
            let four = _mm_max_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256::<1>(four));
            let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)))
        })
    }

    #[inline(always)]
    unsafe fn nibble_sums<const R: usize>(self, words: *const u8, rows: [*const u8; R]) -> [Self::I; R] {
        // SAFETY: words and digits are as the caller promises; the instruction set is there.
        unsafe {
            let mut out = [[_mm256_setzero_si256(); 2]; R];
            for half in 0..2 {
                let sums = half_sums(self, words.add(32 * half), rows);
                for r in 0..R {
                    out[r][half] = sums[r];
                }
            }
            out
        }
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

/// `nibble_sums` of 8 lanes; the vectors of words are 64 bytes apart.
///
/// # Safety
/// As `nibble_sums`, for the first half of each vector.
#[inline(always)]
unsafe fn half_sums<const R: usize>(_proof: Avx2, words: *const u8, rows: [*const u8; R]) -> [__m256i; R] {
    // SAFETY: as the caller promises; the proof stands for the instruction set.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        let mut sums = [[_mm256_setzero_si256(); 3]; R];
        for i in 0..GROUPS / 2 {
            let word = _mm256_loadu_si256(words.add(64 * i).cast());
            let pair = [_mm256_and_si256(word, mask), _mm256_and_si256(_mm256_srli_epi32::<4>(word), mask)];
            for (odd, nibbles) in pair.into_iter().enumerate() {
                for r in 0..R {
                    for place in 0..3 {
                        let group = rows[r].add((place * GROUPS + 2 * i + odd) * 4);
                        let digits = _mm256_set1_epi32(group.cast::<i32>().read_unaligned());
                        // Eight sums of two products of at most 15 x 128 fit in 16 bits.
                        let sum = &mut sums[r][place];
                        *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(nibbles, digits));
                    }
                }
            }
        }
        let mut out = [_mm256_setzero_si256(); R];
        for r in 0..R {
            for place in 0..3 {
                sums[r][place] = _mm256_madd_epi16(sums[r][place], _mm256_set1_epi16(1));
            }
            let upper = _mm256_add_epi32(_mm256_slli_epi32::<8>(sums[r][0]), sums[r][1]);
            out[r] = _mm256_add_epi32(_mm256_slli_epi32::<8>(upper), sums[r][2]);
        }
        out
    }
}
