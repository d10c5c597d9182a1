//! Storing objects.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvdock_plugin_api::{Call, Result};

use super::{Filling, Tiers};
use crate::config::Role;
use crate::local::memory::{Copied, Extents};
use crate::local::state::{Entry, Hidden};
use crate::object::{Put, Stored};
use crate::segment::Item;

/// How long a put waits for memory that others are about to free, between looks.
const LOOK: Duration = Duration::from_millis(20);

impl Tiers {
    /// Stores objects.
    ///
    /// # Safety
    /// The pieces can be read, and nobody writes them meanwhile.
    pub(super) unsafe fn put(&self, puts: &[Put], call: &Call<'_>) -> Result<Vec<Stored>> {
        if self.config.role == Role::Follower {
            let names: Vec<Vec<u8>> = puts.iter().map(|put| put.name.clone()).collect();
            let there = self.exists(&names);
            // Nothing is said to be stored that is not.
            return Ok(there.into_iter().map(|there| if there { Stored::Yes } else { Stored::Refused }).collect());
        }
        let mut stored = vec![Stored::Refused; puts.len()];
        let mut open: Vec<usize> = Vec::new();
        // What is there without a record: the copy of a leader may have failed before.
        let mut in_memory = Vec::new();
        {
            let mut state = self.state.write();
            for (number, put) in puts.iter().enumerate() {
                match state.find(&put.name) {
                    Some(slot) => {
                        state.touch(slot);
                        set(&mut stored, number, Stored::Yes);
                        if state.get(slot).is_some_and(|entry| entry.disk.is_none()) {
                            in_memory.push(slot);
                        }
                    }
                    None => open.push(number),
                }
            }
        }
        let mut first: HashMap<&[u8], usize> = HashMap::new();
        let mut again = Vec::new();
        open.retain(|number| {
            let Some(put) = puts.get(*number) else { return false };
            let before = *first.entry(&put.name).or_insert(*number);
            if before != *number {
                again.push((*number, before));
            }
            before == *number
        });
        let mut hidden = Vec::new();
        // SAFETY: passed on to the caller.
        let result = unsafe { self.put_hidden(puts, &open, &mut stored, &mut hidden, call) };
        // All of a call can be found from the same moment on.
        let mut state = self.state.write();
        let places: Vec<_> = hidden.iter().filter_map(|hidden| state.show(*hidden)).collect();
        drop(state);
        self.forget(&places);
        result?;
        if self.config.role == Role::Leader {
            let written: Vec<u32> = hidden.iter().map(|hidden| hidden.slot).chain(in_memory).collect();
            self.copy_to_disk(&written, puts, &mut stored);
        }
        for (number, before) in again {
            let like = stored.get(before).cloned().unwrap_or(Stored::Refused);
            set(&mut stored, number, like);
        }
        self.settle_memory();
        Ok(stored)
    }

    /// Stores objects that nobody finds yet.
    unsafe fn put_hidden(
        &self,
        puts: &[Put],
        open: &[usize],
        stored: &mut [Stored],
        hidden: &mut Vec<Hidden>,
        call: &Call<'_>,
    ) -> Result<()> {
        let mut rest = open;
        while !rest.is_empty() {
            call.check()?;
            let (taken, needed, filling) = self.take(puts, rest);
            if taken.is_empty() {
                let Some((number, later)) = rest.split_first() else { break };
                let Some(put) = puts.get(*number) else { break };
                if needed > u64::from(self.memory.pages()) {
                    // SAFETY: passed on to the caller.
                    set(stored, *number, unsafe { self.put_on_disk(put, hidden) });
                    rest = later;
                } else if !self.make_room(needed as u32, call)? {
                    rest = later;
                }
                continue;
            }
            rest = rest.get(taken.len()..).unwrap_or_default();
            let bytes = taken.iter().filter_map(|(number, _)| puts.get(*number)).map(Put::len).sum();
            self.memory.fill_all(Copied { objects: taken.len(), bytes }, |at| {
                if let Some((number, extents)) = taken.get(at)
                    && let Some(put) = puts.get(*number)
                {
                    // SAFETY: the extents were taken for this object alone; the pieces are the caller's promise.
                    unsafe { self.memory.fill(extents, put.len(), &put.pieces) };
                }
            });
            let mut state = self.state.write();
            drop(filling);
            for (number, extents) in taken {
                let Some(put) = puts.get(number) else { continue };
                hidden.push(state.insert_hidden(&put.name, put.len(), put.depth, Some(extents), None));
                set(stored, number, Stored::Yes);
            }
        }
        Ok(())
    }

    /// Takes memory for as many as there is room for, and says how many pages the first one that got none needs.
    fn take(&self, puts: &[Put], open: &[usize]) -> (Vec<(usize, Extents)>, u64, Option<Filling<'_>>) {
        let mut taken = Vec::new();
        let mut needed = 0;
        let mut state = self.state.write();
        for number in open {
            let Some(put) = puts.get(*number) else { break };
            let pages = self.memory.pages_for(put.len());
            let Some(extents) = u32::try_from(pages).ok().and_then(|pages| state.pages.take(pages)) else {
                needed = pages;
                break;
            };
            taken.push((*number, extents));
        }
        let filling = (!taken.is_empty()).then(|| Filling::begin(&self.filling));
        (taken, needed, filling)
    }

    /// Frees memory until so many pages are free; false when it can't.
    fn make_room(&self, needed: u32, call: &Call<'_>) -> Result<bool> {
        loop {
            {
                let state = self.state.read();
                if state.pages.total() - state.pages.used() >= needed {
                    return Ok(true);
                }
            }
            call.check()?;
            if !self.free_some(needed) {
                let state = self.state.read();
                if state.pages.total() - state.pages.used() >= needed {
                    return Ok(true);
                }
                // Somebody may have put objects in place between the two looks, which can leave now.
                let in_memory = |entry: &Entry| entry.memory.is_some() && entry.pins == 0;
                let can_leave = state.slots().any(|(_, entry)| in_memory(entry));
                let busy = self.filling.load(Ordering::Acquire) > 0 || state.slots().any(|(_, entry)| entry.pins > 0);
                drop(state);
                if !can_leave && !busy {
                    return Ok(false);
                }
                if !can_leave {
                    self.wait(LOOK);
                }
            }
        }
    }

    /// An object that is larger than all of memory.
    unsafe fn put_on_disk(&self, put: &Put, hidden: &mut Vec<Hidden>) -> Stored {
        let Some(disk) = &self.disk else { return Stored::Refused };
        let len = crate::segment::record::record_len(
            crate::segment::record::Version::Three,
            put.name.len() as u32,
            u32::try_from(put.len()).unwrap_or(u32::MAX),
        );
        if u32::try_from(put.len()).is_err() || !self.make_disk_room(len) {
            return Stored::Refused;
        }
        // SAFETY: passed on to the caller.
        match unsafe { disk.append(&[Item { key: &put.name, pieces: &put.pieces }]) } {
            Ok(places) if places.iter().any(|place| place.at.segment.is_lost()) => Stored::Refused,
            Ok(places) => {
                self.went_well();
                let mut state = self.state.write();
                let new = |place| state.insert_hidden(&put.name, put.len(), put.depth, None, Some(place));
                hidden.extend(places.into_iter().map(new));
                Stored::Yes
            }
            Err(error) => {
                let what = format!("a segment can't be written: {error}");
                self.failed(&what);
                Stored::Failed(what)
            }
        }
    }

    /// A leader's copies: in the background, or at once. A copy at once that fails is no success.
    fn copy_to_disk(&self, written: &[u32], puts: &[Put], stored: &mut [Stored]) {
        let background = if self.config.pipeline.background {
            let mut queue = self.queue.lock();
            let room = self.config.pipeline.queue.saturating_sub(queue.len()).min(written.len());
            queue.extend(written.iter().take(room));
            room
        } else {
            0
        };
        if background > 0 {
            self.ring();
        }
        let now = written.get(background..).unwrap_or_default();
        let mut names = Vec::new();
        for slots in now.chunks(self.config.pipeline.batch) {
            if let Err(what) = self.write_out(slots)
                && !self.config.pipeline.background
            {
                let state = self.state.read();
                let failed = slots.iter().filter_map(|slot| state.get(*slot)).filter(|entry| entry.disk.is_none());
                names.extend(failed.map(|entry| (entry.name.clone(), what.clone())));
            }
        }
        for (put, stored) in puts.iter().zip(stored).filter(|_| !names.is_empty()) {
            if let Some((_, what)) = names.iter().find(|(name, _)| **name == *put.name) {
                *stored = Stored::Failed(what.clone());
            }
        }
    }

    /// Above its high watermark memory is freed down to the low one: here when there is no disk, else by the copying threads.
    fn settle_memory(&self) {
        if self.state.read().used() < self.config.dram.high {
            return;
        }
        if self.disk.is_some() {
            self.ring();
            return;
        }
        while self.state.read().used() > self.config.dram.low {
            let over = {
                let state = self.state.read();
                let low = (f64::from(state.pages.total()) * self.config.dram.low) as u32;
                state.pages.used().saturating_sub(low)
            };
            if !self.free_some(over) {
                return;
            }
        }
    }
}

fn set(stored: &mut [Stored], number: usize, to: Stored) {
    if let Some(entry) = stored.get_mut(number) {
        *entry = to;
    }
}
