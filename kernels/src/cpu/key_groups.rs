//! Keys between rows, as the host has them, and groups of 16 tokens, as the pool has them.

use super::simd::LANES;

/// Copies 16 keys between a group `[dim][16]` of the pool and 16 rows of the host, which are `stride` bytes apart and need no alignment.
///
/// # Safety
/// Both sides are valid as far as the strides reach, nothing else uses them meanwhile, and they do not overlap.
pub(super) unsafe fn copy_group<W: Copy, const OUT: bool>(group: *mut W, dim: usize, host: *mut u8, stride: usize) {
    #[cfg(target_arch = "x86_64")]
    if size_of::<W>() == 2 && std::arch::is_x86_feature_detected!("avx2") {
        let whole = dim - dim % LANES;
        for d in (0..whole).step_by(LANES) {
            // SAFETY: a square of 16 elements of each of the 16 rows lies within both sides, and the processor has the instructions.
            unsafe {
                let (square, rows) = (group.add(d * LANES).cast::<u8>(), host.add(d * 2));
                if OUT {
                    transpose(square, 2 * LANES, rows, stride);
                } else {
                    transpose(rows, stride, square, 2 * LANES);
                }
            }
        }
        // SAFETY: what is left of both sides.
        return unsafe { copy_plainly::<W, OUT>(group, whole..dim, host, stride) };
    }
    // SAFETY: passed on to the caller.
    unsafe { copy_plainly::<W, OUT>(group, 0..dim, host, stride) }
}

/// The elements `range` of each row, one by one.
///
/// # Safety
/// As [`copy_group`].
unsafe fn copy_plainly<W: Copy, const OUT: bool>(
    group: *mut W,
    range: std::ops::Range<usize>,
    host: *mut u8,
    stride: usize,
) {
    // So many elements of a row at once, so that both sides stay within a few cache lines.
    for first in range.clone().step_by(LANES) {
        for token in 0..LANES {
            for d in first..range.end.min(first + LANES) {
                // SAFETY: element `d` of row `token`, on both sides; the host side may be unaligned.
                unsafe {
                    let element = group.add(d * LANES + token);
                    let row = host.add(token * stride).cast::<W>().add(d);
                    if OUT {
                        row.write_unaligned(*element);
                    } else {
                        *element = row.read_unaligned();
                    }
                }
            }
        }
    }
}

/// Turns a square of 16 x 16 elements of 2 bytes over its diagonal. Rows are so many bytes apart.
///
/// # Safety
/// The processor has AVX2; 16 rows of 32 bytes can be read and written, and the two sides do not overlap.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn transpose(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize) {
    use std::arch::x86_64::{
        __m256i, _mm256_loadu_si256, _mm256_permute2x128_si256, _mm256_setzero_si256, _mm256_storeu_si256,
        _mm256_unpackhi_epi16, _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi16,
        _mm256_unpacklo_epi32, _mm256_unpacklo_epi64,
    };
    let mut rows = [_mm256_setzero_si256(); 16];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: by the caller's promise.
        *row = unsafe { _mm256_loadu_si256(from.add(i * from_stride).cast::<__m256i>()) };
    }
    // Each step interleaves runs of one, two, and four elements of neighbours, within halves of 128 bits; the halves are put in place at last.
    let mut pairs = rows;
    for i in 0..8 {
        pairs[2 * i] = _mm256_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]);
    }
    let mut fours = rows;
    for i in 0..4 {
        for half in 0..2 {
            let (a, b) = (pairs[4 * i + half], pairs[4 * i + 2 + half]);
            fours[4 * i + 2 * half] = _mm256_unpacklo_epi32(a, b);
            fours[4 * i + 2 * half + 1] = _mm256_unpackhi_epi32(a, b);
        }
    }
    let mut eights = rows;
    for i in 0..2 {
        for quarter in 0..4 {
            let (a, b) = (fours[8 * i + quarter], fours[8 * i + 4 + quarter]);
            eights[8 * i + 2 * quarter] = _mm256_unpacklo_epi64(a, b);
            eights[8 * i + 2 * quarter + 1] = _mm256_unpackhi_epi64(a, b);
        }
    }
    for i in 0..8 {
        let (a, b) = (eights[i], eights[8 + i]);
        // SAFETY: by the caller's promise.
        unsafe {
            let low = _mm256_permute2x128_si256::<0x20>(a, b);
            let high = _mm256_permute2x128_si256::<0x31>(a, b);
            _mm256_storeu_si256(to.add(i * to_stride).cast::<__m256i>(), low);
            _mm256_storeu_si256(to.add((i + 8) * to_stride).cast::<__m256i>(), high);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element differs, rows are longer than keys, and sides begin at odd addresses.
    fn there_and_back<W: Copy + PartialEq + std::fmt::Debug + Default>(dim: usize, number: impl Fn(usize) -> W) {
        let row_bytes = (dim + 3) * size_of::<W>();
        let mut host = vec![0u8; 16 * row_bytes + 1];
        for token in 0..LANES {
            for d in 0..dim {
                let at = 1 + token * row_bytes + d * size_of::<W>();
                // SAFETY: within the row.
                unsafe { host[at..].as_mut_ptr().cast::<W>().write_unaligned(number(token * dim + d)) };
            }
        }
        let mut group = vec![W::default(); dim * LANES];
        // SAFETY: both sides are as long as the strides say.
        unsafe { copy_group::<W, false>(group.as_mut_ptr(), dim, host[1..].as_mut_ptr(), row_bytes) };
        for token in 0..LANES {
            for d in 0..dim {
                assert_eq!(group[d * LANES + token], number(token * dim + d), "dim {dim}, token {token}, element {d}");
            }
        }
        let mut back = vec![0u8; host.len()];
        // SAFETY: as above.
        unsafe { copy_group::<W, true>(group.as_mut_ptr(), dim, back[1..].as_mut_ptr(), row_bytes) };
        assert!(back == host, "dim {dim}: what lies between the rows is left alone, and all of them come back");
    }

    #[test]
    fn keys_of_every_length_are_turned_there_and_back() {
        for dim in [1, 7, 15, 16, 17, 32, 40, 64, 80, 128] {
            there_and_back::<u16>(dim, |at| at as u16 + 1);
            there_and_back::<u32>(dim, |at| at as u32 + 1);
        }
    }
}
