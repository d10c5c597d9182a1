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
use crate::format::{BLOCK, ENTRY_LEN, TRAILER_LEN, Trailer, file_len};
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
    /// Its pieces in the list; `whole` of them are written from where they lie, and the end of the file after them from a buffer: the rest of
    /// the payload, zeros, the trailer.
    pieces: Range<usize>,
    whole: usize,
    /// Its pieces as they are written, in the other list.
    written: Range<usize>,
    /// The file can be written past the page cache.
    direct: bool,
}

/// A block that may be written past the page cache.
#[repr(C, align(4096))]
struct Block(#[allow(dead_code, reason = "only its address is used")] [u8; BLOCK]);

/// Most bytes of a page that are copied so that it can be written past the page cache.
const COPY_MOST: usize = 64 << 10;

/// How many of the pieces of a page are written from where they lie, and whether that can go past the page cache. Pieces that do not lie
/// at blocks are copied when they are few bytes (such as the host's seal); otherwise the page goes through the page cache.
fn plan(pieces: &[libc::iovec], durable: bool) -> (usize, bool) {
    let aligned =
        |piece: &&libc::iovec| (piece.iov_base as usize).is_multiple_of(BLOCK) && piece.iov_len.is_multiple_of(BLOCK);
    let whole = pieces.iter().take_while(aligned).count();
    let rest: usize = pieces.iter().skip(whole).map(|piece| piece.iov_len).sum();
    if durable && rest <= COPY_MOST { (whole, true) } else { (pieces.len(), false) }
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
    written_list: &'a [libc::iovec],
    written: u64,
    skipped: AtomicBool,
    /// Fan-out folders with new names, and whether there are new folders.
    folders: Vec<AtomicBool>,
    new_folder: AtomicBool,
    /// Pages whose folder was not there.
    homeless: Mutex<Vec<usize>>,
    error: Mutex<Option<io::Error>>,
}

// SAFETY: a page's buffer belongs to it alone, and it is started and done once, one after the other; source pages are only read.
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
        let payload = self.list.get(page.pieces.clone())?;
        let trailer = Trailer {
            namespace: self.store.namespace,
            key: page.id.key,
            pool: self.info.tag.digest,
            len: self.info.page_bytes,
            crc: crc_of(payload),
            written: self.written,
        }
        .encode();
        let written = self.written_list.get(page.written.clone())?;
        fill_end(written.last()?, payload.get(page.whole..)?, &trailer);
        let number = self.store.temp_number.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the pieces are source pages of this call, which nobody writes until it returns, and this page's buffer.
        let pieces = unsafe { Pieces::new(written) };
        Some(Op::WriteFile {
            temp: names::temp(&page.id.key, self.store.owner.id(), number),
            path: names::page(&page.id.key, self.tag),
            pieces,
            sync: self.store.config.durability == Durability::Batch,
            direct: page.direct,
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

/// Fills the buffer at the end of a page's file: what of the payload is copied, zeros (the buffer has them), the trailer.
fn fill_end(end: &libc::iovec, copied: &[libc::iovec], trailer: &[u8; TRAILER_LEN]) {
    // SAFETY: the buffer is this page's alone and no operation on it has started; it is longer than what is copied and the trailer (`file_len`).
    let end = unsafe { std::slice::from_raw_parts_mut(end.iov_base.cast::<u8>(), end.iov_len) };
    let mut at = 0;
    for piece in copied.iter().filter(|piece| piece.iov_len > 0) {
        // SAFETY: a piece of a source page, which lives until the call returns and is not written.
        let bytes = unsafe { std::slice::from_raw_parts(piece.iov_base.cast::<u8>().cast_const(), piece.iov_len) };
        if let Some(to) = end.get_mut(at..at + bytes.len()) {
            to.copy_from_slice(bytes);
        }
        at += bytes.len();
    }
    if let Some(to) = end.last_chunk_mut() {
        *to = *trailer;
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
        let result = self.set_transfers(batch.transfers(), batch.call());
        batch_result(batch.transfers(), result.err())
    }

    /// Stores pages; gives the first error.
    pub fn set_transfers(&self, transfers: &[Transfer<'_>], call: &Call<'_>) -> Result<()> {
        if transfers.iter().all(Transfer::is_empty) {
            return Ok(());
        }
        if let Some(trouble) = self.health.trouble() {
            refuse(transfers);
            return Err(trouble.retryable());
        }
        let root = self.root_for_writing().map_err(|error| {
            refuse(transfers);
            self.write_failed(&error, 0)
        })?;
        // Side pools come first and the anchor last, so an anchor's page is never seen before its companions.
        let mut first_error = None;
        for transfer in transfers {
            let info = self.pool(transfer.pool())?;
            let stored = if info.is_small() {
                self.set_small(&root, call, transfer, &info)
            } else {
                self.set_large(&root, call, transfer, &info)
            };
            if let Err(error) = stored {
                first_error.get_or_insert(error);
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// The error for the host, and the state of the store, after a write failed.
    pub fn write_failed(&self, error: &io::Error, bytes: u64) -> Error {
        let error = Error::new(classify(error).0, format!("{}: {}", self.config.dir.display(), explain(error)));
        self.health.fail(error.clone(), bytes);
        error.retryable()
    }

    fn set_large(&self, root: &Root, call: &Call<'_>, transfer: &Transfer<'_>, info: &PoolInfo) -> Result<()> {
        let mut pages: Vec<FileWrite> = Vec::with_capacity(transfer.len());
        let mut twins = Vec::new();
        let mut first: HashMap<[u8; 32], usize> = HashMap::with_capacity(transfer.len());
        let segments = transfer.pool().segments().len();
        let mut list = Vec::with_capacity(transfer.len() * segments);
        let durable = self.config.durability == Durability::Batch;
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
            let (whole, direct) = plan(list.get(start..).unwrap_or_default(), durable);
            pages.push(FileWrite { id, number, pieces: start..list.len(), whole, written: 0..0, direct });
        }
        let result = self.write_files(root, call, transfer, info, pages, &list, now, synced);
        twins.iter().for_each(|(number, twin)| transfer.finish(*number, transfer.status(*twin)));
        result
    }

    /// Whether a page's file is there with the right length, and whether this instance knew. It counts as used now.
    pub fn is_stored(&self, root: &Root, id: &PageId, info: &PoolInfo) -> Option<bool> {
        let path = names::page(&id.key, &info.tag.text);
        let stat = rustix::fs::statat(&root.namespace, path.as_cstr(), AtFlags::SYMLINK_NOFOLLOW).ok()?;
        let bytes = file_len(info.page_bytes);
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
        list: &[libc::iovec],
        now: u64,
        synced: Vec<names::Name>,
    ) -> Result<()> {
        let page_bytes = file_len(info.page_bytes);
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
            let mut ends = Vec::new();
            let written_list = written_list(&mut pages, list, page_bytes, &mut ends);
            let writes = Writes {
                store: self,
                root,
                transfer,
                call,
                info,
                tag: &info.tag.text,
                pages: &pages,
                list,
                written_list: &written_list,
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
            // Belief is not enough for saying that a page is stored.
            let place = self.living_place(root, &id, &mut looked, call, &mut opened);
            if place.is_some_and(|place| place.len == info.page_bytes) {
                self.index.touch(&id, now);
                transfer.finish(number, PageStatus::Ok);
                continue;
            }
            let start = list.len();
            for segment in 0..transfer.pool().segments().len() {
                let (base, len) = transfer.pool().piece(*page, segment)?;
                list.push(libc::iovec { iov_base: base.cast(), iov_len: len });
            }
            let pieces = start..list.len();
            pages.push(SmallWrite {
                id,
                len: info.page_bytes,
                pieces,
                crc: AtomicU32::new(0),
                number,
                moved_from: None,
            });
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

/// The pieces of the files of pages: pieces of the payload, and a buffer at the end, which lies in `ends`.
fn written_list(
    pages: &mut [FileWrite],
    list: &[libc::iovec],
    file_bytes: u64,
    ends: &mut Vec<Block>,
) -> Vec<libc::iovec> {
    let end_of = |page: &FileWrite| {
        let whole = list.get(page.pieces.clone()).unwrap_or_default().iter().take(page.whole);
        file_bytes as usize - whole.map(|piece| piece.iov_len).sum::<usize>()
    };
    let blocks = pages.iter().map(|page| end_of(page).div_ceil(BLOCK)).sum();
    ends.resize_with(blocks, || Block([0; BLOCK]));
    let base: *mut u8 = ends.as_mut_ptr().cast();
    let (mut written, mut block) = (Vec::with_capacity(list.len() + pages.len()), 0);
    for page in pages {
        let start = written.len();
        written.extend(list.get(page.pieces.clone()).unwrap_or_default().iter().take(page.whole).copied());
        let len = end_of(page);
        written.push(libc::iovec { iov_base: base.wrapping_add(block * BLOCK).cast(), iov_len: len });
        block += len.div_ceil(BLOCK);
        page.written = start..written.len();
    }
    written
}

fn refuse(transfers: &[Transfer<'_>]) {
    for transfer in transfers {
        (0..transfer.len()).for_each(|number| transfer.finish(number, PageStatus::Refused));
    }
}

/// A call of which a part was stored is a success: each page has its status. One of which nothing was stored is an error.
fn batch_result(transfers: &[Transfer<'_>], error: Option<Error>) -> Result<()> {
    let Some(error) = error else { return Ok(()) };
    let stopped = matches!(error.kind, ErrorKind::Cancelled | ErrorKind::TimedOut);
    let any = transfers.iter().any(|t| (0..t.len()).any(|number| t.status(number) == PageStatus::Ok));
    if any && !stopped { Ok(()) } else { Err(error) }
}
