//! Between memory and the segments below it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Call, Result};

use super::Pool;
use super::state::State;
use crate::local::below::{Below, Places};
use crate::local::memory::Extents;
use crate::object::{Got, Piece, Range, Read};

/// How often the thread that writes out looks by itself.
const IDLE: Duration = Duration::from_millis(500);
/// How often room is made for one object that others then take.
const TRIES: usize = 16;

/// An object of memory that is being written out; it is pinned.
struct Leaving {
    slot: u32,
    name: Arc<str>,
    pieces: Vec<Piece>,
}

impl Pool {
    /// Whether there are segments.
    pub fn has_below(&self) -> bool {
        self.below.is_some()
    }

    /// Whether what is read from segments comes back to memory.
    pub fn promotes(&self) -> bool {
        self.promote
    }

    /// The segments.
    pub fn below(&self) -> Option<&Below> {
        self.below.as_ref()
    }

    /// Keeps memory below its high watermark, until it is told to stop. What is used longest ago is written to segments.
    pub fn write_out_until_stopped(&self) {
        let Some(below) = &self.below else { return };
        while !self.stopping.load(Ordering::Acquire) {
            below.look_for_lost();
            while self.used() > self.high && !self.stopping.load(Ordering::Acquire) {
                if !self.demote(below, 1) {
                    break;
                }
            }
            let mut rung = self.rung.lock();
            if !std::mem::take(&mut *rung) {
                self.bell.wait_for(&mut rung, IDLE);
            }
        }
    }

    /// Has [`Pool::write_out_until_stopped`] end.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.ring();
    }

    fn used(&self) -> f64 {
        let state = self.state.lock();
        f64::from(state.pages.used()) / f64::from(state.pages.total().max(1))
    }

    /// Wakes the thread that writes out.
    fn ring(&self) {
        *self.rung.lock() = true;
        self.bell.notify_all();
    }

    /// Where memory is above its high watermark, some of it is to be written out.
    pub(super) fn settle(&self, state: &State) {
        let used = f64::from(state.pages.used()) / f64::from(state.pages.total().max(1));
        if self.below.is_some() && used > self.high {
            self.ring();
        }
    }

    /// Room for an object: what has to go for it is written out before.
    pub(super) fn take_above(&self, below: &Below, pages: u32) -> Option<Extents> {
        for _ in 0..TRIES {
            let free = {
                let mut state = self.state.lock();
                state.reap(Instant::now());
                if let Some(found) = state.pages.take(pages) {
                    self.settle(&state);
                    return Some(found);
                }
                state.pages.total() - state.pages.used()
            };
            if pages == 0 || !self.demote(below, pages.saturating_sub(free).max(1)) {
                return None;
            }
        }
        // Others were faster each time.
        self.state.lock().take(pages, Instant::now())
    }

    /// Frees memory of objects used longest ago, down to the low watermark or as much as one write takes; they are in segments then. Nothing happens where `least`
    /// pages can't come free. Says whether anything did.
    fn demote(&self, below: &Below, least: u32) -> bool {
        let (bytes, count) = below.batch();
        let leaving = {
            let mut state = self.state.lock();
            let now = Instant::now();
            let low = (f64::from(state.pages.total()) * self.low) as u32;
            let pages = state.pages.used().saturating_sub(low).max(least);
            let slots = state.oldest(pages, least, (bytes / self.page).max(1), count, now);
            self.pinned(&mut state, slots)
        };
        if leaving.is_empty() {
            return false;
        }
        self.write_out(below, &leaving, true) > 0
    }

    fn pinned(&self, state: &mut State, slots: Vec<u32>) -> Vec<Leaving> {
        let pin = |slot: u32| {
            let (len, extents) = state.place(slot)?;
            let name = state.name(slot)?;
            state.pin(slot);
            Some(Leaving { slot, name, pieces: self.memory.pieces(&extents, len) })
        };
        slots.into_iter().filter_map(pin).collect()
    }

    /// Writes those that are in no segment yet, and takes their pins off. With `free` they leave memory: also where they could not be written, for memory goes on
    /// without segments, and loses what was used longest ago. Says how many have left.
    fn write_out(&self, below: &Below, leaving: &[Leaving], free: bool) -> usize {
        let names: Vec<&str> = leaving.iter().map(|one| &*one.name).collect();
        let found = below.use_now(&names);
        let new: Vec<&Leaving> = leaving.iter().zip(&found).filter(|(_, found)| !**found).map(|(one, _)| one).collect();
        let objects: Vec<(Arc<str>, Vec<Piece>)> =
            new.iter().map(|one| (one.name.clone(), one.pieces.clone())).collect();
        // SAFETY: the objects are pinned, so their memory stays theirs, and objects are never written again.
        let written = if objects.is_empty() { None } else { unsafe { below.write(&objects) }.ok() };
        let now = Instant::now();
        let mut state = self.state.lock();
        // What was removed meanwhile is not to come back.
        let there = |one: &Leaving| state.find(&one.name) == Some(one.slot);
        let places = written.map(|written| below.show(written, |number| new.get(number).is_some_and(|one| there(one))));
        let mut left = 0;
        for one in leaving {
            state.unpin(one.slot, now);
            if free && state.find(&one.name) == Some(one.slot) && state.is_free(one.slot, now) {
                state.detach(one.slot, now);
                left += 1;
            }
        }
        drop(state);
        below.forget(places.unwrap_or_default());
        left
    }

    /// Writes everything that memory has alone, and has it on the disk.
    ///
    /// # Errors
    /// When that could not be done, or the call is over.
    pub fn write_out_all(&self, call: &Call<'_>) -> Result<()> {
        let Some(below) = &self.below else { return Ok(()) };
        let (bytes, count) = below.batch();
        // Where the segments have room for a part only, the youngest part is worth most.
        let mut slots = self.state.lock().youngest(below.low());
        slots.reverse();
        let mut rest = slots.as_slice();
        while !rest.is_empty() {
            call.check()?;
            let leaving = {
                let mut state = self.state.lock();
                let mut sum = 0;
                let fit = rest.iter().take(count).take_while(|(slot, _)| {
                    sum += state.place(*slot).map_or(0, |(len, _)| len);
                    sum <= bytes
                });
                let (now, later) = rest.split_at(fit.count().max(1).min(rest.len()));
                rest = later;
                // Another object may have the slot by now.
                let same = now.iter().filter(|(slot, name)| state.name(*slot).as_ref() == Some(name));
                let slots = same.map(|(slot, _)| *slot).collect();
                self.pinned(&mut state, slots)
            };
            self.write_out(below, &leaving, false);
        }
        let health = below.health();
        if health.state != kvdock_plugin_api::HealthState::Ok {
            let error = kvdock_plugin_api::Error::new(kvdock_plugin_api::ErrorKind::Unavailable, health.reason);
            return Err(error.retryable());
        }
        below.sync()
    }

    /// Takes some of these out of memory, but what somebody reads; they are in segments then. Gives the bytes of each that has left.
    pub(super) fn evict_above(&self, below: &Below, names: &[String]) -> Vec<u64> {
        let now = Instant::now();
        let leaving = {
            let mut state = self.state.lock();
            let slots: Vec<u32> =
                names.iter().filter_map(|name| state.find(name)).filter(|slot| state.is_free(*slot, now)).collect();
            self.pinned(&mut state, slots)
        };
        let (_, count) = below.batch();
        for part in leaving.chunks(count.max(1)) {
            self.write_out(below, part, true);
        }
        let state = self.state.lock();
        let bytes = |name: &String| {
            let one =
                leaving.iter().find(|one| *one.name == **name).filter(|one| state.find(&one.name) != Some(one.slot));
            one.map_or(0, |one| one.pieces.iter().map(|piece| piece.len as u64).sum())
        };
        names.iter().map(bytes).collect()
    }

    /// Reads these from segments into memory, those for which there is room to spare.
    pub fn bring(&self, names: &[&str]) {
        let Some(below) = self.below.as_ref().filter(|_| self.promote) else { return };
        let epoch = self.state.lock().removals;
        let missing: Vec<&str> = {
            let state = self.state.lock();
            names.iter().copied().filter(|name| state.find(name).is_none()).collect()
        };
        let mut coming: Vec<(String, u64, Extents)> = Vec::new();
        for (name, len) in missing.iter().zip(below.find(&missing)) {
            let Some(len) = len else { continue };
            let Some(extents) = self.take_spare(len, self.high) else { break };
            coming.push(((*name).to_owned(), len, extents));
        }
        if coming.is_empty() {
            return;
        }
        let reads: Vec<Read> = coming
            .iter()
            .map(|(name, len, extents)| {
                let mut offset = 0;
                let range = |piece: Piece| {
                    let range = Range { offset, piece };
                    offset += piece.len as u64;
                    range
                };
                let ranges = self.memory.pieces(extents, *len).into_iter().map(range).collect();
                Read { name: name.as_bytes().to_vec(), len: *len, ranges }
            })
            .collect();
        // SAFETY: the extents were taken for these objects alone, and nobody knows of them yet.
        let got = unsafe { below.read(&reads, &Call::unbounded()) }.unwrap_or_default();
        let mut state = self.state.lock();
        // Something was removed meanwhile: it may be one of these.
        let good = state.removals == epoch;
        for (number, (name, len, extents)) in coming.into_iter().enumerate() {
            if good && got.get(number) == Some(&Got::Yes) {
                state.insert(&name, len, extents);
            } else {
                state.pages.give(&extents);
            }
        }
        self.settle(&state);
    }

    /// Whether memory has it.
    pub fn is_in_memory(&self, name: &str) -> bool {
        self.state.lock().find(name).is_some()
    }

    /// The bytes of an object of the segments; none when it is not there, or damaged.
    pub fn read_below(&self, name: &str) -> Option<Vec<u8>> {
        let below = self.below.as_ref()?;
        let len = below.find(&[name]).first().copied().flatten()?;
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        let piece = Piece { base: bytes.as_mut_ptr(), len: bytes.len() };
        let read = Read { name: name.as_bytes().to_vec(), len, ranges: vec![Range { offset: 0, piece }] };
        // SAFETY: the vector is this function's own.
        let got = unsafe { below.read(&[read], &Call::unbounded()) }.ok()?;
        (got == [Got::Yes]).then_some(bytes)
    }

    /// Nobody finds these any more, in memory or in segments. Says which were there. The places are to be forgotten.
    pub(super) fn take_out(&self, state: &mut State, names: &[&str]) -> (Vec<bool>, Option<Places>) {
        state.removals += 1;
        let below = self.below.as_ref().map(|below| below.take_out(names));
        let (below, places) = below.map_or((Vec::new(), None), |(found, places)| (found, Some(places)));
        let now = Instant::now();
        let take = |(number, name): (usize, &&str)| {
            let slot = state.find(name);
            slot.into_iter().for_each(|slot| state.detach(slot, now));
            slot.is_some() || below.get(number) == Some(&true)
        };
        (names.iter().enumerate().map(take).collect(), places)
    }
}
