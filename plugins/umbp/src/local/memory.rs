//! The pool of memory: one mapping, given out in pages.

use std::collections::BTreeMap;

use kvdock_plugin_api::{Error, ErrorKind, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::bytes;
use crate::config::{Copies, Dram};
use crate::crew::Crew;
use crate::object::{Piece, Range};

/// Runs of pages: first page and number.
pub type Extents = Vec<(u32, u32)>;

/// The mapping.
#[derive(Debug)]
pub struct Memory {
    base: *mut u8,
    mapped: usize,
    page: u64,
    pages: u32,
    copies: Copies,
    /// Copies past the caches are wanted, also of what goes out.
    past_caches: bool,
    crew: Crew,
}

/// Bytes of a call from which what it reads is written past the caches: so much does not stay in those of one core, and each line of it
/// would be fetched before it is written.
const READ_PAST_CACHES: u64 = 1 << 20;

/// Objects that a call copies.
#[derive(Debug, Clone, Copy)]
pub struct Copied {
    /// How many there are.
    pub objects: usize,
    /// Bytes of all of them.
    pub bytes: u64,
}

// SAFETY: the mapping lives as long as this does; who may touch which pages is said by the allocator's users.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps memory. `told` hears of what is not as the settings want it and can be done without.
    ///
    /// # Errors
    /// When there is not so much, or no such NUMA node and the settings insist on it.
    pub fn map(config: &Dram, told: &mut dyn FnMut(String)) -> Result<Memory> {
        let pages = u32::try_from(config.capacity / config.page)
            .map_err(|_| Error::new(ErrorKind::InvalidConfig, "dram_page_size: too small for so much memory"))?;
        let len = pages as usize * config.page as usize;
        let map = |flags: MapFlags, len: usize| {
            // SAFETY: a fresh anonymous mapping at an address that the kernel chooses.
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags) }
        };
        let plain = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let huge = config.huge_page.and_then(|size| {
            let flags = plain | MapFlags::HUGETLB | MapFlags::from_bits_retain(size.ilog2() << 26);
            let mapped = len.next_multiple_of(size as usize);
            map(flags, mapped).ok().map(|base| (base, mapped))
        });
        let (base, mapped) = match huge {
            Some(found) => found,
            None => {
                let base = map(plain, len).map_err(|error| {
                    Error::new(ErrorKind::Unavailable, format!("{len} bytes of memory can't be mapped: {error}"))
                })?;
                (base, len)
            }
        };
        let copies = config.copies;
        // Of the threads that copy, whoever calls is one.
        let crew = Crew::new(copies.write_threads.max(copies.read_threads).saturating_sub(1));
        let past_caches = copies.past_caches.is_some();
        let memory = Memory { base: base.cast(), mapped, page: config.page, pages, copies, past_caches, crew };
        if let Err(error) = memory.bind(&config.numa_nodes) {
            let nodes: Vec<String> = config.numa_nodes.iter().map(u32::to_string).collect();
            let text = format!("dram_numa_nodes: memory can't be bound to {}: {error}", nodes.join(", "));
            if config.numa_strict {
                return Err(Error::new(ErrorKind::InvalidConfig, text));
            }
            told(text);
        }
        if config.prefault {
            memory.touch(config.prefault_threads);
        }
        Ok(memory)
    }

    /// Takes the pages of the mapping from these nodes; from any where there are none.
    fn bind(&self, nodes: &[u32]) -> std::io::Result<()> {
        const BIND: libc::c_long = 2;
        let mut mask = [0u64; 16];
        for node in nodes {
            if let Some(word) = mask.get_mut(*node as usize / 64) {
                *word |= 1 << (node % 64);
            }
        }
        if nodes.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is the mapping, and the mask has the 1024 bits that the call is told of.
        let done = unsafe { libc::syscall(libc::SYS_mbind, self.base, self.mapped, BIND, mask.as_ptr(), 1025, 0) };
        if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }

    /// Has the kernel give all pages of the mapping now, by several threads.
    fn touch(&self, threads: usize) {
        /// Huge pages are given by one thread each.
        const SHARE: usize = 2 << 20;
        let processors = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { processors() } else { threads };
        let share = self.mapped.div_ceil(threads).next_multiple_of(SHARE);
        std::thread::scope(|scope| {
            for start in (0..self.mapped).step_by(share) {
                let populate = move || {
                    let len = share.min(self.mapped - start);
                    // SAFETY: the range is a part of the mapping. Where the kernel does not know the advice, pages come when they are touched.
                    let _ = unsafe { madvise(self.base.add(start).cast(), len, Advice::LinuxPopulateWrite) };
                };
                // Where there is no further thread, pages come when they are touched.
                let _ = std::thread::Builder::new().spawn_scoped(scope, populate);
            }
        });
    }

    /// What comes in stays in the caches, for it is read again at once.
    pub fn keep_in_caches(&mut self) {
        self.copies.past_caches = None;
    }

    /// Copies objects in: calls `fill` for each, by several threads where there are many bytes.
    pub fn fill_all(&self, copied: Copied, fill: impl Fn(usize) + Sync) {
        self.share(copied, self.copies.write_threads, fill);
    }

    /// Copies objects out: calls `read` for each, by several threads where there are many bytes, and says whether they are to be written past the
    /// caches.
    pub fn read_all(&self, copied: Copied, read: impl Fn(usize, bool) + Sync) {
        let past_caches = self.reads_past_caches(copied.bytes);
        self.share(copied, self.copies.read_threads, |at| read(at, past_caches));
    }

    /// Whether a call that reads so many bytes writes them past the caches.
    pub fn reads_past_caches(&self, bytes: u64) -> bool {
        self.past_caches && bytes >= READ_PAST_CACHES
    }

    fn share(&self, copied: Copied, most: usize, work: impl Fn(usize) + Sync) {
        let worth = (copied.bytes / self.copies.worth.max(1)) as usize;
        self.crew.share(copied.objects, most.min(worth), work);
    }

    /// Number of pages.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Pages that so many bytes take.
    pub fn pages_for(&self, len: u64) -> u64 {
        len.div_ceil(self.page).max(1)
    }

    /// The bytes of an object in its extents.
    pub fn pieces(&self, extents: &[(u32, u32)], len: u64) -> Vec<Piece> {
        let mut left = len;
        let mut pieces = Vec::with_capacity(extents.len());
        for (first, count) in extents {
            let part = (u64::from(*count) * self.page).min(left);
            let at = u64::from(*first) * self.page;
            pieces.push(Piece { base: self.base.wrapping_add(at as usize), len: part as usize });
            left -= part;
        }
        pieces
    }

    /// Copies an object in.
    ///
    /// # Safety
    /// The pieces can be read, and the extents belong to the caller alone.
    pub unsafe fn fill(&self, extents: &[(u32, u32)], len: u64, pieces: &[Piece]) {
        let mut at = 0;
        for piece in pieces {
            let range = Range { offset: at, piece: *piece };
            // SAFETY: passed on to the caller.
            unsafe { self.copy(extents, len, &range, true, false) };
            at += piece.len as u64;
        }
    }

    /// Copies a range of an object out, past the caches or not.
    ///
    /// # Safety
    /// The piece can be written and nobody else touches it; nobody writes the extents.
    pub unsafe fn read(&self, extents: &[(u32, u32)], len: u64, range: &Range, past_caches: bool) {
        // SAFETY: passed on to the caller.
        unsafe { self.copy(extents, len, range, false, past_caches) }
    }

    unsafe fn copy(&self, extents: &[(u32, u32)], len: u64, range: &Range, inwards: bool, past_caches: bool) {
        let mut skip = range.offset;
        let mut outside = range.piece;
        let mut left = len;
        for (first, count) in extents {
            let bytes = (u64::from(*count) * self.page).min(left);
            left -= bytes;
            if skip >= bytes {
                skip -= bytes;
                continue;
            }
            let part = ((bytes - skip) as usize).min(outside.len);
            let inside = self.base.wrapping_add((u64::from(*first) * self.page + skip) as usize);
            skip = 0;
            // SAFETY: the extents are pages of the mapping, the piece is the caller's, and the two never overlap: the mapping is ours.
            unsafe {
                if inwards {
                    let past_caches = self.copies.past_caches.is_some_and(|least| part >= least);
                    bytes::copy(outside.base, inside, part, past_caches);
                } else {
                    bytes::copy(inside, outside.base, part, past_caches);
                }
            }
            outside = Piece { base: outside.base.wrapping_add(part), len: outside.len - part };
            if outside.len == 0 {
                return;
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made here, and nothing refers to it any more.
        let _ = unsafe { munmap(self.base.cast(), self.mapped) };
    }
}

/// Which pages are free.
#[derive(Debug)]
pub struct Pages {
    /// First page of a free run, and its length.
    runs: BTreeMap<u32, u32>,
    free: u32,
    total: u32,
}

/// Free runs that are looked at for one that is long enough.
const LOOK: usize = 64;

impl Pages {
    /// All of them free.
    pub fn new(total: u32) -> Pages {
        Pages { runs: BTreeMap::from_iter((total > 0).then_some((0, total))), free: total, total }
    }

    /// Pages in use.
    pub fn used(&self) -> u32 {
        self.total - self.free
    }

    /// All pages.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Takes `count` pages, all or none: one run where one is found, else several.
    pub fn take(&mut self, count: u32) -> Option<Extents> {
        if count == 0 || count > self.free {
            return None;
        }
        let whole = self.runs.iter().take(LOOK).find(|(_, len)| **len >= count).map(|(first, len)| (*first, *len));
        let mut extents = Extents::new();
        let mut left = count;
        if let Some((first, len)) = whole {
            self.runs.remove(&first);
            if len > count {
                self.runs.insert(first + count, len - count);
            }
            extents.push((first, count));
            left = 0;
        }
        while left > 0 {
            let (first, len) = self.runs.pop_first()?;
            let part = len.min(left);
            if len > part {
                self.runs.insert(first + part, len - part);
            }
            extents.push((first, part));
            left -= part;
        }
        self.free -= count;
        Some(extents)
    }

    /// Gives pages back.
    pub fn give(&mut self, extents: &[(u32, u32)]) {
        for (first, count) in extents {
            self.free += count;
            let (mut first, mut count) = (*first, *count);
            if let Some((before, len)) = self.runs.range(..first).next_back().map(|(before, len)| (*before, *len))
                && before + len == first
            {
                self.runs.remove(&before);
                first = before;
                count += len;
            }
            if let Some(len) = self.runs.remove(&(first + count)) {
                count += len;
            }
            self.runs.insert(first, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Copies;

    #[test]
    fn pages_come_in_one_run_or_scattered_and_all_or_none() {
        let mut pages = Pages::new(16);
        let runs: Vec<Extents> = (0..4).map(|_| pages.take(4).unwrap()).collect();
        assert_eq!(pages.used(), 16);
        assert_eq!(pages.take(1), None);
        pages.give(&runs[0]);
        pages.give(&runs[2]);
        let scattered = pages.take(6).unwrap();
        assert_eq!(scattered.iter().map(|(_, count)| count).sum::<u32>(), 6);
        assert!(scattered.len() > 1);
        assert_eq!(pages.take(3), None);
        pages.give(&scattered);
        pages.give(&runs[1]);
        pages.give(&runs[3]);
        assert_eq!((pages.used(), pages.take(16)), (0, Some(vec![(0, 16)])));
    }

    #[test]
    fn objects_come_back_from_scattered_pages() {
        let config = Dram {
            capacity: 64 << 10,
            page: 4096,
            high: 0.9,
            low: 0.7,
            huge_page: None,
            numa_nodes: Vec::new(),
            numa_strict: true,
            prefault: true,
            prefault_threads: 3,
            copies: Copies { write_threads: 4, read_threads: 4, worth: 1, past_caches: Some(0) },
        };
        let memory = Memory::map(&config, &mut |what| panic!("{what}")).unwrap();
        let extents = [(3, 1), (9, 2), (1, 1)];
        let mut bytes: Vec<u8> = (0..13_000u32).map(|i| (i % 251) as u8).collect();
        let (head, tail) = bytes.split_at_mut(5000);
        let pieces =
            [Piece { base: head.as_mut_ptr(), len: head.len() }, Piece { base: tail.as_mut_ptr(), len: tail.len() }];
        // SAFETY: nobody else has the extents or the vectors.
        unsafe { memory.fill(&extents, 13_000, &pieces) };
        for (offset, len) in [(0, 13_000), (4000, 200), (8190, 4200), (12_999, 1)] {
            let mut out = vec![0; len];
            let range = Range { offset: offset as u64, piece: Piece { base: out.as_mut_ptr(), len } };
            // SAFETY: as above.
            unsafe { memory.read(&extents, 13_000, &range, offset == 0) };
            assert!(out == bytes[offset..offset + len], "{offset}");
        }
    }
}
