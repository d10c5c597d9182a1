//! Which kernel computes the attention of which rows.

use std::ops::Range;
use std::sync::Arc;

use super::device::{Arithmetic, CudaDevice, product, shape, size};
use super::driver::{Access, Arg, DevicePtr, Touch};
use super::memory::{DeviceMemory, Queue};
use super::module::Extent;
use super::plan::{CudaPlan, TileKind};
use super::pool::CudaKvPool;
use super::units::Unit;
use kvdock_kernels::KernelError;
use kvdock_kernels::{AttentionSpec, Buf};
use kvdock_kernels::{KvDtype, KvPool, KvSpec};

/// Positions of a split. Part of the arithmetic: another number needs another numerics id.
const SPLIT_TOKENS: usize = 256;
/// Bytes that splits of one launch may leave for the merge; more rows take several launches.
pub(super) const PARTIAL_BYTES: usize = 64 << 20;
/// Pairs of a row and a head that a block of the prefill kernel takes.
const PAIRS: usize = 64;
/// The same of the kernel for sm_90a.
const HOPPER_PAIRS: usize = 128;
/// The widest head that the kernels take.
const MAX_DIM: usize = 256;

/// One call of attention, checked.
struct Call<'a> {
    pool: &'a CudaKvPool,
    layer: usize,
    plan: &'a CudaPlan,
    heads: usize,
    scale: f32,
    window: u32,
    q: DevicePtr,
    out: DevicePtr,
    sinks: Arg,
}

/// Splits that serve positions up to `last`. A power of two, so that recorded work serves longer sequences for a while.
pub(super) fn splits(last: usize) -> usize {
    (last / SPLIT_TOKENS + 1).next_power_of_two()
}

impl CudaDevice {
    pub(super) fn attend(
        &self,
        pool: &CudaKvPool,
        layer: usize,
        plan: &CudaPlan,
        q: &Buf,
        spec: &AttentionSpec<'_>,
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "attention";
        let KvSpec { kv_heads, head_dim_k: dk, head_dim_v: dv, dtype, .. } = *pool.spec();
        let heads = spec.heads;
        if heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(shape(op, "heads", format!("a multiple of {kv_heads} KV heads"), heads.to_string()));
        }
        if spec.window == Some(0) {
            return Err(shape(op, "window", "at least 1".into(), "0".into()));
        }
        if dk.max(dv) > MAX_DIM {
            return Err(shape(op, "a head", format!("at most {MAX_DIM} elements wide"), dk.max(dv).to_string()));
        }
        let sinks = match spec.sinks {
            Some(sinks) => Arg::read(self.floats(op, "sinks", sinks, heads)?, 4 * heads),
            None => Arg::Address(0),
        };
        let rows = plan.rows();
        let call = Call {
            pool,
            layer,
            plan,
            heads,
            scale: spec.scale,
            window: spec.window.unwrap_or(0),
            q: self.floats(op, "q", q, product(op, &[rows, heads, dk])?)?,
            out: self.floats(op, "out", out, product(op, &[rows, heads, dv])?)?,
            sinks,
        };
        let in_tiles = fits_tiles(dtype, (dk, dv));
        let queue = self.order.enter();
        match (in_tiles, self.arithmetic) {
            (false, _) => self.in_splits(&call, 0..rows, &queue),
            (true, Arithmetic::Reproducible) => self.in_tiles(&call, true, &queue),
            (true, Arithmetic::Fast) => {
                self.in_tiles(&call, false, &queue)?;
                single_rows(plan).into_iter().try_for_each(|rows| self.in_splits(&call, rows, &queue))
            }
        }
    }

    /// Rows in tiles, on tensor cores: those of sequences with several rows, or all.
    fn in_tiles(&self, call: &Call<'_>, all: bool, queue: &Queue) -> Result<(), KernelError> {
        let op = "attention";
        let KvSpec { kv_heads, head_dim_k: dk, head_dim_v: dv, page_tokens, dtype, pages, .. } = *call.pool.spec();
        // The pool decides, not the step: a row's bits are those of one kernel.
        let maps = call.pool.maps(queue)?;
        let pairs = if maps.is_some() { HOPPER_PAIRS } else { PAIRS };
        let kind = TileKind { group: call.heads / kv_heads, pairs, decodes_too: all };
        let tiles = call.plan.tiles(kind, &self.blocks, &self.uploads, queue)?;
        let (keys, values) = call.pool.layer(call.layer);
        let rows = call.plan.rows();
        let [of_keys, of_values] = match &maps {
            Some(maps) => maps.args(),
            None => [Arg::Address(keys), Arg::Address(values)],
        };
        let mut args = vec![
            Arg::read(call.q, 4 * rows * call.heads * dk),
            of_keys,
            of_values,
            call.plan.tables(),
            call.plan.seqs(),
            tiles.arg(),
            call.sinks,
            Arg::write(call.out, 4 * rows * call.heads * dv),
            size(op, "heads", call.heads)?,
            size(op, "kv_heads", kv_heads)?,
            size(op, "page_tokens", page_tokens)?,
            Arg::U32(call.window),
            Arg::F32(call.scale),
        ];
        let (dim_k, dim_v) = (dk as u32, dv as u32);
        let grid = [tiles.count, kv_heads, 1];
        let (unit, name, extent) = match &maps {
            Some(maps) => {
                args.extend([size(op, "pages", call.layer * pages)?, Arg::U32(maps.box_rows)]);
                // Two places for keys and values, queries, six barriers; from a multiple of 1024 on.
                let keys_at_once = if dk.max(dv) > 128 { 64 } else { 128 };
                let shared = 1024 + 2 * (2 * keys_at_once * (dk + dv) + HOPPER_PAIRS * dk) + 48;
                let unit = Unit::PrefillHopper { dtype, dim_k, dim_v };
                (unit, "paged_prefill_hopper", Extent { grid, threads: 384, shared })
            }
            None => {
                // Two buffers of keys and values, and wide queries.
                let keys_at_once = if dk.max(dv) > 128 { 32 } else { 64 };
                let queries = if dk > 128 { PAIRS * (dk + 8) } else { 0 };
                let shared = 2 * (2 * keys_at_once * (dk + 8 + dv + 8) + queries);
                (Unit::Prefill { dtype, dim_k, dim_v }, "paged_prefill", Extent { grid, threads: 128, shared })
            }
        };
        // SAFETY: plan and pool belong together, so tables and tiles name what is there; the buffers have room for all rows.
        unsafe { self.kernels.launch_touching(unit, name, extent, &args, &|tell| call.pages(tell, 0..rows), queue) }
    }

    /// Rows one by one, with their keys in splits that are merged.
    fn in_splits(&self, call: &Call<'_>, rows: Range<usize>, queue: &Queue) -> Result<(), KernelError> {
        let op = "attention";
        let KvSpec { kv_heads, head_dim_k: dk, head_dim_v: dv, page_tokens, dtype, .. } = *call.pool.spec();
        let splits = splits(call.plan.last_position());
        let Decode { unit, name, group, threads, shared } = decode_of(dtype, (dk, dv), call.heads / kv_heads);
        let row_bytes = 4 * product(op, &[call.heads, splits, dv + 2])?;
        let at_once = (PARTIAL_BYTES / row_bytes).clamp(1, 65_535);
        for first in rows.clone().step_by(at_once) {
            let count = at_once.min(rows.end - first);
            let partial = self.partial(count * row_bytes)?;
            let (sums, weights) = (4 * count * call.heads * splits * dv, 4 * count * call.heads * splits * 2);
            let sums = Arg::write(partial.at(), sums);
            let weights = Arg::write(partial.at() + 4 * (count * call.heads * splits * dv) as u64, weights);
            let (keys, values) = call.pool.layer(call.layer);
            let args = [
                Arg::read(call.q + 4 * (first * call.heads * dk) as u64, 4 * count * call.heads * dk),
                Arg::Address(keys),
                Arg::Address(values),
                call.plan.tables(),
                call.plan.row_tables(first, count),
                call.plan.positions(first, count),
                sums,
                weights,
                size(op, "heads", call.heads)?,
                size(op, "kv_heads", kv_heads)?,
                size(op, "page_tokens", page_tokens)?,
                Arg::U32(call.window),
                Arg::F32(call.scale),
                Arg::U32(SPLIT_TOKENS as u32),
                size(op, "splits", splits)?,
            ];
            let extent = Extent { grid: [splits, call.heads / group, count], threads, shared };
            let pages = |tell: &mut dyn FnMut(Touch)| call.pages(tell, first..first + count);
            // SAFETY: plan and pool belong together, so tables name what is there; the buffers have room for the rows.
            unsafe { self.kernels.launch_touching(unit, name, extent, &args, &pages, queue)? };
            let args = [
                sums,
                weights,
                call.plan.positions(first, count),
                call.sinks,
                Arg::write(call.out + 4 * (first * call.heads * dv) as u64, 4 * count * call.heads * dv),
                size(op, "heads", call.heads)?,
                Arg::U32(call.window),
                Arg::U32(SPLIT_TOKENS as u32),
                size(op, "splits", splits)?,
            ];
            // SAFETY: as above.
            unsafe { self.kernels.launch(unit, "paged_merge", Extent::plane(call.heads, count, 256), &args, queue)? };
        }
        Ok(())
    }

    /// Memory of at least `bytes` bytes for splits, which all calls use in the queue's order.
    fn partial(&self, bytes: usize) -> Result<Arc<DeviceMemory>, KernelError> {
        let mut partial = self.partial.lock();
        if let Some(memory) = partial.as_ref().filter(|memory| memory.bytes() >= bytes) {
            return Ok(Arc::clone(memory));
        }
        let memory = Arc::new(DeviceMemory::new(&self.driver, bytes.next_power_of_two(), "splits of attention")?);
        *partial = Some(Arc::clone(&memory));
        Ok(memory)
    }
}

impl Call<'_> {
    /// The pages that rows read.
    fn pages(&self, tell: &mut dyn FnMut(Touch), rows: Range<usize>) {
        if self.plan.stands_for_others {
            return;
        }
        for span in &self.plan.checked.spans {
            if span.rows.start < rows.end && rows.start < span.rows.end {
                for page in &span.pages {
                    self.pool.page(self.layer, *page, Access::Read).into_iter().for_each(&mut *tell);
                }
            }
        }
    }
}

/// Whether tensor cores take keys and values of these sizes.
fn fits_tiles(dtype: KvDtype, (dim_k, dim_v): (usize, usize)) -> bool {
    dtype != KvDtype::F32 && dim_k.is_multiple_of(16) && dim_v.is_multiple_of(16)
}

/// The kernel of attention of single rows.
struct Decode {
    unit: Unit,
    name: &'static str,
    /// Query heads of a block.
    group: usize,
    threads: u32,
    /// Bytes of dynamic shared memory.
    shared: usize,
}

fn decode_of(dtype: KvDtype, (dk, dv): (usize, usize), heads_a_kv_head: usize) -> Decode {
    let (dim_k, dim_v) = (dk as u32, dv as u32);
    if fits_tiles(dtype, (dk, dv)) {
        let group = largest_divisor(heads_a_kv_head, 16);
        let warps = if dk.max(dv) > 128 { 2 } else { 4 };
        // Two places of sixteen keys and values for each warp, and wide queries.
        let queries = if dk > 128 { 16 * (dk + 8) } else { 0 };
        let shared = 2 * (warps * 2 * 16 * (dk + 8 + dv + 8) + queries);
        let unit = Unit::DecodeTiles { dtype, dim_k, dim_v, group: group as u32 };
        return Decode { unit, name: "paged_decode_tiles", group, threads: 32 * warps as u32, shared };
    }
    let most = if dtype != KvDtype::F32 && dk.max(dv) <= 128 { 8 } else { 4 };
    let group = largest_divisor(heads_a_kv_head, most);
    let unit = Unit::Decode { dtype, dim_k, dim_v, group: group as u32 };
    Decode { unit, name: "paged_decode", group, threads: 128, shared: 0 }
}

/// The largest divisor of a number up to `most`.
fn largest_divisor(of: usize, most: usize) -> usize {
    (1..=most.min(of)).rev().find(|divisor| of.is_multiple_of(*divisor)).unwrap_or(1)
}

/// Runs of rows that are the only ones of their sequences.
fn single_rows(plan: &CudaPlan) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for span in plan.checked.spans.iter().filter(|span| span.rows.len() == 1) {
        match runs.last_mut() {
            Some(run) if run.end == span.rows.start => run.end = span.rows.end,
            _ => runs.push(span.rows.clone()),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_shared_as_far_as_the_kernel_can() {
        for (heads, dtype, dim, shared) in [
            (1, KvDtype::F16, 64, 1),
            (3, KvDtype::F16, 64, 3),
            (8, KvDtype::BF16, 128, 8),
            (8, KvDtype::BF16, 256, 8),
            (16, KvDtype::F16, 128, 16),
            (24, KvDtype::F16, 128, 12),
            (8, KvDtype::F16, 24, 8),
            (8, KvDtype::F16, 132, 4),
            (8, KvDtype::F32, 64, 4),
            (7, KvDtype::F32, 64, 1),
            (9, KvDtype::F16, 20, 3),
        ] {
            assert_eq!(decode_of(dtype, (dim, dim), heads).group, shared, "{heads} {dtype:?} {dim}");
        }
    }

    #[test]
    fn tiles_of_single_rows_fit_into_the_smallest_shared_memory() {
        for dims in [(64, 64), (128, 128), (192, 128), (256, 256)] {
            let Decode { name, shared, .. } = decode_of(KvDtype::BF16, dims, 8);
            assert!(name == "paged_decode_tiles" && shared + 1024 <= 99 * 1024, "{dims:?}: {shared}");
        }
    }

    #[test]
    fn splits_grow_by_doubling() {
        assert_eq!([0, 255, 256, 511, 512, 1024, 65_535].map(splits), [1, 1, 2, 2, 4, 8, 256]);
    }
}
