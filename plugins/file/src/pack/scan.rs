//! Finding what is in packs: at the start, and what other processes have done since.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::fs::AtFlags;

use super::{PACK_TARGET, Pack};
use crate::format::{self, ENTRY_LEN, ENTRY_STATE_AT, GROUP_HEAD_LEN};
use crate::index::{PackPlace, PageId};
use crate::names;
use crate::root::{Root, list, now_seconds, open_folder};
use crate::store::Store;

/// How thorough a look at the packs is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// What was added.
    New,
    /// Also which pages were marked dead.
    Everything,
}

impl Store {
    /// Looks at the packs. Gives up when another look holds on beyond `until`.
    pub fn look_at_packs(&self, root: &Root, look: Look, until: Option<Instant>) -> io::Result<()> {
        let listing = match until {
            Some(until) => self.packs.listing.try_lock_until(until),
            None => Some(self.packs.listing.lock()),
        };
        let Some(mut listing) = listing else {
            return Err(io::ErrorKind::TimedOut.into());
        };
        let folder = open_folder(root.namespace.as_fd(), "packs")?;
        let stat = rustix::fs::fstat(&folder)?;
        let changed = (stat.st_mtime, stat.st_mtime_nsec as i64);
        // A change within the clock's grain of the last listing would go unseen.
        let settled = (stat.st_mtime as u64).saturating_add(2) < now_seconds();
        if *listing != Some(changed) || !settled {
            self.list_packs(&folder)?;
            *listing = Some(changed);
        }
        let known: Vec<u32> = {
            let table = self.packs.table.read();
            let known = table.packs.iter().enumerate().filter(|(_, pack)| !pack.gone);
            let known = known.filter(|(_, pack)| look == Look::Everything || (!pack.active && pack.size < PACK_TARGET));
            known.map(|(number, _)| number as u32).collect()
        };
        for number in known {
            self.look_at_pack(&folder, root, number, look);
        }
        Ok(())
    }

    fn look_at_pack(&self, folder: &OwnedFd, root: &Root, number: u32, look: Look) {
        let (name, active, size, changed) = {
            let table = self.packs.table.read();
            let Some(pack) = table.packs.get(number as usize) else { return };
            (pack.name.clone(), pack.active, pack.size, pack.changed)
        };
        let Ok(stat) = rustix::fs::statat(folder, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) else { return };
        let now = (stat.st_mtime, stat.st_mtime_nsec as i64);
        let grown = !active && stat.st_size as u64 > size;
        if !grown && (look == Look::New || now == changed) {
            return;
        }
        let Ok(file) = self.open_pack(root, number, false) else { return };
        let from = if look == Look::Everything { 0 } else { u64::MAX };
        self.scan(number, &file, from, stat.st_mtime as u32);
        self.packs.update(number, |pack| {
            if look == Look::Everything {
                pack.changed = now;
            }
            pack.disk = stat.st_blocks as u64 * 512;
            if !pack.active {
                // What lies behind the last whole group may become whole: it is looked at again.
                pack.size = pack.size.max(pack.scanned);
            }
        });
    }

    fn list_packs(&self, folder: &OwnedFd) -> io::Result<()> {
        let mut names = Vec::new();
        list(folder.as_fd(), |name| {
            if names::parse_pack(name).is_some() {
                names.push(name.to_owned());
            }
        })?;
        names.sort_unstable();
        let mut gone = Vec::new();
        {
            let mut table = self.packs.table.write();
            for (number, pack) in table.packs.iter().enumerate() {
                if !pack.gone && !pack.active && names.binary_search(&pack.name).is_err() {
                    gone.push(number as u32);
                }
            }
            for name in names {
                if !table.by_name.contains_key(&name) {
                    let number = table.packs.len() as u32;
                    table.packs.push(Pack { name: name.clone(), ..Pack::default() });
                    table.by_name.insert(name, number);
                }
            }
        }
        for number in gone {
            self.forget_pack(number);
            let mut table = self.packs.table.write();
            if let Some(pack) = table.packs.get_mut(number as usize) {
                pack.gone = true;
                let name = pack.name.clone();
                table.by_name.remove(&name);
            }
        }
        Ok(())
    }

    /// Reads the tables of a pack from byte `from`, or from the end of what is known, and brings the index up to them.
    fn scan(&self, number: u32, file: &OwnedFd, from: u64, used: u32) {
        let (known_end, active) = {
            let table = self.packs.table.read();
            table.packs.get(number as usize).map_or((0, true), |pack| (pack.scanned, pack.active))
        };
        let mut at = from.min(known_end);
        // An own pack grows only by `append`, which puts its pages into the index itself.
        while !active || at < known_end {
            let Some((head, entries)) = self.read_table(file, at) else { break };
            let fresh = at >= known_end;
            let mut added = 0;
            for (index, entry) in entries.into_iter().enumerate() {
                added += 1;
                let Some(tag) = self.index.tag(&entry.tag) else { continue };
                let id = PageId { key: entry.key, tag };
                let state_at = at + (GROUP_HEAD_LEN + index * ENTRY_LEN) as u64 + ENTRY_STATE_AT;
                let place =
                    PackPlace { pack: number, crc: entry.crc, offset: at + entry.offset, len: entry.len, state_at };
                if entry.dead {
                    self.forget_packed(&id, &place);
                } else if fresh {
                    self.adopt_packed(id, place, used);
                }
            }
            if fresh {
                self.packs.update(number, |pack| {
                    pack.scanned = at + head.len;
                    pack.pages += added;
                    pack.groups.push(at);
                });
            }
            at += head.len;
        }
    }

    /// The group that starts at a byte of a pack, if it is whole.
    pub(super) fn read_table(&self, file: &OwnedFd, at: u64) -> Option<(format::GroupHead, Vec<format::Entry>)> {
        let mut head = vec![0; GROUP_HEAD_LEN];
        read_exact(file, &mut head, at)?;
        let group = format::decode_head(&head, &self.namespace)?;
        let mut bytes = vec![0; format::table_len(group.count) as usize];
        read_exact(file, &mut bytes, at)?;
        let entries = format::decode_table(&group, bytes)?;
        let size = rustix::fs::fstat(file).ok()?.st_size as u64;
        let end = entries.iter().map(|entry| at + entry.offset + entry.len).max()?;
        (end <= size).then_some((group, entries))
    }
}

pub(super) fn read_exact(file: &OwnedFd, bytes: &mut [u8], at: u64) -> Option<()> {
    let mut read = 0;
    while read < bytes.len() {
        match rustix::io::pread(file, bytes.get_mut(read..)?, at + read as u64) {
            Ok(0) => return None,
            Ok(now) => read += now,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
    Some(())
}
