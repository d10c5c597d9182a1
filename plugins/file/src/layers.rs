//! Reading pages layer by layer: of each page first what belongs to no layer, then one layer after the other.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex as StdMutex;
use std::sync::PoisonError;

use kvdock_plugin_api::{Call, Error, ErrorKind, LogLevel, PageStatus, Pool, Result, Transfer};

use crate::format::{BLOCK, TRAILER_LEN, Trailer, file_len};
use crate::index::{PackPlace, PageId, Place};
use crate::io::{Batch, Op, Pieces};
use crate::names;
use crate::pack::crc_of;
use crate::root::{Root, now_seconds};
use crate::store::{PoolInfo, Store};

/// Room for what follows the payload in a file, and one byte more, by which a file that is too long is noticed.
type TrailerRoom = UnsafeCell<[u8; BLOCK + TRAILER_LEN]>;

/// Where a page's bytes are.
#[derive(Clone, Copy)]
enum Source {
    /// A file of its own.
    File,
    /// An open pack.
    Pack { file: usize, place: PackPlace },
}

/// A page that is read.
struct Item<'a> {
    transfer: &'a Transfer<'a>,
    number: usize,
    id: PageId,
    info: PoolInfo,
    source: Source,
    shape: usize,
    /// Address of each segment.
    segments: Vec<*mut u8>,
}

/// What the pages of one pool consist of, as ranges of the payload.
struct Shape {
    /// Where each segment begins.
    starts: Vec<u64>,
    /// The runs of each layer.
    layers: Vec<Vec<Range<u64>>>,
    /// What belongs to no layer, the seal included.
    rest: Vec<Range<u64>>,
    /// The seal alone.
    seal: Vec<Range<u64>>,
}

impl Shape {
    fn of(pool: &Pool) -> Shape {
        let mut starts = Vec::with_capacity(pool.segments().len());
        let mut end = 0;
        for segment in pool.segments() {
            starts.push(end);
            end += segment.len;
        }
        let start_of = |segment: usize| starts.get(segment).copied().unwrap_or(0);
        let count = pool.components().iter().map(|component| component.layer as usize + 1).max().unwrap_or(0);
        let mut layers = vec![Vec::new(); count];
        for component in pool.components() {
            if let Some(runs) = layers.get_mut(component.layer as usize) {
                let first = start_of(component.segment) + component.offset;
                runs.extend((0..component.run_count).map(|run| {
                    let at = first + run * component.run_stride;
                    at..at + component.run_len
                }));
            }
        }
        layers.iter_mut().for_each(|runs| runs.sort_unstable_by_key(|run| run.start));
        let mut all: Vec<Range<u64>> = layers.iter().flatten().cloned().collect();
        all.sort_unstable_by_key(|run| run.start);
        let (mut rest, mut at) = (Vec::new(), 0);
        for run in all {
            if run.start > at {
                rest.push(at..run.start);
            }
            at = at.max(run.end);
        }
        if at < end {
            rest.push(at..end);
        }
        let seal =
            pool.seal_segment().and_then(|seal| Some(start_of(seal)..start_of(seal) + pool.segments().get(seal)?.len));
        Shape { starts, layers, rest, seal: seal.into_iter().collect() }
    }

    /// The parts of a range of the payload by segment, as addresses of a page.
    fn pieces(&self, range: &Range<u64>, segments: &[*mut u8], out: &mut Vec<libc::iovec>) {
        let mut at = range.start;
        while at < range.end {
            let segment = self.starts.partition_point(|start| *start <= at).saturating_sub(1);
            let end = self.starts.get(segment + 1).copied().unwrap_or(u64::MAX).min(range.end);
            let (Some(base), Some(start)) = (segments.get(segment), self.starts.get(segment)) else { return };
            let len = (end - at) as usize;
            out.push(libc::iovec { iov_base: base.wrapping_add((at - start) as usize).cast(), iov_len: len });
            at = end;
        }
    }
}

/// One read of a part of a page.
struct Job {
    item: usize,
    offset: u64,
    pieces: Range<usize>,
    bytes: usize,
    /// It ends the file: there is nothing behind it.
    last: bool,
}

/// The reads of one step over all pages.
struct Step<'a> {
    store: &'a Store,
    items: &'a [Item<'a>],
    files: &'a [OwnedFd],
    jobs: Vec<Job>,
    list: Vec<libc::iovec>,
    check: &'a (dyn Fn() -> Result<()> + Sync),
    /// What became of items that failed.
    bad: StdMutex<Vec<(usize, Bad)>>,
}

enum Bad {
    Gone,
    Damaged(String),
    Failed(io::Error),
    Skipped,
}

// SAFETY: the addresses name destination pages of the call, each of whose bytes one job writes, and rooms for trailers, likewise.
unsafe impl Sync for Step<'_> {}

impl<'a> Batch<'a> for Step<'a> {
    fn len(&self) -> usize {
        self.jobs.len()
    }

    fn start(&self, index: usize) -> Option<Op<'a>> {
        let job = self.jobs.get(index)?;
        let item = self.items.get(job.item)?;
        if (self.check)().is_err() {
            self.fail(job.item, Bad::Skipped);
            return None;
        }
        // SAFETY: the pieces are destination pages of this call, which nobody else touches until it ends, and `list` outlives the step.
        let pieces = unsafe { Pieces::new(self.list.get(job.pieces.clone())?) };
        Some(match item.source {
            Source::File => {
                let tag = self.store.index.tag_text(item.id.tag);
                Op::ReadFile { path: names::page(&item.id.key, &tag), offset: job.offset, pieces }
            }
            Source::Pack { file, place } => {
                Op::ReadAt { file: self.files.get(file)?.as_fd(), offset: place.offset + job.offset, pieces }
            }
        })
    }

    fn done(&self, index: usize, result: io::Result<usize>) {
        let Some(job) = self.jobs.get(index) else { return };
        match result {
            Ok(read) if read < job.bytes => self.fail(job.item, Bad::Damaged("it is too short".to_owned())),
            Ok(read) if job.last && read > job.bytes => {
                self.fail(job.item, Bad::Damaged("its file is too long".to_owned()));
            }
            Ok(_) => {}
            Err(error) => {
                let gone = matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE));
                self.fail(job.item, if gone { Bad::Gone } else { Bad::Failed(error) });
            }
        }
    }
}

impl Step<'_> {
    fn fail(&self, item: usize, bad: Bad) {
        self.bad.lock().unwrap_or_else(PoisonError::into_inner).push((item, bad));
    }

    /// Adds the reads of ranges of a page: those that follow one another in the file are one.
    fn add(&mut self, number: usize, shape: &Shape, ranges: &[Range<u64>]) {
        let Some(item) = self.items.get(number) else { return };
        let mut next = 0;
        while let Some(first) = ranges.get(next) {
            let from = self.list.len();
            let mut end = first.start;
            while let Some(range) = ranges.get(next).filter(|range| range.start == end) {
                shape.pieces(range, &item.segments, &mut self.list);
                end = range.end;
                next += 1;
            }
            let bytes = (end - first.start) as usize;
            self.jobs.push(Job {
                item: number,
                offset: first.start,
                pieces: from..self.list.len(),
                bytes,
                last: false,
            });
        }
    }
}

impl Store {
    /// Reads pages layer by layer, and writes the status of each. `settle` is called with each layer, in order, when that layer of every page
    /// has been read or has failed. A page that is read as a whole is checked at the end.
    pub fn read_by_layer(
        &self,
        transfers: &[Transfer<'_>],
        call: &Call<'_>,
        stop: &(dyn Fn() -> Result<()> + Sync),
        mut settle: impl FnMut(usize),
    ) -> Result<()> {
        let root = self.root();
        let check = || stop().and_then(|()| call.check());
        let (mut shapes, mut files) = (Vec::new(), Vec::new());
        let items = self.find_items(&root, transfers, call, &mut shapes, &mut files)?;
        let mut alive = vec![true; items.len()];
        let trailers: Vec<TrailerRoom> = items.iter().map(|_| UnsafeCell::new([0; BLOCK + TRAILER_LEN])).collect();
        let mut errors = Errors::default();
        let run = |alive: &mut Vec<bool>,
                   errors: &mut Errors,
                   ranges: &dyn Fn(&Item<'_>, &Shape) -> Vec<Range<u64>>,
                   trailer: bool| {
            let mut step = Step {
                store: self,
                items: &items,
                files: &files,
                jobs: Vec::new(),
                list: Vec::new(),
                check: &check,
                bad: StdMutex::default(),
            };
            for (number, item) in items.iter().enumerate().filter(|(number, _)| alive[*number]) {
                if let Some(shape) = shapes.get(item.shape) {
                    step.add(number, shape, &ranges(item, shape));
                }
                if trailer && matches!(item.source, Source::File) {
                    let (from, len) =
                        (step.list.len(), (file_len(item.info.page_bytes) - item.info.page_bytes) as usize);
                    let room = trailers.get(number).map_or(std::ptr::null_mut(), |room| room.get().cast());
                    step.list.push(libc::iovec { iov_base: room, iov_len: len + 1 });
                    let (offset, pieces) = (item.info.page_bytes, from..from + 1);
                    step.jobs.push(Job { item: number, offset, pieces, bytes: len, last: true });
                }
            }
            self.engine.run(root.namespace.as_fd(), &step);
            for (number, bad) in step.bad.into_inner().unwrap_or_else(PoisonError::into_inner) {
                alive[number] = false;
                errors.take(number, bad);
            }
        };
        let whole = |item: &Item<'_>| item.transfer.layers().is_none();
        let rest = |item: &Item<'_>, shape: &Shape| if whole(item) { shape.rest.clone() } else { shape.seal.clone() };
        run(&mut alive, &mut errors, &rest, true);
        for (number, item) in items.iter().enumerate() {
            if alive[number] && matches!(item.source, Source::File) {
                // SAFETY: the step is over, and this item alone has the room.
                let room = trailers.get(number).map(|room| unsafe { *room.get() });
                if let Err(why) = self.check_trailer(item, room.as_ref().map(|room| room.as_slice())) {
                    alive[number] = false;
                    errors.take(number, Bad::Damaged(why));
                }
            }
        }
        let layers = shapes.iter().map(|shape| shape.layers.len()).max().unwrap_or(0);
        for layer in 0..layers {
            let of_layer = |item: &Item<'_>, shape: &Shape| match item.transfer.layers() {
                Some(asked) if !asked.contains(&(layer as u32)) => Vec::new(),
                _ => shape.layers.get(layer).cloned().unwrap_or_default(),
            };
            run(&mut alive, &mut errors, &of_layer, false);
            settle(layer);
        }
        self.conclude(&root, &items, &files, &alive, &trailers, errors);
        check()
    }

    /// Where the pages are. Those that are nowhere are missing.
    fn find_items<'a>(
        &self,
        root: &Root,
        transfers: &'a [Transfer<'a>],
        call: &Call<'_>,
        shapes: &mut Vec<Shape>,
        files: &mut Vec<OwnedFd>,
    ) -> Result<Vec<Item<'a>>> {
        let mut items = Vec::new();
        let mut opened: HashMap<u32, Option<usize>> = HashMap::new();
        let mut looked = false;
        for transfer in transfers {
            let info = self.pool(transfer.pool())?;
            shapes.push(Shape::of(transfer.pool()));
            for (number, (key, page)) in transfer.keys().iter().zip(transfer.pages()).enumerate() {
                let id = PageId { key: *key, tag: info.tag_number };
                let source = match self.is_hidden(&id) {
                    true => None,
                    false if info.is_small() => {
                        self.find_packed(root, &id, &info, call, &mut looked, &mut opened, files)
                    }
                    false => {
                        let expired = self.index.get(&id).is_some_and(|known| self.is_expired(known.used));
                        (!expired).then_some(Source::File)
                    }
                };
                let Some(source) = source else {
                    transfer.finish(number, PageStatus::Missing);
                    continue;
                };
                let pieces = (0..transfer.pool().segments().len()).map(|segment| transfer.pool().piece(*page, segment));
                let segments = pieces.map(|piece| Ok(piece?.0)).collect::<Result<_>>()?;
                let shape = shapes.len() - 1;
                items.push(Item { transfer, number, id, info: info.clone(), source, shape, segments });
            }
        }
        Ok(items)
    }

    #[allow(clippy::too_many_arguments)] // The last three are what is kept between pages.
    fn find_packed(
        &self,
        root: &Root,
        id: &PageId,
        info: &PoolInfo,
        call: &Call<'_>,
        looked: &mut bool,
        opened: &mut HashMap<u32, Option<usize>>,
        files: &mut Vec<OwnedFd>,
    ) -> Option<Source> {
        for round in 0..2 {
            let Place::Pack(place) = self.known_small(root, id, looked, call)?.place else { return None };
            if place.len != info.page_bytes {
                return None;
            }
            let file = *opened.entry(place.pack).or_insert_with(|| {
                files.push(self.open_pack(root, place.pack, false).ok()?);
                Some(files.len() - 1)
            });
            match file {
                Some(file) => return Some(Source::Pack { file, place }),
                // The pack has gone since it was looked at; what was in it may be in another one.
                None if round == 0 => drop(self.look_at_packs(root, crate::pack::Look::Everything, None)),
                None => self.forget_packed(id, &place),
            }
        }
        None
    }

    fn check_trailer(&self, item: &Item<'_>, room: Option<&[u8]>) -> std::result::Result<(), String> {
        let rest = (file_len(item.info.page_bytes) - item.info.page_bytes) as usize;
        let bytes = room.and_then(|room| room.get(..rest)?.last_chunk()).ok_or("it has no trailer")?;
        let found = Trailer::decode(bytes)?;
        let owner = (found.namespace, found.key, found.pool, found.len);
        if owner != (self.namespace, item.id.key, item.info.tag.digest, item.info.page_bytes) {
            return Err("it belongs to another page".to_owned());
        }
        Ok(())
    }

    /// Checks what was read as a whole, and writes the statuses.
    fn conclude(
        &self,
        root: &Root,
        items: &[Item<'_>],
        files: &[OwnedFd],
        alive: &[bool],
        trailers: &[TrailerRoom],
        errors: Errors,
    ) {
        let now = now_seconds() as u32;
        let mut corrupt = Vec::new();
        for (number, item) in items.iter().enumerate() {
            let place = match item.source {
                Source::Pack { place, .. } => Some(place),
                Source::File => None,
            };
            let verdict = match errors.of(number) {
                Some(Bad::Gone) => {
                    self.index.remove_if(&item.id, |known| matches!(known.place, Place::File(_)));
                    PageStatus::Missing
                }
                Some(Bad::Damaged(why)) => self.damaged(item, files, why, &mut corrupt),
                Some(Bad::Failed(_) | Bad::Skipped) => PageStatus::Failed,
                None if alive.get(number) != Some(&true) => PageStatus::Failed,
                None if item.transfer.layers().is_some() => self.unless_dead(item, files),
                None => {
                    // SAFETY: all steps are over, and this item alone has the room.
                    let room = trailers.get(number).map(|room| unsafe { *room.get() });
                    let rest = (file_len(item.info.page_bytes) - item.info.page_bytes) as usize;
                    let trailer = room.as_ref().and_then(|room| room.get(..rest)?.last_chunk());
                    let expected = match place {
                        Some(place) => Some(place.crc),
                        None => trailer.and_then(|bytes| Trailer::decode(bytes).ok()).map(|trailer| trailer.crc),
                    };
                    let list: Vec<libc::iovec> = item
                        .segments
                        .iter()
                        .zip(item.transfer.pool().segments())
                        .map(|(base, segment)| libc::iovec { iov_base: base.cast(), iov_len: segment.len as usize })
                        .collect();
                    match expected == Some(crc_of(&list)) {
                        true if item.info.page_bytes > 0 => PageStatus::Ok,
                        // A marker has no bytes that would show that it was removed.
                        true => self.unless_dead(item, files),
                        false => self.damaged(item, files, "the checksum of its payload is wrong", &mut corrupt),
                    }
                }
            };
            if verdict == PageStatus::Ok {
                self.touch(&item.id, now);
            }
            item.transfer.finish(item.number, verdict);
        }
        if !corrupt.is_empty() {
            self.drop_corrupt(root, &corrupt);
        }
        if let Some(error) = errors.first_failure() {
            self.figures.failures.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            self.host.log(LogLevel::Warn, "store", &format!("reading failed: {error}"));
        }
    }

    fn unless_dead(&self, item: &Item<'_>, files: &[OwnedFd]) -> PageStatus {
        let Source::Pack { file, place } = item.source else { return PageStatus::Ok };
        if files.get(file).is_some_and(|file| self.is_alive(file, &place).unwrap_or(false)) {
            return PageStatus::Ok;
        }
        self.forget_packed(&item.id, &place);
        PageStatus::Missing
    }

    fn damaged(
        &self,
        item: &Item<'_>,
        files: &[OwnedFd],
        why: &str,
        corrupt: &mut Vec<(PageId, Option<PackPlace>, String)>,
    ) -> PageStatus {
        if self.unless_dead(item, files) == PageStatus::Missing {
            return PageStatus::Missing;
        }
        let place = match item.source {
            Source::Pack { place, .. } => Some(place),
            Source::File => None,
        };
        corrupt.push((item.id, place, why.to_owned()));
        PageStatus::Corrupt
    }
}

/// The first thing that went wrong with each page.
#[derive(Default)]
struct Errors(HashMap<usize, Bad>);

impl Errors {
    fn take(&mut self, item: usize, bad: Bad) {
        self.0.entry(item).or_insert(bad);
    }

    fn of(&self, item: usize) -> Option<&Bad> {
        self.0.get(&item)
    }

    fn first_failure(&self) -> Option<&io::Error> {
        self.0.values().find_map(|bad| match bad {
            Bad::Failed(error) => Some(error),
            _ => None,
        })
    }
}

/// The error of a load that was ended.
pub fn ended() -> Error {
    Error::new(ErrorKind::Cancelled, "the load was ended")
}
