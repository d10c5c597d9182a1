//! What happens in the background: belief is renewed, uses are saved, room is made, leftovers go, trouble heals.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdock_plugin_api::MetricKind;
use rustix::fs::{AtFlags, OFlags, Timespec, Timestamps};

use crate::faults;
use crate::index::Place;
use crate::io::FILE_MODE;
use crate::names;
use crate::pack::Look;
use crate::root::{Lives, Root, now_seconds};
use crate::store::Store;

const TICK: Duration = Duration::from_millis(200);
/// How often folders and packs are compared with what is believed.
const COMPARE: Duration = Duration::from_secs(1);
/// Most time of a tick that goes into listing folders.
const LISTING: Duration = Duration::from_millis(20);
/// A use is saved when it is newer by this than what was saved; so a page that is used all the time costs one call a minute.
const SAVE_SECONDS: u32 = 60;
/// How often leftovers are looked for.
const CLEAN: Duration = Duration::from_secs(600);
/// Looking at other namespaces takes at most this part of the time.
const FOREIGN_SHARE: u32 = 20;
/// Largest file that a probe writes.
const PROBE_BYTES: u64 = 8 << 20;

/// When what is due.
struct Keeper<'a> {
    store: &'a Store,
    compared: Instant,
    saved: Instant,
    cleaned: Instant,
    measured: Instant,
    expired: Instant,
    foreign_due: Instant,
    seen: Vec<Option<(i64, i64)>>,
    to_list: Vec<u8>,
}

/// Runs until the store closes.
pub fn run(store: &Store) {
    let now = Instant::now();
    let mut keeper = Keeper {
        store,
        compared: now,
        saved: now,
        cleaned: now,
        measured: now,
        expired: now,
        foreign_due: now + Duration::from_secs(10),
        seen: vec![None; 256],
        to_list: Vec::new(),
    };
    while !store.pause(TICK) {
        keeper.tick();
    }
}

fn is_due(last: &mut Instant, every: Duration) -> bool {
    let due = last.elapsed() >= every;
    if due {
        *last = Instant::now();
    }
    due
}

impl Keeper<'_> {
    fn tick(&mut self) {
        let store = self.store;
        if is_due(&mut self.compared, COMPARE) {
            self.follow_directory();
        }
        if let Some(bytes) = store.health.probe_due()
            && store.probe(bytes).is_ok()
        {
            store.health.well();
        }
        let root = store.root();
        self.list_some(&root);
        let until = Instant::now() + TICK;
        // The set that meets the bound says what is wrong.
        let _ = store.make_room(&root, 0, until);
        if let Some(ttl) = store.config.ttl
            && is_due(&mut self.expired, (ttl / 4).clamp(COMPARE, Duration::from_secs(60)))
        {
            store.expire(&root);
        }
        if is_due(&mut self.saved, Duration::from_secs(u64::from(SAVE_SECONDS))) {
            store.save_uses(&root, SAVE_SECONDS, None);
        }
        if store.scanned.load(Ordering::Acquire) {
            self.tidy(&root);
        }
        if is_due(&mut self.measured, Duration::from_secs(5)) {
            store.host.metric(MetricKind::GaugeSet, "file_bytes_used", "", store.bytes_used() as f64);
            store.host.metric(MetricKind::GaugeSet, "file_pages", "", store.index.pages() as f64);
        }
    }

    /// Follows a directory that vanished or was made again, and finds out which folders have changed.
    fn follow_directory(&mut self) {
        let store = self.store;
        let mut root = store.root();
        if !root.is_at(&store.config.dir, &store.namespace) {
            let there = store.config.dir.join(names::namespace_folder(&store.namespace)).exists();
            if there && let Ok(fresh) = store.make_again() {
                root = fresh;
                self.seen.fill(None);
            } else if !root.is_linked() {
                (0..=255).for_each(|shard| store.index.retain(shard, |_, _| false));
                return;
            }
        }
        // A lock file that can't be made is tried again; until then leftovers of ours are younger than an hour.
        let _ = store.owner.ensure(&root);
        let _ = store.look_at_packs(&root, Look::Everything, None);
        store.settle_copies(&root);
        let settled = now_seconds().saturating_sub(2) as i64;
        for (byte, seen) in (0..=255u8).zip(&mut self.seen) {
            let stat = rustix::fs::statat(&root.namespace, names::fan_out(byte).as_cstr(), AtFlags::empty());
            let changed = stat.map(|stat| (stat.st_mtime, stat.st_mtime_nsec as i64)).ok();
            // A change within the clock's grain of the last listing would go unseen.
            let recent = changed.is_some_and(|(seconds, _)| seconds >= settled);
            if (*seen != changed || recent) && !self.to_list.contains(&byte) {
                self.to_list.push(byte);
            }
            *seen = changed;
        }
    }

    fn list_some(&mut self, root: &Root) {
        let began = Instant::now();
        let mut lives = Lives::default();
        let (mut done, mut again) = (0, Vec::new());
        for byte in &self.to_list {
            if began.elapsed() > LISTING {
                break;
            }
            done += 1;
            // A folder that is not there, or can't be listed, is looked at when it changes.
            if self.store.list_fan_out(root, *byte, &mut lives).unwrap_or(false) {
                again.push(*byte);
            }
        }
        self.to_list.drain(..done);
        // Not before the next comparison: a page stays fresh for a while.
        again.iter().for_each(|byte| self.seen[usize::from(*byte)] = None);
    }

    fn tidy(&mut self, root: &Root) {
        let store = self.store;
        if store.health.trouble().is_none() {
            // A pack that can't be tidied now stays as it is.
            let _ = store.tidy_packs(root);
        }
        if Instant::now() >= self.foreign_due || is_due(&mut self.cleaned, CLEAN) {
            let began = Instant::now();
            let mut lives = Lives::default();
            store.look_at_foreign(root, &mut lives);
            self.foreign_due = Instant::now() + Duration::from_secs(10) + began.elapsed() * FOREIGN_SHARE;
        }
    }
}

impl Store {
    /// Writes the times of use to the disk, where the next start and other processes find them.
    pub fn save_uses(&self, root: &Root, after: u32, until: Option<Instant>) {
        let mut packs = std::collections::HashMap::new();
        for shard in 0..=255 {
            for (id, known) in self.index.unsaved(shard, after) {
                if until.is_some_and(|until| Instant::now() > until) {
                    return;
                }
                match known.place {
                    Place::File(_) => {
                        let path = names::page(&id.key, &self.index.tag_text(id.tag));
                        set_time(root, &path, known.used);
                    }
                    Place::Pack(place) => {
                        let used = packs.entry(place.pack).or_insert(known.used);
                        *used = known.used.max(*used);
                    }
                }
            }
        }
        for (pack, used) in packs {
            if let Some(name) = self.packs.name(pack) {
                set_time(root, &names::pack_path(&name), used);
            }
        }
    }

    /// Tries whether pages can be stored again.
    fn probe(&self, bytes: u64) -> io::Result<()> {
        faults::check()?;
        let root = self.root_for_writing()?;
        if self.make_room(&root, bytes, Instant::now() + TICK).is_err() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let number = self.temp_number.fetch_add(1, Ordering::Relaxed);
        let name = format!(".{}-{number:x}{}", self.owner.id(), names::TEMP_SUFFIX);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(root.namespace.as_fd(), name.as_str(), flags, FILE_MODE)?;
        let zeros = vec![0; bytes.clamp(4096, PROBE_BYTES) as usize];
        let mut file = std::fs::File::from(file);
        let written = io::Write::write_all(&mut file, &zeros).and_then(|()| file.sync_data());
        let _ = rustix::fs::unlinkat(&root.namespace, name.as_str(), AtFlags::empty());
        written
    }
}

fn set_time(root: &Root, path: &names::Name, used: u32) {
    let time = Timespec { tv_sec: i64::from(used), tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    // A page that has gone, or a read-only file system: the time is only for the order of eviction.
    let _ = rustix::fs::utimensat(&root.namespace, path.as_cstr(), &times, AtFlags::SYMLINK_NOFOLLOW);
}
