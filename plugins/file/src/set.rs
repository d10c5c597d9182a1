//! Storing pages.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use kvdock_plugin_api::{Batch as Pages, Call, Error, ErrorKind, PageStatus, Result, Set, Transfer};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType};

use crate::config::Durability;
use crate::format::{ENTRY_LEN, TRAILER_LEN, Trailer};
use crate::health::{classify, explain};
use crate::index::{PageId, Place};
use crate::io::{Batch, Op, Pieces};
use crate::names;
use crate::pack::{SmallWrite, crc_of};
use crate::root::{Root, now_seconds};
use crate::store::{PoolInfo, Store};

/// A page that is to be written as a file of its own.
struct FileWrite {
    id: PageId,
    number: usize,
    /// Its pieces in the list, the trailer last.
    pieces: Range<usize>,
    payload: u64,
    crc: AtomicU32,
}

struct Writes<'a> {
    store: &'a Store,
    root: &'a Root,
    transfer: &'a Transfer<'a>,
    call: &'a Call<'a>,
    info: &'a PoolInfo,
    tag: &'a str,
    pages: &'a [FileWrite],
    list: &'a [libc::iovec],
    trailers: &'a [std::cell::UnsafeCell<[u8; TRAILER_LEN]>],
    written: u64,
    skipped: AtomicBool,
    /// Fan-out folders with new names, and whether there are new folders.
    folders: Vec<AtomicBool>,
    new_folder: AtomicBool,
    /// Pages whose folder was not there.
    homeless: Mutex<Vec<usize>>,
    error: Mutex<Option<io::Error>>,
}

// SAFETY: a trailer belongs to one page, which is started and done once, one after the other.
unsafe impl Sync for Writes<'_> {}

impl<'a> Batch<'a> for Writes<'a> {
    fn len(&self) -> usize {
        self.pages.len()
    }

    fn start(&self, index: usize) -> Option<Op<'a>> {
        let page = self.pages.get(index)?;
        if self.call.check().is_err() {
            self.skipped.store(true, Ordering::Release);
            self.transfer.finish(page.number, PageStatus::Failed);
            return None;
        }
        let [first, ..] = page.id.key;
        match self.root.need_fan_out(first) {
            Ok(made) => self.new_folder.fetch_or(made, Ordering::AcqRel),
            Err(error) => {
                self.done(index, Err(error));
                return None;
            }
        };
        let (payload, trailer) = (page.pieces.start..page.pieces.end - 1, self.trailers.get(index)?);
        page.crc.store(crc_of(self.list.get(payload)?), Ordering::Release);
        let bytes = Trailer {
            namespace: self.store.namespace,
            key: page.id.key,
            pool: self.info.tag.digest,
            len: page.payload,
            crc: page.crc.load(Ordering::Acquire),
            written: self.written,
        }
        .encode();
        // SAFETY: the room is this page's, and its operation has not started.
        unsafe { *trailer.get() = bytes };
        let number = self.store.temp_number.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the pieces are source pages of this call, which nobody writes until it returns, and this page's trailer.
        let pieces = unsafe { Pieces::new(self.list.get(page.pieces.clone())?) };
        Some(Op::WriteFile {
            temp: names::temp(&page.id.key, self.store.owner.id(), number),
            path: names::page(&page.id.key, self.tag),
            pieces,
            sync: self.store.config.durability == Durability::Batch,
        })
    }

    fn done(&self, index: usize, result: io::Result<usize>) {
        let Some(page) = self.pages.get(index) else { return };
        match result {
            Ok(_) => {
                let [first, ..] = page.id.key;
                if let Some(folder) = self.folders.get(usize::from(first)) {
                    folder.store(true, Ordering::Release);
                }
                self.transfer.finish(page.number, PageStatus::Ok);
            }
            Err(error) => {
                if error.raw_os_error() == Some(libc::ENOENT) {
                    self.homeless.lock().push(index);
                }
                self.transfer.finish(page.number, classify(&error).1);
                self.error.lock().get_or_insert(error);
            }
        }
    }
}

/// Makes folders durable.
struct Syncs(Vec<names::Name>, Mutex<Option<io::Error>>);

impl<'a> Batch<'a> for Syncs {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn start(&self, index: usize) -> Option<Op<'a>> {
        self.0.get(index).map(|path| Op::Sync { path: *path })
    }
    fn done(&self, _: usize, result: io::Result<usize>) {
        if let Err(error) = result {
            self.1.lock().get_or_insert(error);
        }
    }
}

impl Store {
    /// Stores the pages of a batch.
    pub fn set(&self, batch: &Pages<'_, Set>) -> Result<()> {
        let started = Instant::now();
        let result = self.set_pages(batch);
        self.figures.sets.fetch_add(1, Ordering::Relaxed);
        self.figures.set_ns.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        if result.is_err() {
            self.figures.failures.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    fn set_pages(&self, batch: &Pages<'_, Set>) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        if let Some(trouble) = self.health.trouble() {
            refuse(batch);
            return Err(trouble.retryable());
        }
        let root = self.root_for_writing().map_err(|error| {
            refuse(batch);
            self.write_failed(&error, 0)
        })?;
        // Side pools come first and the anchor last, so an anchor's page is never seen before its companions.
        let mut first_error = None;
        for transfer in batch.transfers() {
            let info = self.pool(transfer.pool())?;
            let stored = if info.is_small() {
                self.set_small(&root, batch.call(), transfer, &info)
            } else {
                self.set_large(&root, batch.call(), transfer, &info)
            };
            if let Err(error) = stored {
                first_error.get_or_insert(error);
            }
        }
        batch_result(batch, first_error)
    }

    /// The error for the host, and the state of the store, after a write failed.
    fn write_failed(&self, error: &io::Error, bytes: u64) -> Error {
        let error = Error::new(classify(error).0, format!("{}: {}", self.config.dir.display(), explain(error)));
        self.health.fail(error.clone(), bytes);
        error.retryable()
    }

    fn set_large(&self, root: &Root, call: &Call<'_>, transfer: &Transfer<'_>, info: &PoolInfo) -> Result<()> {
        let mut pages: Vec<FileWrite> = Vec::with_capacity(transfer.len());
        let mut twins = Vec::new();
        let mut first: HashMap<[u8; 32], usize> = HashMap::with_capacity(transfer.len());
        let segments = transfer.pool().segments().len();
        let mut list = Vec::with_capacity(transfer.len() * (segments + 1));
        let mut synced = Vec::new();
        let now = now_seconds();
        for (number, (key, page)) in transfer.keys().iter().zip(transfer.pages()).enumerate() {
            let id = PageId { key: *key, tag: info.tag_number };
            if let Some(twin) = first.get(key) {
                twins.push((number, *twin));
                continue;
            }
            first.insert(*key, number);
            if let Some(known) = self.is_stored(root, &id, info) {
                if !known {
                    synced.push(names::page(key, &info.tag.text));
                }
                transfer.finish(number, PageStatus::Ok);
                continue;
            }
            let start = list.len();
            for segment in 0..segments {
                let (base, len) = transfer.pool().piece(*page, segment)?;
                list.push(libc::iovec { iov_base: base.cast(), iov_len: len });
            }
            list.push(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: TRAILER_LEN });
            pages.push(FileWrite {
                id,
                number,
                pieces: start..list.len(),
                payload: info.page_bytes,
                crc: AtomicU32::new(0),
            });
        }
        let result = self.write_files(root, call, transfer, info, pages, &mut list, now, synced);
        twins.iter().for_each(|(number, twin)| transfer.finish(*number, transfer.status(*twin)));
        result
    }

    /// Whether a page's file is there with the right length, and whether this instance knew. It counts as used now.
    fn is_stored(&self, root: &Root, id: &PageId, info: &PoolInfo) -> Option<bool> {
        let path = names::page(&id.key, &info.tag.text);
        let stat = rustix::fs::statat(&root.namespace, path.as_cstr(), AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let bytes = info.page_bytes + TRAILER_LEN as u64;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || stat.st_size as u64 != bytes {
            return None;
        }
        let now = now_seconds() as u32;
        let known = self.index.get(id).is_some();
        if known {
            self.index.touch(id, now);
        } else {
            self.index.insert(*id, Place::File(bytes), now);
        }
        Some(known)
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one step that is long enough by itself")]
    fn write_files(
        &self,
        root: &Root,
        call: &Call<'_>,
        transfer: &Transfer<'_>,
        info: &PoolInfo,
        mut pages: Vec<FileWrite>,
        list: &mut [libc::iovec],
        now: u64,
        synced: Vec<names::Name>,
    ) -> Result<()> {
        let page_bytes = info.page_bytes + TRAILER_LEN as u64;
        let (fits, admitted) = self.admit(page_bytes, pages.len(), call);
        pages.iter().skip(fits).for_each(|page| transfer.finish(page.number, PageStatus::Refused));
        pages.truncate(fits);
        let _admitted = admitted?;
        let mut again = None;
        for round in 0..2 {
            let fresh;
            let root = match &again {
                Some(again) => {
                    fresh = std::sync::Arc::clone(again);
                    &*fresh
                }
                None => root,
            };
            let trailers: Vec<_> = pages.iter().map(|_| std::cell::UnsafeCell::new([0; TRAILER_LEN])).collect();
            for (page, trailer) in pages.iter().zip(&trailers) {
                if let Some(piece) = list.get_mut(page.pieces.end - 1) {
                    piece.iov_base = trailer.get().cast();
                }
            }
            let writes = Writes {
                store: self,
                root,
                transfer,
                call,
                info,
                tag: &info.tag.text,
                pages: &pages,
                list,
                trailers: &trailers,
                written: now,
                skipped: AtomicBool::new(false),
                folders: (0..256).map(|_| AtomicBool::new(false)).collect(),
                new_folder: AtomicBool::new(false),
                homeless: Mutex::default(),
                error: Mutex::default(),
            };
            self.engine.run(root.namespace.as_fd(), &writes);
            let mut error = writes.error.lock().take();
            if self.config.durability == Durability::Batch {
                let changed = (0..=255u8).filter(|byte| writes.folders[usize::from(*byte)].load(Ordering::Acquire));
                let mut paths: Vec<names::Name> = changed.map(names::fan_out).collect();
                if writes.new_folder.load(Ordering::Acquire) {
                    paths.push(names::fan_outs());
                }
                paths.extend_from_slice(&synced);
                let syncs = Syncs(paths, Mutex::default());
                self.engine.run(root.namespace.as_fd(), &syncs);
                error = error.or(syncs.1.into_inner().filter(|error| error.kind() != io::ErrorKind::NotFound));
            }
            for page in &pages {
                if transfer.status(page.number) == PageStatus::Ok {
                    self.index.insert(page.id, Place::File(page_bytes), now as u32);
                }
            }
            let (homeless, skipped) =
                (std::mem::take(&mut *writes.homeless.lock()), writes.skipped.load(Ordering::Acquire));
            drop(writes);
            if skipped {
                call.check()?;
            }
            let Some(error) = error else { break };
            if homeless.is_empty() || round == 1 {
                return Err(self.write_failed(&error, page_bytes));
            }
            // The directory has vanished, or a folder of it: once more, in a new one.
            again = Some(self.make_again().map_err(|error| self.write_failed(&error, page_bytes))?);
            let mut number = 0;
            pages.retain(|_| {
                number += 1;
                homeless.contains(&(number - 1))
            });
        }
        Ok(())
    }

    fn set_small(&self, root: &Root, call: &Call<'_>, transfer: &Transfer<'_>, info: &PoolInfo) -> Result<()> {
        let mut pages: Vec<SmallWrite> = Vec::with_capacity(transfer.len());
        let mut list = Vec::with_capacity(transfer.len() * transfer.pool().segments().len());
        let mut first: HashMap<[u8; 32], usize> = HashMap::with_capacity(transfer.len());
        let mut twins = Vec::new();
        let mut opened = HashMap::new();
        let mut looked = false;
        let now = now_seconds() as u32;
        for (number, (key, page)) in transfer.keys().iter().zip(transfer.pages()).enumerate() {
            let id = PageId { key: *key, tag: info.tag_number };
            if let Some(twin) = first.get(key) {
                twins.push((number, *twin));
                continue;
            }
            first.insert(*key, number);
            if let Some(Place::Pack(place)) = self.known_small(root, &id, &mut looked, call).map(|known| known.place)
                && place.len == info.page_bytes
            {
                // Belief is not enough for saying that a page is stored.
                let file = opened.entry(place.pack).or_insert_with(|| self.open_pack(root, place.pack, false).ok());
                if file.as_ref().is_some_and(|file| self.is_alive(file, &place).unwrap_or(false)) {
                    self.index.touch(&id, now);
                    transfer.finish(number, PageStatus::Ok);
                    continue;
                }
                self.forget_packed(&id, &place);
            }
            let start = list.len();
            for segment in 0..transfer.pool().segments().len() {
                let (base, len) = transfer.pool().piece(*page, segment)?;
                list.push(libc::iovec { iov_base: base.cast(), iov_len: len });
            }
            let pieces = start..list.len();
            pages.push(SmallWrite { id, len: info.page_bytes, pieces, crc: AtomicU32::new(0), number });
        }
        let result = self.append_small(root, call, transfer, info, &pages, &list);
        twins.iter().for_each(|(number, twin)| transfer.finish(*number, transfer.status(*twin)));
        result
    }

    fn append_small(
        &self,
        root: &Root,
        call: &Call<'_>,
        transfer: &Transfer<'_>,
        info: &PoolInfo,
        pages: &[SmallWrite],
        list: &[libc::iovec],
    ) -> Result<()> {
        let page_bytes = info.page_bytes + ENTRY_LEN as u64;
        let (fits, admitted) = self.admit(page_bytes, pages.len(), call);
        let (pages, rest) = pages.split_at(fits);
        rest.iter().for_each(|page| transfer.finish(page.number, PageStatus::Refused));
        let _admitted = admitted?;
        let go_on = || call.check().map_err(|_| io::Error::from(io::ErrorKind::TimedOut));
        let stored = |page: &SmallWrite| transfer.finish(page.number, PageStatus::Ok);
        let mut result = self.append(root, pages, list, &go_on, stored);
        if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            // The directory has vanished: once more, in a new one.
            result = self.make_again().and_then(|root| self.append(&root, pages, list, &go_on, stored));
        }
        let Err(error) = result else { return Ok(()) };
        let status = if error.kind() == io::ErrorKind::TimedOut { PageStatus::Failed } else { classify(&error).1 };
        for page in pages.iter().filter(|page| transfer.status(page.number) != PageStatus::Ok) {
            transfer.finish(page.number, status);
        }
        if error.kind() == io::ErrorKind::TimedOut {
            call.check()?;
        }
        Err(self.write_failed(&error, page_bytes))
    }
}

fn refuse(batch: &Pages<'_, Set>) {
    for transfer in batch.transfers() {
        (0..transfer.len()).for_each(|number| transfer.finish(number, PageStatus::Refused));
    }
}

/// A call of which a part was stored is a success: each page has its status. One of which nothing was stored is an error.
fn batch_result(batch: &Pages<'_, Set>, error: Option<Error>) -> Result<()> {
    let Some(error) = error else { return Ok(()) };
    let stopped = matches!(error.kind, ErrorKind::Cancelled | ErrorKind::TimedOut);
    let any = batch.transfers().iter().any(|t| (0..t.len()).any(|number| t.status(number) == PageStatus::Ok));
    if any && !stopped { Ok(()) } else { Err(error) }
}
