//! Attention over rows that are keys and values at once.

use kvdock_kernels::ops::{RowAttention, RowFormat, RowRun};
use kvdock_kernels::{Buf, KernelError};

use super::super::attention::PARTIAL_BYTES;
use super::super::device::{CudaDevice, product, shape, size};
use super::super::driver::{Arg, Touch};
use super::super::memory::Block;
use super::super::module::Extent;
use super::super::page_pool::CudaPages;
use super::super::units::Unit;
use super::rows::{CudaPicks, CudaSpans};
use super::{read, write};

/// Rows of a split. Part of the arithmetic: another number needs another numerics id.
const SPLIT_ROWS: usize = 256;

/// A run, checked.
struct Run<'a> {
    spans: &'a CudaSpans,
    pages: &'a CudaPages,
    layer: usize,
    page_rows: usize,
    /// Lists and runs over them.
    picks: Option<(&'a CudaPicks, std::sync::Arc<Block>, usize)>,
}

impl Run<'_> {
    /// How many rows of the pool row `row` of the step attends to.
    fn count(&self, row: usize) -> usize {
        let count = self.spans.table.spans[row].count;
        self.picks.as_ref().map_or(count, |(_, _, top_k)| count.min(*top_k))
    }

    /// Runs of `count` rows from `first` on.
    fn runs(&self, first: usize, count: usize) -> Arg {
        match &self.picks {
            Some((_, block, _)) => Arg::read(block.at() + 16 * first as u64, 16 * count),
            None => self.spans.runs(first, count),
        }
    }

    /// Its six arguments.
    fn args(&self, op: &'static str, first: usize, count: usize) -> Result<[Arg; 6], KernelError> {
        let rows = self.spans.table.spans.len();
        let lists = match &self.picks {
            Some((picks, _, top_k)) => read(picks.lists.at(), rows * top_k),
            None => Arg::Address(0),
        };
        Ok([
            Arg::Address(self.pages.layer(self.layer)),
            self.spans.tables(),
            lists,
            self.runs(first, count),
            size(op, "rows of a page", self.page_rows)?,
            Arg::U64(self.pages.page_bytes() as u64),
        ])
    }
}

impl CudaDevice {
    /// [`kvdock_kernels::ops::RowOps::attend_rows`].
    pub(super) fn attend_latent(
        &self,
        q: &Buf,
        spec: &RowAttention<'_>,
        runs: &[RowRun<'_>],
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "attend_rows";
        let RowAttention { heads, width, value, scale, sinks } = *spec;
        let rows = spec.check(runs)?;
        let format = runs[0].pool.layout().format;
        if format == RowFormat::Key || runs.iter().any(|run| run.pool.layout().format != format) {
            return Err(shape(op, "runs", "rows of one format, no keys".into(), format!("{format:?} and others")));
        }
        let sinks = match sinks {
            Some(sinks) => read(self.floats(op, "sinks", sinks, heads)?, heads),
            None => Arg::Address(0),
        };
        let (q_len, out_len) = (product(op, &[rows, heads, width])?, product(op, &[rows, heads, value])?);
        let (q, out) = (self.floats(op, "q", q, q_len)?, self.floats(op, "out", out, out_len)?);
        let checked = runs.iter().map(|run| self.run_of(op, run, rows)).collect::<Result<Vec<_>, _>>()?;
        let longest = (0..rows).map(|row| checked.iter().map(|run| run.count(row)).sum::<usize>()).max().unwrap_or(0);
        let splits = longest.div_ceil(SPLIT_ROWS).max(1);
        let unit = Unit::Latent { format, width: width as u32, value: value as u32 };
        let row_bytes = 4 * product(op, &[heads, splits, value + 2])?;
        let at_once = (PARTIAL_BYTES / row_bytes).clamp(1, 65_535);
        let partial = self.room(at_once.min(rows.max(1)) * row_bytes / 4)?;
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            let floats = count * heads * splits * value;
            let sums = write(partial.at(), floats);
            let weights = write(partial.at() + 4 * floats as u64, 2 * count * heads * splits);
            let a = checked[0].args(op, first, count)?;
            let b = match checked.get(1) {
                Some(run) => run.args(op, first, count)?,
                None => {
                    let mut none = a;
                    (none[2], none[3]) = (Arg::Address(0), checked[0].spans.no_runs(first, count));
                    none
                }
            };
            let mut args = vec![read(q + 4 * (first * heads * width) as u64, count * heads * width)];
            args.extend(a);
            args.extend(b);
            args.extend([
                sums,
                weights,
                size(op, "heads", heads)?,
                Arg::F32(scale),
                Arg::U32(SPLIT_ROWS as u32),
                size(op, "splits", splits)?,
            ]);
            let touches = |tell: &mut dyn FnMut(Touch)| {
                for run in &checked {
                    run.spans.touches(tell, first..first + count, run.pages, run.layer);
                }
            };
            let shared = 4 * (8 * width + 16 * (width | 1));
            let extent = Extent { grid: [splits, heads.div_ceil(8), count], threads: 128, shared };
            // SAFETY: spans and lists name rows of the pools, and the buffers have room for the rows.
            unsafe { self.run_touching(unit, "latent_decode", extent, &args, &touches)? };
            let args = [
                sums,
                weights,
                a[3],
                b[3],
                sinks,
                write(out + 4 * (first * heads * value) as u64, count * heads * value),
                size(op, "heads", heads)?,
                Arg::U32(SPLIT_ROWS as u32),
                size(op, "splits", splits)?,
            ];
            // SAFETY: as above.
            unsafe { self.run(unit, "latent_merge", Extent::plane(heads, count, 128), &args)? };
        }
        Ok(())
    }

    fn run_of<'a>(&self, op: &'static str, run: &RowRun<'a>, rows: usize) -> Result<Run<'a>, KernelError> {
        let spans = self.spans_of(op, run.spans)?;
        spans.table.fits(op, &run.pool)?;
        let picks = match run.picks {
            Some(picks) => {
                let inner: Option<&CudaPicks> = picks.downcast_ref();
                let inner = inner.filter(|inner| inner.device == self.id).ok_or_else(|| self.foreign(op, "picks"))?;
                if picks.rows() != rows {
                    let found = format!("for {}", picks.rows());
                    return Err(shape(op, "picks", format!("for {rows} rows"), found));
                }
                Some((inner, self.picked_runs(op, spans, picks.top_k())?, picks.top_k()))
            }
            None => None,
        };
        Ok(Run {
            spans,
            pages: self.pages(op, run.pool.pool())?,
            layer: run.pool.layer(),
            page_rows: run.pool.layout().page_rows,
            picks,
        })
    }
}
