//! Rows of sequences in pools of pages.

use std::cell::OnceCell;

use kvdock_kernels::ops::{Indices, RowFormat, RowLayout, RowPool, RowSpan, RowSpans};
use kvdock_kernels::{Device, KvDtype};

use super::context::Dealt;
use super::step::{Seq, Step};
use crate::{ModelError, NO_PAGE, PageSource, PoolLayout, PoolSet};

/// Buffer `buffer` of the pool declared at `pool`, whose pages are rows.
pub(crate) fn row_pool(pools: &PoolSet, pool: usize, buffer: usize) -> Result<RowPool<'_>, ModelError> {
    let none = || ModelError::Batch(format!("pool {pool} of the set has no rows"));
    let decl = pools.decls().get(pool).ok_or_else(none)?;
    let sizes = pools.sizes();
    let (elements, format) = match decl.layout {
        PoolLayout::Rows { elements, .. } => (elements, RowFormat::Plain(sizes.dtype)),
        PoolLayout::PackedRows { elements, rope, .. } => (elements, RowFormat::Packed { rope }),
        PoolLayout::PackedKeys { elements, .. } => (elements, RowFormat::Key),
        PoolLayout::Ring { elements, .. } => (elements, RowFormat::Plain(KvDtype::F32)),
        PoolLayout::None | PoolLayout::Heads { .. } | PoolLayout::Slot { .. } => return Err(none()),
    };
    let layout = RowLayout { format, page_rows: decl.page_units(sizes.page_tokens), elements };
    Ok(RowPool::new(pools.pages(pool)?, buffer, layout)?)
}

/// The page at `index` of a page table.
pub(crate) fn page_of(pages: &[u32], index: usize) -> Result<u32, ModelError> {
    match pages.get(index) {
        Some(page) if *page != NO_PAGE => Ok(*page),
        _ => Err(ModelError::Batch(format!("page {index} of a sequence is needed and not there"))),
    }
}

/// The slot of row `row` of a sequence, in pages of `page_rows` rows.
pub(crate) fn slot_of(pages: &[u32], row: usize, page_rows: usize) -> Result<u32, ModelError> {
    let slot = page_of(pages, row / page_rows)? as usize * page_rows + row % page_rows;
    u32::try_from(slot).map_err(|_| ModelError::Batch(format!("slot {slot} is more than 32 bits can number")))
}

/// The table of a sequence in pools with pages from `source`.
pub(crate) fn table<'a>(seq: &Seq<'a>, source: PageSource) -> &'a [u32] {
    if source == PageSource::Window { seq.chunk.window } else { seq.chunk.pages }
}

/// Positions of all rows of a step, on the device from when they are first asked for.
pub(crate) struct Positions<'a> {
    device: &'a dyn Device,
    step: &'a Step<'a>,
    made: OnceCell<Indices>,
}

impl<'a> Positions<'a> {
    pub(crate) fn new(device: &'a dyn Device, step: &'a Step<'a>) -> Self {
        Self { device, step, made: OnceCell::new() }
    }

    pub(crate) fn get(&self) -> Result<&Indices, ModelError> {
        if let Some(made) = self.made.get() {
            return Ok(made);
        }
        let positions: Vec<u32> = self.step.seqs.iter().flat_map(Seq::rows).map(|(_, position)| position).collect();
        let made = self.device.upload_indices(&positions)?;
        Ok(self.made.get_or_init(|| made))
    }
}

/// Where a step's new rows go in pools of one kind, whoever computes them, and what each of the rank's own rows sees there.
pub(crate) struct Placement {
    /// One for each new row.
    pub(crate) slots: Indices,
    pub(crate) spans: RowSpans,
}

/// Pools with a row for every `tokens` tokens, and how far back they are seen.
#[derive(Clone, Copy)]
pub(crate) struct Reach {
    pub(crate) source: PageSource,
    /// Tokens of a row.
    pub(crate) tokens: usize,
    /// Rows that are seen, the own one included; `None` for all.
    pub(crate) window: Option<usize>,
}

impl Placement {
    pub(crate) fn new(
        device: &dyn Device,
        dealt: &Dealt<'_>,
        pools: &PoolSet,
        reach: Reach,
    ) -> Result<Self, ModelError> {
        let Reach { source, tokens, window } = reach;
        let sizes = pools.sizes();
        let page_rows = sizes.page_tokens / tokens;
        let mut slots = Vec::new();
        for seq in &dealt.whole().seqs {
            let start = seq.chunk.start as usize;
            for row in start / tokens..(start + seq.chunk.tokens.len()) / tokens {
                slots.push(slot_of(table(seq, source), row, page_rows)?);
            }
        }
        let step = dealt.own();
        let tables: Vec<&[u32]> = step.seqs.iter().map(|seq| table(seq, source)).collect();
        let mut spans = Vec::with_capacity(step.rows());
        for (index, seq) in step.seqs.iter().enumerate() {
            spans.extend(seq.rows().map(|(_, position)| {
                let end = (position as usize + 1) / tokens;
                let first = window.map_or(0, |window| end.saturating_sub(window));
                RowSpan { table: index, first, count: end - first }
            }));
        }
        let spans = device.spans(&tables, &spans, page_rows, sizes.pages(source))?;
        Ok(Self { slots: device.upload_indices(&slots)?, spans })
    }
}
