//! Reading pages.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvdock_plugin_api::{Batch as Pages, Error, ErrorKind, Get, PageStatus, Result, Transfer};
use parking_lot::Mutex;

use crate::format::{BLOCK, TRAILER_LEN, Trailer, file_len};
use crate::index::{PackPlace, PageId, Place};
use crate::io::{Batch, Op, Pieces};
use crate::names;
use crate::pack::crc_of;
use crate::root::{Root, now_seconds};
use crate::store::Store;

/// Room for what follows the payload in a file, and one byte more, by which a file that is too long is noticed.
type TrailerRoom = UnsafeCell<[u8; BLOCK + TRAILER_LEN]>;

/// A page that is to be read.
struct Item<'a> {
    transfer: &'a Transfer<'a>,
    number: usize,
    id: PageId,
    digest: [u8; 8],
    len: u64,
    pieces: Range<usize>,
}

enum Job {
    /// The file of an item; its pieces end in the room for its trailer.
    File { item: usize, pieces: Range<usize>, trailer: usize },
    /// Items that lie one after another in a pack.
    Run { file: usize, offset: u64, items: Range<usize>, pieces: Range<usize> },
}

struct Reads<'a> {
    store: &'a Store,
    items: &'a [Item<'a>],
    packed: &'a [(usize, PackPlace, usize)],
    jobs: Vec<Job>,
    list: &'a [libc::iovec],
    trailers: &'a [TrailerRoom],
    files: &'a [OwnedFd],
    call: &'a kvdock_plugin_api::Call<'a>,
    skipped: AtomicBool,
    read: Mutex<Vec<PageId>>,
    corrupt: Mutex<Vec<(PageId, Option<PackPlace>, String)>>,
    gone: Mutex<Vec<PageId>>,
    /// Items whose copy in a pack is dead; there may be a younger one.
    dead: Mutex<Vec<usize>>,
    error: Mutex<Option<io::Error>>,
}

// SAFETY: a trailer's room belongs to one job, which is started and done once, one after the other.
unsafe impl Sync for Reads<'_> {}

impl<'a> Batch<'a> for Reads<'a> {
    fn len(&self) -> usize {
        self.jobs.len()
    }

    fn start(&self, index: usize) -> Option<Op<'a>> {
        let job = self.jobs.get(index)?;
        if self.call.check().is_err() {
            self.skipped.store(true, Ordering::Release);
            self.finish_job(job, PageStatus::Failed);
            return None;
        }
        // SAFETY: the pieces are destination pages of this call, which nobody else touches until it returns, and the trailer room of this job.
        let pieces = |range: &Range<usize>| self.list.get(range.clone()).map(|list| unsafe { Pieces::new(list) });
        Some(match job {
            Job::File { item, pieces: range, .. } => {
                let item = self.items.get(*item)?;
                let tag = self.store.index.tag_text(item.id.tag);
                Op::ReadFile { path: names::page(&item.id.key, &tag), offset: 0, pieces: pieces(range)? }
            }
            Job::Run { file, offset, pieces: range, .. } => {
                Op::ReadAt { file: self.files.get(*file)?.as_fd(), offset: *offset, pieces: pieces(range)? }
            }
        })
    }

    fn only_reads(&self) -> bool {
        true
    }

    fn done(&self, index: usize, result: io::Result<usize>) {
        match (self.jobs.get(index), result) {
            (Some(Job::File { item, trailer, .. }), result) => {
                let Some(item) = self.items.get(*item) else { return };
                let status = match result {
                    Ok(read) => self.check_file(item, read, *trailer),
                    Err(error) => self.failed(item, error),
                };
                item.transfer.finish(item.number, status);
            }
            (Some(Job::Run { file, items, .. }), Ok(read)) => {
                let mut end = 0;
                for (number, item, place) in self.run(items) {
                    end += place.len as usize;
                    let status = self.check_packed(number, item, place, *file, read >= end);
                    item.transfer.finish(item.number, status);
                }
            }
            (Some(Job::Run { items, .. }), Err(error)) => {
                for (_, item, _) in self.run(items) {
                    item.transfer.finish(item.number, self.failed(item, io::Error::from(error.kind())));
                }
                self.error.lock().get_or_insert(error);
            }
            (None, _) => {}
        }
    }
}

impl<'a> Reads<'a> {
    fn run(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, &Item<'a>, &PackPlace)> {
        let packed = self.packed.get(range.clone()).unwrap_or_default();
        packed.iter().filter_map(|(item, place, _)| Some((*item, self.items.get(*item)?, place)))
    }

    fn finish_job(&self, job: &Job, status: PageStatus) {
        match job {
            Job::File { item, .. } => {
                if let Some(item) = self.items.get(*item) {
                    item.transfer.finish(item.number, status);
                }
            }
            Job::Run { items, .. } => {
                self.run(items).for_each(|(_, item, _)| item.transfer.finish(item.number, status))
            }
        }
    }

    fn failed(&self, item: &Item<'_>, error: io::Error) -> PageStatus {
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE) => {
                self.gone.lock().push(item.id);
                PageStatus::Missing
            }
            Some(libc::EISDIR | libc::ELOOP | libc::ENXIO) => {
                self.corrupt.lock().push((item.id, None, format!("it is no file ({error})")));
                PageStatus::Corrupt
            }
            _ => {
                self.error.lock().get_or_insert(error);
                PageStatus::Failed
            }
        }
    }

    fn check_file(&self, item: &Item<'_>, read: usize, trailer: usize) -> PageStatus {
        let verdict = (|| {
            let expected = file_len(item.len) as usize;
            if read != expected {
                let than = if read < expected { "short" } else { "long" };
                return Err(format!("its file is too {than} for the {expected} bytes it should have"));
            }
            // SAFETY: the operation of this job is done, and no other job has this room.
            let room = self.trailers.get(trailer).map(|room| unsafe { *room.get() });
            let rest = expected - item.len as usize;
            let bytes = room.as_ref().and_then(|room| room.get(..rest)?.last_chunk()).ok_or("it has no trailer")?;
            let found = Trailer::decode(bytes)?;
            let owner = (found.namespace, found.key, found.pool, found.len);
            if owner != (self.store.namespace, item.id.key, item.digest, item.len) {
                return Err("it belongs to another page".to_owned());
            }
            let list = self.list.get(item.pieces.clone()).ok_or("it has no pieces")?;
            if crc_of(list) != found.crc {
                return Err("the checksum of its payload is wrong".to_owned());
            }
            Ok(())
        })();
        match verdict {
            Ok(()) => {
                self.read.lock().push(item.id);
                PageStatus::Ok
            }
            Err(why) => {
                self.corrupt.lock().push((item.id, None, why));
                PageStatus::Corrupt
            }
        }
    }

    fn check_packed(&self, number: usize, item: &Item<'_>, place: &PackPlace, file: usize, whole: bool) -> PageStatus {
        let good = whole && self.list.get(item.pieces.clone()).is_some_and(|list| crc_of(list) == place.crc);
        // A marker has no bytes that would show that it was removed.
        if good && item.len > 0 {
            self.read.lock().push(item.id);
            return PageStatus::Ok;
        }
        let alive = self.files.get(file).is_some_and(|file| self.store.is_alive(file, place).unwrap_or(false));
        if !alive {
            self.store.forget_packed(&item.id, place);
            self.dead.lock().push(number);
            return PageStatus::Missing;
        }
        if good {
            self.read.lock().push(item.id);
            return PageStatus::Ok;
        }
        self.corrupt.lock().push((item.id, Some(*place), "the checksum of its payload is wrong".to_owned()));
        PageStatus::Corrupt
    }
}

/// Bytes that one operation on a pack reads at most, and at least where pages lie side by side.
const RUN_BYTES: (u64, u64) = (1 << 20, 128 << 10);
/// Operations that a call is split into, as long as they are not too short: a disk is faster with several on their way.
const RUNS: u64 = 8;

impl Store {
    /// Reads the pages of a batch.
    pub fn get(&self, batch: &Pages<'_, Get>) -> Result<()> {
        let started = Instant::now();
        let result = self.get_pages(batch);
        self.figures.gets.fetch_add(1, Ordering::Relaxed);
        self.figures.get_ns.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    fn get_pages(&self, batch: &Pages<'_, Get>) -> Result<()> {
        if batch.transfers().iter().any(|transfer| transfer.layers().is_some()) {
            return self.read_by_layer(batch.transfers(), batch.call(), &|| Ok(()), |_| {});
        }
        let root = self.root();
        let mut items = Vec::with_capacity(batch.len());
        let mut list: Vec<libc::iovec> = Vec::new();
        let mut small = Vec::new();
        let mut large = Vec::new();
        for transfer in batch.transfers() {
            let info = self.pool(transfer.pool())?;
            for (number, (key, page)) in transfer.keys().iter().zip(transfer.pages()).enumerate() {
                let id = PageId { key: *key, tag: info.tag_number };
                if self.is_hidden(&id) {
                    transfer.finish(number, PageStatus::Missing);
                    continue;
                }
                let start = list.len();
                for segment in 0..transfer.pool().segments().len() {
                    let (base, len) = transfer.pool().piece(*page, segment)?;
                    list.push(libc::iovec { iov_base: base.cast(), iov_len: len });
                }
                let pieces = start..list.len();
                if info.is_small() {
                    small.push(items.len())
                } else {
                    large.push(items.len())
                };
                items.push(Item { transfer, number, id, digest: info.tag.digest, len: info.page_bytes, pieces });
            }
        }
        let mut dead = self.read(&root, batch, &items, &list, small, large)?;
        if !dead.is_empty() {
            dead.sort_unstable();
            // Another process may have removed a page and stored it again elsewhere.
            self.read(&root, batch, &items, &list, dead, Vec::new())?;
        }
        Ok(())
    }

    /// Reads items, the small and the large ones. Gives those of which the copy that was known is dead.
    fn read(
        &self,
        root: &Root,
        batch: &Pages<'_, Get>,
        items: &[Item<'_>],
        list: &[libc::iovec],
        small: Vec<usize>,
        large: Vec<usize>,
    ) -> Result<Vec<usize>> {
        let trailers: Vec<TrailerRoom> = large.iter().map(|_| UnsafeCell::new([0; BLOCK + TRAILER_LEN])).collect();
        let mut jobs = Vec::with_capacity(items.len());
        let mut full: Vec<libc::iovec> = Vec::with_capacity(list.len() * 2 + large.len());
        full.extend_from_slice(list);
        for (trailer, item) in large.into_iter().enumerate() {
            let Some(page) = items.get(item) else { continue };
            if self.config.ttl.is_some() && self.index.get(&page.id).is_some_and(|known| self.is_expired(known.used)) {
                page.transfer.finish(page.number, PageStatus::Missing);
                continue;
            }
            let start = full.len();
            full.extend_from_slice(list.get(page.pieces.clone()).unwrap_or_default());
            let room = trailers.get(trailer).map(|room| room.get().cast()).unwrap_or(std::ptr::null_mut());
            full.push(libc::iovec { iov_base: room, iov_len: (file_len(page.len) - page.len) as usize + 1 });
            jobs.push(Job::File { item, pieces: start..full.len(), trailer });
        }
        let (mut packed, mut files) = (Vec::new(), Vec::new());
        self.place_small(root, batch, items, small, &mut packed, &mut files);
        self.run_jobs(items, list, &packed, &mut full, &mut jobs);
        let reads = Reads {
            store: self,
            items,
            packed: &packed,
            jobs,
            list: &full,
            trailers: &trailers,
            files: &files,
            call: batch.call(),
            skipped: AtomicBool::new(false),
            read: Mutex::default(),
            corrupt: Mutex::default(),
            gone: Mutex::default(),
            dead: Mutex::default(),
            error: Mutex::default(),
        };
        self.engine.run(root.namespace.as_fd(), &reads);
        let now = now_seconds() as u32;
        reads.read.lock().iter().for_each(|id| self.touch(id, now));
        for id in reads.gone.lock().iter() {
            self.index.remove_if(id, |known| matches!(known.place, Place::File(_)));
        }
        let corrupt = std::mem::take(&mut *reads.corrupt.lock());
        if !corrupt.is_empty() {
            self.drop_corrupt(root, &corrupt);
        }
        if reads.skipped.load(Ordering::Acquire) {
            batch.call().check()?;
        }
        if let Some(error) = reads.error.lock().take() {
            self.figures.failures.fetch_add(1, Ordering::Relaxed);
            self.host.log(kvdock_plugin_api::LogLevel::Warn, "store", &format!("reading failed: {error}"));
            let nothing = items.iter().all(|item| item.transfer.status(item.number) == PageStatus::Failed);
            if nothing {
                let message = format!("{}: reading failed: {error}", self.config.dir.display());
                return Err(Error::new(ErrorKind::Unavailable, message).retryable());
            }
        }
        let dead = std::mem::take(&mut *reads.dead.lock());
        Ok(dead)
    }

    /// Notes a use; a page that another process stored is known from now on.
    pub fn touch(&self, id: &PageId, now: u32) {
        if self.index.get(id).is_some() {
            return self.index.touch(id, now);
        }
        let tag = self.index.tag_text(id.tag);
        let info = self.pool_of_tag(&tag).filter(|info| !info.is_small());
        if let Some(info) = info {
            self.index.insert(*id, Place::File(file_len(info.page_bytes)), now);
        }
    }

    /// Finds the packs of small pages, and opens each once. A pack that has gone since it was looked at is looked for again.
    fn place_small(
        &self,
        root: &Root,
        batch: &Pages<'_, Get>,
        items: &[Item<'_>],
        mut wanted: Vec<usize>,
        packed: &mut Vec<(usize, PackPlace, usize)>,
        files: &mut Vec<OwnedFd>,
    ) {
        let mut opened: HashMap<u32, Option<usize>> = HashMap::new();
        let mut looked = false;
        for round in 0..2 {
            let mut again = Vec::new();
            for number in wanted {
                let Some(item) = items.get(number) else { continue };
                let known = self.known_small(root, &item.id, &mut looked, batch.call());
                let Some(Place::Pack(place)) = known
                    .map(|known| known.place)
                    .filter(|place| matches!(place, Place::Pack(place) if place.len == item.len))
                else {
                    item.transfer.finish(item.number, PageStatus::Missing);
                    continue;
                };
                let file = *opened.entry(place.pack).or_insert_with(|| {
                    let file = self.open_pack(root, place.pack, false).ok()?;
                    files.push(file);
                    Some(files.len() - 1)
                });
                match file {
                    Some(file) => packed.push((number, place, file)),
                    None if round == 0 => again.push(number),
                    None => {
                        self.forget_packed(&item.id, &place);
                        item.transfer.finish(item.number, PageStatus::Missing);
                    }
                }
            }
            wanted = again;
            if !wanted.is_empty() {
                // An error here leaves the pages missing.
                let _ = self.look_at_packs(root, crate::pack::Look::Everything, None);
            }
        }
        packed.sort_unstable_by_key(|(_, place, file)| (*file, place.offset));
    }

    /// Joins small pages that lie one after another into operations.
    fn run_jobs(
        &self,
        items: &[Item<'_>],
        list: &[libc::iovec],
        packed: &[(usize, PackPlace, usize)],
        full: &mut Vec<libc::iovec>,
        jobs: &mut Vec<Job>,
    ) {
        let mut run_bytes = 0;
        let total: u64 = packed.iter().map(|(_, place, _)| place.len).sum();
        let most = (total / RUNS).clamp(RUN_BYTES.1, RUN_BYTES.0);
        let mut expected = None;
        for (number, (item, place, file)) in packed.iter().enumerate() {
            let start = full.len();
            let pieces = items.get(*item).map(|item| item.pieces.clone()).unwrap_or_default();
            full.extend_from_slice(list.get(pieces).unwrap_or_default());
            let joins = expected == Some((*file, place.offset)) && run_bytes + place.len <= most;
            match jobs.last_mut() {
                Some(Job::Run { items, pieces, .. }) if joins => {
                    items.end = number + 1;
                    pieces.end = full.len();
                    run_bytes += place.len;
                }
                _ => {
                    let (items, pieces) = (number..number + 1, start..full.len());
                    jobs.push(Job::Run { file: *file, offset: place.offset, items, pieces });
                    run_bytes = place.len;
                }
            }
            expected = Some((*file, place.offset + place.len));
        }
    }
}
