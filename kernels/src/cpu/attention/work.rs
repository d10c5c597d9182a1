//! How a call of attention is cut into tasks.
//!
//! A unit is some rows with the query heads of one KV head. Rows of one sequence go through all their splits in one task, or a split
//! a task where there are too few units to keep all threads busy. Sequences of one row each that share the pages of whole splits (a
//! batch of decodes behind one prompt) have these splits in common: rows of all of them go through such a split in one task, so that
//! its keys and values are read and widened once for up to [`TASK_QUERIES`] queries, not once for each row. The states of a row's
//! splits are merged in order, wherever they come from.

use super::{Attention, Dims, Part, SPLIT, TASK_QUERIES, Unit};
use crate::cpu::simd::LANES;

/// Queries of a task, if there are so many.
const LEAST_QUERIES: usize = 48;

/// All splits of a unit, or one, whose state goes to a slot.
pub(super) struct Task {
    pub(super) unit: usize,
    /// The split, and where its slot begins.
    pub(super) split: Option<(usize, usize)>,
}

/// The states of a unit's splits, to be merged.
pub(super) struct Merge {
    pub(super) unit: usize,
    /// One a split, in order.
    pub(super) pieces: Vec<Piece>,
}

/// Where the state of some rows for a split is: in a slot that may hold more.
pub(super) struct Piece {
    slot: usize,
    /// Queries of the slot.
    queries: usize,
    /// The first that is meant.
    first: usize,
}

impl Piece {
    /// The state of `queries` queries.
    pub(super) fn part<'a>(&self, floats: &'a [f32], queries: usize, dims: Dims) -> Part<'a> {
        let padded = self.queries.next_multiple_of(LANES);
        let (max, rest) = floats[self.slot..][..dims.state(self.queries)].split_at(padded);
        let (denominator, values) = rest.split_at(padded);
        Part {
            max: &max[self.first..][..queries],
            denominator: &denominator[self.first..][..queries],
            values: &values[self.first * dims.dv_padded..][..queries * dims.dv_padded],
        }
    }
}

/// The tasks of a call, then the merges of what they leave.
pub(super) struct Work {
    pub(super) units: Vec<Unit>,
    pub(super) tasks: Vec<Task>,
    pub(super) merges: Vec<Merge>,
    /// Floats of all slots.
    pub(super) floats: usize,
}

impl Work {
    pub(super) fn new(call: &Attention<'_>, dims: Dims, threads: usize) -> Self {
        let mut work = Self { units: Vec::new(), tasks: Vec::new(), merges: Vec::new(), floats: 0 };
        let spans = call.plan.spans.len();
        // Pieces of each sequence and head, for the splits that it shares.
        let mut shared: Vec<Vec<Piece>> = Vec::new();
        let heads = call.plan.spec.kv_heads;
        shared.resize_with(spans * heads, Vec::new);
        if call.window.is_none() {
            work.share(call, dims, threads, &mut shared);
        }
        let first = work.units.len();
        work.rows(call, dims, threads);
        let few = threads > 1 && work.units.len() - first < 4 * threads;
        for unit in first..work.units.len() {
            let Unit { span, head, splits, .. } = &work.units[unit];
            let pieces = std::mem::take(&mut shared[span * heads + head]);
            if pieces.is_empty() && !(few && splits.len() > 1) {
                work.tasks.push(Task { unit, split: None });
                continue;
            }
            work.by_splits(dims, unit, pieces);
        }
        work
    }

    /// Units of rows of one sequence.
    fn rows(&mut self, call: &Attention<'_>, dims: Dims, threads: usize) {
        let rows_each = rows_each(call.plan.positions.len() * call.plan.spec.kv_heads, dims, threads);
        for (index, span) in call.plan.spans.iter().enumerate() {
            // Latest rows first: they have most to do.
            let mut end = span.rows.end;
            while end > span.rows.start {
                let rows = span.rows.start.max(end.saturating_sub(rows_each))..end;
                end = rows.start;
                let position = |row: usize| call.plan.positions[row] as usize;
                let first = call.seen(position(rows.start)).start / SPLIT;
                let last = position(rows.end - 1) / SPLIT;
                for head in 0..call.plan.spec.kv_heads {
                    self.units.push(Unit { span: index, head, rows: rows.clone().collect(), splits: first..last + 1 });
                }
            }
        }
    }

    /// A task for each split of a unit beyond the `pieces` that others compute.
    fn by_splits(&mut self, dims: Dims, unit: usize, mut pieces: Vec<Piece>) {
        let queries = self.units[unit].rows.len() * dims.group;
        for split in self.units[unit].splits.clone().skip(pieces.len()) {
            let slot = self.slot(queries, dims);
            self.tasks.push(Task { unit, split: Some((split, slot)) });
            pieces.push(Piece { slot, queries, first: 0 });
        }
        self.merges.push(Merge { unit, pieces });
    }

    fn slot(&mut self, queries: usize, dims: Dims) -> usize {
        let slot = self.floats;
        self.floats += dims.state(queries);
        slot
    }

    /// Units and tasks for the splits that sequences share.
    fn share(&mut self, call: &Attention<'_>, dims: Dims, threads: usize, pieces: &mut [Vec<Piece>]) {
        let heads = call.plan.spec.kv_heads;
        let rows: usize = call.shared.iter().map(|shared| shared.spans.len()).sum();
        let most = rows_each(rows * heads, dims, threads);
        for shared in call.shared {
            let spans = &shared.spans;
            let each = spans.len().div_ceil(spans.len().div_ceil(most));
            for head in 0..heads {
                // Parts of one split after another, so that all but the first find it in the cache.
                for spans in spans.chunks(each) {
                    let queries = spans.len() * dims.group;
                    let slot = self.slot(queries, dims);
                    let rows = spans.iter().map(|span| call.plan.spans[*span].rows.start).collect();
                    let splits = shared.split..shared.split + 1;
                    self.tasks.push(Task { unit: self.units.len(), split: Some((shared.split, slot)) });
                    self.units.push(Unit { span: spans[0], head, rows, splits });
                    for (index, span) in spans.iter().enumerate() {
                        pieces[span * heads + head].push(Piece { slot, queries, first: index * dims.group });
                    }
                }
            }
        }
    }
}

/// Rows of a task where there are `rows` in all, counted once for each KV head and split they share: fewer than might be where that would leave
/// threads without work, but not so few that a block is read for hardly anything.
fn rows_each(rows: usize, dims: Dims, threads: usize) -> usize {
    let fair = rows.div_ceil(4 * threads).max(LEAST_QUERIES / dims.group);
    (TASK_QUERIES / dims.group).min(fair).max(1)
}
