//! What is where in the memory.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::events::Log;
use super::slots::Slot;
use crate::local::memory::{Extents, Pages};
use crate::local::order::Order;
use crate::wire::peer::tier;

/// How much longer than its time a place for an object is kept: what another node sends may still be on its way.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Entry {
    name: Arc<str>,
    len: u64,
    extents: Extents,
    /// Those who read it.
    pins: u32,
    /// Somebody was told where it lies, and may read it until then.
    leased: Option<Instant>,
    /// Nobody finds it any more.
    gone: bool,
}

impl Entry {
    fn is_free(&self, now: Instant) -> bool {
        self.pins == 0 && self.leased.is_none_or(|until| until <= now)
    }
}

/// All of it.
#[derive(Debug)]
pub struct State {
    names: HashMap<Arc<str>, u32>,
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    recent: Order,
    /// Entries that are gone, and whose memory is still read.
    ghosts: Vec<u32>,
    holds: HashMap<u64, (Vec<u32>, Instant)>,
    next_hold: u64,
    /// Counts removals: what was read from elsewhere meanwhile may not be wanted any more.
    pub removals: u64,
    /// Pages of the memory.
    pub pages: Pages,
    /// Places for objects that are on their way here.
    pub slots: HashMap<u64, Slot>,
    /// Their names.
    pub pending: HashSet<Arc<str>>,
    /// Number of the slot before the next.
    pub last_slot: u64,
    /// What the master is to be told.
    pub log: Log,
}

impl State {
    pub fn new(pages: u32) -> State {
        State {
            names: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            recent: Order::default(),
            ghosts: Vec::new(),
            holds: HashMap::new(),
            next_hold: 0,
            removals: 0,
            pages: Pages::new(pages),
            slots: HashMap::new(),
            pending: HashSet::new(),
            last_slot: 0,
            log: Log::default(),
        }
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn find(&self, name: &str) -> Option<u32> {
        self.names.get(name).copied()
    }

    fn get(&self, slot: u32) -> Option<&Entry> {
        self.entries.get(slot as usize)?.as_ref()
    }

    fn get_mut(&mut self, slot: u32) -> Option<&mut Entry> {
        self.entries.get_mut(slot as usize)?.as_mut()
    }

    /// Bytes of an object, and its pages.
    pub fn place(&self, slot: u32) -> Option<(u64, Extents)> {
        self.get(slot).map(|entry| (entry.len, entry.extents.clone()))
    }

    /// Name of an object that can be found.
    pub fn name(&self, slot: u32) -> Option<Arc<str>> {
        self.get(slot).filter(|entry| !entry.gone).map(|entry| entry.name.clone())
    }

    pub fn touch(&mut self, slot: u32) {
        self.recent.touch(slot);
    }

    pub fn pin(&mut self, slot: u32) {
        if let Some(entry) = self.get_mut(slot) {
            entry.pins += 1;
        }
    }

    pub fn unpin(&mut self, slot: u32, now: Instant) {
        let Some(entry) = self.get_mut(slot) else { return };
        entry.pins -= 1;
        if entry.gone {
            self.bury(now);
        }
    }

    pub fn lease(&mut self, slot: u32, until: Instant) {
        if let Some(entry) = self.get_mut(slot) {
            entry.leased = Some(entry.leased.map_or(until, |before| before.max(until)));
        }
    }

    /// Pins that end together.
    pub fn hold(&mut self, slots: Vec<u32>, until: Instant) -> u64 {
        self.next_hold += 1;
        self.holds.insert(self.next_hold, (slots, until));
        self.next_hold
    }

    pub fn release(&mut self, hold: u64, now: Instant) {
        let slots = self.holds.remove(&hold).map(|(slots, _)| slots).unwrap_or_default();
        slots.into_iter().for_each(|slot| self.unpin(slot, now));
    }

    pub fn is_free(&self, slot: u32, now: Instant) -> bool {
        self.get(slot).is_some_and(|entry| entry.is_free(now))
    }

    /// A new object, unless its name is there.
    pub fn insert(&mut self, name: &str, len: u64, extents: Extents) {
        if self.names.contains_key(name) {
            return self.pages.give(&extents);
        }
        let name: Arc<str> = name.into();
        let entry = Entry { name: name.clone(), len, extents, pins: 0, leased: None, gone: false };
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.entries.push(None);
                self.entries.len() as u32 - 1
            }
        };
        if let Some(room) = self.entries.get_mut(slot as usize) {
            *room = Some(entry);
        }
        self.log.add(&name, len, tier::DRAM);
        self.names.insert(name, slot);
        self.recent.touch(slot);
    }

    /// Nobody finds it any more; its memory is free when nobody reads it.
    pub fn detach(&mut self, slot: u32, now: Instant) {
        let Some(entry) = self.get_mut(slot).filter(|entry| !entry.gone) else { return };
        entry.gone = true;
        let name = entry.name.clone();
        self.names.remove(&name);
        self.recent.remove(slot);
        self.log.remove(&name, tier::DRAM);
        self.ghosts.push(slot);
        self.bury(now);
    }

    /// Frees what is gone and not read any more.
    fn bury(&mut self, now: Instant) {
        let ghosts = std::mem::take(&mut self.ghosts);
        for slot in ghosts {
            if !self.is_free(slot, now) {
                self.ghosts.push(slot);
            } else if let Some(entry) = self.entries.get_mut(slot as usize).and_then(Option::take) {
                self.pages.give(&entry.extents);
                self.free.push(slot);
            }
        }
    }

    /// Takes pages; what was used longest ago goes for them.
    pub fn take(&mut self, count: u32, now: Instant) -> Option<Extents> {
        if let Some(extents) = self.pages.take(count) {
            return Some(extents);
        }
        self.reap(now);
        let free = self.pages.total() - self.pages.used();
        let needed = count - free.min(count);
        let victims = self.oldest(needed, needed, u64::from(needed), usize::MAX, now);
        victims.into_iter().for_each(|slot| self.detach(slot, now));
        self.pages.take(count)
    }

    /// Objects that were used longest ago and that nobody reads. They have so many pages, or some more, but no more than `most` and `count` of them once there are `least`;
    /// none where there are not `least`.
    pub fn oldest(&self, pages: u32, least: u32, most: u64, count: usize, now: Instant) -> Vec<u32> {
        let (mut have, mut slots) = (0, Vec::new());
        for slot in self.recent.oldest_first() {
            if have >= pages && have >= least {
                break;
            }
            if have >= least && (u64::from(have) >= most || slots.len() >= count) {
                break;
            }
            if let Some(entry) = self.get(slot).filter(|entry| entry.is_free(now)) {
                have += entry.extents.iter().map(|(_, pages)| pages).sum::<u32>();
                slots.push(slot);
            }
        }
        if have < least { Vec::new() } else { slots }
    }

    /// Objects used last, so many bytes of them at most, each with its name.
    pub fn youngest(&self, most: u64) -> Vec<(u32, Arc<str>)> {
        let mut slots: Vec<u32> = self.recent.oldest_first().collect();
        slots.reverse();
        let mut bytes = 0;
        let fits = |slot: &u32| {
            bytes += self.get(*slot).map_or(0, |entry| entry.len);
            bytes <= most
        };
        slots.into_iter().take_while(fits).filter_map(|slot| Some((slot, self.name(slot)?))).collect()
    }

    /// Removes what is named with a prefix.
    pub fn clear(&mut self, prefix: &str, now: Instant) {
        let slots: Vec<u32> =
            self.names.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(_, slot)| *slot).collect();
        slots.into_iter().for_each(|slot| self.detach(slot, now));
        let pending: Vec<u64> =
            self.slots.iter().filter(|(_, slot)| slot.name.starts_with(prefix)).map(|(id, _)| *id).collect();
        for id in pending {
            // Whoever fills it may go on; what it fills is not shown. Its memory is free when its time is over.
            if let Some(slot) = self.slots.get_mut(&id) {
                slot.dead = true;
                let name = slot.name.clone();
                self.pending.remove(&name);
            }
        }
    }

    /// Forgets what has waited too long.
    pub fn reap(&mut self, now: Instant) {
        let over: Vec<u64> = self.holds.iter().filter(|(_, (_, until))| *until <= now).map(|(hold, _)| *hold).collect();
        over.into_iter().for_each(|hold| self.release(hold, now));
        let over: Vec<u64> =
            self.slots.iter().filter(|(_, slot)| !slot.busy && slot.until + GRACE <= now).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|id| self.drop_slot(id));
        self.bury(now);
    }

    /// Every object.
    pub fn all(&self) -> Vec<(Arc<str>, u64)> {
        let entry = |(name, slot): (&Arc<str>, &u32)| Some((name.clone(), self.get(*slot)?.len));
        self.names.iter().filter_map(entry).collect()
    }
}
