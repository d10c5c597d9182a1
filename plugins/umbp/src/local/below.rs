//! Segments under a memory that is not this store's: that of a node of a cluster. It writes out what that memory has no room for any more, and finds it
//! again.

use std::sync::Arc;

use kvdock_plugin_api::{Call, Health, Host, Result};

use super::Tiers;
use super::disk::Place;
use super::state::{Change, Hidden};
use crate::config::{Config, Role};
use crate::object::{Got, Piece, Read};
use crate::segment::Item;
use crate::segment::record::{Version, record_len};

/// The segments.
#[derive(Debug)]
pub struct Below {
    tiers: Tiers,
}

/// Objects that are written, and that nobody finds yet. They have to be shown or given up.
#[derive(Debug)]
#[must_use]
pub struct Written(Vec<Hidden>);

/// Records of objects that nobody finds any more. What holds them is not free until they are forgotten.
#[derive(Debug, Default)]
#[must_use]
pub struct Places(Vec<Place>);

/// What the segments hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Objects.
    pub objects: u64,
    /// Bytes of their records.
    pub used: u64,
    /// Bytes that are free before something has to go.
    pub free: u64,
    /// Bytes that there are.
    pub total: u64,
}

impl Below {
    /// Opens the directories of a configuration that has some, and finds what an earlier process has left there.
    ///
    /// # Errors
    /// When they can't be used.
    pub fn open(config: &Config, host: Host) -> Result<Below> {
        let mut config = config.clone();
        // Its own memory holds nothing.
        config.dram.capacity = config.dram.page;
        config.dram.huge_page = None;
        config.dram.numa_nodes.clear();
        config.dram.prefault = false;
        config.promote = false;
        config.role = Role::Standalone;
        let tiers = Tiers::open(&config, host)?;
        tiers.state.write().changes = Some(Vec::new());
        Ok(Below { tiers })
    }

    /// Bytes that are written at a time, and objects.
    pub fn batch(&self) -> (u64, usize) {
        // Small segments are not emptied for one write.
        let most = self.tiers.disk.as_ref().map_or(0, |disk| disk.low / 4);
        (super::copy::ROUND.min(most), self.tiers.config.pipeline.batch)
    }

    /// Bytes of records that stay when room is made.
    pub fn low(&self) -> u64 {
        self.tiers.disk.as_ref().map_or(0, |disk| disk.low)
    }

    /// Writes objects, each a name and its bytes. Where there is no room what was used longest ago goes.
    ///
    /// # Errors
    /// When they could not be written; none of them counts then.
    ///
    /// # Safety
    /// The pieces can be read, and nobody writes them meanwhile.
    pub unsafe fn write(&self, objects: &[(Arc<str>, Vec<Piece>)]) -> Result<Written, String> {
        let Some(disk) = &self.tiers.disk else { return Err("there are no segments".to_owned()) };
        let len = |pieces: &[Piece]| pieces.iter().map(|piece| piece.len as u64).sum::<u64>();
        let mut bytes = 0;
        for (name, pieces) in objects {
            let len = u32::try_from(len(pieces)).map_err(|_| format!("{name}: no record is so long"))?;
            bytes += record_len(Version::Three, name.len() as u32, len);
        }
        let items: Vec<Item<'_>> = objects.iter().map(|(name, pieces)| Item { key: name.as_bytes(), pieces }).collect();
        let places = if self.tiers.make_disk_room(bytes) {
            // SAFETY: passed on to the caller.
            unsafe { disk.append(&items) }.map_err(|error| format!("a segment can't be written: {error}"))
        } else {
            Err(format!("{bytes} bytes do not fit into ssd_capacity_bytes = {}", disk.capacity))
        };
        let places = places.inspect_err(|what| self.tiers.failed(what))?;
        self.tiers.went_well();
        let mut state = self.tiers.state.write();
        let hide = |((name, pieces), place): (&(Arc<str>, Vec<Piece>), Place)| {
            state.insert_hidden(name.as_bytes(), len(pieces), 0, None, Some(place))
        };
        Ok(Written(objects.iter().zip(places).map(hide).collect()))
    }

    /// Those that `keep` says, by their number, can be found from now on; the others go.
    pub fn show(&self, written: Written, keep: impl Fn(usize) -> bool) -> Places {
        let mut state = self.tiers.state.write();
        let all = written.0.into_iter().enumerate();
        let places = all.filter_map(|(number, hidden)| {
            let lost = state
                .get(hidden.slot)
                .and_then(|entry| entry.disk.as_ref())
                .is_none_or(|place| place.at.segment.is_lost());
            if keep(number) && !lost { state.show(hidden) } else { state.give_up(hidden) }
        });
        Places(places.collect())
    }

    /// The bytes of each of these that is here.
    pub fn find(&self, names: &[&str]) -> Vec<Option<u64>> {
        let state = self.tiers.state.read();
        let len = |name: &&str| state.get(state.find(name.as_bytes())?).map(|entry| entry.len);
        names.iter().map(len).collect()
    }

    /// Which of these are here; they are used now.
    pub fn use_now(&self, names: &[&str]) -> Vec<bool> {
        let mut state = self.tiers.state.write();
        names.iter().map(|name| state.find(name.as_bytes()).map(|slot| state.touch(slot)).is_some()).collect()
    }

    /// Nobody finds these any more. Says which were here.
    pub fn take_out(&self, names: &[&str]) -> (Vec<bool>, Places) {
        let mut state = self.tiers.state.write();
        let mut places = Vec::new();
        let take = |name: &&str| {
            let slot = state.find(name.as_bytes());
            places.extend(slot.and_then(|slot| state.remove(slot)));
            slot.is_some()
        };
        let found = names.iter().map(take).collect();
        (found, Places(places))
    }

    /// The same of all that are named with a prefix.
    pub fn take_out_all(&self, prefix: &str) -> Places {
        let mut state = self.tiers.state.write();
        let named =
            |(slot, entry): (u32, &super::state::Entry)| entry.name.starts_with(prefix.as_bytes()).then_some(slot);
        let slots: Vec<u32> = state.slots().filter_map(named).collect();
        Places(slots.into_iter().filter_map(|slot| state.remove(slot)).collect())
    }

    /// The room of records is free.
    pub fn forget(&self, places: Places) {
        self.tiers.forget(&places.0);
    }

    /// Reads ranges of objects. Checksums are verified.
    ///
    /// # Errors
    /// When the call is over.
    ///
    /// # Safety
    /// The pieces can be written, nobody else touches them, and no two overlap.
    pub unsafe fn read(&self, reads: &[Read], call: &Call<'_>) -> Result<Vec<Got>> {
        // SAFETY: passed on to the caller.
        unsafe { self.tiers.get(reads, call) }
    }

    /// What has come and gone since the last question.
    pub fn changes(&self) -> Vec<Change> {
        let mut state = self.tiers.state.write();
        state.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Everything. What has changed until now is no news after that.
    pub fn all(&self) -> Vec<(Arc<[u8]>, u64)> {
        let mut state = self.tiers.state.write();
        state.changes.as_mut().map(std::mem::take);
        state
            .slots()
            .filter(|(slot, entry)| state.find(&entry.name) == Some(*slot))
            .map(|(_, entry)| (entry.name.clone(), entry.len))
            .collect()
    }

    /// What they hold, and what there is.
    pub fn room(&self) -> Room {
        let objects = self.tiers.state.read().len() as u64;
        let Some(disk) = &self.tiers.disk else { return Room { objects, used: 0, free: 0, total: 0 } };
        let used = disk.live();
        Room { objects, used, free: disk.high.saturating_sub(used), total: disk.capacity }
    }

    /// Forgets what was on segments that somebody else has removed.
    pub fn look_for_lost(&self) {
        self.tiers.look_for_lost();
    }

    /// Everything is on the disk when it answers.
    ///
    /// # Errors
    /// When it could not be written.
    pub fn sync(&self) -> Result<()> {
        self.tiers.sync()
    }

    /// How they are.
    pub fn health(&self) -> Health {
        self.tiers.health()
    }
}
