//! Causal attention over a paged KV pool.
//!
//! # Order of accumulation
//!
//! All positions are absolute, so nothing depends on how rows are grouped into steps.
//!
//! * A score is the chain `fma(scale * q[d], k[d], score)` for d = 0, 1, ... from +0.
//! * Keys are taken in blocks of [`BLOCK`] positions. In a block, a row's new maximum is found,
//!   its sums are multiplied by `exp(old - new)`, then `exp(score - new)` is added: to the
//!   denominator as one tree over the block (unseen positions count zero), to the values as the
//!   chain `fma(p[j], v[j][d], sum)` over the seen positions in order.
//! * Blocks belong to splits of [`SPLIT`] positions. Each split starts from nothing; the results
//!   of splits that a row sees are merged one after another, in order, always by the same
//!   formula. So splits may run in parallel (decode) or in a row (prefill), and a split whose pages
//!   several sequences share is read once for all their rows ([`work`]).
//!
//! Keys and values beyond a row's own position are never used; of memory beyond the last row's
//! position only whole groups of 16 tokens within a page are read, and their lanes dropped.
//!
//! # What it must cost
//!
//! A row and head at position p: `2 (p + 1) (dk + dv)` operations, and for decode the bytes of
//! the sequence's keys and values once for all heads of a group. SmolLM2 at 1,000 tokens: 69
//! MFLOP and 23 MB (f16) a token, 0.4 ms of arithmetic and 1.2 ms of memory at 20 GB/s. At 512
//! tokens of prefill, 18 MFLOP a token beside 212 of matrix products. Blocks are widened to f32
//! once for all rows and heads of a task, so that the inner loops hold nothing but FMAs.

mod block;
mod kernels;
mod work;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use super::kv_pool::{CpuKvPool, KvElement, with_kv_element};
use super::memory::FloatArray;
use super::plan::StepPlan;
use super::shared::SharedSplit;
use super::simd::{Kernel, LANES, Lanes, Machine};
use super::threads::ThreadPool;
use crate::error::KernelError;
use work::{Piece, Work};

/// Positions of a block: those whose scores are computed and normalised together.
const BLOCK: usize = 64;

/// Positions of a split.
pub(super) const SPLIT: usize = 256;

/// Query rows (times heads of a group) that share a block's keys and values in prefill: so many that widening these costs little.
const TASK_QUERIES: usize = 192;

/// A call of attention, checked.
pub(super) struct Attention<'a> {
    pub(super) pool: &'a CpuKvPool,
    pub(super) layer: usize,
    pub(super) plan: &'a StepPlan,
    /// What sequences of the plan share.
    pub(super) shared: &'a [SharedSplit],
    /// `[rows, heads, head_dim_k]`.
    pub(super) q: &'a [f32],
    pub(super) heads: usize,
    pub(super) scale: f32,
    /// Keys a row sees at most.
    pub(super) window: Option<usize>,
    /// One logit a head.
    pub(super) sinks: Option<&'a [f32]>,
    /// `[rows, heads, head_dim_v]`.
    pub(super) out: &'a mut [f32],
}

/// Rows that see the same pages, with all query heads of one KV head.
struct Unit {
    /// The sequence whose page table is used.
    span: usize,
    head: usize,
    /// Rows of the step, in order of positions if they are of one sequence.
    rows: Vec<usize>,
    /// Splits that any of the rows sees.
    splits: Range<usize>,
}

thread_local! {
    static WORK: RefCell<FloatArray> = const { RefCell::new(FloatArray::empty()) };
}

/// Dimensions that all tasks share.
#[derive(Clone, Copy)]
struct Dims {
    dk: usize,
    dv: usize,
    /// `dv` rounded up to whole vectors.
    dv_padded: usize,
    /// Query heads of a KV head.
    group: usize,
}

impl Dims {
    /// Floats of the state of `queries` queries: maxima, denominators, sums of values.
    fn state(self, queries: usize) -> usize {
        2 * queries.next_multiple_of(LANES) + queries * self.dv_padded
    }
}

/// The state of some queries, to read.
struct Part<'a> {
    max: &'a [f32],
    denominator: &'a [f32],
    values: &'a [f32],
}

/// Running maximum, denominator and weighted values of some queries.
struct State<'a> {
    max: &'a mut [f32],
    denominator: &'a mut [f32],
    values: &'a mut [f32],
}

impl<'a> State<'a> {
    fn new(floats: &'a mut [f32], queries: usize, dims: Dims) -> Self {
        let padded = queries.next_multiple_of(LANES);
        let (max, rest) = floats.split_at_mut(padded);
        let (denominator, values) = rest.split_at_mut(padded);
        Self { max, denominator, values: &mut values[..queries * dims.dv_padded] }
    }

    fn part(&self) -> Part<'_> {
        Part { max: self.max, denominator: self.denominator, values: self.values }
    }

    fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.denominator.fill(0.0);
        self.values.fill(0.0);
    }
}

/// A pointer that tasks may share, each using a part of its own.
#[derive(Clone, Copy)]
struct Shared(*mut f32);
// SAFETY: tasks use disjoint parts of a slice that outlives them.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// # Safety
    /// The part lies within the slice, and no other task uses it.
    unsafe fn part<'a>(self, at: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: as promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
    }
}

impl Attention<'_> {
    /// `partial` is work space that the caller keeps between calls.
    pub(super) fn run(
        self,
        machine: Machine,
        threads: &ThreadPool,
        partial: &mut FloatArray,
    ) -> Result<(), KernelError> {
        with_kv_element!(self.plan.spec.dtype, E => {
            self.run_typed::<E>(machine, threads, partial)
        })
    }

    fn dims(&self) -> Dims {
        let spec = &self.plan.spec;
        Dims {
            dk: spec.head_dim_k,
            dv: spec.head_dim_v,
            dv_padded: spec.head_dim_v.next_multiple_of(LANES),
            group: self.heads / spec.kv_heads,
        }
    }

    /// Positions that the row at `position` sees.
    fn seen(&self, position: usize) -> Range<usize> {
        let end = position + 1;
        self.window.map_or(0, |w| end.saturating_sub(w))..end
    }

    fn run_typed<E: KvElement>(
        self,
        machine: Machine,
        threads: &ThreadPool,
        partial: &mut FloatArray,
    ) -> Result<(), KernelError> {
        let dims = self.dims();
        let Work { units, tasks, merges, floats } = Work::new(&self, dims, threads.threads());
        partial.reserve(floats, "partial attention")?;
        let partial = partial.as_mut_slice();
        let out = Shared(self.out.as_mut_ptr());
        let slots = Shared(partial.as_mut_ptr());
        // A task has no way to fail but a panic, which becomes this call's error.
        let reserve = |work: &mut FloatArray, floats: usize| {
            if let Err(e) = work.reserve(floats, "attention") {
                std::panic::panic_any(e.to_string());
            }
        };

        threads.run("attention", tasks.len(), &|index| {
            WORK.with_borrow_mut(|work| {
                let task = &tasks[index];
                let unit = &units[task.unit];
                let queries = unit.rows.len() * dims.group;
                reserve(work, Buffers::floats(queries, dims));
                let split = task.split.as_ref().map(|(split, slot)| {
                    // SAFETY: each split task has a slot of its own, of a state's size.
                    (*split, unsafe { slots.part(*slot, dims.state(queries)) })
                });
                machine.run(UnitKernel::<E> { call: &self, dims, unit, split, work, out, element: PhantomData });
            });
        })?;

        // Merge what ran split by split. Little work: once a split, not once a key.
        let partial = &*partial;
        threads.run("attention", merges.len(), &|index| {
            WORK.with_borrow_mut(|work| {
                let merge = &merges[index];
                let unit = &units[merge.unit];
                let len = dims.state(unit.rows.len() * dims.group);
                reserve(work, len);
                let work = &mut work.as_mut_slice()[..len];
                machine.run(MergeKernel { call: &self, dims, unit, pieces: &merge.pieces, partial, work, out });
            });
        })
    }

    /// State before any key: nothing, or the sinks' share. Returns whether there is any.
    fn begin(&self, dims: Dims, unit: &Unit, state: &mut State<'_>) -> bool {
        state.clear();
        let Some(sinks) = self.sinks else {
            return false;
        };
        let first_head = unit.head * dims.group;
        for query in 0..unit.rows.len() * dims.group {
            state.max[query] = sinks[first_head + query % dims.group];
            state.denominator[query] = 1.0;
        }
        true
    }

    /// Whether `row` sees anything of a split.
    fn sees(&self, row: usize, split: usize) -> bool {
        let seen = self.seen(self.plan.positions[row] as usize);
        seen.start < (split + 1) * SPLIT && split * SPLIT < seen.end
    }
}

/// Work space of a task.
struct Buffers<'a> {
    /// `[dk][BLOCK]`.
    keys: &'a mut [f32],
    /// `[BLOCK][dv_padded]`.
    values: &'a mut [f32],
    /// `[queries][dk]`, scaled.
    q: &'a mut [f32],
    /// `[queries][BLOCK]`: scores, then weights.
    weights: &'a mut [f32],
    /// `[queries]`: factors on the sums so far.
    factors: &'a mut [f32],
    /// State of a split, and of all splits so far.
    split: &'a mut [f32],
    all: &'a mut [f32],
}

impl<'a> Buffers<'a> {
    fn sizes(queries: usize, dims: Dims) -> [usize; 7] {
        [
            dims.dk * BLOCK,
            BLOCK * dims.dv_padded,
            (queries * dims.dk).next_multiple_of(LANES),
            queries * BLOCK,
            queries.next_multiple_of(LANES),
            dims.state(queries),
            dims.state(queries),
        ]
    }

    fn floats(queries: usize, dims: Dims) -> usize {
        Self::sizes(queries, dims).iter().sum()
    }

    fn new(mut floats: &'a mut [f32], queries: usize, dims: Dims) -> Self {
        let mut take = |n| floats.split_off_mut(..n).unwrap_or_default();
        let [keys, values, q, weights, factors, split, all] = Self::sizes(queries, dims).map(&mut take);
        Self { keys, values, q, weights, factors, split, all }
    }
}

/// All splits of a unit, or one.
struct UnitKernel<'a, E> {
    call: &'a Attention<'a>,
    dims: Dims,
    unit: &'a Unit,
    /// A single split, and where its state goes.
    split: Option<(usize, &'a mut [f32])>,
    work: &'a mut FloatArray,
    out: Shared,
    element: PhantomData<E>,
}

impl<E: KvElement> Kernel for UnitKernel<'_, E> {
    type Output = ();

    #[inline(always)]
    fn call<S: Lanes>(self, s: S) {
        let Self { call, dims, unit, .. } = self;
        let queries = unit.rows.len() * dims.group;
        let mut b = Buffers::new(self.work.as_mut_slice(), queries, dims);
        for (r, row) in unit.rows.iter().copied().enumerate() {
            let heads = dims.group * dims.dk;
            let q = &call.q[(row * call.heads + unit.head * dims.group) * dims.dk..][..heads];
            for (scaled, q) in b.q[r * heads..][..heads].iter_mut().zip(q) {
                *scaled = q * call.scale;
            }
        }
        if let Some((split, state)) = self.split {
            let mut state = State::new(state, queries, dims);
            block::attend_split::<S, E>(s, call, dims, unit, split, &mut b, &mut state);
            return;
        }
        let (split_floats, all_floats) = (std::mem::take(&mut b.split), std::mem::take(&mut b.all));
        let mut one = State::new(split_floats, queries, dims);
        let mut all = State::new(all_floats, queries, dims);
        let begun = call.begin(dims, unit, &mut all);
        for split in unit.splits.clone() {
            block::attend_split::<S, E>(s, call, dims, unit, split, &mut b, &mut one);
            merge(s, call, dims, unit, split, begun, &mut all, &one.part());
        }
        finish(s, call, dims, unit, &all, self.out);
    }
}

/// Merges the states of a unit's splits.
struct MergeKernel<'a> {
    call: &'a Attention<'a>,
    dims: Dims,
    unit: &'a Unit,
    /// One a split, in order.
    pieces: &'a [Piece],
    /// All states.
    partial: &'a [f32],
    work: &'a mut [f32],
    out: Shared,
}

impl Kernel for MergeKernel<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Lanes>(self, s: S) {
        let Self { call, dims, unit, .. } = self;
        let queries = unit.rows.len() * dims.group;
        let mut all = State::new(self.work, queries, dims);
        let begun = call.begin(dims, unit, &mut all);
        for (split, piece) in unit.splits.clone().zip(self.pieces) {
            merge(s, call, dims, unit, split, begun, &mut all, &piece.part(self.partial, queries, dims));
        }
        finish(s, call, dims, unit, &all, self.out);
    }
}

/// Merges the state of a split into the state of those before it, for the rows that see it.
/// `begun` says whether the state holds sinks already.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn merge<S: Lanes>(
    s: S,
    call: &Attention<'_>,
    dims: Dims,
    unit: &Unit,
    split: usize,
    begun: bool,
    all: &mut State<'_>,
    one: &Part<'_>,
) {
    for (r, row) in unit.rows.iter().copied().enumerate() {
        if !call.sees(row, split) {
            continue;
        }
        // The row's first split is taken as it is.
        let first = !begun && (split == unit.splits.start || !call.sees(row, split - 1));
        for query in r * dims.group..(r + 1) * dims.group {
            let values = query * dims.dv_padded..(query + 1) * dims.dv_padded;
            if first {
                all.max[query] = one.max[query];
                all.denominator[query] = one.denominator[query];
                all.values[values.clone()].copy_from_slice(&one.values[values]);
            } else {
                kernels::merge(
                    s,
                    &mut all.max[query],
                    &mut all.denominator[query],
                    &mut all.values[values.clone()],
                    (one.max[query], one.denominator[query], &one.values[values]),
                );
            }
        }
    }
}

/// Divides by the denominators and writes the unit's outputs.
#[inline(always)]
fn finish<S: Lanes>(s: S, call: &Attention<'_>, dims: Dims, unit: &Unit, state: &State<'_>, out: Shared) {
    for (r, row) in unit.rows.iter().copied().enumerate() {
        for g in 0..dims.group {
            let query = r * dims.group + g;
            let head = unit.head * dims.group + g;
            // SAFETY: each row and head belongs to one unit, and `out` holds them all.
            let out = unsafe { out.part((row * call.heads + head) * dims.dv, dims.dv) };
            let values = &state.values[query * dims.dv_padded..][..dims.dv_padded];
            kernels::divide(s, values, state.denominator[query], out);
        }
    }
}
