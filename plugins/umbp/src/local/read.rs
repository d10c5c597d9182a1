//! Reading objects.

use std::sync::atomic::Ordering;
use std::time::Duration;

use kvdock_plugin_api::{Call, LogLevel, Result};
use parking_lot::Mutex;

use super::disk::{Place, Take, Trouble, Wanted};
use super::{Filling, Tiers, bytes};
use crate::config::Role;
use crate::local::memory::{Copied, Extents};
use crate::object::{Got, Piece, Read};

/// Where an object is read from.
enum Source {
    Memory(u32, Extents),
    Disk(u32, Place),
}

/// How often a record that was moved meanwhile is looked for again.
const ROUNDS: usize = 4;
/// How long one waits for what another one reads, between looks.
const LOOK: Duration = Duration::from_millis(20);

/// What a round leaves.
#[derive(Default)]
struct Rest {
    /// Has to be looked for again: it was moved while it was read.
    again: Vec<usize>,
    /// Another one reads it.
    coming: Vec<usize>,
}

/// Ranges up to which each step of a value is looked through for them.
const FEW_RANGES: usize = 8;

/// Values on their way from the disk to where they were asked for.
struct Values<'a> {
    tiers: &'a Tiers,
    /// What of each is wanted.
    reads: Vec<Option<&'a Read>>,
    outcomes: Vec<Mutex<Option<Trouble>>>,
    past_caches: bool,
}

impl Values<'_> {
    /// Copies what is wanted of bytes of a value that begin at `at`.
    fn copy(&self, read: &Read, at: usize, bytes: &[u8]) {
        for range in &read.ranges {
            let (offset, end) = (range.offset as usize, range.offset as usize + range.piece.len);
            let (from, to) = (at.max(offset), end.min(at + bytes.len()));
            let Some(part) = bytes.get(from - at..to.saturating_sub(at)).filter(|part| !part.is_empty()) else {
                continue;
            };
            let place = range.piece.base.wrapping_add(from - offset);
            // SAFETY: the piece is the caller's to be written, the part ends within it, and the value lies in a buffer of ours.
            unsafe { bytes::copy(part.as_ptr(), place, part.len(), self.past_caches) };
        }
    }
}

impl Take for Values<'_> {
    fn step(&self, number: usize, at: usize, bytes: &[u8]) {
        // While the checksum has them in the cache. A page whose checksum is wrong then has what it has: its status says so.
        if let Some(Some(read)) =
            self.reads.get(number).filter(|read| read.is_some_and(|read| read.ranges.len() <= FEW_RANGES))
        {
            self.copy(read, at, bytes);
        }
    }

    fn end(&self, number: usize, value: Result<&[u8], Trouble>) {
        let (Some(Some(read)), Some(outcome)) = (self.reads.get(number), self.outcomes.get(number)) else { return };
        match value {
            Ok(value) if value.len() as u64 == read.len => {
                if read.ranges.len() > FEW_RANGES {
                    self.copy(read, 0, value);
                }
                if self.tiers.config.promote {
                    self.tiers.promote(&read.name, value);
                }
            }
            Ok(value) => *outcome.lock() = Some(Trouble::Corrupt(format!("it has {} bytes", value.len()))),
            Err(trouble) => *outcome.lock() = Some(trouble),
        }
    }
}

impl Tiers {
    /// Reads ranges of objects.
    ///
    /// # Safety
    /// The pieces can be written, nobody else touches them, and no two overlap.
    pub(super) unsafe fn get(&self, reads: &[Read], call: &Call<'_>) -> Result<Vec<Got>> {
        let mut got = vec![Got::Missing; reads.len()];
        let mut open: Vec<usize> = (0..reads.len()).collect();
        // It waits for others once: what they read may not have found room in memory.
        let mut waits = self.config.promote && self.config.ssd.as_ref().is_some_and(|ssd| ssd.single_flight);
        let mut round = 0;
        while round < ROUNDS && !open.is_empty() {
            call.check()?;
            // SAFETY: passed on to the caller.
            let rest = unsafe { self.get_round(reads, &open, &mut got, waits) };
            open = rest.again;
            let missing = round == 0 && self.config.role == Role::Follower && got.contains(&Got::Missing);
            if missing && self.look_again() {
                let lost = got.iter().enumerate().filter(|(_, got)| **got == Got::Missing).map(|(number, _)| number);
                open.extend(lost);
            }
            round += 1;
            if !rest.coming.is_empty() {
                self.wait_for_coming(reads, &rest.coming, call)?;
                waits = false;
                // What was only waited for has had no round yet.
                round = 0;
                open.extend(rest.coming);
            }
            open.sort_unstable();
            open.dedup();
        }
        Ok(got)
    }

    /// Waits until nobody reads these any more.
    fn wait_for_coming(&self, reads: &[Read], coming: &[usize], call: &Call<'_>) -> Result<()> {
        loop {
            let state = self.state.read();
            let comes = |number: &usize| {
                let slot = reads.get(*number).and_then(|read| state.find(&read.name));
                slot.and_then(|slot| state.get(slot)).is_some_and(|entry| entry.coming)
            };
            if !coming.iter().any(comes) {
                return Ok(());
            }
            drop(state);
            call.check()?;
            self.wait(LOOK);
        }
    }

    /// Gives those that are not settled yet. Where it `waits`, what another one reads is left to that one.
    unsafe fn get_round(&self, reads: &[Read], open: &[usize], got: &mut [Got], waits: bool) -> Rest {
        let (mut in_memory, mut on_disk, mut rest) = (Vec::new(), Vec::new(), Rest::default());
        let mut bytes = 0;
        {
            let mut state = self.state.write();
            for number in open {
                let (Some(read), Some(entry)) = (reads.get(*number), got.get_mut(*number)) else { continue };
                let source = match self.source(&state, read) {
                    Ok(source) => source,
                    Err(what) => {
                        *entry = what;
                        continue;
                    }
                };
                match source {
                    Source::Memory(slot, extents) => {
                        state.pin(slot);
                        state.touch(slot);
                        bytes += read.ranges.iter().map(|range| range.piece.len as u64).sum::<u64>();
                        in_memory.push((*number, slot, extents));
                    }
                    Source::Disk(slot, place) => {
                        state.touch(slot);
                        if let Some(entry) = state.get_mut(slot).filter(|_| waits) {
                            if entry.coming {
                                rest.coming.push(*number);
                                continue;
                            }
                            entry.coming = true;
                        }
                        on_disk.push((*number, slot, place));
                    }
                }
            }
        }
        let copied = Copied { objects: in_memory.len(), bytes };
        self.memory.read_all(copied, |at, past_caches| {
            if let Some((number, _, extents)) = in_memory.get(at)
                && let Some(read) = reads.get(*number)
            {
                for range in &read.ranges {
                    // SAFETY: the object is pinned, so nobody writes its pages; the pieces are the caller's promise.
                    unsafe { self.memory.read(extents, read.len, range, past_caches) };
                }
            }
        });
        if !in_memory.is_empty() {
            let mut state = self.state.write();
            for (number, slot, _) in &in_memory {
                state.unpin(*slot);
                if let Some(entry) = got.get_mut(*number) {
                    *entry = Got::Yes;
                }
            }
        }
        // SAFETY: passed on to the caller.
        rest.again = unsafe { self.read_disk(reads, &on_disk, got) };
        if waits && !on_disk.is_empty() {
            let mut state = self.state.write();
            for (_, slot, _) in &on_disk {
                // Another object may have the slot by now; then somebody reads that one twice.
                state.get_mut(*slot).into_iter().for_each(|entry| entry.coming = false);
            }
            drop(state);
            self.ring();
        }
        rest
    }

    fn source(&self, state: &super::State, read: &Read) -> Result<Source, Got> {
        let slot = state.find(&read.name).ok_or(Got::Missing)?;
        let entry = state.get(slot).ok_or(Got::Missing)?;
        if entry.len != read.len {
            return Err(Got::Corrupt(format!("it has {} bytes, not {}", entry.len, read.len)));
        }
        match (&entry.memory, &entry.disk) {
            (Some(extents), _) => Ok(Source::Memory(slot, extents.clone())),
            (None, Some(place)) => Ok(Source::Disk(slot, place.clone())),
            (None, None) => Err(Got::Missing),
        }
    }

    unsafe fn read_disk(&self, reads: &[Read], on_disk: &[(usize, u32, Place)], got: &mut [Got]) -> Vec<usize> {
        let Some(disk) = self.disk.as_ref().filter(|_| !on_disk.is_empty()) else { return Vec::new() };
        let wanted: Vec<Wanted<'_>> = on_disk
            .iter()
            .filter_map(|(number, _, place)| Some(Wanted { key: &reads.get(*number)?.name, place: place.clone() }))
            .collect();
        let total = wanted.iter().map(|wanted| u64::from(wanted.place.at.value_len)).sum();
        let values = Values {
            tiers: self,
            reads: on_disk.iter().map(|(number, ..)| reads.get(*number)).collect(),
            outcomes: on_disk.iter().map(|_| Mutex::default()).collect(),
            past_caches: self.memory.reads_past_caches(total),
        };
        disk.read(&wanted, &values);
        let outcomes = values.outcomes;
        let mut again = Vec::new();
        let mut places = Vec::new();
        for ((number, slot, place), outcome) in on_disk.iter().zip(outcomes) {
            let (Some(entry), Some(read)) = (got.get_mut(*number), reads.get(*number)) else { continue };
            match outcome.into_inner() {
                None => *entry = Got::Yes,
                Some(Trouble::Io(what)) => {
                    self.failed(&format!("a segment can't be read: {what}"));
                    *entry = Got::Failed(what);
                }
                Some(Trouble::Corrupt(what)) => {
                    let mut state = self.state.write();
                    let found = state.find(&read.name);
                    let same = found == Some(*slot)
                        && state.get(*slot).and_then(|entry| entry.disk.as_ref()).is_some_and(|at| at.is(place));
                    if !same {
                        // It was moved or removed while it was read.
                        *entry = Got::Missing;
                        again.push(*number);
                        continue;
                    }
                    places.extend(state.drop_disk(*slot));
                    drop(state);
                    let name = String::from_utf8_lossy(&read.name).into_owned();
                    self.host.log(LogLevel::Warn, "umbp", &format!("the record of {name} is corrupt: {what}"));
                    *entry = Got::Corrupt(what);
                }
            }
        }
        self.forget(&places);
        again
    }

    /// A copy in memory of what was read from disk, where there is room below the high watermark.
    fn promote(&self, name: &[u8], value: &[u8]) {
        let len = value.len() as u64;
        let Ok(needed) = u32::try_from(self.memory.pages_for(len)) else { return };
        let extents = {
            let mut state = self.state.write();
            let high = f64::from(state.pages.total()) * self.config.dram.high;
            if f64::from(state.pages.used()) + f64::from(needed) > high {
                return;
            }
            state.pages.take(needed).map(|extents| (extents, Filling::begin(&self.filling)))
        };
        let Some((extents, filling)) = extents else { return };
        let piece = Piece { base: value.as_ptr().cast_mut(), len: value.len() };
        // SAFETY: the extents were taken for this copy alone, and the piece is only read.
        unsafe { self.memory.fill(&extents, len, &[piece]) };
        let mut state = self.state.write();
        drop(filling);
        let slot = state.find(name);
        let target =
            slot.and_then(|slot| state.get_mut(slot)).filter(|entry| entry.memory.is_none() && entry.len == len);
        match target {
            Some(entry) => {
                entry.memory = Some(extents);
                if let Some(slot) = slot {
                    state.recent.touch(slot);
                }
                self.promoted.fetch_add(1, Ordering::Relaxed);
            }
            None => state.pages.give(&extents),
        }
    }
}
