//! One split of a unit: its blocks, from the pool's pages to the running state.

use super::kernels;
use super::{Attention, BLOCK, Buffers, Dims, SPLIT, State, Unit};
use crate::cpu::kv_pool::KvElement;
use crate::cpu::simd::{LANES, Lanes};

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
    let span = &call.plan.spans[unit.span];
    let position = |row: usize| span.start + row - span.rows.start;
    let first_seen = call.seen(position(unit.rows.start)).start;
    let end_seen = position(unit.rows.end - 1) + 1;
    let queries = unit.rows.len() * dims.group;

    let mut start = split * SPLIT;
    while start < ((split + 1) * SPLIT).min(end_seen) {
        let count = BLOCK.min(end_seen - start);
        if start + count > first_seen {
            load_keys::<S, E>(s, call, unit, start, count, b.keys);
            load_values::<S, E>(s, call, dims, unit, start, count, b.values);
            kernels::scores(s, b.keys, b.q, dims.dk, queries, b.weights);
            attend_block(s, call, dims, unit, start, b, state);
        }
        start += BLOCK;
    }
}

/// Softmax and weighted values of one block whose scores are in `b.weights`.
#[inline(always)]
fn attend_block<S: Lanes>(
    s: S,
    call: &Attention<'_>,
    dims: Dims,
    unit: &Unit,
    start: usize,
    b: &mut Buffers<'_>,
    state: &mut State<'_>,
) {
    let span = &call.plan.spans[unit.span];
    // What a row sees of the block, as positions within it; empty if nothing.
    let seen = |row: usize| {
        let seen = call.seen(span.start + row - span.rows.start);
        let first = seen.start.saturating_sub(start).min(BLOCK);
        first..seen.end.saturating_sub(start).min(BLOCK)
    };
    for (r, row) in unit.rows.clone().enumerate() {
        let seen = seen(row);
        if seen.is_empty() {
            continue;
        }
        for query in r * dims.group..(r + 1) * dims.group {
            b.factors[query] = kernels::softmax(
                s,
                &mut b.weights[query * BLOCK..][..BLOCK],
                seen.clone(),
                &mut state.max[query],
                &mut state.denominator[query],
            );
        }
    }
    // Neighbouring rows that see the same part of the block share its values.
    let mut row = unit.rows.start;
    while row < unit.rows.end {
        let part = seen(row);
        let mut end = row + 1;
        while end < unit.rows.end && seen(end) == part {
            end += 1;
        }
        if !part.is_empty() {
            let first = (row - unit.rows.start) * dims.group;
            let count = (end - row) * dims.group;
            kernels::add_values(
                s,
                b.values,
                dims.dv_padded,
                part,
                &b.weights[first * BLOCK..][..count * BLOCK],
                &b.factors[first..][..count],
                &mut state.values[first * dims.dv_padded..][..count * dims.dv_padded],
            );
        }
        row = end;
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
            let position = start + first;
            let page = pages[position / page_tokens];
            let from = call.pool.keys::<E>(call.layer, page, unit.head);
            // SAFETY: a group of 16 tokens never leaves its page, and begins at a multiple of
            // 16; columns `first..first + 16` exist since BLOCK is a multiple of 16.
            unsafe {
                let group = from.add(position % page_tokens * dk);
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
    let pages = &call.plan.spans[unit.span].pages;
    let page_tokens = call.plan.spec.page_tokens;
    let Dims { dv, dv_padded, .. } = dims;
    let whole = dv / LANES * LANES;
    assert!(values.len() >= BLOCK * dv_padded && count <= BLOCK);
    for j in 0..count {
        let position = start + j;
        let page = pages[position / page_tokens];
        let from = call.pool.values::<E>(call.layer, page, unit.head);
        // SAFETY: the token lies within its page, and row `j` within `values`.
        unsafe {
            let from = from.add(position % page_tokens * dv);
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
