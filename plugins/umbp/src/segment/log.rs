//! The segments of one directory.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};

use super::buffer::Buffer;
use super::record::{BLOCK, Checksum, FLAGS_AT, HEADER, Header, Version, record_len, value_at};
use super::scan::{self, Found};
use crate::object::Piece;

/// Bytes of one write, unless a record is longer.
const WRITE: u64 = 8 << 20;
/// A buffer larger than this is given back.
const KEEP: usize = 32 << 20;
const LOCK: &str = ".kvdock-umbp-lock";
const PROBE: &str = ".umbp_odirect_probe";

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

/// A segment file.
#[derive(Debug)]
pub struct Segment {
    /// Its number.
    pub id: u64,
    path: PathBuf,
    file: File,
    direct: Option<File>,
    len: AtomicU64,
    live: AtomicU64,
    sealed: AtomicBool,
}

impl Segment {
    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }
    /// Bytes of records that count.
    pub fn live(&self) -> u64 {
        self.live.load(Ordering::Acquire)
    }
    /// Nothing is appended to it any more.
    pub fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }

    /// The file to read from: past the page cache where what is read is `aligned`.
    pub fn file(&self, aligned: bool) -> &File {
        self.direct.as_ref().filter(|_| aligned).unwrap_or(&self.file)
    }

    /// Reads `bytes` from `at` on; both are whole blocks where `aligned`.
    ///
    /// # Errors
    /// When the file can't be read so far.
    pub fn read(&self, bytes: &mut [u8], at: u64, aligned: bool) -> io::Result<()> {
        self.file(aligned).read_exact_at(bytes, at)
    }
}

/// Where a record lies.
#[derive(Debug, Clone)]
pub struct Location {
    /// The segment.
    pub segment: Arc<Segment>,
    /// Offset of the record.
    pub offset: u64,
    /// Bytes of its key.
    pub key_len: u32,
    /// Bytes of its value.
    pub value_len: u32,
    /// How it is laid out.
    pub version: Version,
    /// Its generation.
    pub generation: u64,
}

impl Location {
    fn of(segment: &Arc<Segment>, offset: u64, header: &Header) -> Location {
        Location {
            segment: segment.clone(),
            offset,
            key_len: header.key_len,
            value_len: header.value_len,
            version: header.version,
            generation: header.generation,
        }
    }
    /// Bytes of the record.
    pub fn len(&self) -> u64 {
        record_len(self.version, self.key_len, self.value_len)
    }
}

/// What is appended.
#[derive(Debug)]
pub struct Item<'a> {
    /// Key.
    pub key: &'a [u8],
    /// Value, one piece after another.
    pub pieces: &'a [Piece],
}

impl Item<'_> {
    fn value_len(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len as u64).sum()
    }
}

#[derive(Debug)]
struct Writer {
    active: Option<Arc<Segment>>,
    next: u64,
    buffer: Buffer,
}

/// The segments of a directory.
#[derive(Debug)]
pub struct Log {
    dir: PathBuf,
    options: Options,
    // Held for as long as this process may write.
    _lock: Option<File>,
    segments: Mutex<BTreeMap<u64, Arc<Segment>>>,
    writer: Mutex<Writer>,
    generation: Arc<AtomicU64>,
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
        let wrong = |what: &str, error: &dyn std::fmt::Display| format!("{}: {what}: {error}", dir.display());
        let mut options = options;
        let lock = if options.follower {
            None
        } else {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(dir)
                .map_err(|error| wrong("it can't be created", &error))?;
            let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(dir.join(LOCK));
            let lock = lock.map_err(|error| wrong("it can't be written", &error))?;
            flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
                wrong("another process writes it", &"give each process a directory, or make this one a follower")
            })?;
            options.direct = options.direct && probe(dir);
            Some(lock)
        };
        let log = Log {
            dir: dir.to_owned(),
            options,
            _lock: lock,
            segments: Mutex::default(),
            writer: Mutex::new(Writer { active: None, next: 0, buffer: Buffer::new() }),
            generation,
        };
        let found = log.look(told).map_err(|error| wrong("it can't be read", &error))?;
        Ok((log, found))
    }

    /// Looks for records that were not known yet; a log that writes itself looks once.
    ///
    /// # Errors
    /// When the directory can't be read. Files that go meanwhile are no error.
    pub fn look(&self, told: &mut dyn FnMut(String)) -> io::Result<Vec<Indexed>> {
        let mut ids: Vec<u64> = Vec::new();
        let listed = match std::fs::read_dir(&self.dir) {
            Ok(listed) => listed,
            Err(error) if self.options.follower && error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        for entry in listed {
            ids.extend(entry?.file_name().to_str().and_then(id_of));
        }
        ids.sort_unstable();
        let mut writer = self.writer.lock();
        writer.next = ids.last().map_or(0, |last| last + 1);
        self.segments.lock().retain(|id, _| ids.binary_search(id).is_ok());
        let mut indexed = Vec::new();
        for id in ids {
            let known = self.segments.lock().get(&id).cloned();
            let segment = match known {
                Some(segment) => segment,
                None => match self.segment(id, false) {
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
            let scan = scan::scan(&segment.file, from, len)?;
            for (at, next, why) in &scan.damaged {
                told(format!(
                    "{}: the record at {at} is damaged ({why}); up to {next} nothing is read",
                    segment.path.display()
                ));
            }
            let mut end = scan.end;
            if let Some(why) = &scan.tail
                && !self.options.follower
            {
                let path = segment.path.display();
                told(format!(
                    "{path}: the record at {end} is damaged ({why}); the file is cut there, at {end} of {len} bytes"
                ));
                segment.file.set_len(end)?;
            }
            if !self.options.follower && end == 0 {
                // An empty file holds nothing and has no use.
                std::fs::remove_file(&segment.path)?;
                continue;
            }
            if scan.records.iter().any(|found| found.header.version == Version::One) && self.options.follower {
                // A writer of version 1 goes on where the file ends.
                end = scan.end;
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

    fn segment(&self, id: u64, new: bool) -> io::Result<Arc<Segment>> {
        let path = self.dir.join(format!("segment_{id}.log"));
        let mut options = OpenOptions::new();
        options.read(true).write(!self.options.follower).create_new(new).mode(0o600);
        let file = options.open(&path)?;
        let direct = if self.options.direct {
            let mut options = OpenOptions::new();
            options.read(true).write(!self.options.follower).custom_flags(libc::O_DIRECT);
            options.open(&path).ok()
        } else {
            None
        };
        Ok(Arc::new(Segment {
            id,
            path,
            file,
            direct,
            len: AtomicU64::new(0),
            live: AtomicU64::new(0),
            sealed: AtomicBool::new(false),
        }))
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

    /// Appends records. When it answers, they are as durable as the options say. All or none: after an error none of them counts.
    ///
    /// # Errors
    /// When they could not be written.
    ///
    /// # Safety
    /// The pieces can be read, and nobody writes them meanwhile.
    pub unsafe fn append(&self, items: &[Item<'_>]) -> io::Result<Vec<Location>> {
        let mut writer = self.writer.lock();
        let mut locations: Vec<Location> = Vec::with_capacity(items.len());
        // SAFETY: passed on to the caller.
        let result = unsafe { self.append_all(&mut writer, items, &mut locations) };
        writer.buffer.shrink(KEEP);
        if let Err(error) = result {
            drop(writer);
            for location in &locations {
                self.forget(location);
            }
            return Err(error);
        }
        Ok(locations)
    }

    unsafe fn append_all(
        &self,
        writer: &mut Writer,
        items: &[Item<'_>],
        locations: &mut Vec<Location>,
    ) -> io::Result<()> {
        let mut touched: Vec<Arc<Segment>> = Vec::new();
        let mut rest = items;
        while let Some(first) = rest.first() {
            let segment = self.active(writer, len_of(first)?)?;
            let start = segment.len();
            let (mut count, mut bytes) = (0, 0);
            for item in rest {
                let len = len_of(item)?;
                // A record that is longer than a segment has one to itself.
                let fits = start + bytes + len <= self.options.segment || start + bytes == 0;
                if count > 0 && (bytes + len > WRITE || !fits) {
                    break;
                }
                count += 1;
                bytes += len;
            }
            let (now, later) = rest.split_at(count);
            rest = later;
            writer.buffer.reserve(bytes as usize);
            let buffer = writer.buffer.bytes_mut().get_mut(..bytes as usize).unwrap_or_default();
            let mut at = 0;
            let mut headers = Vec::with_capacity(count);
            for item in now {
                let generation = self.generation.fetch_add(1, Ordering::AcqRel) + 1;
                let len = len_of(item)? as usize;
                let record = buffer.get_mut(at..at + len).unwrap_or_default();
                // SAFETY: passed on to the caller.
                headers.push((start + at as u64, unsafe { fill(record, item, generation, self.options.verify) }));
                at += len;
            }
            let file = segment.direct.as_ref().unwrap_or(&segment.file);
            if let Err(error) = file.write_all_at(buffer, start) {
                // What was written is cut off; where even that fails, checksums tell, and nothing is appended behind it.
                let _ = segment.file.set_len(start);
                segment.sealed.store(true, Ordering::Release);
                writer.active = None;
                return Err(error);
            }
            segment.len.store(start + bytes, Ordering::Release);
            segment.live.fetch_add(bytes, Ordering::AcqRel);
            for (offset, header) in headers {
                locations.push(Location::of(&segment, offset, &header));
            }
            if touched.last().is_none_or(|last| !Arc::ptr_eq(last, &segment)) {
                touched.push(segment);
            }
        }
        if self.options.strict {
            for segment in touched {
                if let Err(error) = segment.file.sync_data() {
                    segment.sealed.store(true, Ordering::Release);
                    writer.active = None;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// The segment that a record of so many bytes goes to.
    fn active(&self, writer: &mut Writer, len: u64) -> io::Result<Arc<Segment>> {
        if let Some(active) = &writer.active {
            if active.len() + len <= self.options.segment {
                return Ok(active.clone());
            }
            active.sealed.store(true, Ordering::Release);
        }
        writer.active = None;
        let segment = self.segment(writer.next, true)?;
        if self.options.strict {
            // The name of the file has to be there after a power cut as well.
            File::open(&self.dir)?.sync_all()?;
        }
        writer.next += 1;
        self.segments.lock().insert(segment.id, segment.clone());
        writer.active = Some(segment.clone());
        Ok(segment)
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
        // The flag of a record without a checksum stays beside it; a failure leaves a page that is found again later, and is right.
        let mut flags = [0];
        if segment.file.read_exact_at(&mut flags, location.offset + FLAGS_AT).is_ok() {
            let _ = segment.file.write_all_at(&[flags[0] & !1], location.offset + FLAGS_AT);
        }
    }

    /// Removes a sealed segment that holds nothing that counts.
    pub fn drop_segment(&self, segment: &Arc<Segment>) {
        let mut segments = self.segments.lock();
        if segments.get(&segment.id).is_some_and(|known| Arc::ptr_eq(known, segment)) && segment.live() == 0 {
            segments.remove(&segment.id);
            // A file that stays is found by the next process, with records that are marked.
            let _ = std::fs::remove_file(&segment.path);
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
        segments.iter().try_for_each(|segment| segment.file.sync_data())?;
        File::open(&self.dir)?.sync_all()
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
    let id = digits.parse().ok()?;
    // `segment_01.log` is none of ours: its number has another file.
    (digits == format!("{id}")).then_some(id)
}

fn len_of(item: &Item<'_>) -> io::Result<u64> {
    let long = |_| io::Error::new(io::ErrorKind::InvalidInput, "a record has less than 4 GiB");
    let key = u32::try_from(item.key.len()).map_err(long)?;
    Ok(record_len(Version::Three, key, u32::try_from(item.value_len()).map_err(long)?))
}

/// Makes a record of version 3. Padding is zero.
unsafe fn fill(record: &mut [u8], item: &Item<'_>, generation: u64, checked: bool) -> Header {
    let key_len = item.key.len() as u32;
    let at = value_at(Version::Three, key_len) as usize;
    let (head, body) = record.split_at_mut(at);
    let key_end = HEADER + item.key.len();
    let mut sum = Checksum::new(Version::Three);
    if let Some(key) = head.get_mut(HEADER..key_end) {
        key.copy_from_slice(item.key);
    }
    head.get_mut(key_end..).unwrap_or_default().fill(0);
    if checked {
        sum.add(item.key);
    }
    let mut rest = body;
    for piece in item.pieces {
        // SAFETY: the caller says that the piece can be read.
        let bytes = unsafe { std::slice::from_raw_parts(piece.base, piece.len) };
        let (now, later) = rest.split_at_mut(piece.len);
        // In steps that stay in the cache between the copy and the checksum.
        for (to, from) in now.chunks_mut(1 << 15).zip(bytes.chunks(1 << 15)) {
            to.copy_from_slice(from);
            if checked {
                sum.add(to);
            }
        }
        rest = later;
    }
    rest.fill(0);
    let header = Header {
        version: Version::Three,
        committed: true,
        checked,
        key_len,
        value_len: item.value_len() as u32,
        crc: if checked { sum.sum() } else { 0 },
        generation,
    };
    if let Some(to) = head.get_mut(..HEADER) {
        to.copy_from_slice(&header.encode());
    }
    header
}

/// Whether a block can be written and read past the page cache.
fn probe(dir: &Path) -> bool {
    let path = dir.join(PROBE);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_DIRECT);
    let works = options.open(&path).and_then(|file| {
        let mut buffer = Buffer::new();
        buffer.reserve(BLOCK as usize);
        let block = buffer.bytes_mut().get_mut(..BLOCK as usize).unwrap_or_default();
        block.fill(0x5a);
        file.write_all_at(block, 0)?;
        block.fill(0);
        file.read_exact_at(block, 0)?;
        Ok(block.iter().all(|byte| *byte == 0x5a))
    });
    let _ = std::fs::remove_file(&path);
    works.unwrap_or(false)
}
