//! Memory that I/O past the page cache can use.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

use super::record::BLOCK;

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
        let capacity = len.next_multiple_of(1 << 20);
        let layout = layout(capacity);
        // SAFETY: the layout has a size that is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
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
    // SAFETY: the alignment is a power of two, and capacities are far below the end of the address space.
    unsafe { Layout::from_size_align_unchecked(capacity, BLOCK as usize) }
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
