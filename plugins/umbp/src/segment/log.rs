//! The segments of one directory.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::append::Writer;
use super::file::{Location, MOST_SEGMENT, Segment};
use super::lock::{self, Lock};
use super::plain;
use super::record::{BLOCK, Version};
use super::scan::{self, Found, Scan};

/// Damaged places of a file that are told one by one.
const TOLD: usize = 8;

/// How a log works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Bytes of a segment.
    pub segment: u64,
    /// A write is on the disk when it is acknowledged.
    pub strict: bool,
    /// Past the page cache, where that works.
    pub direct: bool,
    /// Records get checksums.
    pub verify: bool,
    /// Somebody else writes.
    pub follower: bool,
}

/// The segments of a directory.
#[derive(Debug)]
pub struct Log {
    pub(super) dir: PathBuf,
    pub(super) options: Options,
    // Held for as long as this process may write; none for a follower.
    lock: Mutex<Option<Lock>>,
    pub(super) segments: Mutex<BTreeMap<u64, Arc<Segment>>>,
    pub(super) writer: Mutex<Writer>,
    pub(super) generation: Arc<AtomicU64>,
    /// Segments of a leader that its follower has not found any more.
    gone: Mutex<Vec<Arc<Segment>>>,
}

/// A key that a scan found, and where.
pub type Indexed = (Vec<u8>, Location);

impl Log {
    /// Opens a directory and finds what is in it: the newest record of each key comes last. Damaged tails are cut. `told` hears what was found damaged.
    ///
    /// # Errors
    /// A text that says what was wrong with which path.
    pub fn open(
        dir: &Path,
        options: Options,
        generation: Arc<AtomicU64>,
        told: &mut dyn FnMut(String),
    ) -> Result<(Log, Vec<Indexed>), String> {
        let mut options = options;
        let lock = if options.follower {
            None
        } else {
            let lock = Lock::take(dir).map_err(|error| error.to_string())?;
            options.direct = options.direct && lock::is_direct(dir);
            Some(lock)
        };
        let log = Log {
            dir: dir.to_owned(),
            options,
            lock: Mutex::new(lock),
            segments: Mutex::default(),
            writer: Mutex::default(),
            generation,
            gone: Mutex::default(),
        };
        let found = log.look(told).map_err(|error| format!("{}: it can't be read: {error}", dir.display()))?;
        Ok((log, found))
    }

    /// The numbers of the segment files there are, in order.
    pub(super) fn ids(&self) -> io::Result<Vec<u64>> {
        let listed = match std::fs::read_dir(&self.dir) {
            Ok(listed) => listed,
            Err(error) if self.options.follower && error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut ids: Vec<u64> = Vec::new();
        for entry in listed {
            ids.extend(entry?.file_name().to_str().and_then(id_of));
        }
        ids.sort_unstable();
        Ok(ids)
    }

    /// Looks for records that were not known yet; a log that writes itself looks once.
    ///
    /// # Errors
    /// When the directory can't be read. Files that go meanwhile are no error.
    pub fn look(&self, told: &mut dyn FnMut(String)) -> io::Result<Vec<Indexed>> {
        let ids = self.ids()?;
        let mut writer = self.writer.lock();
        writer.next = ids.last().map_or(0, |last| last + 1);
        self.let_go(&ids);
        let mut indexed = Vec::new();
        for id in ids {
            let known = self.segments.lock().get(&id).cloned();
            let segment = match known {
                Some(segment) => segment,
                None => match Segment::open(&self.dir, id, &self.options, false) {
                    Ok(segment) => segment,
                    Err(error) if self.options.follower && error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                },
            };
            let len = segment.file.metadata()?.len();
            let from = segment.len();
            if len <= from && len > 0 {
                continue;
            }
            if len > MOST_SEGMENT {
                let text = format!(
                    "{} has {len} bytes, and no segment has more than {MOST_SEGMENT}: move it away",
                    segment.path.display()
                );
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
            }
            let scan = scan::scan(&segment.file, from, len).map_err(|error| plain::named(&segment.path, &error))?;
            self.tell(&segment, &scan, len, told);
            let end = scan.end;
            if !self.options.follower {
                if scan.tail.is_some() {
                    segment.file.set_len(end)?;
                }
                if end == 0 {
                    // An empty file holds nothing and has no use.
                    std::fs::remove_file(&segment.path)?;
                    continue;
                }
            }
            segment.len.store(end, Ordering::Release);
            let appendable = scan.damaged.is_empty()
                && end.is_multiple_of(BLOCK)
                && scan.records.iter().all(|found| found.header.version == Version::Three);
            for Found { offset, header, key } in scan.records {
                self.generation.fetch_max(header.generation, Ordering::AcqRel);
                if header.committed {
                    let location = Location::of(&segment, offset, &header);
                    segment.live.fetch_add(location.len(), Ordering::AcqRel);
                    indexed.push((key, location));
                }
            }
            segment.sealed.store(true, Ordering::Release);
            if appendable && !self.options.follower && id + 1 == writer.next && end < self.options.segment {
                segment.sealed.store(false, Ordering::Release);
                writer.active = Some(segment.clone());
            }
            self.segments.lock().insert(id, segment);
        }
        indexed.sort_by_key(|(_, location)| location.generation);
        Ok(indexed)
    }

    /// Lets go of segments that are not there any more, or have another file in their place.
    fn let_go(&self, ids: &[u64]) {
        let mut gone = self.gone.lock();
        self.segments.lock().retain(|id, segment| {
            let there = ids.binary_search(id).is_ok() && segment.is_in_place().unwrap_or(true);
            if !there {
                segment.lose();
                gone.push(segment.clone());
            }
            there
        });
    }

    fn tell(&self, segment: &Segment, scan: &Scan, len: u64, told: &mut dyn FnMut(String)) {
        let path = segment.path.display();
        for (at, next, why) in scan.damaged.iter().take(TOLD) {
            told(format!("{path}: the record at {at} is damaged ({why}); up to {next} nothing is read"));
        }
        if scan.damaged.len() > TOLD {
            told(format!("{path}: {} more places are damaged", scan.damaged.len() - TOLD));
        }
        if let Some(why) = scan.tail.as_ref().filter(|_| !self.options.follower) {
            let end = scan.end;
            told(format!(
                "{path}: the record at {end} is damaged ({why}); the file is cut there, at {end} of {len} bytes"
            ));
        }
    }

    /// Bytes of all files.
    pub fn disk(&self) -> u64 {
        self.segments.lock().values().map(|segment| segment.len()).sum()
    }

    /// Bytes of records that count.
    pub fn live(&self) -> u64 {
        self.segments.lock().values().map(|segment| segment.live()).sum()
    }

    /// Whether I/O goes past the page cache.
    pub fn is_direct(&self) -> bool {
        self.options.direct
    }

    /// The segment that holds the least that counts for its length, of those that nothing is appended to.
    pub fn sparsest(&self) -> Option<Arc<Segment>> {
        let segments = self.segments.lock();
        let sealed = segments.values().filter(|segment| segment.is_sealed() && segment.len() > segment.live());
        sealed.min_by_key(|segment| segment.live() * 1024 / segment.len().max(1)).cloned()
    }

    /// Nothing is appended to the segment in use any more, so that it can be reclaimed.
    pub fn seal_active(&self) {
        if let Some(active) = self.writer.lock().active.take() {
            active.sealed.store(true, Ordering::Release);
        }
    }

    /// Whether it belongs to this log.
    pub fn has(&self, segment: &Arc<Segment>) -> bool {
        self.segments.lock().get(&segment.id).is_some_and(|known| Arc::ptr_eq(known, segment))
    }

    /// Segments whose files somebody else has removed, or put others in the place of, since the last call. They belong to this log no more, and what is on them can be read
    /// for as long as somebody holds them.
    pub fn take_lost(&self) -> Vec<Arc<Segment>> {
        if !self.options.follower {
            let all: Vec<Arc<Segment>> = self.segments.lock().values().cloned().collect();
            let lost = all.into_iter().filter(|segment| !segment.is_in_place().unwrap_or(true));
            for segment in lost {
                let mut segments = self.segments.lock();
                // One that this process removes itself meanwhile is none of these.
                if segments.get(&segment.id).is_some_and(|known| Arc::ptr_eq(known, &segment)) {
                    segments.remove(&segment.id);
                    drop(segments);
                    segment.lose();
                    self.gone.lock().push(segment);
                }
            }
            // Nobody holds the one in use any longer than the others.
            let mut writer = self.writer.lock();
            writer.active.take_if(|active| active.is_lost());
        }
        std::mem::take(&mut *self.gone.lock())
    }

    /// Sees to it that others are kept out; says whether that had to be done anew, because somebody has removed the lock with the directory.
    pub(super) fn hold(&self) -> io::Result<bool> {
        let mut lock = self.lock.lock();
        if let Some(held) = &*lock
            && held.is_in_place()?
        {
            return Ok(false);
        }
        *lock = None;
        *lock = Some(Lock::take(&self.dir)?);
        Ok(true)
    }

    /// A record does not count any more: it is marked so in the file, for the next process, and a segment without records that count goes.
    pub fn forget(&self, location: &Location) {
        if self.options.follower {
            return;
        }
        let segment = &location.segment;
        let live = segment.live.fetch_sub(location.len(), Ordering::AcqRel) - location.len();
        if live == 0 && segment.is_sealed() {
            self.drop_segment(segment);
            return;
        }
        if !segment.is_lost() {
            segment.mark(location.offset);
        }
    }

    /// Removes a sealed segment that holds nothing that counts.
    pub fn drop_segment(&self, segment: &Arc<Segment>) {
        let mut segments = self.segments.lock();
        if segments.get(&segment.id).is_some_and(|known| Arc::ptr_eq(known, segment)) && segment.live() == 0 {
            segments.remove(&segment.id);
            // A file that stays is found by the next process, with records that are marked. One that somebody else has put in its place is not ours to remove.
            if segment.is_in_place().unwrap_or(false) {
                let _ = std::fs::remove_file(&segment.path);
            }
        }
    }

    /// Everything is on the disk when it answers.
    ///
    /// # Errors
    /// When it could not be written.
    pub fn sync(&self) -> io::Result<()> {
        if self.options.follower {
            return Ok(());
        }
        let segments: Vec<Arc<Segment>> = self.segments.lock().values().cloned().collect();
        if segments.is_empty() {
            return Ok(());
        }
        segments.iter().try_for_each(|segment| segment.file.sync_data())?;
        plain::sync_dir(&self.dir)
    }

    /// Removes every segment that holds nothing that counts, also the one in use.
    pub fn tidy(&self) {
        self.seal_active();
        let segments: Vec<Arc<Segment>> = self.segments.lock().values().cloned().collect();
        segments.iter().filter(|segment| segment.is_sealed()).for_each(|segment| self.drop_segment(segment));
    }
}

fn id_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("segment_")?.strip_suffix(".log")?;
    let id = digits.parse().ok().filter(|id| *id < 1 << 62)?;
    // `segment_01.log` is none of ours: its number has another file.
    (digits == format!("{id}")).then_some(id)
}
