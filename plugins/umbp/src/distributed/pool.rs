//! The memory of a node: objects of its own and of others, places for objects that are on their way here, and what the master is to be told.

mod below;
mod events;
mod slots;
mod state;

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use kvdock_plugin_api::Result;
use parking_lot::{Condvar, Mutex};

use crate::config::Dram;
use crate::local::below::{Below, Places};
use crate::local::memory::{Copied, Extents, Memory};
use crate::object::{Got, Held, Piece, Range};

pub use events::{Beat, Bounds};
pub use slots::{Allocated, PENDING, Writing};
use state::State;

/// The pool.
#[derive(Debug)]
pub struct Pool {
    memory: Memory,
    page: u64,
    /// Used part of the memory from which it is written out, and down to which. They count where there are segments.
    high: f64,
    low: f64,
    /// What is read from segments comes back to memory.
    promote: bool,
    /// What memory has no room for any more. Whoever needs both takes the state first.
    below: Option<Below>,
    /// How long an object that another node was told the place of stays there.
    lease: Duration,
    state: Mutex<State>,
    /// Rings when the master has acknowledged something.
    acknowledged: Condvar,
    /// For the thread that writes out: there is something to do, or it is to stop.
    rung: Mutex<bool>,
    bell: Condvar,
    stopping: AtomicBool,
}

/// An object that stays where it is while this lives.
#[derive(Debug)]
pub struct Pinned<'a> {
    pool: &'a Pool,
    slot: u32,
    extents: Extents,
    /// Its bytes.
    pub len: u64,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.pool.state.lock().unpin(self.slot, Instant::now());
    }
}

impl Pinned<'_> {
    /// Copies a range of it out, past the caches or not; one that ends behind it is cut.
    ///
    /// # Safety
    /// The piece can be written, and nobody else touches it.
    pub unsafe fn read(&self, range: &Range, past_caches: bool) {
        // SAFETY: passed on to the caller; the object is pinned, and objects are never written again.
        unsafe { self.pool.memory.read(&self.extents, self.len, range, past_caches) }
    }

    /// Where the bytes of a range lie.
    pub fn pieces(&self, offset: u64, len: u64) -> Vec<Piece> {
        let (mut skip, mut left) = (offset, len.min(self.len.saturating_sub(offset)));
        let mut pieces = Vec::new();
        for piece in self.pool.memory.pieces(&self.extents, self.len) {
            let bytes = piece.len as u64;
            if skip >= bytes {
                skip -= bytes;
                continue;
            }
            let part = (bytes - skip).min(left);
            if part > 0 {
                pieces.push(Piece { base: piece.base.wrapping_add(skip as usize), len: part as usize });
            }
            left -= part;
            skip = 0;
        }
        pieces
    }
}

/// Where an object lies, for nodes that read it by themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// Numbers of its pages, in order.
    pub pages: Vec<u32>,
    /// Its bytes.
    pub len: u64,
}

fn pages_of(extents: &[(u32, u32)]) -> Vec<u32> {
    extents.iter().flat_map(|(first, count)| *first..first + count).collect()
}

impl Pool {
    /// Maps the memory. `told` hears of what is not as the settings want it.
    ///
    /// # Errors
    /// When there is not so much.
    pub fn new(config: &Dram, lease: Duration, told: &mut dyn FnMut(String)) -> Result<Pool> {
        let memory = Memory::map(config, told)?;
        let state = Mutex::new(State::new(memory.pages()));
        Ok(Pool {
            page: config.page,
            high: config.high,
            low: config.low,
            promote: false,
            below: None,
            lease,
            state,
            acknowledged: Condvar::new(),
            rung: Mutex::new(false),
            bell: Condvar::new(),
            stopping: AtomicBool::new(false),
            memory,
        })
    }

    /// The same with segments below. With `promote`, what is read from them comes back to memory.
    #[must_use]
    pub fn above(self, below: Option<Below>, promote: bool) -> Pool {
        Pool { below, promote, ..self }
    }

    /// Bytes of a page.
    pub fn page_size(&self) -> u64 {
        self.page
    }

    /// As [`Memory::fill_all`].
    pub fn fill_all(&self, copied: Copied, fill: impl Fn(usize) + Sync) {
        self.memory.fill_all(copied, fill);
    }

    /// As [`Memory::read_all`].
    pub fn read_all(&self, copied: Copied, read: impl Fn(usize, bool) + Sync) {
        self.memory.read_all(copied, read);
    }

    /// All of the memory.
    pub fn whole(&self) -> Piece {
        let pages = self.memory.pages();
        let pieces = self.memory.pieces(&[(0, pages)], u64::from(pages) * self.page);
        pieces.first().copied().unwrap_or(Piece { base: std::ptr::null_mut(), len: 0 })
    }

    /// Which of these are here.
    pub fn has(&self, names: &[&str]) -> Vec<bool> {
        let state = self.state.lock();
        let found = names.iter().map(|name| state.find(name).is_some()).collect();
        drop(state);
        self.or_below(names, found, |below, names| below.find(names).iter().map(Option::is_some).collect())
    }

    /// Which of these are here; they are used now.
    pub fn use_now(&self, names: &[&str]) -> Vec<bool> {
        let mut state = self.state.lock();
        let found = names.iter().map(|name| state.find(name).map(|slot| state.touch(slot)).is_some()).collect();
        drop(state);
        self.or_below(names, found, Below::use_now)
    }

    /// Looks in segments for those that memory has not. An object that leaves memory is in segments before.
    fn or_below(&self, names: &[&str], mut found: Vec<bool>, look: impl Fn(&Below, &[&str]) -> Vec<bool>) -> Vec<bool> {
        let Some(below) = self.below.as_ref().filter(|_| found.contains(&false)) else { return found };
        let open: Vec<&str> = names.iter().zip(&found).filter(|(_, found)| !**found).map(|(name, _)| *name).collect();
        for (found, there) in found.iter_mut().filter(|found| !**found).zip(look(below, &open)) {
            *found = there;
        }
        found
    }

    /// Whether the master may still take an object to be here that is not any more.
    pub fn is_leaving(&self, name: &str) -> bool {
        self.hear().log.is_leaving(name)
    }

    /// Keeps an object of memory where it is, to be read. With `len`, it has to have so many bytes.
    ///
    /// # Errors
    /// When it is not here, or has another length.
    pub fn pin(&self, name: &str, len: Option<u64>) -> Result<Pinned<'_>, Got> {
        let mut state = self.state.lock();
        let slot = state.find(name).ok_or(Got::Missing)?;
        let (found, extents) = state.place(slot).ok_or(Got::Missing)?;
        if let Some(len) = len.filter(|len| *len != found) {
            return Err(Got::Corrupt(format!("it has {found} bytes, not {len}")));
        }
        state.pin(slot);
        state.touch(slot);
        Ok(Pinned { pool: self, slot, extents, len: found })
    }

    /// Room for an object. What was used longest ago goes where there is none. It has to be shown or given back.
    pub fn take(&self, len: u64) -> Option<Extents> {
        let pages = u32::try_from(self.memory.pages_for(len)).ok()?;
        match &self.below {
            None => self.state.lock().take(pages, Instant::now()),
            Some(below) => self.take_above(below, pages),
        }
    }

    /// As [`Pool::take`], but only where a part of the memory stays free without anything having to go.
    pub fn take_spare(&self, len: u64, high: f64) -> Option<Extents> {
        let pages = u32::try_from(self.memory.pages_for(len)).ok()?;
        let mut state = self.state.lock();
        let most = f64::from(self.memory.pages()) * high;
        if f64::from(state.pages.used()) + f64::from(pages) > most {
            return None;
        }
        state.pages.take(pages)
    }

    /// Copies an object into room that was taken.
    ///
    /// # Safety
    /// The pieces can be read, and the extents are the caller's.
    pub unsafe fn fill(&self, extents: &[(u32, u32)], len: u64, pieces: &[Piece]) {
        // SAFETY: passed on to the caller.
        unsafe { self.memory.fill(extents, len, pieces) }
    }

    /// Shows objects, all from the same moment on. One whose name is there already goes. Says how many events wait for the master.
    pub fn show(&self, objects: Vec<(String, u64, Extents)>) -> usize {
        let mut state = self.state.lock();
        for (name, len, extents) in objects {
            state.insert(&name, len, extents);
        }
        self.settle(&state);
        state.log.waiting()
    }

    /// Counts removals.
    pub fn removals(&self) -> u64 {
        self.state.lock().removals
    }

    /// Shows a copy of an object that was found elsewhere, unless something was removed since `epoch`: it may be this. Says how many events wait for the master.
    pub fn show_copy(&self, name: &str, len: u64, extents: Extents, epoch: u64) -> usize {
        let mut state = self.state.lock();
        if state.removals == epoch {
            state.insert(name, len, extents);
        } else {
            state.pages.give(&extents);
        }
        state.log.waiting()
    }

    /// Gives room back that was taken.
    pub fn give(&self, extents: &[(u32, u32)]) {
        self.state.lock().pages.give(extents);
    }

    /// Tells where an object is, and keeps it there for the time of a lease.
    pub fn resolve(&self, name: &str) -> Option<Located> {
        let mut state = self.state.lock();
        let slot = state.find(name)?;
        let (len, extents) = state.place(slot)?;
        state.lease(slot, Instant::now() + self.lease);
        state.touch(slot);
        Some(Located { pages: pages_of(&extents), len })
    }

    /// Tells where objects are, and keeps them there until the lease is released or its time is over.
    pub fn hold(&self, names: &[String], time: Duration) -> (u64, Vec<Option<Located>>) {
        let mut state = self.state.lock();
        let mut slots = Vec::new();
        let located = names
            .iter()
            .map(|name| {
                let slot = state.find(name)?;
                let (len, extents) = state.place(slot)?;
                state.pin(slot);
                state.touch(slot);
                slots.push(slot);
                Some(Located { pages: pages_of(&extents), len })
            })
            .collect();
        (state.hold(slots, Instant::now() + time), located)
    }

    /// Ends a lease.
    pub fn release(&self, lease: u64) {
        self.state.lock().release(lease, Instant::now());
    }

    /// Frees memory of objects, and says how many bytes of each; 0 when it is not there, or somebody reads it. They go to segments, where there are some.
    pub fn evict(&self, names: &[String]) -> Vec<u64> {
        if let Some(below) = &self.below {
            return self.evict_above(below, names);
        }
        let (mut state, now) = (self.state.lock(), Instant::now());
        let evict = |name: &String| {
            let Some(slot) = state.find(name).filter(|slot| state.is_free(*slot, now)) else { return 0 };
            let len = state.place(slot).map_or(0, |(len, _)| len);
            state.detach(slot, now);
            len
        };
        names.iter().map(evict).collect()
    }

    /// Nobody finds these objects any more; those who read them go on. Says which were here.
    pub fn remove(&self, names: &[&str]) -> Vec<bool> {
        let mut state = self.state.lock();
        let (found, places) = self.take_out(&mut state, names);
        drop(state);
        self.forget(places);
        found
    }

    /// Removes what is named with a prefix, also what is still on its way here.
    pub fn clear(&self, prefix: &str) {
        let mut state = self.state.lock();
        state.removals += 1;
        let places = self.below.as_ref().map(|below| below.take_out_all(prefix));
        state.clear(prefix, Instant::now());
        drop(state);
        self.forget(places);
    }

    fn forget(&self, places: Option<Places>) {
        if let (Some(below), Some(places)) = (&self.below, places) {
            below.forget(places);
        }
    }

    /// Forgets what has waited too long.
    pub fn reap(&self) {
        self.state.lock().reap(Instant::now());
    }

    /// Figures of the memory: `used` and `total` in bytes of whole pages.
    pub fn held(&self) -> Held {
        let state = self.state.lock();
        let (objects, used) = (state.len() as u64, u64::from(state.pages.used()) * self.page);
        Held { objects, used, total: u64::from(self.memory.pages()) * self.page }
    }

    /// Figures of memory and segments. An object that both have counts once.
    pub fn held_in_all(&self) -> Held {
        let memory = self.held();
        let Some(below) = &self.below else { return memory };
        let both = {
            let all = self.state.lock().all();
            let names: Vec<&str> = all.iter().map(|(name, _)| &**name).collect();
            below.find(&names).iter().flatten().count() as u64
        };
        let room = below.room();
        Held {
            objects: (memory.objects + room.objects).saturating_sub(both),
            used: memory.used + room.used,
            total: memory.total + room.total,
        }
    }
}

#[cfg(test)]
mod tests;
