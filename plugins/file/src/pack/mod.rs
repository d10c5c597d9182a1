//! Pages that are too small for a file of their own share append-only packs.
//!
//! A pack is written by one instance, which holds its lock while it does, a group of pages at a time: first the payloads, then the table
//! that makes them visible. Any instance may mark a page dead in the table and give its blocks back.

mod append;
mod compact;
mod scan;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdock_plugin_api::Call;
use parking_lot::{Mutex, RwLock};
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

pub use append::{SmallWrite, crc_of};
pub use scan::Look;

use crate::format::DEAD;
use crate::index::{PackPlace, PageId, Place};
use crate::names;
use crate::root::Root;
use crate::store::Store;

/// Bytes after which a pack gets no more groups.
pub const PACK_TARGET: u64 = 64 << 20;

/// A pack as this instance knows it.
#[derive(Debug, Default)]
struct Pack {
    name: String,
    /// This instance appends to it.
    active: bool,
    gone: bool,
    /// Byte after the last valid group.
    scanned: u64,
    /// Size and time of change when it was last looked at.
    size: u64,
    changed: (i64, i64),
    /// Bytes on the disk.
    disk: u64,
    /// Pages in its tables, and of them those that are not dead.
    pages: u64,
    live_pages: u64,
    live_bytes: u64,
    /// Where its groups start.
    groups: Vec<u64>,
}

#[derive(Debug, Default)]
struct Table {
    packs: Vec<Pack>,
    by_name: HashMap<String, u32>,
}

/// A second copy of a page: two processes stored it, or a pack is being tidied.
#[derive(Debug)]
struct Copy {
    id: PageId,
    place: PackPlace,
    used: u32,
    seen: Instant,
}

/// How long a page may have two copies.
const COPY_AGE: Duration = Duration::from_secs(5);

/// An own pack that takes more groups.
#[derive(Debug)]
struct Active {
    pack: u32,
    file: OwnedFd,
    end: u64,
}

/// The packs of the namespace.
#[derive(Debug)]
pub struct Packs {
    table: RwLock<Table>,
    active: Mutex<Vec<Active>>,
    copies: Mutex<Vec<Copy>>,
    next_number: AtomicU64,
    /// Time of change of the folder at the last listing; held while packs are looked at.
    listing: Mutex<Option<(i64, i64)>>,
    /// Whether blocks in the middle of a file can be given back here.
    punches: AtomicBool,
}

impl Packs {
    /// No packs known.
    pub fn new() -> Packs {
        Packs {
            table: RwLock::default(),
            active: Mutex::default(),
            copies: Mutex::default(),
            next_number: AtomicU64::new(0),
            listing: Mutex::new(None),
            punches: AtomicBool::new(true),
        }
    }

    /// Bytes of all packs on the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.table.read().packs.iter().filter(|pack| !pack.gone).map(|pack| pack.disk).sum()
    }

    /// Whether blocks in the middle of a file can be given back here.
    pub fn punches(&self) -> bool {
        self.punches.load(Ordering::Relaxed)
    }

    /// Name of a pack; none when it is gone.
    pub fn name(&self, pack: u32) -> Option<String> {
        self.table.read().packs.get(pack as usize).filter(|pack| !pack.gone).map(|pack| pack.name.clone())
    }

    fn update(&self, pack: u32, change: impl FnOnce(&mut Pack)) {
        if let Some(pack) = self.table.write().packs.get_mut(pack as usize) {
            change(pack);
        }
    }

    /// Lets go of the packs that this instance appends to: others may tidy them now.
    pub fn retire_all(&self) {
        for active in self.active.lock().drain(..) {
            self.update(active.pack, |pack| pack.active = false);
        }
    }

    /// Forgets everything, because the directory was made anew.
    pub fn forget(&self) {
        let mut listing = self.listing.lock();
        self.retire_all();
        *listing = None;
        for pack in &mut self.table.write().packs {
            pack.gone = true;
        }
        self.table.write().by_name.clear();
        self.copies.lock().clear();
    }
}

impl Store {
    /// Opens a pack; `NotFound` when it is gone.
    pub fn open_pack(&self, root: &Root, pack: u32, write: bool) -> io::Result<OwnedFd> {
        let name = self.packs.name(pack).ok_or(io::ErrorKind::NotFound)?;
        let flags = if write { OFlags::RDWR } else { OFlags::RDONLY } | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(rustix::fs::openat(&root.namespace, names::pack_path(&name).as_cstr(), flags, Mode::empty())?)
    }

    /// Whether a page in a pack is not marked dead.
    pub fn is_alive(&self, file: &OwnedFd, place: &PackPlace) -> io::Result<bool> {
        let mut state = [0; 4];
        let read = rustix::io::pread(file, &mut state, place.state_at)?;
        Ok(read == 4 && state == [0; 4])
    }

    /// Where a page lies alive in a pack, by what the disk says. `opened` keeps the packs open for the next page.
    pub fn living_place(
        &self,
        root: &Root,
        id: &PageId,
        looked: &mut bool,
        call: &Call<'_>,
        opened: &mut HashMap<u32, Option<OwnedFd>>,
    ) -> Option<PackPlace> {
        // A second copy may live where the first one is dead.
        for _ in 0..4 {
            let Place::Pack(place) = self.known_small(root, id, looked, call)?.place else { return None };
            let file = opened.entry(place.pack).or_insert_with(|| self.open_pack(root, place.pack, false).ok());
            if file.as_ref().is_some_and(|file| self.is_alive(file, &place).unwrap_or(false)) {
                return Some(place);
            }
            self.forget_packed(id, &place);
        }
        None
    }

    /// Marks pages dead on the disk, takes them out of the index, and gives their blocks back. Gives the number of pages that could not
    /// be marked.
    pub fn bury_in_packs(&self, root: &Root, pages: &mut [(PageId, PackPlace)]) -> usize {
        pages.sort_unstable_by_key(|(_, place)| (place.pack, place.offset));
        let mut failed = 0;
        let mut touched = Vec::new();
        for pages in pages.chunk_by(|a, b| a.1.pack == b.1.pack) {
            let Some(pack) = pages.first().map(|(_, place)| place.pack) else { continue };
            touched.push(pack);
            let file = match self.open_pack(root, pack, true) {
                Ok(file) => file,
                Err(error) => {
                    if error.kind() == io::ErrorKind::NotFound {
                        pages.iter().for_each(|(id, place)| self.forget_packed(id, place));
                    } else {
                        failed += pages.len();
                    }
                    continue;
                }
            };
            let mut groups = Vec::new();
            for (id, place) in pages {
                if rustix::io::pwrite(&file, &DEAD.to_le_bytes(), place.state_at).is_err() {
                    failed += 1;
                    continue;
                }
                self.forget_packed(id, place);
                groups.extend(self.group_of(pack, place.state_at));
            }
            groups.dedup();
            groups.iter().for_each(|group| self.punch_dead(&file, *group));
            if let Ok(stat) = rustix::fs::fstat(&file) {
                self.packs.update(pack, |pack| pack.disk = stat.st_blocks as u64 * 512);
            }
        }
        touched.iter().for_each(|pack| self.unlink_if_dead(root, *pack));
        failed
    }

    /// Start of the group in whose table a byte of a pack lies.
    fn group_of(&self, pack: u32, at: u64) -> Option<u64> {
        let table = self.packs.table.read();
        let groups = &table.packs.get(pack as usize)?.groups;
        groups.get(groups.partition_point(|group| *group <= at).checked_sub(1)?).copied()
    }

    /// Gives the blocks of a group's dead pages back. Neighbours go together: they share blocks.
    fn punch_dead(&self, file: &OwnedFd, group: u64) {
        let Some((head, entries)) = self.read_table(file, group).filter(|_| self.packs.punches()) else { return };
        let mut hole = 0..0;
        for entry in entries.iter().filter(|entry| entry.dead && entry.len > 0) {
            if entry.offset != hole.end {
                self.punch(file, group, &hole);
                hole.start = entry.offset;
            }
            hole.end = entry.offset + entry.len;
        }
        if entries.iter().map(|entry| entry.offset + entry.len).max() == Some(hole.end) {
            hole.end = head.len;
        }
        self.punch(file, group, &hole);
    }

    fn punch(&self, file: &OwnedFd, group: u64, hole: &std::ops::Range<u64>) {
        if hole.is_empty() {
            return;
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = rustix::fs::fallocate(file, flags, group + hole.start, hole.end - hole.start);
        // With other errors the file system is in trouble: the blocks come back with the pack.
        if matches!(punched, Err(Errno::OPNOTSUPP | Errno::NOSYS)) {
            self.packs.punches.store(false, Ordering::Relaxed);
        }
    }

    /// Takes a page in a pack out of the index, if it lies where it is said to lie. A second copy takes its place.
    pub fn forget_packed(&self, id: &PageId, place: &PackPlace) {
        {
            let mut copies = self.packs.copies.lock();
            copies.retain(|copy| copy.id != *id || copy.place != *place);
        }
        if self.index.remove_if(id, |known| known.place == Place::Pack(*place)).is_none() {
            return;
        }
        self.count_live(place, false);
        let mut copies = self.packs.copies.lock();
        if let Some(at) = copies.iter().position(|copy| copy.id == *id) {
            let copy = copies.swap_remove(at);
            drop(copies);
            self.adopt_packed(copy.id, copy.place, copy.used);
        }
    }

    fn count_live(&self, place: &PackPlace, add: bool) {
        self.packs.update(place.pack, |pack| {
            if add {
                pack.live_pages += 1;
                pack.live_bytes += place.len;
            } else {
                pack.live_pages = pack.live_pages.saturating_sub(1);
                pack.live_bytes = pack.live_bytes.saturating_sub(place.len);
            }
        });
    }

    /// Puts a page in a pack into the index. Of two copies the one in the pack that is first by name is preferred, in every process; the
    /// other one is remembered.
    fn adopt_packed(&self, id: PageId, place: PackPlace, used: u32) {
        let mut extra = (place, used);
        let known = self.index.get(&id).and_then(|known| match known.place {
            Place::Pack(other) => Some((other, known.used)),
            Place::File(_) => None,
        });
        if known.is_some_and(|(other, _)| other == place) {
            return;
        }
        let names = known.and_then(|(other, _)| Some((self.packs.name(other.pack)?, self.packs.name(place.pack)?)));
        let preferred = match (&known, names) {
            (Some((other, _)), Some((theirs, ours))) => (ours, place.offset) < (theirs, other.offset),
            _ => true,
        };
        if preferred {
            let old = self.index.insert(id, Place::Pack(place), used);
            self.count_live(&place, true);
            let Some(Place::Pack(old)) = old else { return };
            self.count_live(&old, false);
            extra = (old, known.map_or(used, |(_, used)| used));
        }
        let mut copies = self.packs.copies.lock();
        if copies.iter().all(|copy| copy.id != id || copy.place != extra.0) {
            copies.push(Copy { id, place: extra.0, used: extra.1, seen: Instant::now() });
        }
    }

    /// A page was copied from one pack to another: the index follows, unless the page has moved or gone meanwhile.
    fn move_packed(&self, id: PageId, from: PackPlace, to: PackPlace, used: u32) {
        if self.index.replace(&id, Place::Pack(from), Place::Pack(to), used) {
            self.count_live(&from, false);
            self.count_live(&to, true);
        }
    }

    /// Second copies of a page, which go with it.
    pub fn copies_of(&self, id: &PageId) -> Vec<(PageId, PackPlace)> {
        let copies = self.packs.copies.lock();
        copies.iter().filter(|copy| copy.id == *id).map(|copy| (copy.id, copy.place)).collect()
    }

    /// Marks second copies dead that have been there for a while, if the preferred ones live. (Not at once: a pack that is being tidied
    /// has its pages twice for a moment.)
    pub fn settle_copies(&self, root: &Root) {
        let old: Vec<(PageId, PackPlace)> = {
            let copies = self.packs.copies.lock();
            let old = copies.iter().filter(|copy| copy.seen.elapsed() > COPY_AGE);
            old.map(|copy| (copy.id, copy.place)).collect()
        };
        let mut extra = Vec::new();
        for (id, place) in old {
            let Some(Place::Pack(preferred)) = self.index.get(&id).map(|known| known.place) else { continue };
            let lives = self.open_pack(root, preferred.pack, false).and_then(|file| self.is_alive(&file, &preferred));
            if lives.is_ok_and(|lives| lives) {
                extra.push((id, place));
            } else {
                self.forget_packed(&id, &preferred);
            }
        }
        self.bury_in_packs(root, &mut extra);
    }

    /// Removes a pack in which nothing lives and to which nobody appends.
    fn unlink_if_dead(&self, root: &Root, pack: u32) {
        let dead = {
            let table = self.packs.table.read();
            table
                .packs
                .get(pack as usize)
                .is_some_and(|pack| !pack.active && !pack.gone && pack.live_pages == 0 && pack.pages > 0)
        };
        if !dead {
            return;
        }
        // A second copy in it may be the only one by now; tidying finds out.
        if self.packs.copies.lock().iter().any(|copy| copy.place.pack == pack) {
            return;
        }
        let Ok(file) = self.open_pack(root, pack, true) else { return };
        if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            return;
        }
        // Its last groups may be newer than the last look at it.
        let size = rustix::fs::fstat(&file).map_or(u64::MAX, |stat| stat.st_size as u64);
        if self.packs.table.read().packs.get(pack as usize).is_none_or(|pack| size > pack.size.max(pack.scanned)) {
            return;
        }
        self.unlink_pack(root, pack);
    }

    /// Removes a pack's file. Gives the bytes freed. The caller holds the pack's lock and has taken its pages out of the index.
    fn unlink_pack(&self, root: &Root, pack: u32) -> u64 {
        let Some(name) = self.packs.name(pack) else { return 0 };
        match rustix::fs::unlinkat(&root.namespace, names::pack_path(&name).as_cstr(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(_) => return 0,
        }
        self.packs.copies.lock().retain(|copy| copy.place.pack != pack);
        let mut table = self.packs.table.write();
        table.by_name.remove(&name);
        let Some(pack) = table.packs.get_mut(pack as usize) else { return 0 };
        pack.gone = true;
        std::mem::take(&mut pack.disk)
    }

    /// Packs to which nobody of this instance appends, with their bytes on the disk.
    pub fn idle_packs(&self) -> Vec<(u32, u64)> {
        let table = self.packs.table.read();
        let idle = table.packs.iter().enumerate().filter(|(_, pack)| !pack.active && !pack.gone);
        idle.map(|(number, pack)| (number as u32, pack.disk)).collect()
    }

    /// Removes a whole pack with what lives in it, unless somebody appends to it. Gives the bytes freed.
    pub fn drop_pack(&self, root: &Root, pack: u32) -> u64 {
        let Ok(file) = self.open_pack(root, pack, true) else { return 0 };
        if rustix::fs::flock(file.as_fd(), rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            return 0;
        }
        self.forget_pack(pack);
        self.unlink_pack(root, pack)
    }

    /// Takes the pages of a pack out of the index.
    fn forget_pack(&self, number: u32) {
        for shard in 0..=255 {
            self.index.retain(shard, |_, known| !matches!(known.place, Place::Pack(place) if place.pack == number));
        }
        self.packs.copies.lock().retain(|copy| copy.place.pack != number);
        self.packs.update(number, |pack| {
            pack.live_pages = 0;
            pack.live_bytes = 0;
        });
    }
}
