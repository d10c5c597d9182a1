//! Appending a group of pages.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crc_fast::{CrcAlgorithm, Digest};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, OFlags};

use super::{Active, PACK_TARGET, Pack};
use crate::config::Durability;
use crate::faults;
use crate::format::{self, ENTRY_LEN, ENTRY_STATE_AT, GROUP_HEAD_LEN};
use crate::index::{PackPlace, PageId};
use crate::io::{Batch, FILE_MODE, Op, Pieces};
use crate::names;
use crate::root::{Root, now_seconds};
use crate::store::Store;

/// A page to be appended.
#[derive(Debug)]
pub struct SmallWrite {
    /// The page.
    pub id: PageId,
    /// Bytes of the payload.
    pub len: u64,
    /// Its pieces, as a range of the batch's list.
    pub pieces: Range<usize>,
    /// CRC-32C of the payload, set while it is written.
    pub crc: AtomicU32,
    /// The caller's number of the page.
    pub number: usize,
    /// Where the page lies until now, when it is only moved, and when it was used last.
    pub moved_from: Option<(PackPlace, u32)>,
}

/// Most pages and bytes of a group.
const GROUP_PAGES: usize = 1024;
const GROUP_BYTES: u64 = 32 << 20;
/// Bytes that one operation writes, about.
const RUN_BYTES: u64 = 1 << 20;

/// The payloads of a group, as runs of pages that lie one after another.
struct Runs<'a> {
    file: BorrowedFd<'a>,
    pages: &'a [SmallWrite],
    list: &'a [libc::iovec],
    runs: Vec<(Range<usize>, u64)>,
    go_on: &'a (dyn Fn() -> io::Result<()> + Sync),
    failed: Mutex<Option<io::Error>>,
}

// SAFETY: the list holds addresses of source pages, which are only read here, by the rules of the boundary.
unsafe impl Sync for Runs<'_> {}

impl<'a> Batch<'a> for Runs<'a> {
    fn len(&self) -> usize {
        self.runs.len()
    }

    fn start(&self, index: usize) -> Option<Op<'a>> {
        let (pages, offset) = self.runs.get(index)?;
        if let Err(error) = (self.go_on)() {
            self.failed.lock().get_or_insert(error);
            return None;
        }
        let pages = self.pages.get(pages.clone())?;
        for page in pages {
            page.crc.store(crc_of(self.list.get(page.pieces.clone())?), Ordering::Release);
        }
        let pieces = pages.first()?.pieces.start..pages.last()?.pieces.end;
        // SAFETY: the list belongs to the batch call, whose source pages nobody writes until it returns (rule of the boundary).
        let pieces = unsafe { Pieces::new(self.list.get(pieces)?) };
        Some(Op::WriteAt { file: self.file, offset: *offset, pieces })
    }

    fn done(&self, _: usize, result: io::Result<usize>) {
        if let Err(error) = result {
            self.failed.lock().get_or_insert(error);
        }
    }
}

/// CRC-32C over pieces of memory that nobody writes meanwhile.
pub fn crc_of(list: &[libc::iovec]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    for piece in list.iter().filter(|piece| piece.iov_len > 0) {
        // SAFETY: pieces lie in registered pools, which stay mapped until the call returns; by the rules of the boundary nobody else
        // writes the pages of a call in flight, and this library has no operation in flight on them while it reads.
        digest.update(unsafe { std::slice::from_raw_parts(piece.iov_base.cast::<u8>().cast_const(), piece.iov_len) });
    }
    // A checksum of 32 bits in 64.
    digest.finalize() as u32
}

impl Store {
    /// Appends pages; calls `stored` with each that is. `list` holds the pieces of all pages, in the order of the pages. `go_on` is asked
    /// between pages.
    pub fn append(
        &self,
        root: &Root,
        pages: &[SmallWrite],
        list: &[libc::iovec],
        go_on: &(dyn Fn() -> io::Result<()> + Sync),
        mut stored: impl FnMut(&SmallWrite),
    ) -> io::Result<()> {
        let mut rest = pages;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = rest.iter().take(GROUP_PAGES).take_while(|page| {
                bytes += page.len;
                bytes <= GROUP_BYTES
            });
            let (group, after) = rest.split_at(fits.count().max(1).min(rest.len()));
            let mut active = self.take_active(root)?;
            let result = self.append_group(root, &mut active, group, list, go_on);
            if result.is_err() {
                // Nobody may find old bytes behind the end of the pack; if this fails, no valid table follows all the same.
                let _ = rustix::fs::ftruncate(&active.file, active.end);
            }
            self.give_active(active);
            result?;
            group.iter().for_each(&mut stored);
            rest = after;
        }
        Ok(())
    }

    fn append_group(
        &self,
        root: &Root,
        active: &mut Active,
        group: &[SmallWrite],
        list: &[libc::iovec],
        go_on: &(dyn Fn() -> io::Result<()> + Sync),
    ) -> io::Result<()> {
        let table = format::table_len(group.len());
        let mut offset = active.end + table;
        let mut places = Vec::with_capacity(group.len());
        let mut runs: Vec<(Range<usize>, u64)> = Vec::new();
        let mut run_bytes = RUN_BYTES;
        for (number, page) in group.iter().enumerate() {
            places.push(offset);
            if page.len > 0 {
                match runs.last_mut() {
                    Some((run, _)) if run_bytes + page.len <= RUN_BYTES && run.end == number => run.end = number + 1,
                    _ => {
                        runs.push((number..number + 1, offset));
                        run_bytes = 0;
                    }
                }
                run_bytes += page.len;
            }
            offset += page.len;
        }
        let len = format::group_len(group.len(), offset - active.end - table);
        let batch = Runs { file: active.file.as_fd(), pages: group, list, runs, go_on, failed: Mutex::new(None) };
        self.engine.run(root.namespace.as_fd(), &batch);
        if let Some(error) = batch.failed.into_inner() {
            return Err(error);
        }
        let tags: Vec<_> = group.iter().map(|page| self.index.tag_text(page.id.tag)).collect();
        let entries = group.iter().zip(&places).zip(&tags).map(|((page, offset), tag)| {
            (&page.id.key, &**tag, offset - active.end, page.len, page.crc.load(Ordering::Acquire))
        });
        let written = now_seconds();
        let head = format::encode_group(&self.namespace, written, len, entries);
        faults::check()?;
        std::os::unix::fs::FileExt::write_all_at(&std::fs::File::from(active.file.try_clone()?), &head, active.end)?;
        // The next group starts at a block of its own: a file that ends inside of one is made longer by a hole.
        rustix::fs::ftruncate(&active.file, active.end + len)?;
        if self.config.durability == Durability::Batch {
            rustix::fs::fdatasync(&active.file)?;
        }
        let start = active.end;
        active.end += len;
        let disk = rustix::fs::fstat(&active.file).map(|stat| stat.st_blocks as u64 * 512);
        self.packs.update(active.pack, |pack| {
            pack.scanned = active.end;
            pack.size = active.end;
            pack.disk = disk.unwrap_or(pack.disk + len);
            pack.pages += group.len() as u64;
            pack.groups.push(start);
        });
        for (number, (page, offset)) in group.iter().zip(&places).enumerate() {
            let state_at = start + (GROUP_HEAD_LEN + number * ENTRY_LEN) as u64 + ENTRY_STATE_AT;
            let crc = page.crc.load(Ordering::Acquire);
            let place = PackPlace { pack: active.pack, crc, offset: *offset, len: page.len, state_at };
            match page.moved_from {
                Some((from, used)) => self.move_packed(page.id, from, place, used),
                None => self.adopt_packed(page.id, place, written as u32),
            }
        }
        Ok(())
    }

    fn take_active(&self, root: &Root) -> io::Result<Active> {
        loop {
            let Some(active) = self.packs.active.lock().pop() else { break };
            let linked = rustix::fs::fstat(&active.file).is_ok_and(|stat| stat.st_nlink > 0);
            if linked && active.end < PACK_TARGET {
                return Ok(active);
            }
            self.packs.update(active.pack, |pack| {
                pack.active = false;
                pack.gone |= !linked;
            });
        }
        let name = names::pack(self.owner.id(), self.packs.next_number.fetch_add(1, Ordering::Relaxed));
        faults::check()?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file: OwnedFd = rustix::fs::openat(&root.namespace, names::pack_path(&name).as_cstr(), flags, FILE_MODE)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        if rustix::fs::fstat(&file)?.st_nlink == 0 {
            // Another process took it for an empty leftover before it was locked.
            return self.take_active(root);
        }
        if self.config.durability == Durability::Batch {
            rustix::fs::fsync(crate::root::open_folder(root.namespace.as_fd(), "packs")?)?;
        }
        let mut table = self.packs.table.write();
        // A listing may have seen the file already.
        let pack = match table.by_name.get(&name) {
            Some(pack) => *pack,
            None => {
                let pack = table.packs.len() as u32;
                table.packs.push(Pack { name: name.clone(), ..Pack::default() });
                table.by_name.insert(name, pack);
                pack
            }
        };
        if let Some(pack) = table.packs.get_mut(pack as usize) {
            pack.active = true;
        }
        Ok(Active { pack, file, end: 0 })
    }

    fn give_active(&self, active: Active) {
        self.packs.active.lock().push(active);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files hold what `crc32c` computes, which earlier builds wrote by another library.
    #[test]
    fn checksums_of_pieces_are_crc32c_of_all_bytes() {
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        assert_eq!(crc_of(&[]), 0);
        for cuts in [&[0][..], &[0, 0, 1], &[5, 64, 1_000], &[127, 128, 129, 4_096, 131_072], &[300_000]] {
            let mut list = Vec::new();
            let mut from = 0;
            for to in cuts.iter().copied().chain([bytes.len()]) {
                let piece = &bytes[from..to];
                list.push(libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() });
                from = to;
            }
            assert_eq!(crc_of(&list), crc32c::crc32c(&bytes), "cut at {cuts:?}");
        }
        // The check value of CRC-32C.
        let nine = b"123456789";
        let list = [libc::iovec { iov_base: nine.as_ptr().cast_mut().cast(), iov_len: nine.len() }];
        assert_eq!(crc_of(&list), 0xE306_9283);
    }
}
