//! The memory of a segment.
//!
//! Peers and local calls may write and read the same bytes at the same time: the store's leases say which reads count. So no code of this
//! crate touches it by reference; bytes move by the kernel, to and from sockets, or by [`copy::bytes`], to and from pools.

use std::io;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::copy;

/// Addresses start at a multiple of this.
const BASE_STEP: u64 = 1 << 32;

/// Memory under addresses of its own.
#[derive(Debug)]
pub struct Memory {
    map: *mut u8,
    len: u64,
    base: u64,
}

// SAFETY: the mapping is only ever named to the kernel and to `copy::bytes`, which move bytes in and out of it from any thread.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`.
unsafe impl Sync for Memory {}

impl Memory {
    /// Sets `len` bytes aside.
    ///
    /// Peers know the memory by addresses that begin at a place drawn by chance: an address that was given out by an earlier process under
    /// the same name means nothing here, so whoever still uses it is refused and reads no foreign bytes.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(len: u64) -> io::Result<Memory> {
        let mut chance = [0; 8];
        getrandom::fill(&mut chance).map_err(io::Error::other)?;
        // Between 2^44 and 2^46: what official peers see as addresses of a process.
        let base = (1 << 44) + u64::from_le_bytes(chance) % (((1 << 46) - (1 << 44)) / BASE_STEP) * BASE_STEP;
        let size = usize::try_from(len).map_err(io::Error::other)?;
        let (null, access) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe { mmap_anonymous(null, size, access, MapFlags::PRIVATE) }?;
        // Huge pages make copies and first writes faster, and a child has no use for it; without either it works as well.
        for advice in [Advice::LinuxHugepage, Advice::LinuxDontFork] {
            // SAFETY: the mapping is new, and neither advice changes what it holds.
            let _ = unsafe { madvise(map, size, advice) };
        }
        Ok(Memory { map: map.cast(), len, base })
    }

    /// First address.
    pub fn base(&self) -> u64 {
        self.base
    }
    /// Bytes.
    #[allow(clippy::len_without_is_empty, reason = "a segment has bytes")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Where it lies in this process.
    pub(crate) fn map(&self) -> *mut u8 {
        self.map
    }

    fn offset(&self, address: u64, len: u64) -> Option<u64> {
        let offset = address.checked_sub(self.base)?;
        (len > 0 && offset.checked_add(len)? <= self.len).then_some(offset)
    }

    /// Where a range lies in this process; none when it is not inside of the memory.
    pub(super) fn find(&self, address: u64, len: u64) -> Option<*mut u8> {
        self.offset(address, len).map(|offset| self.map.wrapping_add(offset as usize))
    }

    /// Copies pieces of other memory, one after another, to an address.
    ///
    /// # Safety
    /// The pieces may be read until this returns.
    ///
    /// # Errors
    /// When the range is not inside of the memory.
    pub unsafe fn write(&self, address: u64, pieces: &[libc::iovec]) -> io::Result<()> {
        let mut to = self.find_all(address, pieces)?;
        for piece in pieces {
            // SAFETY: the caller's promise; all pieces together lie inside of the memory.
            unsafe { copy::bytes(piece.iov_base.cast_const().cast(), to, piece.iov_len) };
            to = to.wrapping_add(piece.iov_len);
        }
        Ok(())
    }

    /// Copies from an address to pieces of other memory, one after another.
    ///
    /// # Safety
    /// The pieces are the caller's alone to write until this returns.
    ///
    /// # Errors
    /// As [`Memory::write`].
    pub unsafe fn read(&self, address: u64, pieces: &[libc::iovec]) -> io::Result<()> {
        let mut from = self.find_all(address, pieces)?.cast_const();
        for piece in pieces {
            // SAFETY: the caller's promise; all pieces together lie inside of the memory.
            unsafe { copy::bytes(from, piece.iov_base.cast(), piece.iov_len) };
            from = from.wrapping_add(piece.iov_len);
        }
        Ok(())
    }

    fn find_all(&self, address: u64, pieces: &[libc::iovec]) -> io::Result<*mut u8> {
        let total = pieces.iter().try_fold(0u64, |total, piece| total.checked_add(piece.iov_len as u64));
        total
            .and_then(|total| self.find(address, total))
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the range is not inside of the segment"))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is what mmap gave, and nobody else holds it: sessions hold the whole object.
        let _ = unsafe { munmap(self.map.cast(), self.len as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(parts: &mut [Vec<u8>]) -> Vec<libc::iovec> {
        parts.iter_mut().map(|part| libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() }).collect()
    }

    #[test]
    fn pieces_are_gathered_and_scattered() {
        let memory = Memory::new(1 << 20).unwrap();
        let mut parts: Vec<Vec<u8>> = (0..3000u32).map(|n| n.to_le_bytes().to_vec()).collect();
        let expected: Vec<u8> = parts.concat();
        // SAFETY: the pieces are vectors of this test.
        unsafe { memory.write(memory.base() + 17, &pieces(&mut parts)) }.unwrap();
        let mut back = vec![vec![0; 5000], vec![0; 7000]];
        // SAFETY: as above.
        unsafe { memory.read(memory.base() + 17, &pieces(&mut back)) }.unwrap();
        assert_eq!(back.concat(), expected);
    }

    #[test]
    fn ranges_outside_are_refused_also_where_addresses_overflow() {
        let memory = Memory::new(4096).unwrap();
        let base = memory.base();
        assert!(base >= 1 << 44);
        for (address, len) in
            [(base - 1, 2), (base, 4097), (base + 4096, 1), (base, 0), (base + 1, u64::MAX), (u64::MAX, 2), (0, 1)]
        {
            assert!(memory.find(address, len).is_none(), "{address:#x} {len}");
        }
        assert!(memory.find(base, 4096).is_some() && memory.find(base + 4095, 1).is_some());
        // SAFETY: no pieces.
        assert!(unsafe { memory.read(base, &[]) }.is_err());
    }
}
