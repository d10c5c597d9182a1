//! The objects of a call: their names, and which memory here holds which of their bytes.

use std::cell::Cell;
use std::ops::Range;

use kvdock_plugin_api::{Error, ErrorKind, PageKey, PageStatus, Pool, Result, Transfer};

use super::shape::{PoolShape, SpanPlan, Want};
use super::{MARKER, Store};

/// A range of an object, and the memory here that holds it.
#[derive(Debug)]
pub(super) struct Span {
    /// First byte in the object.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    pieces: Range<usize>,
}

/// One object of a page.
#[derive(Debug)]
pub(super) struct Item<'a> {
    /// Number among the objects of the call.
    pub number: usize,
    /// Number of its page among those of the call.
    pub page: usize,
    pub key: &'a PageKey,
    pub name: String,
    /// Bytes of the object.
    pub len: u64,
    /// It stands for a page without bytes.
    pub marker: bool,
    /// It ends in the host's seal, by which the host knows its bytes again.
    pub sealed: bool,
    status: Cell<PageStatus>,
}

impl Item<'_> {
    /// Says what became of it.
    pub fn finish(&self, status: PageStatus) {
        self.status.set(status);
    }
    /// What was said of it.
    pub fn status(&self) -> PageStatus {
        self.status.get()
    }
}

/// The objects of a call.
#[derive(Debug)]
pub(super) struct Items<'a> {
    pub list: Vec<Item<'a>>,
    pages: Vec<(&'a Transfer<'a>, usize)>,
    pieces: Vec<libc::iovec>,
    spans: Vec<Span>,
    /// For each object and step the spans.
    step_spans: Vec<Range<usize>>,
    /// Steps in which the objects are read; 1 but for layers that come one by one.
    pub steps: usize,
}

impl<'a> Items<'a> {
    /// The spans of an object that a step moves.
    pub fn spans(&self, item: &Item<'_>, step: usize) -> &[Span] {
        let range = self.step_spans.get(item.number * self.steps + step).cloned().unwrap_or_default();
        self.spans.get(range).unwrap_or_default()
    }

    /// The memory of a span.
    pub fn pieces(&self, span: &Span) -> &[libc::iovec] {
        self.pieces.get(span.pieces.clone()).unwrap_or_default()
    }

    /// The memory of an object that moves in one piece.
    pub fn whole(&self, item: &Item<'_>) -> &[libc::iovec] {
        self.spans(item, 0).first().map_or(&[], |span| self.pieces(span))
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Says what became of each page: as much as of the worst of its objects. A page of which nothing is known keeps what it has.
    pub fn settle(&self) {
        let mut worst = vec![PageStatus::Ok; self.pages.len()];
        for item in &self.list {
            if let Some(worst) = worst.get_mut(item.page) {
                *worst = worse(*worst, item.status());
            }
        }
        for ((transfer, index), status) in self.pages.iter().zip(worst) {
            if status != PageStatus::Unset {
                transfer.finish(*index, status);
            }
        }
    }

    /// Gives every page a status that it did not get otherwise.
    pub fn settle_rest(&self, status: PageStatus) {
        for item in self.list.iter().filter(|item| item.status() == PageStatus::Unset) {
            item.finish(status);
        }
        self.settle();
    }
}

fn worse(one: PageStatus, other: PageStatus) -> PageStatus {
    let rank = |status: PageStatus| match status {
        PageStatus::Ok => 0,
        PageStatus::Missing => 1,
        PageStatus::Refused => 2,
        PageStatus::Corrupt => 3,
        PageStatus::Failed => 4,
        _ => 5,
    };
    if rank(other) > rank(one) { other } else { one }
}

/// What the objects of a call are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Their names alone.
    Names,
    /// They are written.
    Write,
    /// They are read in one step.
    Read,
    /// They are read in so many steps, a layer each.
    Layers(usize),
}

impl Store {
    /// The objects of the pages of some transfers.
    pub(super) fn items<'a>(&self, transfers: &'a [Transfer<'a>], how: Use) -> Result<Items<'a>> {
        let steps = if let Use::Layers(steps) = how { steps.max(1) } else { 1 };
        let mut items = Items {
            list: Vec::new(),
            pages: Vec::new(),
            pieces: Vec::new(),
            spans: Vec::new(),
            step_spans: Vec::new(),
            steps,
        };
        for transfer in transfers {
            let shape = self.pool(transfer.pool())?;
            let plans = match how {
                Use::Names => Vec::new(),
                Use::Write => shape.plans(&Want::Whole),
                Use::Read => match transfer.layers() {
                    None => shape.plans(&Want::Whole),
                    Some(layers) => shape.plans(&Want::Layers(layers)),
                },
                Use::Layers(_) => shape.plans(&Want::Steps { steps, layers: transfer.layers() }),
            };
            for (index, key) in transfer.keys().iter().enumerate() {
                self.add_page(&mut items, transfer, (index, key), &shape, &plans, how)?;
            }
        }
        Ok(items)
    }

    fn add_page<'a>(
        &self,
        items: &mut Items<'a>,
        transfer: &'a Transfer<'a>,
        (index, key): (usize, &'a PageKey),
        shape: &PoolShape,
        plans: &[Vec<Vec<SpanPlan>>],
        with: Use,
    ) -> Result<()> {
        let page = items.pages.len();
        items.pages.push((transfer, index));
        if shape.read_only && with == Use::Write {
            // Another rank stores the same bytes.
            return Ok(());
        }
        for (at, object) in shape.objects.iter().enumerate() {
            let number = items.list.len();
            items.list.push(Item {
                number,
                page,
                key,
                name: self.names.object(&object.label, key),
                len: object.len,
                marker: shape.logical,
                sealed: shape.is_sealed(),
                status: Cell::new(PageStatus::Unset),
            });
            let Some(plan) = plans.get(at) else { continue };
            for step in 0..items.steps {
                let first = items.spans.len();
                for span in plan.get(step).into_iter().flatten() {
                    let pieces = items.pieces.len();
                    if shape.logical {
                        // A marker is only ever written.
                        let base = MARKER.as_ptr().cast_mut().cast();
                        items.pieces.push(libc::iovec { iov_base: base, iov_len: MARKER.len() });
                    } else {
                        add_pieces(&mut items.pieces, transfer, index, span)?;
                    }
                    let pieces = pieces..items.pieces.len();
                    items.spans.push(Span { offset: span.offset, len: span.len, pieces });
                }
                items.step_spans.push(first..items.spans.len());
            }
        }
        Ok(())
    }

    /// Whether a pool is registered.
    ///
    /// # Errors
    /// When it is not.
    pub fn knows(&self, pool: &Pool) -> Result<()> {
        self.pool(pool).map(drop)
    }

    /// The shape of a registered pool.
    pub(super) fn pool(&self, pool: &Pool) -> Result<PoolShape> {
        self.pools.read().get(&pool.id()).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("pool {} ({}) is not registered", pool.id(), pool.name()))
        })
    }
}

fn add_pieces(pieces: &mut Vec<libc::iovec>, transfer: &Transfer<'_>, index: usize, span: &SpanPlan) -> Result<()> {
    let page = transfer.pages().get(index).copied();
    let page = page.ok_or_else(|| Error::new(ErrorKind::Internal, "the call names no page to move"))?;
    for piece in &span.pieces {
        let (base, len) = transfer.pool().piece(page, piece.segment)?;
        let (offset, wanted) = (piece.offset as usize, piece.len as usize);
        if offset.checked_add(wanted).is_none_or(|end| end > len) {
            return Err(Error::new(ErrorKind::Internal, "a part of a page ends outside of it"));
        }
        pieces.push(libc::iovec { iov_base: base.wrapping_add(offset).cast(), iov_len: wanted });
    }
    Ok(())
}
