//! What is where: the index over memory and disk.

use std::collections::HashMap;
use std::sync::Arc;

use super::disk::Place;
use super::memory::{Extents, Pages};
use super::order::Order;

/// An object.
#[derive(Debug)]
pub struct Entry {
    /// Its name.
    pub name: Arc<[u8]>,
    /// Its bytes.
    pub len: u64,
    /// Pages of the sequence before it.
    pub depth: u32,
    /// Its pages in memory.
    pub memory: Option<Extents>,
    /// Its record.
    pub disk: Option<Place>,
    /// Those who read its memory or write it out.
    pub pins: u32,
    /// It is being written out.
    pub moving: bool,
    /// Somebody reads its record, and memory is to have it after that.
    pub coming: bool,
    /// It was removed, and stays for those who have it pinned.
    gone: bool,
    /// Tells it from others that had its slot before, or have it after it.
    pub serial: u64,
}

/// An object that nobody finds yet.
#[derive(Debug, Clone, Copy)]
pub struct Hidden {
    /// Its slot.
    pub slot: u32,
    serial: u64,
}

/// An object that can be found from now on, or not any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Its name.
    pub name: Arc<[u8]>,
    /// Its bytes; none when it has gone.
    pub len: Option<u64>,
}

/// The index.
#[derive(Debug)]
pub struct State {
    /// What has changed, for somebody who asks; none where nobody does.
    pub changes: Option<Vec<Change>>,
    names: HashMap<Arc<[u8]>, u32>,
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    serial: u64,
    /// Objects in memory by their last use.
    pub recent: Order,
    /// Objects on disk by their last use.
    pub on_disk: Order,
    /// Pages of memory.
    pub pages: Pages,
}

impl State {
    /// Nothing yet.
    pub fn new(pages: u32) -> State {
        State {
            changes: None,
            names: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            serial: 0,
            recent: Order::default(),
            on_disk: Order::default(),
            pages: Pages::new(pages),
        }
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// The slot of a name.
    pub fn find(&self, name: &[u8]) -> Option<u32> {
        self.names.get(name).copied()
    }

    /// An entry.
    pub fn get(&self, slot: u32) -> Option<&Entry> {
        self.entries.get(slot as usize)?.as_ref()
    }

    /// An entry, to be changed.
    pub fn get_mut(&mut self, slot: u32) -> Option<&mut Entry> {
        self.entries.get_mut(slot as usize)?.as_mut()
    }

    /// Every slot in use whose object was not removed.
    pub fn slots(&self) -> impl Iterator<Item = (u32, &Entry)> {
        let all = self.entries.iter().enumerate();
        all.filter_map(|(slot, entry)| Some((slot as u32, entry.as_ref().filter(|entry| !entry.gone)?)))
    }

    /// Used now.
    pub fn touch(&mut self, slot: u32) {
        let Some((memory, disk)) = self.get(slot).map(|entry| (entry.memory.is_some(), entry.disk.is_some())) else {
            return;
        };
        if memory {
            self.recent.touch(slot);
        }
        if disk {
            self.on_disk.touch(slot);
        }
    }

    /// A new object. There is none of this name.
    pub fn insert(&mut self, name: &[u8], len: u64, depth: u32, memory: Option<Extents>, disk: Option<Place>) -> u32 {
        let hidden = self.insert_hidden(name, len, depth, memory, disk);
        self.list(hidden.slot);
        hidden.slot
    }

    /// Its name leads to it from now on.
    fn list(&mut self, slot: u32) {
        let Some((name, len)) = self.get(slot).map(|entry| (entry.name.clone(), entry.len)) else { return };
        if let Some(changes) = &mut self.changes {
            changes.push(Change { name: name.clone(), len: Some(len) });
        }
        self.names.insert(name, slot);
    }

    /// A new object that nobody finds until it is shown.
    pub fn insert_hidden(
        &mut self,
        name: &[u8],
        len: u64,
        depth: u32,
        memory: Option<Extents>,
        disk: Option<Place>,
    ) -> Hidden {
        self.serial += 1;
        let serial = self.serial;
        let slot = self.free.pop().unwrap_or(self.entries.len() as u32);
        let entry = Entry {
            name: name.into(),
            len,
            depth,
            memory,
            disk,
            pins: 0,
            moving: false,
            coming: false,
            gone: false,
            serial,
        };
        if let Some(room) = self.entries.get_mut(slot as usize) {
            *room = Some(entry);
        } else {
            self.entries.push(Some(entry));
        }
        self.touch(slot);
        Hidden { slot, serial }
    }

    /// The object can be found from now on, if it was not evicted meanwhile. Where another one has its name, it goes; its record is for the caller to
    /// forget.
    pub fn show(&mut self, hidden: Hidden) -> Option<Place> {
        let entry = self.get(hidden.slot).filter(|entry| entry.serial == hidden.serial && !entry.gone)?;
        if self.names.contains_key(&entry.name) {
            return self.remove(hidden.slot);
        }
        self.list(hidden.slot);
        None
    }

    /// The object goes without having been shown. Its record is for the caller to forget.
    pub fn give_up(&mut self, hidden: Hidden) -> Option<Place> {
        self.get(hidden.slot).filter(|entry| entry.serial == hidden.serial)?;
        self.remove(hidden.slot)
    }

    /// Its memory is free, if nobody has it pinned. Without a record the object goes.
    pub fn drop_memory(&mut self, slot: u32) -> bool {
        let Some(entry) = self.get_mut(slot).filter(|entry| entry.pins == 0) else { return false };
        let Some(extents) = entry.memory.take() else { return false };
        let lost = entry.disk.is_none();
        self.pages.give(&extents);
        self.recent.remove(slot);
        if lost {
            let _ = self.remove(slot);
        }
        true
    }

    /// Its record does not count any more; it is for the caller to forget. Without memory the object goes.
    pub fn drop_disk(&mut self, slot: u32) -> Option<Place> {
        let entry = self.get_mut(slot)?;
        let place = entry.disk.take();
        let lost = entry.memory.is_none();
        self.on_disk.remove(slot);
        if lost {
            let _ = self.remove(slot);
        }
        place
    }

    /// Nobody finds the object any more. Its memory is free when the last pin goes; its record is for the caller to forget.
    pub fn remove(&mut self, slot: u32) -> Option<Place> {
        let entry = self.get_mut(slot).filter(|entry| !entry.gone)?;
        entry.gone = true;
        let place = entry.disk.take();
        let name = entry.name.clone();
        // One that is hidden has no name yet, and another one may have it.
        if self.names.get(&name) == Some(&slot) {
            self.names.remove(&name);
            if let Some(changes) = &mut self.changes {
                changes.push(Change { name, len: None });
            }
        }
        self.recent.remove(slot);
        self.on_disk.remove(slot);
        self.reap(slot);
        place
    }

    /// Keeps memory where it is, until [`State::unpin`].
    pub fn pin(&mut self, slot: u32) {
        if let Some(entry) = self.get_mut(slot) {
            entry.pins += 1;
        }
    }

    /// Takes a pin off.
    pub fn unpin(&mut self, slot: u32) {
        if let Some(entry) = self.get_mut(slot) {
            entry.pins -= 1;
            self.reap(slot);
        }
    }

    /// Whether the slot still has an object that can be found.
    pub fn is_there(&self, slot: u32) -> bool {
        self.get(slot).is_some_and(|entry| !entry.gone)
    }

    fn reap(&mut self, slot: u32) {
        if self.get(slot).is_none_or(|entry| !entry.gone || entry.pins > 0) {
            return;
        }
        if let Some(entry) = self.entries.get_mut(slot as usize).and_then(Option::take) {
            if let Some(extents) = entry.memory {
                self.pages.give(&extents);
            }
            self.free.push(slot);
        }
    }

    /// Part of memory in use.
    pub fn used(&self) -> f64 {
        f64::from(self.pages.used()) / f64::from(self.pages.total().max(1))
    }
}
