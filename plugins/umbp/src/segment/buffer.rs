//! Memory that I/O past the page cache can use.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

use rustix::mm::{Advice, madvise};

use super::record::BLOCK;

/// Huge pages: a buffer of so many bytes begins at one. A request to a disk names only so many places in memory, 254 of 4 KiB with some, so that a read of
/// 1 MiB into small pages is two requests.
const HUGE: usize = 2 << 20;

/// Bytes that begin at a multiple of a block.
#[derive(Debug)]
pub struct Buffer {
    base: *mut u8,
    capacity: usize,
}

// SAFETY: the buffer owns its bytes.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// An empty one.
    pub const fn new() -> Buffer {
        Buffer { base: std::ptr::null_mut(), capacity: 0 }
    }

    /// Makes room for `len` bytes; what was in it is lost.
    pub fn reserve(&mut self, len: usize) {
        if len <= self.capacity {
            return;
        }
        self.release();
        let capacity = len.next_multiple_of(if len < HUGE { 1 << 20 } else { HUGE });
        let layout = layout(capacity);
        // SAFETY: the layout has a size that is not zero.
        let base = unsafe { alloc(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        if capacity >= HUGE {
            // SAFETY: the range is the allocation, in whole huge pages. Where the kernel has none, small ones do.
            let _ = unsafe { madvise(base.cast(), capacity, Advice::LinuxHugepage) };
        }
        // After that, for pages come when they are touched.
        // SAFETY: so many bytes were allocated.
        unsafe { base.write_bytes(0, capacity) };
        (self.base, self.capacity) = (base, capacity);
    }

    /// Gives memory back when it has become much.
    pub fn shrink(&mut self, most: usize) {
        if self.capacity > most {
            self.release();
        }
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        if self.base.is_null() {
            return &[];
        }
        // SAFETY: `base` has `capacity` initialised bytes, which live as long as the buffer.
        unsafe { std::slice::from_raw_parts(self.base, self.capacity) }
    }

    /// All bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.base.is_null() {
            return &mut [];
        }
        // SAFETY: as above, and this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.capacity) }
    }

    fn release(&mut self) {
        if !self.base.is_null() {
            // SAFETY: it was allocated with this layout.
            unsafe { dealloc(self.base, layout(self.capacity)) };
            (self.base, self.capacity) = (std::ptr::null_mut(), 0);
        }
    }
}

fn layout(capacity: usize) -> Layout {
    let align = if capacity < HUGE { BLOCK as usize } else { HUGE };
    // SAFETY: the alignments are powers of two, and capacities are far below the end of the address space.
    unsafe { Layout::from_size_align_unchecked(capacity, align) }
}

impl Default for Buffer {
    fn default() -> Buffer {
        Buffer::new()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_all_lengths_begin_where_they_should() {
        let mut buffer = Buffer::new();
        for len in [1, 4096, (1 << 20) + 1, (2 << 20) - 1, 2 << 20, (8 << 20) + 4096] {
            buffer.reserve(len);
            let bytes = buffer.bytes_mut();
            assert!(bytes.len() >= len && bytes.iter().all(|byte| *byte == 0), "{len}");
            let align = if bytes.len() < HUGE { BLOCK as usize } else { HUGE };
            assert_eq!(bytes.as_ptr().addr() % align, 0, "{len}");
            buffer.shrink(0);
            assert!(buffer.bytes().is_empty());
        }
    }
}
