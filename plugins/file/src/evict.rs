//! Making room: quota, free space and age. Reads go on meanwhile.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Call, Error, ErrorKind, LogLevel, MetricKind, Result};
use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::format::ENTRY_LEN;
use crate::index::{PackPlace, PageId, Place};
use crate::io::FILE_MODE;
use crate::names;
use crate::root::{EVICT_LOCK, Root};
use crate::store::Store;

/// How long a set without a deadline waits for room.
const ROOM_WAIT: Duration = Duration::from_secs(5);
/// With a smaller quota no more than what is needed is removed, with a larger one at most so much more.
const SLACK_FROM: u64 = 1 << 30;
const SLACK_MOST: u64 = 1 << 30;
/// How long to wait for another process that makes room.
const PEER_WAIT: Duration = Duration::from_millis(10);

/// Bytes that were let in and are not yet counted as stored.
#[derive(Debug)]
pub struct Admitted<'a>(&'a Store, u64);

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        self.0.pending.fetch_sub(self.1, Ordering::AcqRel);
    }
}

/// What may go, the pages used longest ago first.
enum Victim {
    File(PageId),
    Packed(PageId, PackPlace),
    Pack(u32),
    Foreign(String),
}

impl Store {
    /// Lets in pages of `page_bytes`: how many fit, and the error when none do.
    pub fn admit(&self, page_bytes: u64, pages: usize, call: &Call<'_>) -> (usize, Result<Admitted<'_>>) {
        let most = self.config.max_bytes.map_or(u64::MAX, |max| max / page_bytes.max(1));
        let fits = usize::try_from(most).unwrap_or(usize::MAX).min(pages);
        if fits == 0 && pages > 0 {
            let max = self.config.max_bytes.unwrap_or_default();
            let message = format!("a page of {page_bytes} bytes is larger than max_bytes = {max}");
            return (0, Err(Error::new(ErrorKind::NoSpace, message)));
        }
        let bytes = page_bytes * fits as u64;
        let until = Instant::now() + call.remaining().map_or(ROOM_WAIT, |left| left.min(ROOM_WAIT));
        let root = self.root();
        self.pending.fetch_add(bytes, Ordering::AcqRel);
        let admitted = Admitted(self, bytes);
        match self.make_room(&root, 0, until) {
            Ok(()) => (fits, Ok(admitted)),
            Err(error) => {
                // A call without time is no sign of a full store.
                if let Err(late) = call.check() {
                    return (0, Err(late));
                }
                if error.kind == ErrorKind::NoSpace {
                    self.health.fail(error.clone(), page_bytes);
                }
                (0, Err(error.retryable()))
            }
        }
    }

    /// Bytes by which the store, with what is being written and `more`, is above its bounds, and which bound that is.
    pub fn excess(&self, root: &Root, more: u64) -> (u64, &'static str) {
        let coming = self.pending.load(Ordering::Acquire).saturating_add(more);
        let quota = self.config.max_bytes.map_or(0, |max| self.bytes_used().saturating_add(coming).saturating_sub(max));
        // Where the system doesn't say what is free there is nothing to keep free.
        let free = rustix::fs::fstatvfs(&root.namespace).map_or(0, |stat| {
            let default = (stat.f_blocks.saturating_mul(stat.f_frsize) / 20).min(10 << 30);
            let keep = self.config.min_free_bytes.unwrap_or(default);
            let available = stat.f_bavail.saturating_mul(stat.f_frsize);
            // With nothing to keep free the file system itself says when it is full.
            if keep == 0 { 0 } else { keep.saturating_add(coming).saturating_sub(available) }
        });
        if quota >= free { (quota, "max_bytes") } else { (free, "min_free_bytes") }
    }

    /// What is removed beyond what is needed, so that not every set has to make room.
    fn slack(&self) -> u64 {
        self.config.max_bytes.filter(|max| *max >= SLACK_FROM).map_or(0, |max| (max / 50).min(SLACK_MOST))
    }

    /// Removes pages until the store is within its bounds with `more` bytes.
    pub fn make_room(&self, root: &Root, more: u64, until: Instant) -> Result<()> {
        loop {
            if self.excess(root, more).0 == 0 {
                return Ok(());
            }
            let Some(_one_at_a_time) = self.evicting.try_lock_until(until) else {
                return Err(self.no_room(root, more));
            };
            let (excess, _) = self.excess(root, more);
            if excess == 0 {
                return Ok(());
            }
            let Some(_peers) = self.lock_against_peers(root) else {
                if Instant::now() >= until {
                    return Err(self.no_room(root, more));
                }
                std::thread::sleep(PEER_WAIT);
                continue;
            };
            if self.evict(root, excess.saturating_add(self.slack())) == 0 && !self.squeeze(root) {
                return Err(self.no_room(root, more));
            }
        }
    }

    fn no_room(&self, root: &Root, more: u64) -> Error {
        let (excess, bound) = self.excess(root, more);
        let stuck = match self.undeletable.load(Ordering::Relaxed) {
            0 => String::new(),
            count => format!("; {count} files can't be deleted"),
        };
        let dir = self.config.dir.display();
        // The number of bytes stays out of the text: a changed text is a new line in the log.
        let what = if excess == 0 { "making room takes too long" } else { "nothing more can be removed" };
        Error::new(ErrorKind::NoSpace, format!("{dir}: the bound {bound} is reached and {what}{stuck}"))
    }

    /// The lock by which one process at a time makes room. Without locks on this file system all of them do.
    fn lock_against_peers(&self, root: &Root) -> Option<Option<std::os::fd::OwnedFd>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&root.dir, EVICT_LOCK, flags, FILE_MODE)
            .or_else(|_| rustix::fs::openat(&root.dir, EVICT_LOCK, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()));
        let Ok(file) = opened else { return Some(None) };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Some(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => None,
            Err(_) => Some(None),
        }
    }

    /// Removes what was used longest ago until `goal` bytes are free, as far as can be foreseen: of a page in a pack only whole blocks
    /// come back. Gives the number of pages and packs that went; skips what can't be removed.
    fn evict(&self, root: &Root, goal: u64) -> u64 {
        let mut victims: Vec<(u32, u64, Victim)> = Vec::new();
        let mut packs: HashMap<u32, u32> = HashMap::new();
        for shard in 0..=255 {
            self.index.for_each(shard, |id, known| match known.place {
                Place::File(bytes) => victims.push((known.used, bytes, Victim::File(*id))),
                Place::Pack(place) if self.packs.punches() => {
                    victims.push((known.used, place.len + ENTRY_LEN as u64, Victim::Packed(*id, place)));
                }
                Place::Pack(place) => {
                    let used = packs.entry(place.pack).or_insert(known.used);
                    *used = known.used.max(*used);
                }
            });
        }
        if !self.packs.punches() {
            for (pack, disk) in self.idle_packs() {
                victims.push((packs.get(&pack).copied().unwrap_or(0), disk, Victim::Pack(pack)));
            }
        }
        if self.foreign.bytes.load(Ordering::Relaxed) > 0 {
            self.walk_foreign(root, &mut |file| {
                victims.push((file.used, file.bytes, Victim::Foreign(file.path.to_owned())))
            });
        }
        // Neighbours in a pack go together: the blocks they share come back then.
        victims.sort_unstable_by_key(|(used, _, victim)| match victim {
            Victim::Packed(_, place) => (*used, place.pack, place.offset),
            Victim::File(_) | Victim::Pack(_) | Victim::Foreign(_) => (*used, u32::MAX, 0),
        });
        let (mut freed, mut gone, mut stuck) = (0u64, 0u64, Stuck::default());
        let mut packed = Vec::new();
        let mut packed_bytes = 0;
        for (_, bytes, victim) in victims {
            if freed.saturating_add(packed_bytes) >= goal {
                break;
            }
            let removed = match victim {
                Victim::File(id) => self
                    .remove_file(root, &id)
                    .map_err(|error| (names::page(&id.key, &self.index.tag_text(id.tag)).as_str().to_owned(), error)),
                Victim::Packed(id, place) => {
                    packed_bytes += bytes;
                    packed.push((id, place));
                    packed.extend(self.copies_of(&id));
                    continue;
                }
                Victim::Pack(pack) => {
                    let bytes = self.drop_pack(root, pack);
                    freed += bytes;
                    gone += u64::from(bytes > 0);
                    continue;
                }
                Victim::Foreign(path) => {
                    let removed = unlink(root, &path).map_err(|error| (path, error));
                    if removed.is_ok() {
                        let left = |before: u64| Some(before.saturating_sub(bytes));
                        // The closure always gives a value.
                        let _ = self.foreign.bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, left);
                    }
                    removed
                }
            };
            match removed {
                Ok(_) => {
                    freed += bytes;
                    gone += 1;
                }
                Err((path, error)) => stuck.note(path, error),
            }
        }
        let failed = self.bury_in_packs(root, &mut packed);
        gone += (packed.len() - failed.min(packed.len())) as u64;
        self.report_stuck(&stuck);
        self.host.metric(MetricKind::CounterAdd, "file_evicted_pages", "", gone as f64);
        gone
    }

    fn report_stuck(&self, stuck: &Stuck) {
        let before = self.undeletable.swap(stuck.count, Ordering::Relaxed);
        if let Some((path, error)) = stuck.first.as_ref().filter(|_| before == 0) {
            let message = format!("{path} can't be deleted ({error}); it is skipped, as are others like it");
            self.host.log(LogLevel::Warn, "evict", &message);
        }
        self.host.metric(MetricKind::GaugeSet, "file_undeletable", "", stuck.count as f64);
    }

    /// Removes pages that were not used for the time they have.
    pub fn expire(&self, root: &Root) {
        let mut packed = Vec::new();
        let mut stuck = Stuck::default();
        for shard in 0..=255 {
            let mut files = Vec::new();
            self.index.for_each(shard, |id, known| match known.place {
                _ if !self.is_expired(known.used) => {}
                Place::File(_) => files.push(*id),
                Place::Pack(place) => packed.push((*id, place)),
            });
            for id in files {
                if let Err(error) = self.remove_file(root, &id) {
                    stuck.note(names::page(&id.key, &self.index.tag_text(id.tag)).as_str().to_owned(), error);
                }
            }
        }
        self.bury_in_packs(root, &mut packed);
        if stuck.count > 0 {
            self.report_stuck(&stuck);
        }
    }
}

/// Files that can't be removed.
#[derive(Debug, Default)]
struct Stuck {
    count: u64,
    first: Option<(String, io::Error)>,
}

impl Stuck {
    fn note(&mut self, path: String, error: io::Error) {
        self.count += 1;
        self.first.get_or_insert((path, error));
    }
}

/// Removes a file of another namespace.
pub fn unlink(root: &Root, path: &str) -> io::Result<bool> {
    match rustix::fs::unlinkat(root.dir.as_fd(), path, rustix::fs::AtFlags::empty()) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
