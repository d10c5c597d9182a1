//! Between memory and disk: what leaves memory, how it is written out, and what makes room on the disk.

use std::sync::atomic::Ordering;
use std::time::Duration;

use kvdock_plugin_api::{Call, Error, ErrorKind, Result};

use super::Tiers;
use super::disk::{Place, Take, Trouble, Wanted};
use super::state::State;
use crate::config::Policy;
use crate::names::group;
use crate::object::Piece;
use crate::segment::Item;
use crate::segment::record::{Version, record_len};

/// Bytes that are written out at a time.
pub(super) const ROUND: u64 = 32 << 20;
/// How often the copying threads look by themselves.
const IDLE: Duration = Duration::from_millis(500);

/// How long who needs room looks away from a segment that somebody else is writing to, and how often.
const WAIT: Duration = Duration::from_millis(20);
const WAITS: u32 = 250;

/// What became of a segment that was written anew.
enum Compacted {
    /// Its file is gone.
    Gone,
    /// Another thread is writing a record to it; it goes with that.
    Held,
    /// It could not be written anew.
    Failed,
}

/// Copies of values that are right.
struct Values(Vec<parking_lot::Mutex<Option<Vec<u8>>>>);

impl Take for Values {
    fn end(&self, number: usize, value: Result<&[u8], Trouble>) {
        if let (Some(room), Ok(value)) = (self.0.get(number), value) {
            *room.lock() = Some(value.to_vec());
        }
    }
}

impl Tiers {
    /// What the copying threads do.
    pub(super) fn copy_loop(&self) {
        while !self.is_stopping() {
            self.look_for_lost();
            let batch: Vec<u32> = {
                let mut queue = self.queue.lock();
                let many = queue.len().min(self.config.pipeline.batch);
                queue.drain(..many).collect()
            };
            if !batch.is_empty() {
                // What fails is told by the health, and tried again when the object leaves memory.
                let _ = self.write_out(&batch);
                continue;
            }
            if self.state.read().used() >= self.config.dram.high {
                while !self.is_stopping() && self.state.read().used() > self.config.dram.low && self.free_some(1) {}
            }
            self.wait(IDLE);
        }
    }

    /// Frees memory of objects used longest ago: at least so many pages where it can. With a disk they are written out first. False when
    /// nothing could be freed.
    pub(super) fn free_some(&self, pages: u32) -> bool {
        let (mut freed, mut out, mut bytes) = (0, Vec::new(), 0);
        let mut serials = Vec::new();
        {
            let mut state = self.state.write();
            let before = state.pages.used();
            while freed < pages && out.len() < self.config.pipeline.batch && bytes < ROUND {
                let victims = self.victims(&state, &out);
                if victims.is_empty() {
                    break;
                }
                for slot in victims {
                    let Some(entry) = state.get(slot) else { continue };
                    if entry.disk.is_none() && self.disk.is_some() {
                        bytes += entry.len;
                        serials.push(entry.serial);
                        out.push(slot);
                        freed += self.memory.pages_for(entry.len) as u32;
                    } else {
                        let lost = entry.disk.is_none();
                        state.drop_memory(slot);
                        self.evicted.fetch_add(u64::from(lost), Ordering::Relaxed);
                    }
                }
                if out.is_empty() {
                    freed = before - state.pages.used();
                }
            }
            if out.is_empty() {
                drop(state);
                if freed > 0 {
                    self.ring();
                }
                return freed > 0;
            }
        }
        // Where the disk has no room or fails, memory goes on without it: what was used longest ago is lost, and counted.
        let _ = self.write_out(&out);
        let mut state = self.state.write();
        let before = state.pages.used();
        for (slot, serial) in out.into_iter().zip(serials) {
            // It may have been removed while it was written, and another object have its slot, which nobody has written out.
            let Some(entry) = state.get(slot).filter(|entry| entry.serial == serial) else { continue };
            let lost = entry.disk.is_none();
            if state.drop_memory(slot) {
                let count = if lost { &self.evicted } else { &self.demoted };
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
        let freed = before.saturating_sub(state.pages.used());
        drop(state);
        self.ring();
        freed > 0
    }

    /// What leaves memory next: one object, and those of its page.
    fn victims(&self, state: &State, taken: &[u32]) -> Vec<u32> {
        let free = |slot: &u32| {
            !taken.contains(slot)
                && state.get(*slot).is_some_and(|entry| entry.pins == 0 && !entry.moving && entry.memory.is_some())
        };
        let mut candidates = state.recent.oldest_first().filter(free);
        let chosen = match self.config.policy {
            Policy::Lru => candidates.next(),
            Policy::PrefixAwareLru => {
                let mut best: Option<(u32, u32)> = None;
                for slot in candidates.take(self.config.window) {
                    let depth = state.get(slot).map_or(0, |entry| entry.depth);
                    if best.is_none_or(|(_, deepest)| depth > deepest) {
                        best = Some((slot, depth));
                    }
                }
                best.map(|(slot, _)| slot)
            }
        };
        let Some(chosen) = chosen else { return Vec::new() };
        let mut victims = vec![chosen];
        let Some(name) = state.get(chosen).map(|entry| entry.name.clone()) else { return victims };
        if group(&name).len() < name.len() {
            let (head, last) = name.split_at(name.len() - 1);
            let other = if last == b"k" { b'v' } else { b'k' };
            let twin = state.find(&[head, &[other]].concat());
            victims.extend(twin.filter(|slot| *slot != chosen && free(slot)));
        }
        victims
    }

    /// Gives objects in memory a record on the disk, if they have none. They stay in memory.
    pub(super) fn write_out(&self, slots: &[u32]) -> Result<(), String> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let mut todo: Vec<(u32, std::sync::Arc<[u8]>, Vec<Piece>)> = Vec::new();
        let mut bytes = 0;
        {
            let mut state = self.state.write();
            for slot in slots {
                let Some(entry) = state.get_mut(*slot).filter(|entry| entry.disk.is_none() && !entry.moving) else {
                    continue;
                };
                let Some(extents) = &entry.memory else { continue };
                let Ok(len) = u32::try_from(entry.len) else { continue };
                let pieces = self.memory.pieces(extents, entry.len);
                bytes += record_len(Version::Three, entry.name.len() as u32, len);
                todo.push((*slot, entry.name.clone(), pieces));
                entry.moving = true;
                entry.pins += 1;
            }
        }
        if todo.is_empty() {
            return Ok(());
        }
        let result = if self.make_disk_room(bytes) {
            let items: Vec<Item<'_>> = todo.iter().map(|(_, key, pieces)| Item { key, pieces }).collect();
            // SAFETY: the objects are pinned, so their memory stays theirs, and objects in memory are never written again.
            unsafe { disk.append(&items) }.map_err(|error| format!("a segment can't be written: {error}"))
        } else {
            Err(format!("{bytes} bytes do not fit into ssd_capacity_bytes = {}", disk.capacity))
        };
        let mut places = match &result {
            Ok(places) => places.clone(),
            Err(_) => Vec::new(),
        }
        .into_iter();
        let mut lost = Vec::new();
        let mut state = self.state.write();
        for (slot, ..) in &todo {
            let place = places.next();
            let there = state.is_there(*slot);
            if let Some(entry) = state.get_mut(*slot) {
                entry.moving = false;
                match place {
                    Some(place) if there && !place.at.segment.is_lost() => entry.disk = Some(place),
                    Some(place) => lost.push(place),
                    None => {}
                }
            }
            let on_disk = there && state.get(*slot).is_some_and(|entry| entry.disk.is_some());
            if on_disk {
                state.on_disk.touch(*slot);
            }
            state.unpin(*slot);
        }
        drop(state);
        self.forget(&lost);
        self.ring();
        match result {
            Ok(_) => {
                self.went_well();
                Ok(())
            }
            Err(what) => {
                self.failed(&what);
                Err(what)
            }
        }
    }

    /// Writes out everything that has no record yet, the oldest first.
    pub(super) fn write_out_all(&self, call: &Call<'_>) -> Result<()> {
        let mut slots: Vec<u32> = {
            let state = self.state.read();
            let all = state.recent.oldest_first();
            all.filter(|slot| state.get(*slot).is_some_and(|entry| entry.disk.is_none())).collect()
        };
        let fail = |what: String| Error::new(ErrorKind::Unavailable, what).retryable();
        // Where the disk has room for a part only, the youngest part is worth most.
        if let Some(disk) = &self.disk {
            let state = self.state.read();
            let mut bytes = 0;
            let keep = slots.iter().rev().take_while(|slot| {
                bytes += state.get(**slot).map_or(0, |entry| {
                    record_len(Version::Three, entry.name.len() as u32, u32::try_from(entry.len).unwrap_or(u32::MAX))
                });
                bytes <= disk.low
            });
            let skip = slots.len() - keep.count();
            drop(state);
            slots.drain(..skip);
        }
        let mut rest = slots.as_slice();
        while !rest.is_empty() {
            call.check()?;
            let mut bytes = 0;
            let state = self.state.read();
            let fit = rest.iter().take(self.config.pipeline.batch).take_while(|slot| {
                bytes += state.get(**slot).map_or(0, |entry| entry.len);
                bytes <= ROUND
            });
            let count = fit.count().max(1);
            drop(state);
            let (now, later) = rest.split_at(count.min(rest.len()));
            self.write_out(now).map_err(fail)?;
            rest = later;
        }
        // Another thread may be writing some of them.
        loop {
            let moving = self.state.read().slots().any(|(_, entry)| entry.moving);
            if !moving {
                return Ok(());
            }
            call.check()?;
            self.wait(Duration::from_millis(20));
        }
    }

    /// Makes room for so many bytes of records. False when there can't be.
    pub(super) fn make_disk_room(&self, bytes: u64) -> bool {
        let Some(disk) = &self.disk else { return false };
        if bytes > disk.files {
            return false;
        }
        let _one = disk.room.lock();
        if disk.live() + bytes > disk.high {
            let mut places = Vec::new();
            let mut state = self.state.write();
            let mut live = disk.live();
            let victims: Vec<u32> = state.on_disk.oldest_first().collect();
            for slot in victims {
                if live + bytes <= disk.low {
                    break;
                }
                if state.get(slot).is_some_and(|entry| !entry.moving)
                    && let Some(place) = state.drop_disk(slot)
                {
                    live = live.saturating_sub(place.at.len());
                    places.push(place);
                }
            }
            drop(state);
            self.forget(&places);
        }
        let (mut sealed, mut waits) = (false, 0);
        while disk.bytes() + bytes > disk.files {
            let sparsest = disk.logs.iter().enumerate().filter_map(|(drive, log)| Some((drive, log.sparsest()?)));
            let sparsest = sparsest.min_by_key(|(_, segment)| segment.live() * 1024 / segment.len().max(1));
            match sparsest {
                Some((drive, segment)) => match self.compact(drive, &segment) {
                    Compacted::Gone => {}
                    // Whoever writes there needs no room any more, and is done soon.
                    Compacted::Held if waits < WAITS => {
                        waits += 1;
                        self.wait(WAIT);
                    }
                    Compacted::Held | Compacted::Failed => return disk.bytes() + bytes <= disk.files,
                },
                None if !sealed => {
                    disk.logs.iter().for_each(crate::segment::Log::tidy);
                    sealed = true;
                }
                None => return disk.bytes() + bytes <= disk.files,
            }
        }
        true
    }

    /// Writes what still counts of a segment anew, so that its file goes.
    fn compact(&self, drive: usize, segment: &std::sync::Arc<crate::segment::Segment>) -> Compacted {
        let Some(disk) = &self.disk else { return Compacted::Failed };
        let found: Vec<(u32, std::sync::Arc<[u8]>, Place)> = {
            let state = self.state.read();
            let here = state.slots().filter_map(|(slot, entry)| {
                let place = entry.disk.as_ref()?;
                let is_here = place.drive == drive && std::sync::Arc::ptr_eq(&place.at.segment, segment);
                is_here.then(|| (slot, entry.name.clone(), place.clone()))
            });
            here.collect()
        };
        let mut rest = found.as_slice();
        while !rest.is_empty() {
            let mut bytes = 0;
            let fit = rest.iter().take_while(|(_, _, place)| {
                bytes += place.at.len();
                bytes <= ROUND
            });
            let (now, later) = rest.split_at(fit.count().max(1).min(rest.len()));
            rest = later;
            if !self.move_records(now) {
                return Compacted::Failed;
            }
        }
        let Some(log) = disk.logs.get(drive) else { return Compacted::Failed };
        log.drop_segment(segment);
        if log.has(segment) { Compacted::Held } else { Compacted::Gone }
    }

    fn move_records(&self, records: &[(u32, std::sync::Arc<[u8]>, Place)]) -> bool {
        let Some(disk) = &self.disk else { return false };
        let wanted: Vec<Wanted<'_>> =
            records.iter().map(|(_, key, place)| Wanted { key, place: place.clone() }).collect();
        let values = Values(records.iter().map(|_| Default::default()).collect());
        disk.read(&wanted, &values);
        let mut values: Vec<Option<Vec<u8>>> = values.0.into_iter().map(parking_lot::Mutex::into_inner).collect();
        let pieces: Vec<Vec<Piece>> = values
            .iter_mut()
            .map(|value| value.iter_mut().map(|value| Piece { base: value.as_mut_ptr(), len: value.len() }).collect())
            .collect();
        let good: Vec<usize> = (0..records.len()).filter(|at| values.get(*at).is_some_and(Option::is_some)).collect();
        let items: Vec<Item<'_>> =
            good.iter().filter_map(|at| Some(Item { key: &records.get(*at)?.1, pieces: pieces.get(*at)? })).collect();
        // SAFETY: the values are this function's own, and live through the call.
        let written = match unsafe { disk.append(&items) } {
            Ok(written) => written,
            Err(error) => {
                self.failed(&format!("a segment can't be written anew: {error}"));
                return false;
            }
        };
        drop(values);
        let mut old = Vec::new();
        let mut state = self.state.write();
        let mut written = written.into_iter();
        let mut good = good.into_iter().peekable();
        for (at, (slot, _, place)) in records.iter().enumerate() {
            let anew = if good.next_if_eq(&at).is_some() { written.next() } else { None };
            let anew = anew.filter(|anew| !anew.at.segment.is_lost());
            let same = state.is_there(*slot)
                && state.get(*slot).and_then(|entry| entry.disk.as_ref()).is_some_and(|found| found.is(place));
            match (anew, same) {
                (Some(anew), true) => {
                    if let Some(entry) = state.get_mut(*slot) {
                        old.extend(entry.disk.replace(anew));
                    }
                }
                // It was removed meanwhile.
                (Some(anew), false) => old.push(anew),
                // It can't be read: it is lost, as a read would have found.
                (None, true) => old.extend(state.drop_disk(*slot)),
                (None, false) => {}
            }
        }
        drop(state);
        self.forget(&old);
        true
    }
}
