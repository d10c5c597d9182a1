//! Attention over rows that are keys and values at once.

use kvdock_kernels::ops::{RowAttention, RowFormat, RowRun};
use kvdock_kernels::{Buf, KernelError, KvDtype};

use super::super::attention::PARTIAL_BYTES;
use super::super::device::{Arithmetic, CudaDevice, product, shape, size};
use super::super::driver::{Arg, Touch};
use super::super::memory::Block;
use super::super::module::Extent;
use super::super::page_pool::CudaPages;
use super::super::units::Unit;
use super::rows::{CudaPicks, CudaSpans};
use super::{read, write};

/// Rows of a split. Part of the arithmetic: another number needs another numerics id.
const SPLIT_ROWS: usize = 256;

/// A kernel that attends to rows, and what a launch of it has.
#[derive(Debug, PartialEq)]
struct Kernel {
    unit: Unit,
    name: &'static str,
    /// Heads of a block.
    heads: usize,
    threads: u32,
    /// Bytes of dynamic shared memory.
    shared: usize,
}

/// Tiles on tensor cores where they can be had, with as many heads a block as there are and as fit into `limit` bytes of shared memory; else plain arithmetic.
fn kernel_of(format: RowFormat, (width, value): (usize, usize), heads: usize, parts: u32, limit: usize) -> Kernel {
    let (columns, values) = (width as u32, value as u32);
    let rope = match format {
        RowFormat::Packed { rope } => rope,
        _ => 0,
    };
    let narrow = !matches!(format, RowFormat::Plain(KvDtype::F32) | RowFormat::Key);
    if narrow && [width, value, rope].iter().all(|size| size.is_multiple_of(8)) {
        // With two parts a warp has the registers for half as many heads.
        for at_once in [64 / parts as usize, 32, 16].into_iter().filter(|at_once| heads > at_once / 2 || *at_once == 16)
        {
            let shared = tile_bytes(format, width, at_once, parts as usize);
            if shared + FIXED_BYTES <= limit {
                let unit = Unit::LatentTiles { format, width: columns, value: values, heads: at_once as u32, parts };
                return Kernel { unit, name: "latent_tiles", heads: at_once, threads: 256, shared };
            }
        }
    }
    let unit = Unit::Latent { format, width: columns, value: values };
    Kernel { unit, name: "latent_decode", heads: 8, threads: 128, shared: 4 * (8 * width + 16 * (width | 1)) }
}

/// Bytes of shared memory that a kernel of tiles has beside those that its launch gives, at most.
const FIXED_BYTES: usize = 2048;

/// Shared memory of tiles of 32 rows: two of them, or of packed rows two as they come and one of bf16; scores of each of eight warps; weights.
fn tile_bytes(format: RowFormat, width: usize, heads: usize, parts: usize) -> usize {
    let row = 2 * (width.next_multiple_of(16) + 8);
    let rows = match format {
        RowFormat::Packed { rope } => row + 2 * (width + rope).next_multiple_of(16),
        _ => 2 * row,
    };
    32 * rows + 4 * 8 * 16 * (32 + 4) + 2 * parts * heads * (32 + 8)
}

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
        // A power of two, so that what is recorded serves longer sequences for a while.
        let splits = longest.div_ceil(SPLIT_ROWS).max(1).next_power_of_two();
        let kernel = kernel_of(format, (width, value), heads, self.row_parts(format), self.driver.gpu().shared_bytes);
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
            let Kernel { unit, name, heads: at_once, threads, shared } = kernel;
            let extent = Extent { grid: [splits, heads.div_ceil(at_once), count], threads, shared };
            // SAFETY: spans and lists name rows of the pools, and the buffers have room for the rows.
            unsafe { self.run_touching(unit, name, extent, &args, &touches)? };
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
            unsafe { self.run(unit, "latent_merge", Extent::plane(heads, count, 256), &args)? };
        }
        Ok(())
    }

    /// Parts of 16 bits that queries, and weights of values, are cut into where they meet rows on tensor cores. Packed rows are rounded anew in each layer, where a
    /// difference in the last bits grows to one of their steps: they always get two.
    pub(super) fn row_parts(&self, format: RowFormat) -> u32 {
        match (self.arithmetic, format) {
            (Arithmetic::Fast, RowFormat::Plain(_)) => 1,
            _ => 2,
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_taken_where_they_fit() {
        let of = |format, dims, heads, parts, limit| {
            let kernel = kernel_of(format, dims, heads, parts, limit);
            (kernel.name, kernel.heads)
        };
        let (half, hopper, ada) = (RowFormat::Plain(KvDtype::BF16), 227 * 1024, 99 * 1024);
        let packed = RowFormat::Packed { rope: 64 };
        for (format, dims, heads, parts, limit, expected) in [
            (half, (576, 512), 128, 1, hopper, ("latent_tiles", 64)),
            (half, (576, 512), 128, 2, hopper, ("latent_tiles", 32)),
            (half, (576, 512), 40, 1, hopper, ("latent_tiles", 64)),
            (half, (576, 512), 32, 1, hopper, ("latent_tiles", 32)),
            (half, (576, 512), 16, 1, hopper, ("latent_tiles", 16)),
            (half, (576, 512), 1, 2, hopper, ("latent_tiles", 16)),
            (packed, (512, 512), 64, 2, ada, ("latent_tiles", 32)),
            (half, (576, 512), 128, 1, 48 * 1024, ("latent_decode", 8)),
            (half, (577, 512), 128, 1, hopper, ("latent_decode", 8)),
            (RowFormat::Packed { rope: 4 }, (512, 512), 128, 1, hopper, ("latent_decode", 8)),
            (RowFormat::Plain(KvDtype::F32), (576, 512), 128, 1, hopper, ("latent_decode", 8)),
        ] {
            assert_eq!(of(format, dims, heads, parts, limit), expected, "{format:?} {dims:?} {heads} {parts}");
        }
    }
}
