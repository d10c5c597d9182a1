//! Memory that a server has mapped.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use kvdock_plugin_api::{Error, ErrorKind, MemoryKind, Pool, Result};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::object::Piece;

/// A mapping that the server has been given.
#[derive(Debug)]
pub struct Region {
    /// Address of its first byte here, by which the server knows it.
    pub base: u64,
    /// Bytes.
    pub size: u64,
    /// Its descriptor.
    pub fd: OwnedFd,
    /// Pools that lie in it.
    users: Vec<u32>,
}

/// All of them, by their addresses.
#[derive(Debug, Default)]
pub struct Regions {
    by_base: BTreeMap<u64, Region>,
}

impl Regions {
    /// Takes the memory of a pool; says which mappings are new or longer than before.
    ///
    /// # Errors
    /// When the memory can't be shared.
    pub fn add(&mut self, pool: &Pool) -> Result<Vec<u64>> {
        let mut changed = Vec::new();
        for (number, region) in pool.regions().iter().enumerate() {
            let fail = |what: &str| {
                let text = format!("pool {} ({}): region {number} {what}", pool.id(), pool.name());
                Error::new(ErrorKind::Unsupported, text)
            };
            if region.memory_kind != MemoryKind::Host && region.memory_kind != MemoryKind::CudaPinned {
                return Err(fail("lies in device memory; the server of a node is given host memory"));
            }
            let fd = region.fd.ok_or_else(|| fail("has no descriptor by which the server could map it"))?;
            // The server maps a descriptor from its start on.
            let base = (region.base as u64)
                .checked_sub(region.fd_offset)
                .filter(|base| *base > 0)
                .ok_or_else(|| fail("begins before its descriptor does"))?;
            let size = region.fd_offset + region.len;
            // SAFETY: the host owns the descriptor, and it is open for as long as the pool is registered.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            let stat = fstat(fd).map_err(|error| fail(&format!("has a bad descriptor: {error}")))?;
            if (stat.st_size as u64) < size {
                return Err(fail(&format!("has {size} bytes, its descriptor {}", stat.st_size)));
            }
            if let Some(known) = self.by_base.get_mut(&base) {
                known.users.push(pool.id());
                if known.size < size {
                    known.size = size;
                    changed.push(base);
                }
                continue;
            }
            let fd = fd.try_clone_to_owned().map_err(|error| fail(&format!("can't be shared: {error}")))?;
            self.by_base.insert(base, Region { base, size, fd, users: vec![pool.id()] });
            changed.push(base);
        }
        Ok(changed)
    }

    /// Gives the memory of a pool back; says whether a mapping is not needed any more.
    pub fn remove(&mut self, pool: u32) -> bool {
        let before = self.by_base.len();
        self.by_base.retain(|_, region| {
            let used = !region.users.is_empty();
            region.users.retain(|user| *user != pool);
            // A region of our own never had a user.
            !used || !region.users.is_empty()
        });
        self.by_base.len() < before
    }

    /// Takes memory of our own.
    pub fn add_own(&mut self, scratch: &Scratch) -> Result<()> {
        let fd = scratch.fd.as_fd().try_clone_to_owned();
        let fd = fd.map_err(|error| Error::new(ErrorKind::Unavailable, format!("memory can't be shared: {error}")))?;
        let base = scratch.base as u64;
        self.by_base.insert(base, Region { base, size: Scratch::LEN as u64, fd, users: Vec::new() });
        Ok(())
    }

    /// Which mapping a piece lies in, and where in it.
    pub fn find(&self, piece: &Piece) -> Option<(u64, u64)> {
        let at = piece.base as u64;
        let (base, region) = self.by_base.range(..=at).next_back()?;
        let offset = at - base;
        (offset + piece.len as u64 <= region.size).then_some((*base, offset))
    }

    /// One of them.
    pub fn get(&self, base: u64) -> Option<&Region> {
        self.by_base.get(&base)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Region> {
        self.by_base.values()
    }
}

/// A little memory of our own for what lies in no pool: the objects of pages without bytes.
#[derive(Debug)]
pub struct Scratch {
    fd: OwnedFd,
    base: *mut u8,
}

// SAFETY: the mapping lives as long as this does; what is in it is written by the server, and read by nobody.
unsafe impl Send for Scratch {}
// SAFETY: as for `Send`.
unsafe impl Sync for Scratch {}

impl Scratch {
    const LEN: usize = 4096;

    /// Maps it.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new() -> Result<Scratch> {
        let fail =
            |error: rustix::io::Errno| Error::new(ErrorKind::Unavailable, format!("no memory to share: {error}"));
        let fd = memfd_create("kvdock-umbp", MemfdFlags::CLOEXEC).map_err(fail)?;
        ftruncate(&fd, Scratch::LEN as u64).map_err(fail)?;
        // SAFETY: a fresh mapping of a descriptor of ours, at an address that the kernel chooses.
        let base = unsafe {
            mmap(std::ptr::null_mut(), Scratch::LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)
        };
        let base: *mut u8 = base.map_err(fail)?.cast();
        // SAFETY: the mapping has room for a byte, and nobody else has it yet.
        unsafe { base.write(b'1') };
        Ok(Scratch { fd, base })
    }

    /// The marker, to be stored.
    pub fn source(&self) -> Piece {
        Piece { base: self.base, len: 1 }
    }

    /// Where a marker is read to, and left.
    pub fn sink(&self) -> Piece {
        Piece { base: self.base.wrapping_add(Scratch::LEN / 2), len: 1 }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the mapping was made here, and nothing here refers to it any more; the server has one of its own.
        let _ = unsafe { munmap(self.base.cast(), Scratch::LEN) };
    }
}
