//! Memory that other processes may be given: a memfd, mapped once and for ever.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::cache::types::CacheError;

/// The memory. It is given back when this is dropped; mapping and descriptor stay.
#[derive(Debug)]
pub(super) struct Mapping {
    base: *mut u8,
    fd: ManuallyDrop<OwnedFd>,
    bytes: u64,
}

// SAFETY: plain memory that stays mapped for ever; who may touch which part of it is governed by those who hand out its address.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared access gives the address alone.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `bytes` bytes of zeros, at least one, not yet backed by memory.
    pub fn new(bytes: u64) -> Result<Self, CacheError> {
        let failed = |error: rustix::io::Errno| CacheError::HostMemory { bytes, message: error.to_string() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("kvdock-host-pool", flags).map_err(failed)?;
        rustix::fs::ftruncate(&fd, bytes).map_err(failed)?;
        // Nobody who gets the descriptor can cut the memory off under us.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).map_err(failed)?;
        // SAFETY: a fresh shared mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        }
        .map_err(failed)?;
        // SAFETY: the range is the mapping just made. Only advice: where huge pages are off, nothing is lost.
        let _ = unsafe { rustix::mm::madvise(base, bytes as usize, Advice::LinuxHugepage) };
        Ok(Mapping { base: base.cast(), fd: ManuallyDrop::new(fd), bytes })
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The descriptor; valid until the process ends.
    pub fn fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Mapping and descriptor stay: a backend that never returned from a call or from `close`
        // may still use them. The memory behind them is given back; whoever reads it sees zeros.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&*self.fd, flags, 0, self.bytes) {
            tracing::error!(%error, "the memory of a host pool could not be given back");
        }
    }
}
