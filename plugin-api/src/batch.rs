//! `batch_get`, `batch_set` and `batch_remove`: many pages of several pools in one call.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::call::{Call, Chain};
use crate::pool::Pool;
use crate::v0_1::PageKey;
use crate::{Error, ErrorKind, MemoryKind, PageStatus, Result};

/// Marks a batch that reads from the store into pages.
#[derive(Debug, Clone, Copy)]
pub struct Get;
/// Marks a batch that stores pages.
#[derive(Debug, Clone, Copy)]
pub struct Set;
/// Marks a batch that removes pages; it has keys only.
#[derive(Debug, Clone, Copy)]
pub struct Remove;

/// The pages of one pool in a batch.
#[derive(Debug, Clone)]
pub struct Transfer<'a> {
    pub(crate) pool: Pool,
    pub(crate) keys: &'a [PageKey],
    pub(crate) pages: &'a [u32],
    pub(crate) statuses: &'a [AtomicU8],
    pub(crate) layers: Option<Range<u32>>,
    pub(crate) position: u64,
}

impl<'a> Transfer<'a> {
    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
    /// Keys, one a page.
    pub fn keys(&self) -> &'a [PageKey] {
        self.keys
    }
    /// Page indices, one a key; empty in a remove.
    pub fn pages(&self) -> &'a [u32] {
        self.pages
    }
    /// The layers that are asked for; none for the whole page. A range moves their components, and the seal.
    pub fn layers(&self) -> Option<Range<u32>> {
        self.layers.clone()
    }
    /// Pages of the sequence before page `index`.
    pub fn position(&self, index: usize) -> u64 {
        self.position + index as u64
    }
    /// Number of pages.
    pub fn len(&self) -> usize {
        self.keys.len()
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
    /// Writes what became of page `index` of this transfer. May be called from any thread, until the call returns.
    pub fn finish(&self, index: usize, status: PageStatus) {
        if let Some(entry) = self.statuses.get(index) {
            entry.store(status.raw(), Ordering::Release);
        }
    }
    /// Every page of this transfer. Not for everybody: two pages with the same bytes must not be handed out.
    pub(crate) fn into_pages<M>(self) -> impl Iterator<Item = Page<'a, M>> {
        (0..self.len()).map(move |index| Page { transfer: self.clone(), index, mode: PhantomData })
    }
    /// What was written for page `index`.
    pub fn status(&self, index: usize) -> PageStatus {
        self.statuses.get(index).map_or(PageStatus::Failed, |entry| PageStatus::from_raw(entry.load(Ordering::Acquire)))
    }
}

/// A batch call: `M` is [`Get`], [`Set`] or [`Remove`].
#[derive(Debug)]
pub struct Batch<'a, M> {
    pub(crate) call: Call<'a>,
    pub(crate) chain: Chain<'a>,
    pub(crate) transfers: Vec<Transfer<'a>>,
    pub(crate) mode: PhantomData<M>,
}

impl<'a, M> Batch<'a, M> {
    /// Deadline and cancel flag.
    pub fn call(&self) -> &Call<'a> {
        &self.call
    }
    /// The part of the chain that this call is about.
    pub fn chain(&self) -> Chain<'a> {
        self.chain
    }
    /// The parts by pool. On a set, side pools come first and the anchor last.
    pub fn transfers(&self) -> &[Transfer<'a>] {
        &self.transfers
    }
    /// Number of pages over all pools.
    pub fn len(&self) -> usize {
        self.transfers.iter().map(Transfer::len).sum()
    }
    /// Whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every page of every pool, each once. The pages may be spread over threads that end before the call returns.
    pub fn into_pages(self) -> impl Iterator<Item = Page<'a, M>> {
        self.transfers.into_iter().flat_map(Transfer::into_pages)
    }
}

/// One page of one pool in a batch. Whoever holds it is the only one to touch its bytes.
#[derive(Debug)]
pub struct Page<'a, M> {
    transfer: Transfer<'a>,
    index: usize,
    mode: PhantomData<M>,
}

impl<'a, M> Page<'a, M> {
    /// Key of the page.
    pub fn key(&self) -> &'a PageKey {
        &self.transfer.keys[self.index]
    }
    /// Its pool.
    pub fn pool(&self) -> &Pool {
        &self.transfer.pool
    }
    /// Pages of its sequence before this one: how deep it stands in the chain.
    pub fn position(&self) -> u64 {
        self.transfer.position(self.index)
    }
    /// The layers that are asked for; none for all.
    pub fn layers(&self) -> Option<Range<u32>> {
        self.transfer.layers.clone()
    }
    /// Bytes of the whole page; 0 for a logical pool, whose pages are marker objects.
    pub fn len(&self) -> usize {
        self.transfer.pool.page_bytes() as usize
    }
    /// Whether the page has no bytes, as those of a logical pool.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Number of pieces.
    pub fn piece_count(&self) -> usize {
        self.transfer.pool.segments().len()
    }
    /// Writes what became of the page.
    pub fn finish(self, status: PageStatus) {
        self.transfer.finish(self.index, status);
    }

    /// Address and length of piece `index`, for I/O that scatters and gathers. The bytes may be touched until the call returns.
    ///
    /// # Errors
    /// When there is no such piece.
    pub fn piece(&self, index: usize) -> Result<(*mut u8, usize)> {
        let page = self.transfer.pages.get(self.index).copied();
        let page = page.ok_or_else(|| Error::new(ErrorKind::Internal, "the call names no page to move"))?;
        self.transfer.pool.piece(page, index)
    }

    fn host_piece(&self, index: usize) -> Result<(*mut u8, usize)> {
        let region = self.transfer.pool.segments().get(index).and_then(|s| self.transfer.pool.regions().get(s.region));
        match region.map(|r| r.memory_kind) {
            Some(MemoryKind::Host | MemoryKind::CudaPinned) => self.piece(index),
            _ => Err(Error::unsupported("touching device memory from the host")),
        }
    }
}

impl Page<'_, Get> {
    /// Piece `index` of the page, to be filled.
    ///
    /// # Errors
    /// When there is no such piece, or it lies on a device.
    pub fn piece_mut(&mut self, index: usize) -> Result<&mut [u8]> {
        let (ptr, len) = self.host_piece(index)?;
        // SAFETY: registration checked that the piece lies in its region, which is mapped until the call returns. Destination pages of
        // calls in flight are disjoint (rule of the boundary), this page exists once in its batch, and `&mut self` makes this the only slice.
        Ok(unsafe { std::slice::from_raw_parts_mut(ptr, len) })
    }

    /// Fills the page from stored bytes and writes its status: `Ok`, or `Corrupt` when the length is not the page's.
    pub fn fill(mut self, stored: &[u8]) {
        if stored.len() != self.len() {
            return self.finish(PageStatus::Corrupt);
        }
        let mut rest = stored;
        for index in 0..self.piece_count() {
            let Ok(piece) = self.piece_mut(index) else {
                return self.finish(PageStatus::Failed);
            };
            let (head, tail) = rest.split_at(piece.len());
            piece.copy_from_slice(head);
            rest = tail;
        }
        self.finish(PageStatus::Ok);
    }
}

impl Page<'_, Set> {
    /// Piece `index` of the page.
    ///
    /// # Errors
    /// When there is no such piece, or it lies on a device.
    pub fn piece_bytes(&self, index: usize) -> Result<&[u8]> {
        let (ptr, len) = self.host_piece(index)?;
        // SAFETY: registration checked that the piece lies in its region, which is mapped until the call returns; the host does not write
        // source pages (rule of the boundary).
        Ok(unsafe { std::slice::from_raw_parts(ptr, len) })
    }

    /// All bytes of the page, gathered.
    ///
    /// # Errors
    /// When a piece lies on a device.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(self.len());
        for index in 0..self.piece_count() {
            bytes.extend_from_slice(self.piece_bytes(index)?);
        }
        Ok(bytes)
    }
}
