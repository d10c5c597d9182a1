//! What this instance believes to be stored under its namespace.
//!
//! A belief may be wrong: other processes add and remove pages. A page that is believed to be there is read and verified; one that is
//! not believed to be there is looked for on the disk. Belief is renewed in the background (see the keeper).

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvdock_plugin_api::PageKey;
use parking_lot::RwLock;

/// A page of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId {
    /// Key of the page.
    pub key: PageKey,
    /// Number of the pool's tag, see [`Index::tag`].
    pub tag: u16,
}

/// Where a page in a pack lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackPlace {
    /// Number of the pack.
    pub pack: u32,
    /// CRC-32C of the payload.
    pub crc: u32,
    /// Byte of the payload in the pack.
    pub offset: u64,
    /// Bytes of the payload.
    pub len: u64,
    /// Byte of the state word in the pack.
    pub state_at: u64,
}

/// Where a page lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In a file of its own, of this many bytes.
    File(u64),
    /// In a pack.
    Pack(PackPlace),
}

#[derive(Debug)]
struct Slot {
    place: Place,
    used: AtomicU32,
    saved: AtomicU32,
}

/// A page as the index knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// Where it lies.
    pub place: Place,
    /// When it was used last, in seconds since 1970.
    pub used: u32,
}

/// Keys are digests: some of their bytes are as good as a hash of them.
#[derive(Debug, Default)]
pub struct DigestHasher(u64);

impl Hasher for DigestHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        let word = bytes
            .split_at_checked(8)
            .and_then(|(_, rest)| rest.first_chunk())
            .map_or(0, |word| u64::from_le_bytes(*word));
        self.0 ^= word;
    }
    fn write_u16(&mut self, tag: u16) {
        self.0 ^= u64::from(tag).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    fn write_usize(&mut self, _: usize) {}
}

type Shard = HashMap<PageId, Slot, BuildHasherDefault<DigestHasher>>;

/// The index: a shard for every first byte of a key, as the folders on the disk.
#[derive(Debug)]
pub struct Index {
    shards: Vec<RwLock<Shard>>,
    tags: RwLock<Vec<Arc<str>>>,
    pages: AtomicU64,
    file_bytes: AtomicU64,
}

impl Index {
    /// An index without pages.
    pub fn new() -> Index {
        Index {
            shards: (0..256).map(|_| RwLock::default()).collect(),
            tags: RwLock::default(),
            pages: AtomicU64::new(0),
            file_bytes: AtomicU64::new(0),
        }
    }

    /// Number of a pool's tag; none when there are too many.
    pub fn tag(&self, text: &str) -> Option<u16> {
        let find = |tags: &[Arc<str>]| tags.iter().position(|tag| **tag == *text).map(|at| at as u16);
        if let Some(tag) = find(&self.tags.read()) {
            return Some(tag);
        }
        let mut tags = self.tags.write();
        if let Some(tag) = find(&tags) {
            return Some(tag);
        }
        let tag = u16::try_from(tags.len()).ok()?;
        tags.push(text.into());
        Some(tag)
    }

    /// Text of a tag.
    pub fn tag_text(&self, tag: u16) -> Arc<str> {
        self.tags.read().get(usize::from(tag)).cloned().unwrap_or_else(|| "".into())
    }

    fn shard(&self, key: &PageKey) -> &RwLock<Shard> {
        let [first, ..] = *key;
        // There are 256 shards, one for every value of a byte.
        &self.shards[usize::from(first)]
    }

    /// What is known of a page.
    pub fn get(&self, id: &PageId) -> Option<Known> {
        let shard = self.shard(&id.key).read();
        shard.get(id).map(|slot| Known { place: slot.place, used: slot.used.load(Ordering::Relaxed) })
    }

    /// Notes that a page was used.
    pub fn touch(&self, id: &PageId, now: u32) {
        if let Some(slot) = self.shard(&id.key).read().get(id) {
            slot.used.store(now, Ordering::Relaxed);
        }
    }

    /// Puts a page in, or moves it. Gives where it was before.
    pub fn insert(&self, id: PageId, place: Place, used: u32) -> Option<Place> {
        let slot = Slot { place, used: AtomicU32::new(used), saved: AtomicU32::new(used) };
        let old = self.shard(&id.key).write().insert(id, slot).map(|slot| slot.place);
        self.count(place, true);
        if let Some(old) = old {
            self.count(old, false);
        }
        old
    }

    /// Moves a page, if it lies where it is said to lie. Says whether it does.
    pub fn replace(&self, id: &PageId, from: Place, to: Place, used: u32) -> bool {
        let mut shard = self.shard(&id.key).write();
        let Some(slot) = shard.get_mut(id).filter(|slot| slot.place == from) else { return false };
        slot.place = to;
        slot.used.fetch_max(used, Ordering::Relaxed);
        self.count(to, true);
        self.count(from, false);
        true
    }

    /// Takes a page out when `condition` holds of what is known of it.
    pub fn remove_if(&self, id: &PageId, condition: impl FnOnce(Known) -> bool) -> Option<Place> {
        let mut shard = self.shard(&id.key).write();
        let slot = shard.get(id)?;
        if !condition(Known { place: slot.place, used: slot.used.load(Ordering::Relaxed) }) {
            return None;
        }
        let place = shard.remove(id)?.place;
        self.count(place, false);
        Some(place)
    }

    fn count(&self, place: Place, add: bool) {
        let bytes = if let Place::File(bytes) = place { bytes } else { 0 };
        if add {
            self.pages.fetch_add(1, Ordering::Relaxed);
            self.file_bytes.fetch_add(bytes, Ordering::Relaxed);
        } else {
            self.pages.fetch_sub(1, Ordering::Relaxed);
            self.file_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Bytes of the pages that have a file of their own.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes.load(Ordering::Relaxed)
    }

    /// Calls `see` with every page of a shard.
    pub fn for_each(&self, shard: u8, mut see: impl FnMut(&PageId, Known)) {
        for (id, slot) in self.shards[usize::from(shard)].read().iter() {
            see(id, Known { place: slot.place, used: slot.used.load(Ordering::Relaxed) });
        }
    }

    /// Keeps those pages of a shard of which `keep` says so.
    pub fn retain(&self, shard: u8, mut keep: impl FnMut(&PageId, Known) -> bool) {
        self.shards[usize::from(shard)].write().retain(|id, slot| {
            let kept = keep(id, Known { place: slot.place, used: slot.used.load(Ordering::Relaxed) });
            if !kept {
                self.count(slot.place, false);
            }
            kept
        });
    }

    /// The pages of a shard whose last use is newer by more than `after` seconds than what was saved, and notes that it will be saved.
    pub fn unsaved(&self, shard: u8, after: u32) -> Vec<(PageId, Known)> {
        let mut found = Vec::new();
        for (id, slot) in self.shards[usize::from(shard)].read().iter() {
            let used = slot.used.load(Ordering::Relaxed);
            if used.saturating_sub(slot.saved.load(Ordering::Relaxed)) > after {
                slot.saved.store(used, Ordering::Relaxed);
                found.push((*id, Known { place: slot.place, used }));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_and_bytes_are_counted() {
        let index = Index::new();
        let (kv, swa) = (index.tag("kv-0").unwrap(), index.tag("swa-0").unwrap());
        assert_ne!(kv, swa);
        assert_eq!(index.tag("kv-0"), Some(kv));
        assert_eq!(&*index.tag_text(swa), "swa-0");
        let id = |byte: u8, tag| PageId { key: [byte; 32], tag };
        assert_eq!(index.insert(id(1, kv), Place::File(100), 5), None);
        assert_eq!(index.insert(id(1, kv), Place::File(70), 6), Some(Place::File(100)));
        index.insert(id(1, swa), Place::File(30), 7);
        assert_eq!((index.pages(), index.file_bytes()), (2, 100));
        assert_eq!(index.remove_if(&id(1, kv), |known| known.used != 6), None);
        index.touch(&id(1, swa), 100);
        assert_eq!(index.unsaved(1, 60).len(), 1);
        assert_eq!(index.unsaved(1, 60).len(), 0);
        index.retain(1, |id, _| id.tag == kv);
        assert_eq!((index.pages(), index.file_bytes()), (1, 70));
        assert!(index.get(&id(1, swa)).is_none());
    }
}
