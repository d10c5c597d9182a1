//! Rows in pools of pages: writing them, picking among them, attention over them.

use crate::device::Buf;
use crate::error::KernelError;
use crate::handle::handle;
use crate::kv::KvDtype;
use crate::ops::Indices;
use crate::packed_rows::{PACKED_SCALES, pack_key, pack_row, unpack_key, unpack_row};
use crate::pages::{PagePool, PageSpec, decode_row, encode_row};

/// How a row lies in its page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// Elements one after another.
    Plain(KvDtype),
    /// As [`pack_row`] does it, this many elements at the end in bf16.
    Packed {
        /// Elements in bf16.
        rope: usize,
    },
    /// As [`pack_key`] does it.
    Key,
}

/// What a page of rows looks like: the data of all rows, then their scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowLayout {
    /// How a row lies in it.
    pub format: RowFormat,
    /// Rows of a page.
    pub page_rows: usize,
    /// Elements of a row.
    pub elements: usize,
}

impl RowLayout {
    /// Bytes of a row without its scales, and bytes of its scales.
    pub const fn row_bytes(&self) -> (usize, usize) {
        match self.format {
            RowFormat::Plain(dtype) => (self.elements * dtype.bytes(), 0),
            RowFormat::Packed { rope } => (self.elements + rope, PACKED_SCALES),
            RowFormat::Key => (self.elements, size_of::<f32>()),
        }
    }

    /// Where row `index` of a page begins, and its scales.
    fn places(&self, index: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let (data, scales) = self.row_bytes();
        let behind = self.page_rows * data + index * scales;
        (index * data..(index + 1) * data, behind..behind + scales)
    }

    /// Writes row `index` of `page`.
    pub(crate) fn put(&self, page: &mut [u8], index: usize, row: &[f32]) {
        let (data, scales) = self.places(index);
        let (front, back) = page.split_at_mut(scales.start);
        match self.format {
            RowFormat::Plain(dtype) => encode_row(dtype, row, &mut front[data]),
            RowFormat::Packed { rope } => pack_row(row, rope, &mut front[data], &mut back[..scales.len()]),
            RowFormat::Key => pack_key(row, &mut front[data], &mut back[..scales.len()]),
        }
    }

    /// Reads row `index` of `page`.
    pub(crate) fn get(&self, page: &[u8], index: usize, out: &mut [f32]) {
        let (data, scales) = self.places(index);
        match self.format {
            RowFormat::Plain(dtype) => decode_row(dtype, &page[data], out),
            RowFormat::Packed { rope } => unpack_row(&page[data], &page[scales], rope, out),
            RowFormat::Key => unpack_key(&page[data], &page[scales], out),
        }
    }
}

/// One layer of a pool whose pages are rows.
#[derive(Clone, Copy)]
pub struct RowPool<'a> {
    pool: &'a PagePool,
    layer: usize,
    layout: RowLayout,
}

impl<'a> RowPool<'a> {
    /// A layer of `pool`, found to have room for pages of this layout.
    ///
    /// # Errors
    /// A layer that is not there, pages that are too small, an empty layout.
    pub fn new(pool: &'a PagePool, layer: usize, layout: RowLayout) -> Result<Self, KernelError> {
        let refuse = |reason: String| Err(KernelError::Page { op: "rows", reason });
        let PageSpec { layers, page_bytes, .. } = *pool.spec();
        if layer >= layers {
            return refuse(format!("layer {layer}, but the pool has {layers}"));
        }
        let (data, scales) = layout.row_bytes();
        let need = layout.page_rows.saturating_mul(data + scales);
        if need == 0 || need > page_bytes {
            return refuse(format!("pages of {page_bytes} bytes for {layout:?}, which needs {need}"));
        }
        let parted = match layout.format {
            RowFormat::Packed { rope } => rope <= layout.elements,
            RowFormat::Plain(_) | RowFormat::Key => true,
        };
        if !parted {
            return refuse(format!("{layout:?} has fewer elements than are kept in bf16"));
        }
        Ok(Self { pool, layer, layout })
    }

    /// The pool.
    pub fn pool(&self) -> &'a PagePool {
        self.pool
    }

    /// The layer.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// What its pages look like.
    pub fn layout(&self) -> RowLayout {
        self.layout
    }
}

/// Rows of a sequence that a row of the step sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSpan {
    /// The sequence's page table among those given.
    pub table: usize,
    /// First row of the sequence.
    pub first: usize,
    /// How many.
    pub count: usize,
}

/// What each row of a step sees, checked. For implementers of [`RowOps`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpanTable {
    /// Page tables; pages that no row sees may be any.
    pub tables: Vec<Vec<u32>>,
    /// One for each row of the step.
    pub spans: Vec<RowSpan>,
    /// Rows of a page.
    pub page_rows: usize,
    /// Pages lie below.
    pub pages: usize,
}

impl SpanTable {
    /// Checks that every page that is seen is there.
    ///
    /// # Errors
    /// A page that is not there, more rows than 32 bits count.
    pub fn new(tables: &[&[u32]], spans: &[RowSpan], page_rows: usize, pages: usize) -> Result<Self, KernelError> {
        let refuse = |reason: String| Err(KernelError::Page { op: "spans", reason });
        if page_rows == 0 {
            return refuse("pages of no rows".to_owned());
        }
        for (row, span) in spans.iter().enumerate() {
            let RowSpan { table, first, count } = *span;
            let Some(end) = first.checked_add(count).filter(|end| u32::try_from(*end).is_ok()) else {
                return refuse(format!("row {row} sees {count} rows from {first} on, more than 32 bits count"));
            };
            let Some(table) = tables.get(table) else {
                return refuse(format!("row {row} has page table {table} of {}", tables.len()));
            };
            if count == 0 {
                continue;
            }
            for index in first / page_rows..end.div_ceil(page_rows) {
                if table.get(index).is_none_or(|page| *page as usize >= pages) {
                    return refuse(format!("page {index} of a sequence is needed and not there"));
                }
            }
        }
        let tables = tables.iter().map(|table| table.to_vec()).collect();
        Ok(Self { tables, spans: spans.to_vec(), page_rows, pages })
    }

    /// Whether it serves rows of `pool`.
    ///
    /// # Errors
    /// What does not fit.
    pub fn fits(&self, op: &'static str, pool: &RowPool<'_>) -> Result<(), KernelError> {
        let (layout, pages) = (pool.layout(), pool.pool().spec().pages);
        if layout.page_rows == self.page_rows && self.pages <= pages {
            return Ok(());
        }
        let expected = format!("pages of {} rows, {} of them", self.page_rows, self.pages);
        let found = format!("{} rows, {pages} pages", layout.page_rows);
        Err(KernelError::Shape { op, what: "the pool", expected, found })
    }

    /// The most rows that a row of the step sees.
    pub fn longest(&self) -> usize {
        self.spans.iter().map(|span| span.count).max().unwrap_or(0)
    }
}

handle! {
    /// What each row of a step sees of a pool.
    RowSpans {
        /// Rows of the step.
        rows: usize,
    }
}

handle! {
    /// Which rows each row of a step attends to.
    Picks {
        /// Rows of the step.
        rows: usize,
        /// The most that a row attends to.
        top_k: usize,
    }
}

/// Rows that are attended to.
#[derive(Clone, Copy)]
pub struct RowRun<'a> {
    /// Where they lie.
    pub pool: RowPool<'a>,
    /// Which of them each row sees.
    pub spans: &'a RowSpans,
    /// If given, only these of them.
    pub picks: Option<&'a Picks>,
}

/// How attention over rows is computed. A row is key and value at once, for all heads.
#[derive(Clone, Copy)]
pub struct RowAttention<'a> {
    /// Query heads.
    pub heads: usize,
    /// Elements of a row; all of them are key.
    pub width: usize,
    /// How many of them are value.
    pub value: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// If given, one logit a head that takes part in the softmax without a value.
    pub sinks: Option<&'a Buf>,
}

impl RowAttention<'_> {
    /// Checks that the runs fit together; gives the rows of the step. For implementers of [`RowOps`].
    ///
    /// # Errors
    /// What does not fit.
    pub fn check(&self, runs: &[RowRun<'_>]) -> Result<usize, KernelError> {
        let refuse = |what, expected: String, found: String| {
            Err(KernelError::Shape { op: "attend_rows", what, expected, found })
        };
        let [first, rest @ ..] = runs else {
            return refuse("runs", "one or two".into(), "none".into());
        };
        if rest.len() > 1 {
            return refuse("runs", "one or two".into(), runs.len().to_string());
        }
        let (heads, width, value) = (self.heads, self.width, self.value);
        if heads == 0 || value == 0 || value > width {
            let expected = "at least one head, and values within the rows".to_owned();
            return refuse("sizes", expected, format!("{heads} heads, {value} of {width} elements"));
        }
        for run in runs {
            if run.pool.layout().elements != width {
                let found = format!("{} elements", run.pool.layout().elements);
                return refuse("a run", format!("rows of {width} elements"), found);
            }
            if run.spans.rows() != first.spans.rows() {
                return refuse("a run", format!("for {} rows", first.spans.rows()), format!("{}", run.spans.rows()));
            }
        }
        Ok(first.spans.rows())
    }
}

/// Operations on rows in pools of pages.
pub trait RowOps {
    /// A pool of pages in the device's memory.
    fn alloc_page_pool(&self, spec: PageSpec) -> Result<PagePool, KernelError>;

    /// Checks and fixes what each row of a step sees, for pools with pages of `page_rows` rows, `pages` of them at least.
    fn spans(
        &self,
        tables: &[&[u32]],
        spans: &[RowSpan],
        page_rows: usize,
        pages: usize,
    ) -> Result<RowSpans, KernelError>;

    /// Writes rows `x` `[slots.len(), elements]` to their slots (`page * page_rows + row`), rounded or packed as the pool
    /// has them. No slot is there twice.
    fn write_rows(&self, pool: &RowPool<'_>, slots: &Indices, x: &Buf) -> Result<(), KernelError>;

    /// For each row the `top_k` rows of what it sees with the highest `Σ weight · relu(query · key)` over the index heads,
    /// the lower number among equals, numbered from the beginning of the sequence; all of them where there are no more. `queries` is
    /// `[rows, heads, elements]`, `weights` `[rows, heads]`. Spans begin at 0.
    fn pick(
        &self,
        keys: &RowPool<'_>,
        spans: &RowSpans,
        queries: &Buf,
        weights: &Buf,
        heads: usize,
        top_k: usize,
    ) -> Result<Picks, KernelError>;

    /// Attention of queries `[rows, heads, width]` over one or two runs of rows, taken in order; `out` is
    /// `[rows, heads, value]`.
    fn attend_rows(
        &self,
        q: &Buf,
        spec: &RowAttention<'_>,
        runs: &[RowRun<'_>],
        out: &mut Buf,
    ) -> Result<(), KernelError>;
}
