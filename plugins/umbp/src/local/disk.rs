//! The segment files of all drives.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::config::{IoBackend, Ssd};
use crate::segment::log::Indexed;
use crate::segment::record::{self, Version};
use crate::segment::ring::{self, Ring};
use crate::segment::{Buffer, Item, Location, Log, Options};

/// Bytes that one read takes in, about.
const RUN: u64 = 1 << 20;
/// Bytes that one thread has in flight at most, unless one run is longer.
const WINDOW: u64 = 8 << 20;
/// Threads of one read that have rings.
const RINGS: usize = 4;
/// Buffers and rings that are kept.
const KEPT: usize = 8;

/// Where a record lies, and on which drive.
#[derive(Debug, Clone)]
pub struct Place {
    /// Number of the drive.
    pub drive: usize,
    /// Where on it.
    pub at: Location,
}

impl Place {
    /// Whether it is the same record.
    pub fn is(&self, other: &Place) -> bool {
        self.drive == other.drive
            && self.at.offset == other.at.offset
            && Arc::ptr_eq(&self.at.segment, &other.at.segment)
    }
}

/// Who takes records, each by its number. Several threads call, one of them for each record.
pub trait Take: Sync {
    /// Bytes of a value, and where in it they begin. They come in order, before it is known whether they are right.
    fn step(&self, _number: usize, _at: usize, _bytes: &[u8]) {}

    /// The whole value, or what is wrong with it.
    fn end(&self, number: usize, value: Result<&[u8], Trouble>);
}

/// A key and where its record lies.
pub type Found = (Vec<u8>, Place);

/// The drives.
#[derive(Debug)]
pub struct Disk {
    /// One log a drive.
    pub logs: Vec<Log>,
    /// Bytes over all of them.
    pub capacity: u64,
    /// Bytes of records above which room is made.
    pub high: u64,
    /// And down to which.
    pub low: u64,
    /// Bytes of files above which segments are reclaimed.
    pub files: u64,
    threads: usize,
    /// Drives that are written at once.
    shards: usize,
    depth: u32,
    /// There is io_uring, and it is wanted.
    uring: AtomicBool,
    rings: Mutex<Vec<Ring>>,
    buffers: Mutex<Vec<Buffer>>,
    /// One makes room at a time.
    pub room: Mutex<()>,
}

/// A read of one record.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// Whose.
    pub key: &'a [u8],
    /// Where.
    pub place: Place,
}

impl Disk {
    /// Opens the drives, and finds what is there: the newest record of each key comes last.
    ///
    /// # Errors
    /// A text that says what was wrong with which directory.
    pub fn open(config: &Ssd, follower: bool, told: &mut dyn FnMut(String)) -> Result<(Disk, Vec<Found>), String> {
        let options = Options {
            segment: config.segment,
            strict: config.strict,
            direct: config.direct,
            verify: config.verify,
            follower,
        };
        let generation = Arc::new(AtomicU64::new(0));
        let (mut logs, mut found) = (Vec::new(), Vec::new());
        for (drive, dir) in config.dirs.iter().enumerate() {
            let (log, records) = Log::open(dir, options, generation.clone(), told)?;
            logs.push(log);
            found.extend(placed(drive, records));
        }
        found.sort_by_key(|(_, place)| place.at.generation);
        let part = |part: f64| (config.capacity as f64 * part) as u64;
        let files = config.capacity.saturating_sub(config.segment);
        let high = part(config.high).min(config.capacity.saturating_sub(2 * config.segment));
        let low = part(config.low).min(high);
        let threads = config.threads.min(std::thread::available_parallelism().map_or(1, usize::from).max(2));
        let disk = Disk {
            logs,
            capacity: config.capacity,
            high,
            low,
            files,
            threads,
            shards: if config.shard_threads == 0 { usize::MAX } else { config.shard_threads },
            depth: config.queue_depth,
            uring: AtomicBool::new(config.io == IoBackend::Uring),
            rings: Mutex::default(),
            buffers: Mutex::default(),
            room: Mutex::default(),
        };
        Ok((disk, found))
    }

    /// Looks for records that others have written meanwhile.
    ///
    /// # Errors
    /// When a directory can't be read.
    pub fn look(&self, told: &mut dyn FnMut(String)) -> io::Result<Vec<Found>> {
        let mut found = Vec::new();
        for (drive, log) in self.logs.iter().enumerate() {
            found.extend(placed(drive, log.look(told)?));
        }
        Ok(found)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.logs.iter().map(Log::disk).sum()
    }

    /// Bytes of records that count.
    pub fn live(&self) -> u64 {
        self.logs.iter().map(Log::live).sum()
    }

    /// Appends records, spread over the drives so that they fill evenly. All or none.
    ///
    /// # Errors
    /// When they could not be written.
    ///
    /// # Safety
    /// As for [`Log::append`].
    pub unsafe fn append(&self, items: &[Item<'_>]) -> io::Result<Vec<Place>> {
        let mut filled: Vec<u64> = self.logs.iter().map(Log::live).collect();
        let mut parts: Vec<Vec<usize>> = vec![Vec::new(); self.logs.len()];
        for (number, item) in items.iter().enumerate() {
            let emptiest = filled.iter_mut().zip(&mut parts).min_by_key(|(filled, _)| **filled);
            if let Some((filled, part)) = emptiest {
                *filled += item.pieces.iter().map(|piece| piece.len as u64).sum::<u64>() + record::BLOCK;
                part.push(number);
            }
        }
        let work: Vec<(usize, &Log, Vec<usize>)> = (0..)
            .zip(&self.logs)
            .zip(parts)
            .map(|((drive, log), part)| (drive, log, part))
            .filter(|(_, _, part)| !part.is_empty())
            .collect();
        let written: Vec<Mutex<Option<io::Result<Vec<Location>>>>> = work.iter().map(|_| Mutex::default()).collect();
        // A drive a thread: their waits are no reason for one another's.
        super::share(work.len(), self.shards, |at| {
            let (Some((_, log, numbers)), Some(written)) = (work.get(at), written.get(at)) else { return };
            let own = numbers.iter().filter_map(|number| items.get(*number));
            let own: Vec<Item<'_>> = own.map(|item| Item { key: item.key, pieces: item.pieces }).collect();
            // SAFETY: passed on to the caller.
            *written.lock() = Some(unsafe { log.append(&own) });
        });
        let mut places: Vec<Option<Place>> = vec![None; items.len()];
        let mut error = None;
        for ((drive, _, numbers), written) in work.into_iter().zip(written) {
            match written.into_inner() {
                Some(Ok(written)) => {
                    for (number, at) in numbers.into_iter().zip(written) {
                        if let Some(place) = places.get_mut(number) {
                            *place = Some(Place { drive, at });
                        }
                    }
                }
                Some(Err(failed)) => error = Some(failed),
                None => error = Some(io::Error::other("a drive was not written")),
            }
        }
        let places: Vec<Place> = places.into_iter().flatten().collect();
        match error {
            Some(error) => {
                places.iter().for_each(|place| self.forget(place));
                Err(error)
            }
            None => Ok(places),
        }
    }

    /// A record does not count any more.
    pub fn forget(&self, place: &Place) {
        if let Some(log) = self.logs.get(place.drive) {
            log.forget(&place.at);
        }
    }

    /// Reads records and gives each to `take`. Records that lie one after another are read at once, and runs
    /// by several threads.
    pub fn read(&self, wanted: &[Wanted<'_>], take: &dyn Take) {
        let mut order: Vec<usize> = (0..wanted.len()).collect();
        let key = |number: usize| {
            wanted.get(number).map(|wanted| (wanted.place.drive, wanted.place.at.segment.id, wanted.place.at.offset))
        };
        order.sort_unstable_by_key(|number| key(*number));
        let mut runs: Vec<&[usize]> = Vec::new();
        let (mut start, mut bytes) = (0, 0);
        for (at, number) in order.iter().enumerate() {
            let Some(place) = wanted.get(*number).map(|wanted| &wanted.place) else { continue };
            let follows = at > start
                && order.get(at - 1).and_then(|before| wanted.get(*before)).is_some_and(|before| {
                    let before = &before.place.at;
                    Arc::ptr_eq(&before.segment, &place.at.segment)
                        && before.offset + before.len() == place.at.offset
                        && before.version == place.at.version
                });
            if at > start && (!follows || bytes + place.at.len() > RUN) {
                runs.push(order.get(start..at).unwrap_or_default());
                (start, bytes) = (at, 0);
            }
            bytes += place.at.len();
        }
        if start < order.len() {
            runs.push(order.get(start..).unwrap_or_default());
        }
        if runs.len() > 1
            && let Some(ring) = self.ring()
        {
            return self.read_by_rings(ring, wanted, &runs, take);
        }
        let next = AtomicUsize::new(0);
        let work = || {
            let mut buffer = self.buffers.lock().pop().unwrap_or_default();
            while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                read_run(wanted, run, &mut buffer, take);
            }
            self.keep(buffer);
        };
        let threads = self.threads.min(runs.len());
        if threads < 2 {
            return work();
        }
        std::thread::scope(|scope| {
            (1..threads).for_each(|_| {
                // Where there is no further thread, this one does it all.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            });
            work();
        });
    }

    fn keep(&self, mut buffer: Buffer) {
        let mut buffers = self.buffers.lock();
        if buffers.len() < KEPT {
            buffer.shrink(4 * WINDOW as usize);
            buffers.push(buffer);
        }
    }

    /// A ring; none where the settings or the kernel have none.
    fn ring(&self) -> Option<Ring> {
        if !self.uring.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(ring) = self.rings.lock().pop() {
            return Some(ring);
        }
        let ring = Ring::new(self.depth);
        if ring.is_err() {
            self.uring.store(false, Ordering::Relaxed);
        }
        ring.ok()
    }

    /// Reads runs with many in flight, some at a time so that memory stays bounded. While some are on the way, others are verified.
    fn read_by_rings(&self, ring: Ring, wanted: &[Wanted<'_>], runs: &[&[usize]], take: &dyn Take) {
        let mut windows: Vec<&[&[usize]]> = Vec::new();
        let mut rest = runs;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fit = rest.iter().take_while(|run| {
                bytes += span(wanted, run).1 as u64;
                bytes <= WINDOW
            });
            let (now, later) = rest.split_at(fit.count().max(1).min(rest.len()));
            windows.push(now);
            rest = later;
        }
        let next = AtomicUsize::new(0);
        let work = |mut ring: Ring| {
            let mut buffer = self.buffers.lock().pop().unwrap_or_default();
            while let Some(window) = windows.get(next.fetch_add(1, Ordering::Relaxed)) {
                read_window(&mut ring, &mut buffer, wanted, window, take);
            }
            self.keep(buffer);
            let mut rings = self.rings.lock();
            if rings.len() < KEPT {
                rings.push(ring);
            }
        };
        let more = self.threads.min(RINGS).min(windows.len()).saturating_sub(1);
        let rings: Vec<Ring> = (0..more).map_while(|_| self.ring()).collect();
        let work = &work;
        std::thread::scope(|scope| {
            for ring in rings {
                // Where there is no further thread, this one does it all.
                let _ = std::thread::Builder::new().spawn_scoped(scope, move || work(ring));
            }
            work(ring);
        });
    }
}

/// Why a record could not be read.
#[derive(Debug)]
pub enum Trouble {
    /// The file can't be read.
    Io(String),
    /// Its bytes are wrong.
    Corrupt(String),
}

fn placed(drive: usize, records: Vec<Indexed>) -> impl Iterator<Item = Found> {
    records.into_iter().map(move |(key, at)| (key, Place { drive, at }))
}

/// Where a run begins, and how many bytes it has.
fn span(wanted: &[Wanted<'_>], run: &[usize]) -> (u64, usize) {
    let of = |number: Option<&usize>| number.and_then(|number| wanted.get(*number)).map(|wanted| &wanted.place.at);
    match (of(run.first()), of(run.last())) {
        (Some(first), Some(last)) => (first.offset, (last.offset + last.len() - first.offset) as usize),
        _ => (0, 0),
    }
}

fn read_window(ring: &mut Ring, buffer: &mut Buffer, wanted: &[Wanted<'_>], window: &[&[usize]], take: &dyn Take) {
    let spans: Vec<(u64, usize)> = window.iter().map(|run| span(wanted, run)).collect();
    buffer.reserve(spans.iter().map(|(_, len)| len).sum());
    let mut room = buffer.bytes_mut();
    let mut reads = Vec::with_capacity(window.len());
    for (run, (offset, len)) in window.iter().zip(&spans) {
        let (bytes, more) = std::mem::take(&mut room).split_at_mut(*len);
        room = more;
        let Some(first) = run.first().and_then(|number| wanted.get(*number)) else { continue };
        let aligned = first.place.at.version == Version::Three;
        reads.push(ring::Wanted { segment: &first.place.at.segment, aligned, offset: *offset, bytes });
    }
    ring.read(&mut reads, &mut |at, bytes, result| {
        if let (Some(run), Some((start, _))) = (window.get(at), spans.get(at)) {
            give(wanted, run, *start, bytes, &result, take);
        }
    });
}

fn read_run(wanted: &[Wanted<'_>], run: &[usize], buffer: &mut Buffer, take: &dyn Take) {
    let Some(first) = run.first().and_then(|number| wanted.get(*number)) else { return };
    let (start, len) = span(wanted, run);
    buffer.reserve(len);
    let aligned = first.place.at.version == Version::Three;
    let bytes = buffer.bytes_mut().get_mut(..len).unwrap_or_default();
    let result = first.place.at.segment.read(bytes, start, aligned);
    give(wanted, run, start, bytes, &result, take);
}

/// Gives the records of a run that was read.
fn give(wanted: &[Wanted<'_>], run: &[usize], start: u64, bytes: &[u8], result: &io::Result<()>, take: &dyn Take) {
    for number in run {
        let Some(wanted) = wanted.get(*number) else { continue };
        let at = (wanted.place.at.offset - start) as usize;
        let record = bytes.get(at..at + wanted.place.at.len() as usize).unwrap_or_default();
        match result {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                take.end(*number, Err(Trouble::Corrupt("its file is too short".to_owned())));
            }
            Err(error) => take.end(*number, Err(Trouble::Io(error.to_string()))),
            Ok(()) => match record::open_by_steps(record, wanted.key, |at, bytes| take.step(*number, at, bytes)) {
                Ok((_, value)) => take.end(*number, Ok(value)),
                Err(why) => take.end(*number, Err(Trouble::Corrupt(why))),
            },
        }
    }
}
