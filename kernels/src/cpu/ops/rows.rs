//! Rows in pools of pages in host memory.

use super::super::device::{CpuDevice, Shared, product, shape};
use crate::device::Buf;
use crate::error::KernelError;
use crate::ops::{Indices, Picks, RowAttention, RowOps, RowPool, RowRun, RowSpan, RowSpans, SpanTable};
use crate::pages::{PagePool, PageSpec};
use crate::rowmath::{attend_shared, dot, top_k};

/// The rows that each row of a step attends to; `None` for all that it sees.
type Picked = Vec<Option<Vec<u32>>>;

/// `Σ weight · relu(query · key)` over the index heads.
fn index_score(queries: &[f32], weights: &[f32], key: &[f32]) -> f32 {
    queries.chunks_exact(key.len()).zip(weights).map(|(query, weight)| weight * dot(query, key).max(0.0)).sum()
}

/// Rows of a sequence by their numbers, one after the other.
fn read(
    pool: &RowPool<'_>,
    table: &[u32],
    rows: impl ExactSizeIterator<Item = usize>,
) -> Result<Vec<f32>, KernelError> {
    let layout = pool.layout();
    let layer = pool.pool().read(pool.layer())?;
    let mut out = vec![0.0; rows.len() * layout.elements];
    for (row, out) in rows.zip(out.chunks_exact_mut(layout.elements)) {
        let none = || KernelError::Page { op: "rows", reason: format!("row {row} lies beyond its page table") };
        let page = table.get(row / layout.page_rows).ok_or_else(none)?;
        layout.get(layer.page(*page)?, row % layout.page_rows, out);
    }
    Ok(out)
}

/// For each page table the rows that any of the step's `rows` sees, the first one's number and their elements.
fn seen(
    pool: &RowPool<'_>,
    table: &SpanTable,
    wanted: &dyn Fn(usize) -> bool,
) -> Result<Vec<(usize, Vec<f32>)>, KernelError> {
    let mut ranges = vec![(usize::MAX, 0); table.tables.len()];
    for (row, span) in table.spans.iter().enumerate().filter(|(_, span)| span.count > 0) {
        if wanted(row) {
            let (first, end) = &mut ranges[span.table];
            *first = span.first.min(*first);
            *end = (span.first + span.count).max(*end);
        }
    }
    let read = |(index, (first, end)): (usize, &(usize, usize))| {
        let first = (*first).min(*end);
        Ok((first, read(pool, &table.tables[index], first..*end)?))
    };
    ranges.iter().enumerate().map(read).collect()
}

/// A run of rows with what is read once for all rows of the step.
struct Run<'a> {
    pool: RowPool<'a>,
    table: &'a SpanTable,
    picked: Option<&'a Picked>,
    seen: Vec<(usize, Vec<f32>)>,
}

impl Run<'_> {
    /// Appends the rows that row `row` of the step attends to.
    fn append(&self, row: usize, width: usize, keys: &mut Vec<f32>) -> Result<(), KernelError> {
        let RowSpan { table, first, count } = self.table.spans[row];
        match self.picked.and_then(|picked| picked[row].as_ref()) {
            Some(rows) => {
                keys.extend(read(&self.pool, &self.table.tables[table], rows.iter().map(|row| *row as usize))?);
            }
            None if count > 0 => {
                let (from, rows) = &self.seen[table];
                keys.extend_from_slice(&rows[(first - from) * width..][..count * width]);
            }
            None => {}
        }
        Ok(())
    }
}

impl CpuDevice {
    fn span_table<'a>(&self, op: &'static str, spans: &'a RowSpans) -> Result<&'a SpanTable, KernelError> {
        spans.downcast_ref().ok_or_else(|| self.foreign(op, "spans"))
    }

    /// Calls `of` with each row, on all threads; each gives `width` elements of `out`.
    fn rows_by_themselves(
        &self,
        op: &'static str,
        rows: usize,
        (out, width): (&mut [f32], usize),
        of: impl Fn(usize, &mut [f32]) -> Result<(), KernelError> + Sync,
    ) -> Result<(), KernelError> {
        let failed = parking_lot::Mutex::new(None);
        let out = Shared(out.as_mut_ptr());
        self.threads.run(op, rows, &|row| {
            // SAFETY: row `row` of `out`, which this task alone has.
            if let Err(error) = of(row, unsafe { out.part(row * width, width) }) {
                *failed.lock() = Some(error);
            }
        })?;
        failed.into_inner().map_or(Ok(()), Err)
    }
}

impl RowOps for CpuDevice {
    fn alloc_page_pool(&self, spec: PageSpec) -> Result<PagePool, KernelError> {
        PagePool::new(spec)
    }

    fn spans(
        &self,
        tables: &[&[u32]],
        spans: &[RowSpan],
        page_rows: usize,
        pages: usize,
    ) -> Result<RowSpans, KernelError> {
        let table = SpanTable::new(tables, spans, page_rows, pages)?;
        Ok(RowSpans::from_parts(spans.len(), Box::new(table)))
    }

    fn write_rows(&self, pool: &RowPool<'_>, slots: &Indices, x: &Buf) -> Result<(), KernelError> {
        let op = "write_rows";
        let slots = self.indices(op, "slots", slots)?;
        let layout = pool.layout();
        let x = self.floats(op, "x", x, product(op, &[slots.len(), layout.elements])?)?;
        let mut layer = pool.pool().write(pool.layer())?;
        for (slot, row) in slots.iter().zip(x.chunks_exact(layout.elements)) {
            let (page, index) = (*slot as usize / layout.page_rows, *slot as usize % layout.page_rows);
            layout.put(layer.page(page as u32)?, index, row);
        }
        Ok(())
    }

    fn pick(
        &self,
        keys: &RowPool<'_>,
        spans: &RowSpans,
        queries: &Buf,
        weights: &Buf,
        heads: usize,
        count: usize,
    ) -> Result<Picks, KernelError> {
        let op = "pick";
        let table = self.span_table(op, spans)?;
        table.fits(op, keys)?;
        let (rows, dim) = (spans.rows(), keys.layout().elements);
        let queries = self.floats(op, "queries", queries, product(op, &[rows, heads, dim])?)?;
        let weights = self.floats(op, "weights", weights, product(op, &[rows, heads])?)?;
        let picking = |row: usize| table.spans[row].count > count;
        let seen = seen(keys, table, &picking)?;
        let picked: Vec<parking_lot::Mutex<Option<Vec<u32>>>> = (0..rows).map(|_| Default::default()).collect();
        self.threads.run(op, rows, &|row| {
            if picking(row) {
                let span = table.spans[row];
                let queries = &queries[row * heads * dim..][..heads * dim];
                let (from, keys) = &seen[span.table];
                let scores: Vec<f32> = keys[(span.first - from) * dim..][..span.count * dim]
                    .chunks_exact(dim)
                    .map(|key| index_score(queries, &weights[row * heads..][..heads], key))
                    .collect();
                let mut rows = top_k(&scores, count);
                rows.sort_unstable();
                *picked[row].lock() = Some(rows);
            }
        })?;
        let picked: Picked = picked.into_iter().map(parking_lot::Mutex::into_inner).collect();
        Ok(Picks::from_parts(rows, count, Box::new(picked)))
    }

    fn attend_rows(
        &self,
        q: &Buf,
        spec: &RowAttention<'_>,
        runs: &[RowRun<'_>],
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "attend_rows";
        let RowAttention { heads, width, value, scale, sinks } = *spec;
        let rows = spec.check(runs)?;
        let sinks = match sinks {
            Some(sinks) => Some(self.floats(op, "sinks", sinks, heads)?),
            None => None,
        };
        let q = self.floats(op, "q", q, product(op, &[rows, heads, width])?)?;
        let out = self.floats_mut(op, "out", out, product(op, &[rows, heads, value])?)?;
        let mut all = Vec::with_capacity(runs.len());
        for run in runs {
            let table = self.span_table(op, run.spans)?;
            table.fits(op, &run.pool)?;
            let picked = match run.picks {
                Some(picks) => {
                    let picked: &Picked = picks.downcast_ref().ok_or_else(|| self.foreign(op, "picks"))?;
                    if picked.len() != rows {
                        return Err(shape(op, "picks", format!("for {rows} rows"), format!("for {}", picked.len())));
                    }
                    Some(picked)
                }
                None => None,
            };
            let whole = |row: usize| picked.is_none_or(|picked| picked[row].is_none());
            all.push(Run { pool: run.pool, table, picked, seen: seen(&run.pool, table, &whole)? });
        }
        self.rows_by_themselves(op, rows, (out, heads * value), |row, out| {
            let mut keys = Vec::new();
            all.iter().try_for_each(|run| run.append(row, width, &mut keys))?;
            for (head, out) in out.chunks_exact_mut(value).enumerate() {
                let query = &q[(row * heads + head) * width..][..width];
                attend_shared(query, &keys, width, scale, sinks.map(|sinks| sinks[head]), out);
            }
            Ok(())
        })
    }
}
