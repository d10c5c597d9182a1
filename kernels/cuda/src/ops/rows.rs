//! Rows in pools of pages: what rows of a step see, writing, and picking.

use std::sync::Arc;

use kvdock_kernels::ops::{
    Indices, Picks, RowAttention, RowFormat, RowOps, RowPool, RowRun, RowSpan, RowSpans, SpanTable,
};
use kvdock_kernels::{Buf, KernelError, KvDtype, PagePool, PageSpec};
use parking_lot::Mutex;

use super::super::device::{CudaDevice, product, shape, size};
use super::super::driver::{Access, Arg, Touch};
use super::super::memory::Block;
use super::super::module::Extent;
use super::super::page_pool::CudaPages;
use super::super::units::Unit;
use super::{read, write};

/// Bytes of scores that one launch may leave; more rows take several launches.
const SCORE_BYTES: usize = 256 << 20;

/// What is behind [`RowSpans`]: for each row of the step where its page table starts, how many rows it sees, and the run of four numbers that
/// attention takes; as many zeros as a run for each row; the page tables.
pub(super) struct CudaSpans {
    pub(super) device: u64,
    pub(super) table: SpanTable,
    block: Block,
    words: usize,
    /// Runs of those that see no more than so many rows, which are listed.
    picked: Mutex<Vec<(usize, Arc<Block>)>>,
}

/// What is behind [`Picks`]: lists `[rows, top_k]`.
pub(super) struct CudaPicks {
    pub(super) device: u64,
    pub(super) lists: Block,
}

impl CudaSpans {
    fn rows(&self) -> usize {
        self.table.spans.len()
    }

    fn part(&self, first: usize, len: usize) -> Arg {
        Arg::read(self.block.at() + 4 * first as u64, 4 * len)
    }

    /// Where the page tables of `count` rows from `first` on start.
    fn row_tables(&self, first: usize, count: usize) -> Arg {
        self.part(first, count)
    }

    fn counts(&self, first: usize, count: usize) -> Arg {
        self.part(self.rows() + first, count)
    }

    /// Runs of `count` rows from `first` on.
    pub(super) fn runs(&self, first: usize, count: usize) -> Arg {
        self.part(2 * self.rows() + 4 * first, 4 * count)
    }

    /// Runs of nothing.
    pub(super) fn no_runs(&self, first: usize, count: usize) -> Arg {
        self.part(6 * self.rows() + 4 * first, 4 * count)
    }

    pub(super) fn tables(&self) -> Arg {
        let first = 10 * self.rows();
        self.part(first, self.words - first)
    }

    /// The pages that rows `rows` read.
    pub(super) fn touches(
        &self,
        tell: &mut dyn FnMut(Touch),
        rows: std::ops::Range<usize>,
        pages: &CudaPages,
        layer: usize,
    ) {
        for span in self.table.spans[rows].iter().filter(|span| span.count > 0) {
            let page_rows = self.table.page_rows;
            let seen = span.first / page_rows..(span.first + span.count).div_ceil(page_rows);
            for page in &self.table.tables[span.table][seen] {
                tell(pages.page(layer, *page, Access::Read));
            }
        }
    }
}

/// Where each page table starts among all of them.
fn starts(table: &SpanTable) -> Vec<u32> {
    table
        .tables
        .iter()
        .scan(0u32, |at, pages| {
            let start = *at;
            *at += pages.len() as u32;
            Some(start)
        })
        .collect()
}

impl CudaDevice {
    pub(super) fn spans_of<'a>(&self, op: &'static str, spans: &'a RowSpans) -> Result<&'a CudaSpans, KernelError> {
        let inner: Option<&CudaSpans> = spans.downcast_ref();
        inner.filter(|inner| inner.device == self.id).ok_or_else(|| self.foreign(op, "spans"))
    }

    /// Runs of listed rows, at most `top_k` for each row of the step; row r's list starts at `r * top_k`.
    pub(super) fn picked_runs(
        &self,
        op: &'static str,
        spans: &CudaSpans,
        top_k: usize,
    ) -> Result<Arc<Block>, KernelError> {
        let mut made = spans.picked.lock();
        if let Some((_, block)) = made.iter().find(|(known, _)| *known == top_k) {
            return Ok(Arc::clone(block));
        }
        let starts = starts(&spans.table);
        let run = |(row, span): (usize, &RowSpan)| {
            [starts[span.table], 0, span.count.min(top_k) as u32, (row * top_k) as u32]
        };
        let words: Vec<u32> = spans.table.spans.iter().enumerate().flat_map(run).collect();
        let block = Arc::new(self.send_words(op, &words, &self.order.enter())?);
        made.push((top_k, Arc::clone(&block)));
        Ok(block)
    }
}

/// The name of a kernel for rows of a format.
fn row_kernel(stem: &str, format: RowFormat) -> String {
    match format {
        RowFormat::Plain(dtype) => format!("{stem}_{}", dtype.name()),
        RowFormat::Packed { .. } | RowFormat::Key => format!("{stem}_packed"),
    }
}

/// A kernel that scores keys.
struct Scores {
    unit: Unit,
    name: String,
    /// Keys of a block.
    keys: usize,
    /// Bytes of dynamic shared memory.
    shared: usize,
}

/// Tiles on tensor cores where they take such keys and fit into `limit` bytes of shared memory, else plain arithmetic.
fn scores_of(format: RowFormat, heads: usize, dim: usize, parts: u32, limit: usize) -> Scores {
    if format != RowFormat::Plain(KvDtype::F32) && dim.is_multiple_of(16) && (16..=128).contains(&dim) {
        let key = if format == RowFormat::Key { dim + 16 } else { 2 * dim + 16 };
        // A weight and a query for each head, and 32 keys for each of four warps.
        let shared = heads.next_multiple_of(16) * (4 + 2 * parts as usize * (dim + 8)) + 4 * 32 * key;
        if shared <= limit {
            let name = row_kernel("index_tiles", format);
            return Scores { unit: Unit::IndexTiles { parts }, name, keys: 512, shared };
        }
    }
    let shared = 4 * (heads * dim + 32 * (dim | 1));
    Scores { unit: Unit::Index, name: row_kernel("index_scores", format), keys: 32, shared }
}

impl RowOps for CudaDevice {
    fn alloc_page_pool(&self, spec: PageSpec) -> Result<PagePool, KernelError> {
        let memory = CudaPages::new(self.id, spec, &self.driver, &self.order)?;
        Ok(PagePool::on_device(spec, Box::new(memory)))
    }

    fn spans(
        &self,
        tables: &[&[u32]],
        spans: &[RowSpan],
        page_rows: usize,
        pages: usize,
    ) -> Result<RowSpans, KernelError> {
        let op = "spans";
        let table = SpanTable::new(tables, spans, page_rows, pages)?;
        let entries: usize = tables.iter().map(|table| table.len()).sum();
        size(op, "pages of a step", entries)?;
        let starts = starts(&table);
        let mut words: Vec<u32> = spans.iter().map(|span| starts[span.table]).collect();
        words.extend(spans.iter().map(|span| span.count as u32));
        words.extend(spans.iter().flat_map(|span| [starts[span.table], span.first as u32, span.count as u32, 0]));
        words.resize(10 * spans.len(), 0);
        words.extend(tables.iter().flat_map(|table| table.iter().copied()));
        let block = self.send_words(op, &words, &self.order.enter())?;
        let inner = CudaSpans { device: self.id, table, block, words: words.len(), picked: Mutex::default() };
        Ok(RowSpans::from_parts(spans.len(), Box::new(inner)))
    }

    fn write_rows(&self, pool: &RowPool<'_>, slots: &Indices, x: &Buf) -> Result<(), KernelError> {
        let op = "write_rows";
        let pages = self.pages(op, pool.pool())?;
        let slots = self.indices(op, "slots", slots)?;
        let layout = pool.layout();
        let end = pool.pool().spec().pages * layout.page_rows;
        if let Some((row, slot)) = slots.host.iter().enumerate().find(|(_, slot)| **slot as usize >= end) {
            return Err(KernelError::Index { op, row, index: *slot, rows: end });
        }
        let need = product(op, &[slots.host.len(), layout.elements])?;
        let mut args = vec![
            read(self.floats(op, "x", x, need)?, need),
            Arg::Address(pages.layer(pool.layer())),
            slots.arg(),
            size(op, "elements", layout.elements)?,
        ];
        let name = match layout.format {
            RowFormat::Key => "keys_write_packed".to_owned(),
            RowFormat::Packed { rope } => {
                args.push(size(op, "elements in bf16", rope)?);
                "rows_write_packed".to_owned()
            }
            RowFormat::Plain(_) => row_kernel("rows_write", layout.format),
        };
        args.extend([size(op, "rows of a page", layout.page_rows)?, Arg::U64(pages.page_bytes() as u64)]);
        let touches = |tell: &mut dyn FnMut(Touch)| {
            for slot in &slots.host {
                tell(pages.page(pool.layer(), slot / layout.page_rows as u32, Access::Write));
            }
        };
        let extent = Extent::line(slots.host.len(), 128);
        // SAFETY: the slots lie within the pool, and the buffer has a row for each.
        unsafe { self.run_touching(Unit::Rows, &name, extent, &args, &touches) }
    }

    fn pick(
        &self,
        keys: &RowPool<'_>,
        spans: &RowSpans,
        queries: &Buf,
        weights: &Buf,
        heads: usize,
        top_k: usize,
    ) -> Result<Picks, KernelError> {
        let op = "pick";
        let spans = self.spans_of(op, spans)?;
        spans.table.fits(op, keys)?;
        let pages = self.pages(op, keys.pool())?;
        let layout = keys.layout();
        if matches!(layout.format, RowFormat::Packed { .. }) {
            return Err(shape(op, "keys", "plain or packed as keys".into(), format!("{layout:?}")));
        }
        if spans.table.spans.iter().any(|span| span.first != 0) {
            return Err(shape(op, "spans", "from the first row on".into(), "one from another row on".into()));
        }
        // A power of two, so that what is recorded serves longer sequences for a while.
        let (rows, dim, longest) = (spans.rows(), layout.elements, spans.table.longest().max(1).next_power_of_two());
        let need = product(op, &[rows, heads, dim])?;
        let (queries, weights) =
            (self.floats(op, "queries", queries, need)?, self.floats(op, "weights", weights, rows * heads)?);
        let kernel =
            scores_of(layout.format, heads, dim, self.row_parts(layout.format), self.driver.gpu().shared_bytes);
        let lists = self.room(product(op, &[rows, top_k])?)?;
        size(op, "lists", rows * top_k)?;
        let counts = self.room(rows)?;
        let at_once = (SCORE_BYTES / (4 * longest)).clamp(1, 65_535);
        let scores = self.room(at_once.min(rows.max(1)) * longest)?;
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            let left = write(scores.at(), count * longest);
            let args = [
                read(queries + 4 * (first * heads * dim) as u64, count * heads * dim),
                read(weights + 4 * (first * heads) as u64, count * heads),
                Arg::Address(pages.layer(keys.layer())),
                spans.tables(),
                spans.row_tables(first, count),
                spans.counts(first, count),
                left,
                Arg::U64(longest as u64),
                size(op, "heads", heads)?,
                size(op, "elements", dim)?,
                size(op, "rows of a page", layout.page_rows)?,
                Arg::U64(pages.page_bytes() as u64),
            ];
            let extent =
                Extent { grid: [longest.div_ceil(kernel.keys), count, 1], threads: 128, shared: kernel.shared };
            let touches = |tell: &mut dyn FnMut(Touch)| spans.touches(tell, first..first + count, pages, keys.layer());
            // SAFETY: spans lie within the pool, and the buffers have room for the rows.
            unsafe { self.run_touching(kernel.unit, &kernel.name, extent, &args, &touches)? };
            let args = [
                left,
                Arg::U64(longest as u64),
                spans.counts(first, count),
                size(op, "top_k", top_k)?,
                write(lists.at() + 4 * (first * top_k) as u64, count * top_k),
                write(counts.at() + 4 * first as u64, count),
            ];
            // SAFETY: as above; a row's scores up to its count have been written.
            unsafe { self.run(Unit::Index, "top_k", Extent::line(count, 256), &args)? };
        }
        Ok(Picks::from_parts(rows, top_k, Box::new(CudaPicks { device: self.id, lists })))
    }

    fn attend_rows(
        &self,
        q: &Buf,
        spec: &RowAttention<'_>,
        runs: &[RowRun<'_>],
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        self.attend_latent(q, spec, runs, out)
    }
}
