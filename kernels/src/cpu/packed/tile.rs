//! How weights lie in memory, and how a kernel reads them.
//!
//! A tile is 16 rows of the matrix (output features), one a lane. Along k (input features) a tile
//! is a run of blocks; a block is a header (scales of 16 lanes), then sub-blocks. So one stream
//! of loads feeds 16 independent sums, each sequential in k, and the bytes read are those of the
//! file (K-quants have their 6-bit scales unpacked: 3 % more).
//!
//! Nibbles: word `i` of a sub-block has 16 lanes of u32; nibble `j` of a lane belongs to
//! `k = 8 i + j`. High bits of 5- and 6-bit formats are one u32 a lane.

use super::super::simd::{LANES, Lanes};

/// Steps of k that a kernel decodes at once.
pub(in crate::cpu) const STEP: usize = 8;

/// The packed form of one [`WeightFormat`].
///
/// # Safety of the methods
///
/// `block` points at a whole packed block of this format, `sub` at the sub-block `BLOCK_HEADER +
/// j * SUB_BYTES` of one.
pub(in crate::cpu) trait TileFormat: 'static {
    /// Elements of k in a block.
    const BLOCK: usize;
    /// Elements of k in a sub-block: those that share a scale. A multiple of [`STEP`].
    const SUB: usize;
    /// Bytes of a block's header.
    const HEADER: usize;
    /// Bytes of a sub-block.
    const SUB_BYTES: usize;
    /// Bytes of a block.
    const BLOCK_BYTES: usize = Self::HEADER + Self::BLOCK / Self::SUB * Self::SUB_BYTES;
    /// Bytes of 16 lanes of one element, for formats whose rows may end within a block; their
    /// last elements lie one after another without a header. Zero for the others.
    const ELEMENT_BYTES: usize = 0;

    /// Scale and minimum of the block, by lane.
    unsafe fn header<S: Lanes>(s: S, block: *const u8) -> [S::F; 2];

    /// Factor and summand that make weights of quants, for one sub-block.
    unsafe fn scales<S: Lanes>(s: S, header: [S::F; 2], sub: *const u8) -> [S::F; 2];

    /// The weights of [`STEP`] elements of k from `STEP * step` on, within a sub-block.
    unsafe fn weights<S: Lanes>(s: S, scales: [S::F; 2], sub: *const u8, step: usize) -> [S::F; STEP];

    /// The weights of one element at `p`, for formats with `ELEMENT_BYTES`.
    unsafe fn element<S: Lanes>(s: S, _p: *const u8) -> S::F {
        s.splat(0.0)
    }
}

/// A format whose quants are nibbles, and nothing else, with a scale for each 32 elements.
pub(in crate::cpu) trait NibbleFormat: TileFormat {
    /// Bytes before the words of nibbles in a sub-block.
    const WORDS: usize;
}

impl NibbleFormat for Q4_0 {
    const WORDS: usize = 0;
}

impl NibbleFormat for Q4_1 {
    const WORDS: usize = 0;
}

impl NibbleFormat for Q4_K {
    const WORDS: usize = 2 * LANES;
}

/// Bytes that a tile of `cols` elements of k takes.
pub(in crate::cpu) const fn tile_bytes<T: TileFormat>(cols: usize) -> usize {
    cols / T::BLOCK * T::BLOCK_BYTES + cols % T::BLOCK * T::ELEMENT_BYTES
}

macro_rules! float_format {
    ($name:ident, $element:ty, $load:ident) => {
        #[doc = concat!("Packed ", stringify!($name), ": `[k][16]`, unchanged elements.")]
        pub(in crate::cpu) struct $name;

        impl TileFormat for $name {
            const BLOCK: usize = STEP;
            const SUB: usize = STEP;
            const HEADER: usize = 0;
            const SUB_BYTES: usize = STEP * LANES * size_of::<$element>();
            const ELEMENT_BYTES: usize = LANES * size_of::<$element>();

            #[inline(always)]
            unsafe fn header<S: Lanes>(s: S, _block: *const u8) -> [S::F; 2] {
                [s.splat(1.0), s.splat(0.0)]
            }
            #[inline(always)]
            unsafe fn scales<S: Lanes>(_s: S, header: [S::F; 2], _sub: *const u8) -> [S::F; 2] {
                header
            }
            #[inline(always)]
            unsafe fn weights<S: Lanes>(s: S, _scales: [S::F; 2], sub: *const u8, step: usize) -> [S::F; STEP] {
                let mut w = [s.splat(0.0); STEP];
                let mut j = 0;
                while j < STEP {
                    // SAFETY: the sub-block holds STEP elements of 16 lanes.
                    w[j] = unsafe { s.$load(sub.cast::<$element>().add((step * STEP + j) * LANES)) };
                    j += 1;
                }
                w
            }
            #[inline(always)]
            unsafe fn element<S: Lanes>(s: S, p: *const u8) -> S::F {
                // SAFETY: the caller promises 16 lanes of one element at `p`.
                unsafe { s.$load(p.cast()) }
            }
        }
    };
}

float_format!(F32, f32, load);
float_format!(F16, u16, load_f16);
float_format!(BF16, u16, load_bf16);

/// Bytes of 16 lanes of f16.
const HALVES: usize = 2 * LANES;
/// Bytes of 16 lanes of u32.
const WORD: usize = 4 * LANES;

/// Eight weights from one word of nibbles.
#[inline(always)]
unsafe fn from_nibbles<S: Lanes>(s: S, scales: [S::F; 2], word: *const u8) -> [S::F; STEP] {
    // SAFETY: the caller promises a word at `word`.
    let v = unsafe { s.load_u32(word.cast()) };
    let mut w = [scales[0]; STEP];
    let mut j = 0;
    while j < STEP {
        w[j] = s.fma(s.nibble(v, 4 * j as u32), scales[0], scales[1]);
        j += 1;
    }
    w
}

/// Header `d[16] f16`; sub-block of 32: four words of nibbles. `w = d q - 8 d`, exact.
pub(in crate::cpu) struct Q4_0;

impl TileFormat for Q4_0 {
    const BLOCK: usize = 32;
    const SUB: usize = 32;
    const HEADER: usize = HALVES;
    const SUB_BYTES: usize = 4 * WORD;

    #[inline(always)]
    unsafe fn header<S: Lanes>(s: S, block: *const u8) -> [S::F; 2] {
        // SAFETY: the block begins with 16 f16.
        let d = unsafe { s.load_f16(block.cast()) };
        [d, s.mul(d, s.splat(-8.0))]
    }
    #[inline(always)]
    unsafe fn scales<S: Lanes>(_s: S, header: [S::F; 2], _sub: *const u8) -> [S::F; 2] {
        header
    }
    #[inline(always)]
    unsafe fn weights<S: Lanes>(s: S, scales: [S::F; 2], sub: *const u8, step: usize) -> [S::F; STEP] {
        // SAFETY: the sub-block begins with four words.
        unsafe { from_nibbles(s, scales, sub.add(step * WORD)) }
    }
}

/// Header `d[16] f16, m[16] f16`; sub-block of 32: four words of nibbles. `w = d q + m`.
pub(in crate::cpu) struct Q4_1;

impl TileFormat for Q4_1 {
    const BLOCK: usize = 32;
    const SUB: usize = 32;
    const HEADER: usize = 2 * HALVES;
    const SUB_BYTES: usize = 4 * WORD;

    #[inline(always)]
    unsafe fn header<S: Lanes>(s: S, block: *const u8) -> [S::F; 2] {
        // SAFETY: the block begins with 32 f16.
        unsafe { [s.load_f16(block.cast()), s.load_f16(block.add(HALVES).cast())] }
    }
    #[inline(always)]
    unsafe fn scales<S: Lanes>(_s: S, header: [S::F; 2], _sub: *const u8) -> [S::F; 2] {
        header
    }
    #[inline(always)]
    unsafe fn weights<S: Lanes>(s: S, scales: [S::F; 2], sub: *const u8, step: usize) -> [S::F; STEP] {
        // SAFETY: the sub-block begins with four words.
        unsafe { from_nibbles(s, scales, sub.add(step * WORD)) }
    }
}

/// Header `d[16] f16`; sub-block of 32: `[32][16] i8`. `w = d q`.
pub(in crate::cpu) struct Q8_0;

impl TileFormat for Q8_0 {
    const BLOCK: usize = 32;
    const SUB: usize = 32;
    const HEADER: usize = HALVES;
    const SUB_BYTES: usize = 32 * LANES;

    #[inline(always)]
    unsafe fn header<S: Lanes>(s: S, block: *const u8) -> [S::F; 2] {
        // SAFETY: the block begins with 16 f16.
        [unsafe { s.load_f16(block.cast()) }, s.splat(0.0)]
    }
    #[inline(always)]
    unsafe fn scales<S: Lanes>(_s: S, header: [S::F; 2], _sub: *const u8) -> [S::F; 2] {
        header
    }
    #[inline(always)]
    unsafe fn weights<S: Lanes>(s: S, scales: [S::F; 2], sub: *const u8, step: usize) -> [S::F; STEP] {
        let mut w = [scales[0]; STEP];
        let mut j = 0;
        while j < STEP {
            // SAFETY: the sub-block has 32 rows of 16 bytes.
            let q = unsafe { s.load_i8(sub.add((step * STEP + j) * LANES).cast()) };
            w[j] = s.mul(s.to_float(q), scales[0]);
            j += 1;
        }
        w
    }
}

/// Factor and summand of a sub-block that begins with `scale[16] u8, min[16] u8`.
#[inline(always)]
unsafe fn k_scales<S: Lanes>(s: S, header: [S::F; 2], sub: *const u8) -> [S::F; 2] {
    // SAFETY: the caller promises 32 bytes of scales.
    let (scale, min) = unsafe { (s.load_u8(sub), s.load_u8(sub.add(LANES))) };
    let min = s.mul(header[1], s.to_float(min));
    [s.mul(header[0], s.to_float(scale)), s.sub(s.splat(0.0), min)]
}

/// Header `d[16] f16, dmin[16] f16`; eight sub-blocks of 32: `scale[16] u8, min[16] u8`, four
/// words of nibbles. `w = (d scale) q - dmin min`; both products are exact.
#[allow(non_camel_case_types)]
pub(in crate::cpu) struct Q4_K;

impl TileFormat for Q4_K {
    const BLOCK: usize = 256;
    const SUB: usize = 32;
    const HEADER: usize = 2 * HALVES;
    const SUB_BYTES: usize = 2 * LANES + 4 * WORD;

    #[inline(always)]
    unsafe fn header<S: Lanes>(s: S, block: *const u8) -> [S::F; 2] {
        // SAFETY: the block begins with 32 f16.
        unsafe { [s.load_f16(block.cast()), s.load_f16(block.add(HALVES).cast())] }
    }
    #[inline(always)]
    unsafe fn scales<S: Lanes>(s: S, header: [S::F; 2], sub: *const u8) -> [S::F; 2] {
        // SAFETY: the sub-block begins with 32 bytes of scales.
        unsafe { k_scales(s, header, sub) }
    }
    #[inline(always)]
    unsafe fn weights<S: Lanes>(s: S, scales: [S::F; 2], sub: *const u8, step: usize) -> [S::F; STEP] {
        // SAFETY: four words follow the scales.
        unsafe { from_nibbles(s, scales, sub.add(2 * LANES + step * WORD)) }
    }
}

/// As [`Q4_K`], with a word between scales and nibbles: bit `k` is the fifth bit of element `k`.
#[allow(non_camel_case_types)]
pub(in crate::cpu) struct Q5_K;

impl TileFormat for Q5_K {
    const BLOCK: usize = 256;
    const SUB: usize = 32;
    const HEADER: usize = 2 * HALVES;
    const SUB_BYTES: usize = 2 * LANES + 5 * WORD;

    #[inline(always)]
    unsafe fn header<S: Lanes>(s: S, block: *const u8) -> [S::F; 2] {
        // SAFETY: the block begins with 32 f16.
        unsafe { [s.load_f16(block.cast()), s.load_f16(block.add(HALVES).cast())] }
    }
    #[inline(always)]
    unsafe fn scales<S: Lanes>(s: S, header: [S::F; 2], sub: *const u8) -> [S::F; 2] {
        // SAFETY: the sub-block begins with 32 bytes of scales.
        unsafe { k_scales(s, header, sub) }
    }
    #[inline(always)]
    unsafe fn weights<S: Lanes>(s: S, scales: [S::F; 2], sub: *const u8, step: usize) -> [S::F; STEP] {
        // SAFETY: five words follow the scales, the first of them the high bits.
        let (high, low) = unsafe {
            (s.load_u32(sub.add(2 * LANES).cast()), s.load_u32(sub.add(2 * LANES + WORD + step * WORD).cast()))
        };
        let mut w = [scales[0]; STEP];
        let mut j = 0;
        while j < STEP {
            let q = s.nibble_and_1(low, 4 * j as u32, high, (step * STEP + j) as u32);
            w[j] = s.fma(q, scales[0], scales[1]);
            j += 1;
        }
        w
    }
}

/// Header `d[16] f16`; 16 sub-blocks of 16: `scale[16] i8`, a word of high bits (bits `2k` and
/// `2k + 1` are the upper two of element `k`), two words of nibbles. `w = (d scale) q - 32 (d
/// scale)`, exact.
#[allow(non_camel_case_types)]
pub(in crate::cpu) struct Q6_K;

impl TileFormat for Q6_K {
    const BLOCK: usize = 256;
    const SUB: usize = 16;
    const HEADER: usize = HALVES;
    const SUB_BYTES: usize = LANES + 3 * WORD;

    #[inline(always)]
    unsafe fn header<S: Lanes>(s: S, block: *const u8) -> [S::F; 2] {
        // SAFETY: the block begins with 16 f16.
        [unsafe { s.load_f16(block.cast()) }, s.splat(0.0)]
    }
    #[inline(always)]
    unsafe fn scales<S: Lanes>(s: S, header: [S::F; 2], sub: *const u8) -> [S::F; 2] {
        // SAFETY: the sub-block begins with 16 scales.
        let scale = unsafe { s.load_i8(sub.cast()) };
        let scale = s.mul(header[0], s.to_float(scale));
        [scale, s.mul(scale, s.splat(-32.0))]
    }
    #[inline(always)]
    unsafe fn weights<S: Lanes>(s: S, scales: [S::F; 2], sub: *const u8, step: usize) -> [S::F; STEP] {
        // SAFETY: three words follow the scales, the first of them the high bits.
        let (high, low) =
            unsafe { (s.load_u32(sub.add(LANES).cast()), s.load_u32(sub.add(LANES + WORD + step * WORD).cast())) };
        let mut w = [scales[0]; STEP];
        let mut j = 0;
        while j < STEP {
            let q = s.nibble_and_2(low, 4 * j as u32, high, 2 * (step * STEP + j) as u32);
            w[j] = s.fma(q, scales[0], scales[1]);
            j += 1;
        }
        w
    }
}
