//! One split of a unit: its blocks, from the pool's pages to the running state.

use std::ops::Range;

use super::kernels;
use super::{Attention, BLOCK, Buffers, Dims, SPLIT, State, Unit};
use crate::cpu::kv_pool::KvElement;
use crate::cpu::simd::{LANES, Lanes, prefetch};

/// Computes the state of a unit's rows over one split, from nothing.
#[inline(always)]
pub(super) fn attend_split<S: Lanes, E: KvElement>(
    s: S,
    call: &Attention<'_>,
    dims: Dims,
    unit: &Unit,
    split: usize,
    b: &mut Buffers<'_>,
    state: &mut State<'_>,
) {
    state.clear();
    let positions = || unit.rows.iter().map(|row| call.plan.positions[*row] as usize);
    let first_seen = call.seen(positions().min().unwrap_or(0)).start;
    // A unit of rows that share its splits has pages of them alone: the first sequence may end just behind.
    let end_seen = positions().max().map_or(0, |position| position + 1).min(unit.splits.end * SPLIT);
    let queries = unit.rows.len() * dims.group;
    // With few queries a block is used about once, and widened where it is used.
    let direct = queries <= kernels::GROUP && call.pool.keys_in_groups() && dims.dv == dims.dv_padded;

    let mut start = split * SPLIT;
    while start < ((split + 1) * SPLIT).min(end_seen) {
        let count = BLOCK.min(end_seen - start);
        if start + count <= first_seen {
            // No row sees any of it.
        } else if direct {
            let next = BLOCK.min(end_seen - (start + BLOCK).min(end_seen));
            fetch_values::<E>(call, dims, unit, start, count);
            score_in_place::<S, E>(s, call, dims, unit, start, count, b);
            fetch_keys::<E>(call, dims, unit, start + BLOCK, next);
            attend_block::<S, E>(s, call, dims, unit, 0..unit.rows.len(), start, true, b, state);
        } else {
            load_keys::<S, E>(s, call, unit, start, count, b.keys);
            load_values::<S, E>(s, call, dims, unit, start, count, b.values);
            // A few rows after another, so that their scores and sums stay in the nearest cache beside the block.
            let some = (2 * kernels::GROUP / dims.group).max(1);
            let mut row = 0;
            while row < unit.rows.len() {
                let rows = row..unit.rows.len().min(row + some);
                let q = &b.q[row * dims.group * dims.dk..];
                kernels::scores(s, b.keys, q, dims.dk, rows.len() * dims.group, b.weights);
                attend_block::<S, E>(s, call, dims, unit, rows, start, false, b, state);
                row += some;
            }
        }
        start += BLOCK;
    }
}

/// Softmax and weighted values of one block for some rows of the unit, whose scores are in
/// `b.weights`. The values are in the pool (`direct`) or in `b.values`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn attend_block<S: Lanes, E: KvElement>(
    s: S,
    call: &Attention<'_>,
    dims: Dims,
    unit: &Unit,
    rows: Range<usize>,
    start: usize,
    direct: bool,
    b: &mut Buffers<'_>,
    state: &mut State<'_>,
) {
    // What a row of the unit sees of the block, as positions within it; empty if nothing.
    let seen = |r: usize| {
        let seen = call.seen(call.plan.positions[unit.rows[r]] as usize);
        let first = seen.start.saturating_sub(start).min(BLOCK);
        first..seen.end.saturating_sub(start).min(BLOCK)
    };
    let first_query = rows.start * dims.group;
    for r in rows.clone() {
        let seen = seen(r);
        if seen.is_empty() {
            continue;
        }
        for query in r * dims.group..(r + 1) * dims.group {
            b.factors[query - first_query] = kernels::softmax(
                s,
                &mut b.weights[(query - first_query) * BLOCK..][..BLOCK],
                seen.clone(),
                &mut state.max[query],
                &mut state.denominator[query],
            );
        }
    }
    // Neighbouring rows that see the same part of the block share its values.
    let mut row = rows.start;
    while row < rows.end {
        let part = seen(row);
        let mut end = row + 1;
        while end < rows.end && seen(end) == part {
            end += 1;
        }
        if !part.is_empty() {
            let first = row * dims.group;
            let count = (end - row) * dims.group;
            let sums = kernels::Sums {
                dv: dims.dv_padded,
                weights: &b.weights[(first - first_query) * BLOCK..][..count * BLOCK],
                factors: &b.factors[first - first_query..][..count],
                sums: &mut state.values[first * dims.dv_padded..][..count * dims.dv_padded],
            };
            if direct {
                add_in_place::<S, E>(s, call, unit, start, part, sums);
            } else {
                assert!(b.values.len() >= BLOCK * dims.dv_padded);
                // SAFETY: `b.values` is a whole block, of which `part` is a part.
                unsafe { kernels::add_values(s, b.values.as_ptr(), true, part, sums) };
            }
        }
        row = end;
    }
}

/// Scores of a block whose keys are read from the pool, for at most [`kernels::GROUP`] queries.
#[inline(always)]
fn score_in_place<S: Lanes, E: KvElement>(
    s: S,
    call: &Attention<'_>,
    dims: Dims,
    unit: &Unit,
    start: usize,
    count: usize,
    b: &mut Buffers<'_>,
) {
    let queries = unit.rows.len() * dims.group;
    let mut groups = [std::ptr::null(); BLOCK / LANES];
    let used = count.div_ceil(LANES);
    for (i, group) in groups[..used].iter_mut().enumerate() {
        *group = key_group::<E>(call, unit, start + i * LANES);
    }
    // SAFETY: each of the groups is 16 keys within a page, which lie `[dk][16]`.
    unsafe { kernels::score_groups(s, &groups[..used], b.q, dims.dk, queries, b.weights) };
}

/// The group of 16 keys at `position`, a multiple of 16.
#[inline(always)]
fn key_group<E: KvElement>(call: &Attention<'_>, unit: &Unit, position: usize) -> *const E {
    let spec = &call.plan.spec;
    let page = call.plan.spans[unit.span].pages[position / spec.page_tokens];
    let keys = call.pool.keys::<E>(call.layer, page, unit.head);
    keys.wrapping_add(position % spec.page_tokens * spec.head_dim_k)
}

/// The values at `position`; those of its page that follow lie behind them.
#[inline(always)]
fn value_row<E: KvElement>(call: &Attention<'_>, unit: &Unit, position: usize) -> *const E {
    let spec = &call.plan.spec;
    let page = call.plan.spans[unit.span].pages[position / spec.page_tokens];
    let values = call.pool.values::<E>(call.layer, page, unit.head);
    values.wrapping_add(position % spec.page_tokens * spec.head_dim_v)
}

/// Adds the weighted values of positions `start + part`, read from the pool page by page.
#[inline(always)]
fn add_in_place<S: Lanes, E: KvElement>(
    s: S,
    call: &Attention<'_>,
    unit: &Unit,
    start: usize,
    part: Range<usize>,
    mut sums: kernels::Sums<'_>,
) {
    let page_tokens = call.plan.spec.page_tokens;
    let mut j = part.start;
    while j < part.end {
        let position = start + j;
        let count = (page_tokens - position % page_tokens).min(part.end - j);
        // The kernel counts rows from the start of the block.
        let rows = value_row::<E>(call, unit, position).wrapping_sub(j * sums.dv);
        let first = j == part.start;
        // SAFETY: rows `j..j + count` lie one after another in a page.
        unsafe { kernels::add_values(s, rows, first, j..j + count, sums.reborrow()) };
        j += count;
    }
}

/// Asks for the keys of `count` positions to be fetched into the cache.
#[inline(always)]
fn fetch_keys<E: KvElement>(call: &Attention<'_>, dims: Dims, unit: &Unit, start: usize, count: usize) {
    for first in (0..count).step_by(LANES) {
        let group = key_group::<E>(call, unit, start + first).cast::<u8>();
        for line in (0..LANES * dims.dk * size_of::<E>()).step_by(64) {
            prefetch(group, line);
        }
    }
}

/// Asks for the values of `count` positions to be fetched into the cache.
#[inline(always)]
fn fetch_values<E: KvElement>(call: &Attention<'_>, dims: Dims, unit: &Unit, start: usize, count: usize) {
    for j in 0..count {
        let row = value_row::<E>(call, unit, start + j).cast::<u8>();
        for line in (0..dims.dv * size_of::<E>()).step_by(64) {
            prefetch(row, line);
        }
    }
}

/// Widens the keys of `count` positions from `start` (a multiple of [`BLOCK`]) on to
/// `[dk][BLOCK]`. Columns beyond are left as they are, or hold what lies beyond in the page.
#[inline(always)]
fn load_keys<S: Lanes, E: KvElement>(
    s: S,
    call: &Attention<'_>,
    unit: &Unit,
    start: usize,
    count: usize,
    keys: &mut [f32],
) {
    let pages = &call.plan.spans[unit.span].pages;
    let spec = &call.plan.spec;
    let (dk, page_tokens) = (spec.head_dim_k, spec.page_tokens);
    assert!(keys.len() >= dk * BLOCK && count <= BLOCK);
    if call.pool.keys_in_groups() {
        let mut first = 0;
        while first < count {
            let group = key_group::<E>(call, unit, start + first);
            // SAFETY: a group of 16 tokens never leaves its page, and begins at a multiple of
            // 16; columns `first..first + 16` exist since BLOCK is a multiple of 16.
            unsafe {
                let to = keys.as_mut_ptr().add(first);
                for d in 0..dk {
                    s.store(to.add(d * BLOCK), E::load(s, group.add(d * LANES)));
                }
            }
            first += LANES;
        }
        return;
    }
    for j in 0..count {
        let position = start + j;
        let page = pages[position / page_tokens];
        let from = call.pool.keys::<E>(call.layer, page, unit.head);
        for d in 0..dk {
            // SAFETY: the token lies within its page.
            keys[d * BLOCK + j] = unsafe { (*from.add(position % page_tokens * dk + d)).to_f32() };
        }
    }
}

/// Widens the values of `count` positions from `start` on to `[BLOCK][dv_padded]`; the padding
/// is zero.
#[inline(always)]
fn load_values<S: Lanes, E: KvElement>(
    s: S,
    call: &Attention<'_>,
    dims: Dims,
    unit: &Unit,
    start: usize,
    count: usize,
    values: &mut [f32],
) {
    let Dims { dv, dv_padded, .. } = dims;
    let whole = dv / LANES * LANES;
    assert!(values.len() >= BLOCK * dv_padded && count <= BLOCK);
    for j in 0..count {
        let from = value_row::<E>(call, unit, start + j);
        // SAFETY: the token lies within its page, and row `j` within `values`.
        unsafe {
            let to = values.as_mut_ptr().add(j * dv_padded);
            let mut d = 0;
            while d < whole {
                s.store(to.add(d), E::load(s, from.add(d)));
                d += LANES;
            }
            while d < dv {
                *to.add(d) = (*from.add(d)).to_f32();
                d += 1;
            }
            while d < dv_padded {
                *to.add(d) = 0.0;
                d += 1;
            }
        }
    }
}
