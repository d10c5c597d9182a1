//! Places for objects that other nodes send here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::state::State;
use super::{Pool, pages_of};
use crate::local::memory::Extents;
use crate::object::Piece;

/// How long an object may take from its place to its commit.
pub const PENDING: Duration = Duration::from_secs(30);

/// A place.
#[derive(Debug)]
pub struct Slot {
    pub name: Arc<str>,
    len: u64,
    extents: Extents,
    pub until: Instant,
    /// It is being filled over a socket.
    pub busy: bool,
    /// Filling it was broken off.
    torn: bool,
    /// It is not to be shown any more.
    pub dead: bool,
}

/// What becomes of a request for a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allocated {
    /// Number of the slot, and its pages.
    Yes(u64, Vec<u32>),
    /// An object of this name is there.
    Exists,
    /// Another one is on its way.
    Pending,
    /// There is no room.
    NoSpace,
}

/// A place that is being filled.
#[derive(Debug)]
pub struct Writing<'a> {
    pool: &'a Pool,
    id: u64,
    /// Its memory, which is this one's alone.
    pub pieces: Vec<Piece>,
    whole: bool,
}

impl Writing<'_> {
    /// All of its bytes have come.
    pub fn done(mut self) {
        self.whole = true;
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        if let Some(slot) = state.slots.get_mut(&self.id) {
            slot.busy = false;
            slot.torn = !self.whole;
        }
    }
}

impl State {
    /// Gives a place up.
    pub fn drop_slot(&mut self, id: u64) {
        let Some(slot) = self.slots.remove(&id) else { return };
        // Of a dead one the name may be another one's by now.
        if !slot.dead {
            self.pending.remove(&slot.name);
        }
        self.pages.give(&slot.extents);
    }
}

impl Pool {
    /// A place for an object that another node sends.
    pub fn allocate(&self, name: &str, len: u64) -> Allocated {
        if self.use_now(&[name]) == [true] {
            return Allocated::Exists;
        }
        if self.state.lock().pending.contains(name) {
            return Allocated::Pending;
        }
        let Some(extents) = self.take(len) else { return Allocated::NoSpace };
        let now = Instant::now();
        let mut state = self.state.lock();
        // Somebody else may have come first meanwhile.
        let there = if state.find(name).is_some() {
            Some(Allocated::Exists)
        } else {
            state.pending.contains(name).then_some(Allocated::Pending)
        };
        if let Some(there) = there {
            state.pages.give(&extents);
            return there;
        }
        state.last_slot += 1;
        let (id, pages, name) = (state.last_slot, pages_of(&extents), Arc::<str>::from(name));
        state.pending.insert(name.clone());
        let slot = Slot { name, len, extents, until: now + PENDING, busy: false, torn: false, dead: false };
        state.slots.insert(id, slot);
        Allocated::Yes(id, pages)
    }

    /// Fills a place of so many bytes; none when there is no such place.
    pub fn write(&self, id: u64, len: u64) -> Option<Writing<'_>> {
        let mut state = self.state.lock();
        let slot = state.slots.get_mut(&id)?;
        if slot.busy || slot.dead || slot.len != len || slot.until <= Instant::now() {
            return None;
        }
        slot.busy = true;
        let pieces = self.memory.pieces(&slot.extents, len);
        Some(Writing { pool: self, id, pieces, whole: false })
    }

    /// Shows what was sent. Says whether it did, and how many events wait for the master.
    pub fn commit(&self, id: u64, name: &str) -> (bool, usize) {
        let mut state = self.state.lock();
        let good = state.slots.get(&id).is_some_and(|slot| {
            *slot.name == *name && !slot.busy && !slot.dead && !slot.torn && slot.until > Instant::now()
        });
        if good && let Some(slot) = state.slots.remove(&id) {
            state.pending.remove(&slot.name);
            state.insert(&slot.name, slot.len, slot.extents);
            self.settle(&state);
        }
        (good, state.log.waiting())
    }

    /// Gives a place back. One that is being filled goes when its time is over.
    pub fn abort(&self, id: u64) {
        let mut state = self.state.lock();
        match state.slots.get_mut(&id) {
            Some(slot) if slot.busy => {
                slot.dead = true;
                let name = slot.name.clone();
                state.pending.remove(&name);
            }
            _ => state.drop_slot(id),
        }
    }
}
