//! Memory of the CPU device: aligned f32 arrays, and page-backed regions.

use std::ffi::c_void;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::KernelError;

/// One cache line of f32, so that arrays of it are aligned for every vector load.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([f32; 16]);

/// Bytes of an array from which on it has pages of its own: those that nothing writes never take up memory, nor the time to zero them.
const OWN_PAGES: usize = 1 << 20;

/// An array of f32 that starts on a cache line.
pub(super) struct FloatArray {
    memory: Memory,
    len: usize,
}

enum Memory {
    Lines(Vec<Line>),
    Pages(Region),
}

impl FloatArray {
    /// No elements, and no memory.
    pub(super) const fn empty() -> Self {
        Self { memory: Memory::Lines(Vec::new()), len: 0 }
    }

    /// `len` zeros.
    pub(super) fn zeroed(len: usize, what: &'static str) -> Result<Self, KernelError> {
        let bytes = len.saturating_mul(size_of::<f32>());
        if bytes >= OWN_PAGES {
            return Ok(Self { memory: Memory::Pages(Region::zeroed(bytes, what)?), len });
        }
        let count = len.div_ceil(16);
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).map_err(|e| KernelError::Memory { what, bytes, reason: e.to_string() })?;
        lines.resize(count, Line([0.0; 16]));
        Ok(Self { memory: Memory::Lines(lines), len })
    }

    /// Grows to at least `len` elements. What it held is lost.
    pub(super) fn reserve(&mut self, len: usize, what: &'static str) -> Result<(), KernelError> {
        if self.len < len {
            *self = Self::zeroed(len, what)?;
        }
        Ok(())
    }

    pub(super) fn as_slice(&self) -> &[f32] {
        let start: *const f32 = match &self.memory {
            Memory::Lines(lines) => lines.as_ptr().cast(),
            Memory::Pages(region) => region.as_ptr().cast(),
        };
        // SAFETY: `len` floats: a Line is 16 f32 without padding, and there are at least `len / 16` of them; or a region, whose pages begin
        // at a multiple of their size, has 4 bytes of zeros for each, which is 0.0.
        unsafe { std::slice::from_raw_parts(start, self.len) }
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [f32] {
        let start: *mut f32 = match &mut self.memory {
            Memory::Lines(lines) => lines.as_mut_ptr().cast(),
            Memory::Pages(region) => region.as_ptr().cast(),
        };
        // SAFETY: as in `as_slice`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(start, self.len) }
    }
}

/// Anonymous pages of memory that read as zero, and take up real memory only where written.
pub(super) struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a Region is plain memory that it owns; access goes through raw pointers whose users
// state how they keep from racing.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// `len` bytes of zeros. Large pages of the system are used where it allows them.
    pub(super) fn zeroed(len: usize, what: &'static str) -> Result<Self, KernelError> {
        let error = |reason: String| KernelError::Memory { what, bytes: len, reason };
        let mapped = len.max(1);
        // SAFETY: a new private mapping at an address of the system's choice touches no memory
        // that exists already.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|e| error(e.to_string()))?;
        let start = NonNull::new(start.cast()).ok_or_else(|| error("null mapping".into()))?;
        Ok(Self { start, len: mapped })
    }

    /// Asks the system for large pages, which save address translations when much is read in
    /// a row. A refusal changes nothing but speed.
    pub(super) fn prefer_large_pages(&self) {
        // SAFETY: the range is a mapping that this Region owns, and this advice does not change
        // its contents.
        let _ = unsafe { rustix::mm::madvise(self.start.as_ptr().cast::<c_void>(), self.len, Advice::LinuxHugepage) };
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// All bytes, to fill them before they are shared.
    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is readable, writable, initialised (zero), and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// All bytes, for memory that nothing writes any more.
    pub(super) fn as_slice(&self) -> &[u8] {
        // SAFETY: readable and initialised; users that write do so through `as_mut_slice` or
        // never call this.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody can hold a reference to it any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast::<c_void>(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_aligned_and_zero() {
        for len in [0, 1, 15, 16, 17, 1000, OWN_PAGES / 4 - 1, OWN_PAGES / 4, OWN_PAGES] {
            let mut a = FloatArray::zeroed(len, "test").unwrap();
            assert_eq!(a.as_slice().len(), len);
            assert_eq!(a.as_slice().as_ptr() as usize % 64, 0);
            assert!(a.as_slice().iter().all(|x| *x == 0.0));
            a.as_mut_slice().fill(1.0);
            assert!(a.as_slice().iter().all(|x| *x == 1.0));
        }
    }

    #[test]
    fn an_array_too_large_is_an_error() {
        let e = FloatArray::zeroed(usize::MAX / 8, "test").err().unwrap();
        assert!(matches!(e, KernelError::Memory { .. }), "{e}");
    }

    #[test]
    fn a_region_reads_as_zero_and_costs_nothing() {
        // More than the machine has; only what is touched is real.
        let mut r = Region::zeroed(1 << 40, "test").unwrap();
        let bytes = r.as_mut_slice();
        bytes[1 << 39] = 7;
        assert_eq!((bytes[0], bytes[1 << 39]), (0, 7));
    }

    #[test]
    fn a_region_too_large_is_an_error() {
        let e = Region::zeroed(usize::MAX / 2, "test").err().unwrap();
        assert!(matches!(e, KernelError::Memory { .. }), "{e}");
    }
}
