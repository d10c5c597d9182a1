//! Sixteen lanes of f32, on every machine.
//!
//! A kernel is written once over [`Lanes`], as a [`Kernel`], and runs on whichever instruction
//! set the machine has: AVX-512 (one register of 16), AVX2 with FMA (two of 8), or plain Rust.
//! All of them do the same IEEE operations on the same lanes, so all give the same bits. That is
//! why lanes are always 16, why `a * b + c` is always fused, and why sums over lanes are always
//! the same tree.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use portable::Portable;

/// Lanes of a vector, on every instruction set.
pub(crate) const LANES: usize = 16;

/// Operations on 16 lanes of f32 (`F`) and 16 lanes of 32-bit integers (`I`).
///
/// A value of the implementing type is proof that the machine has the instructions, so the
/// operations are safe; those that take a pointer state what must be valid there.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    /// 16 f32.
    type F: Copy;
    /// 16 integers of 32 bits.
    type I: Copy;

    /// Whether there are 32 registers of 16 lanes, so that a kernel should use wide tiles.
    const WIDE: bool;

    /// Runs a kernel with the instruction set switched on.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::F;
    /// # Safety
    /// 16 f32 at `p` (any alignment) are readable.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// # Safety
    /// 16 f32 at `p` (any alignment) are writable.
    unsafe fn store(self, p: *mut f32, v: Self::F);
    /// # Safety
    /// 16 u16 at `p` (any alignment) are readable. IEEE half precision.
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    /// # Safety
    /// 16 u16 at `p` (any alignment) are readable. bfloat16.
    unsafe fn load_bf16(self, p: *const u16) -> Self::F;
    /// # Safety
    /// 16 u32 at `p` (any alignment) are readable.
    unsafe fn load_u32(self, p: *const u32) -> Self::I;
    /// # Safety
    /// 16 bytes at `p` are readable. Zero-extended.
    unsafe fn load_u8(self, p: *const u8) -> Self::I;
    /// # Safety
    /// 16 bytes at `p` are readable. Sign-extended.
    unsafe fn load_i8(self, p: *const i8) -> Self::I;

    /// `a * b + c`, one rounding.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a > b ? a : b` by lane: if either is NaN, `b`.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b` by lane: if either is NaN, `b`.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Lanes below `n` from `a`, the others from `b`.
    fn first(self, n: usize, a: Self::F, b: Self::F) -> Self::F;

    /// Signed integers as floats.
    fn to_float(self, v: Self::I) -> Self::F;
    /// `((v >> shift) & 15)` as float; `shift` at most 28.
    fn nibble(self, v: Self::I, shift: u32) -> Self::F;
    /// `(((v >> shift) & 15) + 16 * ((high >> high_shift) & 1))` as float.
    fn nibble_and_1(self, v: Self::I, shift: u32, high: Self::I, high_shift: u32) -> Self::F;
    /// `(((v >> shift) & 15) + 16 * ((high >> high_shift) & 3))` as float.
    fn nibble_and_2(self, v: Self::I, shift: u32, high: Self::I, high_shift: u32) -> Self::F;
    /// `2^n` for whole `n` in -126..=127, given `n + 1.5 * 2^23` (the sum that rounds to whole
    /// numbers) as the bits of a float.
    fn pow2_of_rounded(self, magic: Self::F) -> Self::F;

    fn splat_int(self, x: i32) -> Self::I;
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I;
    fn and_int(self, a: Self::I, b: Self::I) -> Self::I;
    fn max_int(self, a: Self::I, b: Self::I) -> Self::I;
    /// `shift` at most 31; what leaves on the left is lost.
    fn shift_left(self, v: Self::I, shift: u32) -> Self::I;
    /// `shift` at most 31; the sign stays.
    fn shift_right(self, v: Self::I, shift: u32) -> Self::I;
    /// The bits of floats.
    fn bits(self, v: Self::F) -> Self::I;
    /// Floats below 2^30 in size rounded to nearest, halves to even.
    fn to_int(self, v: Self::F) -> Self::I;
    /// Even lanes of each eight before the odd ones: 0, 2, 4, 6, 1, 3, 5, 7.
    fn part_lanes(self, v: Self::I) -> Self::I;
    /// Stores the lowest byte of each lane.
    /// # Safety
    /// 16 bytes at `p` are writable.
    unsafe fn store_bytes(self, p: *mut u8, v: Self::I);
    /// # Safety
    /// 16 u32 at `p` (any alignment) are writable.
    unsafe fn store_int(self, p: *mut u32, v: Self::I);
    /// Sum of the lanes, which must fit.
    fn sum_int(self, v: Self::I) -> i32;
    /// Greatest lane.
    fn greatest_int(self, v: Self::I) -> i32;

    /// For each row and lane, the sum over 32 elements of a nibble times an integer, exact as long as it fits.
    ///
    /// An integer is three signed digits to the base of 256. Nibbles lie in four vectors of words, nibble `j` of word `i` being
    /// element `8 i + j` of the lane, so the even nibbles of a word are one group of four bytes and the odd ones another:
    /// element `j` of group `g` is `8 (g / 2) + g % 2 + 2 j`. The digits of a row are `[3][group][4]`, the highest first.
    ///
    /// # Safety
    /// 256 bytes at `words` and [`DIGITS`] bytes at each of `rows` are readable.
    unsafe fn nibble_sums<const R: usize>(self, words: *const u8, rows: [*const u8; R]) -> [Self::I; R];

    /// All lanes, in order.
    fn to_array(self, v: Self::F) -> [f32; LANES];

    /// Sum of the lanes: lane `l` and `l + 8` first, then 4, 2 and 1 apart.
    #[inline(always)]
    fn sum(self, v: Self::F) -> f32 {
        let mut a = self.to_array(v);
        for half in [8, 4, 2, 1] {
            for l in 0..half {
                a[l] += a[l + half];
            }
        }
        a[0]
    }

    /// Greatest lane; not NaN unless all are.
    #[inline(always)]
    fn greatest(self, v: Self::F) -> f32 {
        let mut a = self.to_array(v);
        for half in [8, 4, 2, 1] {
            for l in 0..half {
                a[l] = a[l].max(a[l + half]);
            }
        }
        a[0]
    }
}

/// Code that runs on any [`Lanes`]. `call` and all that it calls must be `#[inline(always)]`, so
/// that it is compiled with the instruction set of the `Lanes` it gets.
pub(crate) trait Kernel {
    type Output;
    fn call<S: Lanes>(self, s: S) -> Self::Output;
}

/// Groups of four elements in a block of 32.
pub(crate) const GROUPS: usize = 8;

/// Bytes of the digits of a row's block; see [`Lanes::nibble_sums`].
pub(crate) const DIGITS: usize = 3 * 4 * GROUPS;

/// The instruction sets that the CPU kernels know. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// As below, with AMX tiles of bytes (AMX-INT8), for which the system was asked.
    Amx,
    /// As below, with products of bytes (AVX512-VNNI).
    Avx512Vnni,
    /// AVX-512 (F, BW, DQ, VL) with FMA and F16C.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// Plain Rust; slow on x86-64.
    Portable,
}

impl Isa {
    /// The instruction sets that this machine has, best first.
    pub fn available() -> Vec<Isa> {
        let all = [Isa::Amx, Isa::Avx512Vnni, Isa::Avx512, Isa::Avx2, Isa::Portable];
        all.into_iter().filter(|isa| Machine::new(*isa).is_some()).collect()
    }

    /// The name that shows in logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amx => "amx",
            Self::Avx512Vnni => "avx512-vnni",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }
}

/// An instruction set that has been found on this machine.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Machine {
    #[cfg(target_arch = "x86_64")]
    Amx(x86::Avx512<false>, x86::Avx512<true>, amx::Amx),
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(x86::Avx512<false>, x86::Avx512<true>),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    Portable(Portable),
}

impl Machine {
    /// `None` if the machine lacks it.
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Some(Self::Amx(x86::Avx512::detect()?, x86::Avx512::detect()?, amx::Amx::detect()?)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Some(Self::Avx512Vnni(x86::Avx512::detect()?, x86::Avx512::detect()?)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => x86::Avx512::detect().map(Self::Avx512),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::Avx2::detect().map(Self::Avx2),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Amx | Isa::Avx512Vnni | Isa::Avx512 | Isa::Avx2 => None,
            Isa::Portable => Some(Self::Portable(Portable)),
        }
    }

    /// [`Lanes::WIDE`] of the instruction set.
    pub(crate) fn is_wide(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(..) | Self::Avx512Vnni(..) | Self::Avx512(_) => x86::Avx512::<false>::WIDE,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => x86::Avx2::WIDE,
            Self::Portable(_) => Portable::WIDE,
        }
    }

    /// Runs a kernel on the instruction set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(s, ..) | Self::Avx512Vnni(s, _) | Self::Avx512(s) => s.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(s) => s.run(kernel),
            Self::Portable(s) => s.run(kernel),
        }
    }

    /// As [`Self::run`], with the instructions for products of bytes where there are any.
    #[inline]
    pub(crate) fn run_on_bytes<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_, s, _) | Self::Avx512Vnni(_, s) => s.run(kernel),
            other => other.run(kernel),
        }
    }
}

/// Asks for the cache line `bytes` after `p` to be fetched. Only a hint: any address will do.
#[inline(always)]
pub(crate) fn prefetch(p: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address is harmless, and SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(bytes).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (p, bytes);
}

#[cfg(test)]
mod tests;
