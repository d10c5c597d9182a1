//! Copying bytes of which one side may be changed meanwhile.

/// Copies `len` bytes from one place to another; they do not overlap.
///
/// Others may write either side at the same time, also other threads of this program by this function. Then what arrives is any mix of old
/// and new bytes, and nothing else goes wrong: no value is made of them here, and each byte is moved by itself.
///
/// # Safety
/// `from` may be read and `to` written for `len` bytes, and no reference to either is in use meanwhile.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn bytes(from: *const u8, to: *mut u8, len: usize) {
    // The fastest way of this processor, and one that the compiler takes no view of: it may not assume that the bytes stay what they are.
    // SAFETY: the caller's promise; the direction flag is clear where Rust runs, and the instruction changes no flag.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

/// See above.
///
/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn bytes(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { one_by_one(from, to, len) }
}

/// The same, for any processor.
#[cfg(any(test, not(target_arch = "x86_64")))]
unsafe fn one_by_one(from: *const u8, to: *mut u8, len: usize) {
    use std::sync::atomic::{AtomicU8, Ordering};
    for at in 0..len {
        // SAFETY: the caller's promise. Bytes need no alignment, and atomics may meet at the same time.
        let (from, to) = unsafe { (AtomicU8::from_ptr(from.add(at).cast_mut()), AtomicU8::from_ptr(to.add(at))) };
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_at_any_place_and_nothing_beside_them_changes() {
        let source: Vec<u8> = (0..10_000u32).map(|at| (at * 7 + at / 251) as u8).collect();
        for copy in [bytes as unsafe fn(*const u8, *mut u8, usize), one_by_one] {
            for (skip, len) in [(0, 0), (0, 1), (1, 1), (3, 64), (5, 4096), (9, 9991)] {
                let mut target = vec![0xee; source.len()];
                let to = target.len() - len;
                // SAFETY: both ranges lie inside of the vectors.
                unsafe { copy(source.as_ptr().add(skip), target.as_mut_ptr().add(to), len) };
                assert_eq!(target[to..], source[skip..skip + len]);
                assert!(target[..to].iter().all(|byte| *byte == 0xee));
            }
        }
    }
}
