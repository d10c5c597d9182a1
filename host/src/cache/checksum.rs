//! CRC-32C of several runs of bytes side by side.
//!
//! A checksum's steps wait for each other, three cycles each, and a processor could begin one in each cycle. Runs of a page are too short to be cut
//! into parts, but each component has a checksum of its own, so several of these are computed at once.

/// Runs that are gone through side by side.
pub(crate) const LANES: usize = 4;

/// How many bytes ahead of what is gone through memory is asked for: what came from storage lies in no cache, and what the processor foresees by itself
/// ends with each page of its own.
pub(crate) const FORESIGHT: usize = 3072;

/// Asks for `bytes` bytes, `after` bytes after `from`, to be fetched. Only a hint: any address will do.
pub(crate) fn prefetch(from: *const u8, after: usize, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address is harmless, and SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(after + at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, after, bytes);
}

/// Appends a run to each checksum. Runs are best equally long.
pub(crate) fn append(sums: &mut [u32; LANES], runs: [&[u8]; LANES]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has the instructions.
        return unsafe { append_by_instruction(sums, runs) };
    }
    append_one_by_one(sums, runs);
}

fn append_one_by_one(sums: &mut [u32; LANES], runs: [&[u8]; LANES]) {
    for (sum, run) in sums.iter_mut().zip(runs) {
        *sum = crc32c::crc32c_append(*sum, run);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn append_by_instruction(sums: &mut [u32; LANES], runs: [&[u8]; LANES]) {
    use std::arch::x86_64::_mm_crc32_u64;

    let words = runs.map(|run| run.as_chunks::<8>().0);
    let [a, b, c, d] = words;
    let mut states = sums.map(|sum| u64::from(!sum));
    for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
        states[0] = _mm_crc32_u64(states[0], u64::from_le_bytes(*a));
        states[1] = _mm_crc32_u64(states[1], u64::from_le_bytes(*b));
        states[2] = _mm_crc32_u64(states[2], u64::from_le_bytes(*c));
        states[3] = _mm_crc32_u64(states[3], u64::from_le_bytes(*d));
    }
    let done = words.iter().map(|words| words.len()).min().unwrap_or(0) * 8;
    // The upper half of a state is zero.
    *sums = states.map(|state| !(state as u32));
    if runs.iter().any(|run| run.len() > done) {
        append_one_by_one(sums, runs.map(|run| run.get(done..).unwrap_or_default()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_side_by_side_are_those_of_each_run() {
        let bytes: Vec<u8> = (0..2000u32).map(|at| (at * at % 251) as u8).collect();
        for lengths in [[384; 4], [0; 4], [8, 16, 24, 32], [7, 1, 0, 3], [385, 391, 390, 2], [128, 0, 128, 129]] {
            let mut at = 1;
            let runs = lengths.map(|length| {
                at += length;
                &bytes[at - length..at]
            });
            let before = [0, 1, 0xdead_beef, u32::MAX];
            let mut sums = before;
            append(&mut sums, runs);
            let expected: Vec<u32> =
                before.iter().zip(runs).map(|(sum, run)| crc32c::crc32c_append(*sum, run)).collect();
            assert_eq!(sums[..], expected[..], "{lengths:?}");
        }
    }
}
