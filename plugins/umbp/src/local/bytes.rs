//! Copying many bytes.

/// Copies bytes. So many that they would only push others out of the caches are written past those, from `past_caches` on.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize, past_caches: Option<usize>) {
    #[cfg(target_arch = "x86_64")]
    if past_caches.is_some_and(|least| len >= least.max(LEAST)) && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the processor has the instructions; the rest is the caller's promise.
        return unsafe { stream(from, to, len) };
    }
    let _ = past_caches;
    // SAFETY: passed on to the caller.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// Below this, what is done at both ends costs more than it saves.
#[cfg(target_arch = "x86_64")]
const LEAST: usize = 4096;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    /// Bytes of a store.
    const WIDTH: usize = 32;
    /// Bytes of a step: two lines of the caches.
    const STEP: usize = 4 * WIDTH;
    // Stores have to be aligned, loads need not be.
    let head = to.align_offset(WIDTH).min(len);
    let steps = (len - head) / STEP;
    // SAFETY: `head`, the steps and the tail are parts of `len` bytes, which the caller says can be read at `from` and written at `to`; the stores begin at a multiple of
    // their width.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for step in 0..steps {
            let (from, to) = (from.add(head + step * STEP), to.add(head + step * STEP));
            let a = _mm256_loadu_si256(from.cast());
            let b = _mm256_loadu_si256(from.add(WIDTH).cast());
            let c = _mm256_loadu_si256(from.add(2 * WIDTH).cast());
            let d = _mm256_loadu_si256(from.add(3 * WIDTH).cast());
            _mm256_stream_si256(to.cast(), a);
            _mm256_stream_si256(to.add(WIDTH).cast(), b);
            _mm256_stream_si256(to.add(2 * WIDTH).cast(), c);
            _mm256_stream_si256(to.add(3 * WIDTH).cast(), d);
        }
        let done = head + steps * STEP;
        std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
    }
    // Such stores are not ordered with others: what tells another thread that the bytes are there has to come after them.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use super::copy;

    #[test]
    fn bytes_arrive_past_the_caches_too() {
        let from: Vec<u8> = (0..70_000u32).map(|i| (i % 253) as u8).collect();
        for (start, at, len) in
            [(0, 0, 65_536), (1, 0, 65_536), (0, 1, 4097), (3, 31, 66_001), (7, 5, 127), (0, 9, 4096)]
        {
            let mut to = vec![0xee; 70_000];
            // SAFETY: both vectors have so many bytes from there on.
            unsafe { copy(from.as_ptr().add(start), to.as_mut_ptr().add(at), len, Some(0)) };
            assert!(to[at..at + len] == from[start..start + len], "{start} {at} {len}");
            assert!(to[..at].iter().chain(&to[at + len..]).all(|byte| *byte == 0xee), "{start} {at} {len}");
        }
    }
}
