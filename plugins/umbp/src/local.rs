//! Local mode: memory and disk of this process.

pub mod below;
mod bytes;
mod copy;
pub mod disk;
mod lost;
pub mod memory;
pub mod order;
mod put;
mod read;
mod share;
pub mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Call, ClearScope, Error, ErrorKind, Health, HealthState, Host, LogLevel, Result};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::config::{Config, Role};
use crate::object::Held;
use crate::store::show_degraded;
use disk::{Disk, Place};
use memory::Memory;
use state::State;

pub use share::Local;

/// How often a follower looks at the leader's directory at most.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Memory and disk, and what is in them.
#[derive(Debug)]
struct Tiers {
    config: Config,
    memory: Memory,
    state: RwLock<State>,
    disk: Option<Disk>,
    host: Host,
    /// Says that memory may have come free, or that there is something to copy.
    bell: Condvar,
    bell_lock: Mutex<()>,
    /// How many are copying objects into memory that no entry has yet.
    filling: AtomicU32,
    /// Objects that wait to be copied to the disk.
    queue: Mutex<std::collections::VecDeque<u32>>,
    stop: AtomicBool,
    /// Why the disk last failed, if nothing has gone well since.
    trouble: Mutex<Option<String>>,
    looked: Mutex<Option<Instant>>,
    /// When it was last seen to that the segments are still there.
    missed: Mutex<Option<Instant>>,
    /// Objects that went without a copy because there was no room.
    evicted: AtomicU64,
    demoted: AtomicU64,
    promoted: AtomicU64,
}

/// Memory is taken, and no entry has it yet: it can be freed a little later. Begun and dropped with the state locked.
#[derive(Debug)]
struct Filling<'a>(&'a AtomicU32);

impl Filling<'_> {
    fn begin(count: &AtomicU32) -> Filling<'_> {
        count.fetch_add(1, Ordering::AcqRel);
        Filling(count)
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Tiers {
    fn open(config: &Config, host: Host) -> Result<Tiers> {
        let mut told = |what: String| host.log(LogLevel::Warn, "umbp", &what);
        let mut memory = Memory::map(&config.dram, &mut told)?;
        if config.role == Role::Leader {
            // To be written to the disk.
            memory.keep_in_caches();
        }
        let mut state = State::new(memory.pages());
        let follower = config.role == Role::Follower;
        let disk = match &config.ssd {
            None => None,
            Some(ssd) => {
                let (disk, found) = Disk::open(ssd, follower, &mut told)
                    .map_err(|what| Error::new(ErrorKind::InvalidConfig, format!("ssd_storage_dir: {what}")))?;
                index(&mut state, &disk, found);
                Some(disk)
            }
        };
        let tiers = Tiers {
            config: config.clone(),
            memory,
            state: RwLock::new(state),
            disk,
            host,
            bell: Condvar::new(),
            bell_lock: Mutex::new(()),
            filling: AtomicU32::new(0),
            queue: Mutex::default(),
            stop: AtomicBool::new(false),
            trouble: Mutex::default(),
            looked: Mutex::default(),
            missed: Mutex::default(),
            evicted: AtomicU64::new(0),
            demoted: AtomicU64::new(0),
            promoted: AtomicU64::new(0),
        };
        if !follower {
            // An earlier process may have had a larger capacity.
            tiers.make_disk_room(0);
        }
        Ok(tiers)
    }

    fn ring(&self) {
        // Taken and released, so that nobody goes to sleep between the look and the bell.
        drop(self.bell_lock.lock());
        self.bell.notify_all();
    }

    /// Waits for the bell, briefly.
    fn wait(&self, at_most: Duration) {
        let mut guard = self.bell_lock.lock();
        self.bell.wait_for(&mut guard, at_most);
    }

    fn failed(&self, what: &str) {
        let mut trouble = self.trouble.lock();
        if trouble.is_none() {
            self.host.log(LogLevel::Error, "umbp", what);
            self.host.health_changed(HealthState::Degraded, what);
            show_degraded(&self.host, true);
        }
        *trouble = Some(what.to_owned());
    }

    fn went_well(&self) {
        if self.trouble.lock().take().is_some() {
            self.host.health_changed(HealthState::Ok, "");
            show_degraded(&self.host, false);
        }
    }

    /// A follower looks for what its leader has written, not too often. Who comes while another one looks does not wait for that.
    fn look_again(&self) -> bool {
        let Some(disk) = self.disk.as_ref().filter(|_| self.config.role == Role::Follower) else { return false };
        let Some(mut looked) = self.looked.try_lock() else { return false };
        if looked.is_some_and(|at| at.elapsed() < LOOK_AGAIN) {
            return false;
        }
        let mut told = |what: String| self.host.log(LogLevel::Debug, "umbp", &what);
        let any = match disk.look(&mut told) {
            Ok(found) => {
                let any = !found.is_empty();
                index(&mut self.state.write(), disk, found);
                // What the leader has moved is known by its new place now.
                self.give_up_lost();
                self.went_well();
                any
            }
            Err(error) => {
                self.failed(&format!("the leader's directory can't be read: {error}"));
                false
            }
        };
        *looked = Some(Instant::now());
        any
    }

    fn exists(&self, names: &[Vec<u8>]) -> Vec<bool> {
        let look = || -> Vec<bool> {
            let state = self.state.read();
            names.iter().map(|name| state.find(name).is_some()).collect()
        };
        let found = look();
        if found.iter().all(|there| *there) || !self.look_again() { found } else { look() }
    }

    fn remove(&self, names: &[Vec<u8>]) -> Result<Vec<bool>> {
        if self.config.role == Role::Follower {
            return Err(Error::unsupported("removing what its leader has stored"));
        }
        let mut places = Vec::new();
        let mut state = self.state.write();
        let removed = names
            .iter()
            .map(|name| {
                let slot = state.find(name);
                places.extend(slot.and_then(|slot| state.remove(slot)));
                slot.is_some()
            })
            .collect();
        drop(state);
        self.forget(&places);
        Ok(removed)
    }

    fn forget(&self, places: &[Place]) {
        if let Some(disk) = &self.disk {
            places.iter().for_each(|place| disk.forget(place));
        }
    }

    fn clear(&self, prefix: &[u8], scope: ClearScope) -> Result<()> {
        if self.config.role == Role::Follower {
            return Err(Error::unsupported("clearing what its leader has stored"));
        }
        let everything = scope == ClearScope::Everything;
        if everything && self.disk.is_none() {
            return Err(Error::unsupported("clearing the memory of other instances"));
        }
        if !everything && prefix.is_empty() {
            return Err(Error::unsupported("clearing one model's pages where names do not say whose they are"));
        }
        let mut state = self.state.write();
        let slots: Vec<u32> = state
            .slots()
            .filter(|(_, entry)| everything || entry.name.starts_with(prefix))
            .map(|(slot, _)| slot)
            .collect();
        let places: Vec<Place> = slots.into_iter().filter_map(|slot| state.remove(slot)).collect();
        drop(state);
        self.forget(&places);
        if let Some(disk) = self.disk.as_ref().filter(|_| everything) {
            disk.logs.iter().for_each(crate::segment::Log::tidy);
        }
        self.ring();
        Ok(())
    }

    fn held(&self) -> Held {
        let state = self.state.read();
        let (objects, pages) = (state.len() as u64, u64::from(state.pages.used()));
        drop(state);
        let (live, capacity) = self.disk.as_ref().map_or((0, 0), |disk| (disk.live(), disk.capacity));
        Held { objects, used: pages * self.config.dram.page + live, total: self.config.dram.capacity + capacity }
    }

    fn health(&self) -> Health {
        match &*self.trouble.lock() {
            None => Health::ok(),
            Some(reason) => Health { state: HealthState::Degraded, reason: reason.clone() },
        }
    }

    /// Everything in memory gets a record, and everything is on the disk.
    fn flush(&self, call: &Call<'_>) -> Result<()> {
        let Some(disk) = self.disk.as_ref().filter(|_| self.config.role != Role::Follower) else { return Ok(()) };
        self.give_up_lost();
        self.write_out_all(call)?;
        self.sync_to(disk)
    }

    /// Everything that is in segments is on the disk.
    fn sync(&self) -> Result<()> {
        self.disk.as_ref().map_or(Ok(()), |disk| self.sync_to(disk))
    }

    fn sync_to(&self, disk: &Disk) -> Result<()> {
        disk.logs.iter().try_for_each(crate::segment::Log::sync).map_err(|error| {
            let what = format!("segments can't be written to the disk: {error}");
            self.failed(&what);
            Error::new(ErrorKind::Unavailable, what).retryable()
        })
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// Takes up what a scan found; the newest record of a key comes last.
fn index(state: &mut State, disk: &Disk, found: Vec<(Vec<u8>, Place)>) {
    for (name, place) in found {
        let len = u64::from(place.at.value_len);
        match state.find(&name) {
            None => {
                state.insert(&name, len, 0, None, Some(place));
            }
            Some(slot) => {
                let old = state.get_mut(slot).and_then(|entry| {
                    // What a follower has in memory stays as long as it says the same.
                    entry.len = if entry.memory.is_some() { entry.len } else { len };
                    entry.disk.replace(place)
                });
                state.touch(slot);
                if let Some(old) = old {
                    disk.forget(&old);
                }
            }
        }
    }
}

/// Runs work over `count` items, by so many threads.
fn share(count: usize, threads: usize, work: impl Fn(usize) + Sync) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let run = || {
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= count {
                return;
            }
            work(item);
        }
    };
    let threads = threads.min(count);
    if threads < 2 {
        return run();
    }
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Where there is no further thread, the others do its work.
            let _ = std::thread::Builder::new().spawn_scoped(scope, run);
        }
        run();
    });
}

type Shared = Arc<Tiers>;
