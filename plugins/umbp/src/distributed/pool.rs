//! The memory of a node: objects of its own and of others, places for objects that are on their way here, and what the master is to be told.

mod events;
mod slots;
mod state;

use std::time::{Duration, Instant};

use kvdock_plugin_api::Result;
use parking_lot::{Condvar, Mutex};

use crate::config::{Copies, Dram};
use crate::local::memory::{Extents, Memory};
use crate::object::{Got, Held, Piece, Range};

pub use events::{Beat, Bounds};
pub use slots::{Allocated, PENDING, Writing};
use state::State;

/// The pool.
#[derive(Debug)]
pub struct Pool {
    memory: Memory,
    page: u64,
    copies: Copies,
    /// How long an object that another node was told the place of stays there.
    lease: Duration,
    state: Mutex<State>,
    /// Rings when the master has acknowledged something.
    acknowledged: Condvar,
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
    /// Copies a range of it out; one that ends behind it is cut.
    ///
    /// # Safety
    /// The piece can be written, and nobody else touches it.
    pub unsafe fn read(&self, range: &Range) {
        // SAFETY: passed on to the caller; the object is pinned, and objects are never written again.
        unsafe { self.pool.memory.read(&self.extents, self.len, range) }
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
        Ok(Pool { page: config.page, copies: config.copies, lease, state, acknowledged: Condvar::new(), memory })
    }

    /// Bytes of a page.
    pub fn page_size(&self) -> u64 {
        self.page
    }

    /// How bytes are copied in and out.
    pub fn copies(&self) -> Copies {
        self.copies
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
        names.iter().map(|name| state.find(name).is_some()).collect()
    }

    /// Which of these are here; they are used now.
    pub fn use_now(&self, names: &[&str]) -> Vec<bool> {
        let mut state = self.state.lock();
        names.iter().map(|name| state.find(name).map(|slot| state.touch(slot)).is_some()).collect()
    }

    /// Whether the master may still take an object to be here that is not any more.
    pub fn is_leaving(&self, name: &str) -> bool {
        self.state.lock().log.is_leaving(name)
    }

    /// Keeps an object where it is, to be read. With `len`, it has to have so many bytes.
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
        self.state.lock().take(pages, Instant::now())
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

    /// Frees an object, and says how many bytes; 0 when it is not here, or somebody reads it.
    pub fn evict(&self, name: &str) -> u64 {
        let mut state = self.state.lock();
        let Some(slot) = state.find(name).filter(|slot| state.is_free(*slot, Instant::now())) else { return 0 };
        let len = state.place(slot).map_or(0, |(len, _)| len);
        state.detach(slot, Instant::now());
        len
    }

    /// Nobody finds an object any more; those who read it go on. Says whether it was here.
    pub fn remove(&self, name: &str) -> bool {
        let mut state = self.state.lock();
        let Some(slot) = state.find(name) else { return false };
        state.detach(slot, Instant::now());
        true
    }

    /// Removes what is named with a prefix, also what is still on its way here.
    pub fn clear(&self, prefix: &str) {
        self.state.lock().clear(prefix, Instant::now());
    }

    /// Forgets what has waited too long.
    pub fn reap(&self) {
        self.state.lock().reap(Instant::now());
    }

    /// Figures: `used` and `total` in bytes of whole pages.
    pub fn held(&self) -> Held {
        let state = self.state.lock();
        let (objects, used) = (state.len() as u64, u64::from(state.pages.used()) * self.page);
        Held { objects, used, total: u64::from(self.memory.pages()) * self.page }
    }
}

#[cfg(test)]
mod tests;
