//! Tidying packs: mostly dead ones and small leftovers are copied together, torn ends are cut.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU32;

use rustix::fs::{AtFlags, FlockOperation};

use super::{PACK_TARGET, SmallWrite};
use crate::format::{ENTRY_LEN, ENTRY_STATE_AT, GROUP_HEAD_LEN};
use crate::index::{PackPlace, PageId, Place};
use crate::names;
use crate::root::Root;
use crate::store::Store;

/// So many packs that end early may lie about.
const SMALL_PACKS: usize = 8;

impl Store {
    /// Tidies at most one pack. Says whether there was one.
    pub fn tidy_packs(&self, root: &Root) -> io::Result<bool> {
        let (mut worth, mut small) = (Vec::new(), Vec::new());
        {
            let table = self.packs.table.read();
            for (number, pack) in table.packs.iter().enumerate().filter(|(_, pack)| !pack.active && !pack.gone) {
                let number = number as u32;
                if pack.pages == 0 || pack.live_bytes < pack.scanned / 2 {
                    worth.push(number);
                } else if pack.scanned < PACK_TARGET / 4 {
                    small.push(number);
                }
            }
        }
        if small.len() > SMALL_PACKS {
            worth.append(&mut small);
        }
        for number in worth {
            let Ok(file) = self.open_pack(root, number, true) else { continue };
            // Whoever appends to it, or tidies it, holds the lock.
            if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                continue;
            }
            if self.tidy(root, number, &file)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Gives back what dead pages hold on to: blocks that they share with others, and tables. Says whether that was anything.
    pub fn squeeze(&self, root: &Root) -> bool {
        let before = self.packs.disk_bytes();
        self.packs.retire_all();
        for (pack, _) in self.idle_packs() {
            self.unlink_if_dead(root, pack);
        }
        let mut most = self.idle_packs().len();
        while most > 0 && self.tidy_packs(root).unwrap_or(false) {
            most -= 1;
        }
        self.packs.disk_bytes() < before
    }

    fn tidy(&self, root: &Root, number: u32, file: &OwnedFd) -> io::Result<bool> {
        // Another process may have tidied it between the opening and the lock.
        if rustix::fs::fstat(file)?.st_nlink == 0 {
            self.forget_pack(number);
            return Ok(false);
        }
        let mut at = 0;
        while let Some((head, entries)) = self.read_table(file, at) {
            let mut moved = Vec::new();
            for (index, entry) in entries.iter().enumerate().filter(|(_, entry)| !entry.dead) {
                let Some(tag) = self.index.tag(&entry.tag) else { continue };
                let id = PageId { key: entry.key, tag };
                let state_at = at + (GROUP_HEAD_LEN + index * ENTRY_LEN) as u64 + ENTRY_STATE_AT;
                let place =
                    PackPlace { pack: number, crc: entry.crc, offset: at + entry.offset, len: entry.len, state_at };
                if let Some(used) = self.is_home(root, &id, place, head.written as u32) {
                    moved.push((id, place, used));
                }
            }
            self.move_pages(root, file, &moved)?;
            at += head.len;
        }
        let mut rest = Vec::new();
        for shard in 0..=255 {
            self.index.for_each(shard, |id, known| match known.place {
                Place::Pack(place) if place.pack == number => rest.push((*id, place)),
                Place::Pack(_) | Place::File(_) => {}
            });
        }
        // What is left was not readable.
        rest.iter().for_each(|(id, place)| self.forget_packed(id, place));
        self.unlink_pack(root, number);
        Ok(true)
    }

    /// Whether a page's only living copy lies at a place, and when it was used last. The index follows what is found.
    fn is_home(&self, root: &Root, id: &PageId, place: PackPlace, written: u32) -> Option<u32> {
        // Each round takes a dead copy out; a page has hardly ever more than two.
        for _ in 0..4 {
            let known = self.index.get(id);
            match known.map(|known| (known.place, known.used)) {
                Some((Place::Pack(known), used)) if known == place => return Some(used),
                Some((Place::Pack(known), _)) => {
                    if self
                        .open_pack(root, known.pack, false)
                        .and_then(|file| self.is_alive(&file, &known))
                        .unwrap_or(false)
                    {
                        return None;
                    }
                    self.forget_packed(id, &known);
                }
                Some((Place::File(_), _)) => return None,
                None => self.adopt_packed(*id, place, written),
            }
        }
        None
    }

    fn move_pages(&self, root: &Root, file: &OwnedFd, pages: &[(PageId, PackPlace, u32)]) -> io::Result<()> {
        let mut payloads = Vec::with_capacity(pages.len());
        for (id, place, used) in pages {
            let mut bytes = vec![0; place.len as usize];
            let whole = crate::pack::scan::read_exact(file, &mut bytes, place.offset).is_some();
            if whole && crc32c::crc32c(&bytes) == place.crc {
                payloads.push((*id, *place, *used, bytes));
            }
        }
        let list: Vec<libc::iovec> = payloads
            .iter()
            .map(|(_, _, _, bytes)| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() })
            .collect();
        let writes: Vec<SmallWrite> = payloads
            .iter()
            .enumerate()
            .map(|(number, (id, place, used, _))| SmallWrite {
                id: *id,
                len: place.len,
                pieces: number..number + 1,
                crc: AtomicU32::new(0),
                number,
                moved_from: Some((*place, *used)),
            })
            .collect();
        self.append(root, &writes, &list, &|| Ok(()), |_| ())?;
        for (_, place, _, _) in &payloads {
            // A process that looked before now reads the old copy until its pack is gone.
            let _ = rustix::io::pwrite(file, &crate::format::DEAD.to_le_bytes(), place.state_at);
        }
        Ok(())
    }

    /// Cuts what a crash left behind the last whole group of a pack.
    pub fn cut_torn_ends(&self, root: &Root) {
        let torn: Vec<(u32, String, u64)> = {
            let table = self.packs.table.read();
            let idle = table.packs.iter().enumerate().filter(|(_, pack)| !pack.active && !pack.gone);
            idle.map(|(number, pack)| (number as u32, pack.name.clone(), pack.scanned)).collect()
        };
        for (number, name, end) in torn {
            let path = names::pack_path(&name);
            let stat = rustix::fs::statat(&root.namespace, path.as_cstr(), AtFlags::SYMLINK_NOFOLLOW);
            if stat.is_ok_and(|stat| stat.st_size as u64 <= end) {
                continue;
            }
            let Ok(file) = self.open_pack(root, number, true) else { continue };
            if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
                && self.read_table(&file, end).is_none()
            {
                // What can't be cut does no harm.
                let _ = rustix::fs::ftruncate(&file, end);
            }
        }
    }
}
