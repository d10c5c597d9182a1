//! Copying many bytes.

/// Copies bytes; with `past_caches`, they are written to memory past the caches where the processor can.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize, past_caches: bool) {
    #[cfg(target_arch = "x86_64")]
    if past_caches && len >= LEAST {
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the instructions; the rest is the caller's promise.
            return unsafe { stream_64(from, to, len) };
        }
        if std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: as above.
            return unsafe { stream_32(from, to, len) };
        }
    }
    let _ = past_caches;
    // SAFETY: passed on to the caller.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// Below this, what is done at both ends costs more than it saves.
#[cfg(target_arch = "x86_64")]
const LEAST: usize = 4096;
/// A line of the caches.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;
/// Within a page of memory the processor fetches ahead. Two pages are copied side by side, so that more is on its way at a time.
#[cfg(target_arch = "x86_64")]
const PAGE: usize = 4096;

/// Defines a function that copies past the caches by registers of `$width` bytes.
#[cfg(target_arch = "x86_64")]
macro_rules! stream {
    ($name:ident, $feature:literal, $width:literal, $load:ident, $store:ident) => {
        #[target_feature(enable = $feature)]
        unsafe fn $name(from: *const u8, to: *mut u8, len: usize) {
            use std::arch::x86_64::{_mm_sfence, $load, $store};
            // Stores have to be aligned, loads need not be.
            let head = to.align_offset(LINE).min(len);
            let pairs = (len - head) / (2 * PAGE);
            let lines = (len - head - pairs * 2 * PAGE) / LINE;
            let line = |at: usize| {
                for at in (at..at + LINE).step_by($width) {
                    // SAFETY: it is called for lines within `len` bytes, which the caller says can be read at `from` and written at `to`; they begin at a multiple of the width
                    // there.
                    unsafe { $store(to.add(at).cast(), $load(from.add(at).cast())) };
                }
            };
            // SAFETY: head and tail are parts of `len` bytes.
            unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
            for pair in 0..pairs {
                let first = head + pair * 2 * PAGE;
                for at in (first..first + PAGE).step_by(2 * LINE) {
                    line(at);
                    line(at + LINE);
                    line(at + PAGE);
                    line(at + PAGE + LINE);
                }
            }
            let rest = head + pairs * 2 * PAGE;
            (0..lines).for_each(|number| line(rest + number * LINE));
            let done = rest + lines * LINE;
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done) };
            // Such stores are not ordered with others: what tells another thread that the bytes are there has to come after them.
            _mm_sfence();
        }
    };
}

#[cfg(target_arch = "x86_64")]
stream!(stream_32, "avx", 32, _mm256_loadu_si256, _mm256_stream_si256);
#[cfg(target_arch = "x86_64")]
stream!(stream_64, "avx512f", 64, _mm512_loadu_si512, _mm512_stream_si512);

#[cfg(test)]
mod tests {
    /// Copies of many lengths from and to many places.
    fn check(copy: impl Fn(*const u8, *mut u8, usize)) {
        let from: Vec<u8> = (0..70_000u32).map(|i| (i % 253) as u8).collect();
        for (start, at, len) in [
            (0, 0, 65_536),
            (1, 0, 65_536),
            (0, 1, 4097),
            (3, 31, 66_001),
            (7, 5, 127),
            (0, 9, 4096),
            (2, 64, 8192),
            (0, 63, 8191 + 64),
            (5, 17, 0),
        ] {
            let mut to = vec![0xee; 70_000];
            assert!(start + len <= from.len() && at + len <= to.len());
            copy(from[start..].as_ptr(), to[at..].as_mut_ptr(), len);
            assert!(to[at..at + len] == from[start..start + len], "{start} {at} {len}");
            assert!(to[..at].iter().chain(&to[at + len..]).all(|byte| *byte == 0xee), "{start} {at} {len}");
        }
    }

    #[test]
    fn bytes_arrive_past_the_caches_too() {
        for past_caches in [false, true] {
            // SAFETY: `check` gives places that have so many bytes.
            check(|from, to, len| unsafe { super::copy(from, to, len, past_caches) });
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn bytes_arrive_by_registers_of_either_width() {
        if std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: `check` gives places that have so many bytes, and the processor has the instructions.
            check(|from, to, len| unsafe { super::stream_32(from, to, len) });
        }
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: as above.
            check(|from, to, len| unsafe { super::stream_64(from, to, len) });
        }
    }
}
