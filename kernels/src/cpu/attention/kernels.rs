//! The inner loops of attention, on f32 blocks.

use std::ops::Range;

use super::BLOCK;
use crate::cpu::kv_pool::KvElement;
use crate::cpu::math::exp;
use crate::cpu::simd::{LANES, Lanes};

/// Vectors of a block.
const VECTORS: usize = BLOCK / LANES;

/// Queries that a kernel holds in registers.
pub(super) const GROUP: usize = 6;

/// Calls a kernel with its const parameter for 1 to 6 queries.
macro_rules! with_count {
    ($count:expr, $N:ident => $body:expr) => {
        match $count {
            6 => {
                const $N: usize = 6;
                $body
            }
            5 => {
                const $N: usize = 5;
                $body
            }
            4 => {
                const $N: usize = 4;
                $body
            }
            3 => {
                const $N: usize = 3;
                $body
            }
            2 => {
                const $N: usize = 2;
                $body
            }
            _ => {
                const $N: usize = 1;
                $body
            }
        }
    };
}

/// `out[query][j] = sum over d of q[query][d] * keys[d][j]`.
#[inline(always)]
pub(super) fn scores<S: Lanes>(s: S, keys: &[f32], q: &[f32], dk: usize, queries: usize, out: &mut [f32]) {
    assert!(keys.len() >= dk * BLOCK && q.len() >= queries * dk && out.len() >= queries * BLOCK);
    let mut query = 0;
    while query < queries {
        let count = GROUP.min(queries - query);
        // SAFETY: `count` queries from `query` on exist in `q` and `out`, and the keys are whole.
        unsafe {
            let q = q.as_ptr().add(query * dk);
            let out = out.as_mut_ptr().add(query * BLOCK);
            with_count!(count, N => if S::WIDE {
                score_columns::<S, N, VECTORS>(s, keys.as_ptr(), q, dk, out);
            } else {
                for v in 0..VECTORS {
                    let keys = keys.as_ptr().add(v * LANES);
                    score_columns::<S, N, 1>(s, keys, q, dk, out.add(v * LANES));
                }
            });
        }
        query += count;
    }
}

/// Scores of N queries with `16 * V` keys.
///
/// # Safety
/// `keys` holds `dk` rows (BLOCK apart) of `16 * V` floats, `q` N rows of `dk`, `out` N rows
/// (BLOCK apart) of `16 * V`.
#[inline(always)]
unsafe fn score_columns<S: Lanes, const N: usize, const V: usize>(
    s: S,
    keys: *const f32,
    q: *const f32,
    dk: usize,
    out: *mut f32,
) {
    let mut sums = [[s.splat(0.0); V]; N];
    // SAFETY: all within what the caller promises.
    unsafe {
        for d in 0..dk {
            let mut k = [s.splat(0.0); V];
            for v in 0..V {
                k[v] = s.load(keys.add(d * BLOCK + v * LANES));
            }
            for n in 0..N {
                let q = s.splat(*q.add(n * dk + d));
                for v in 0..V {
                    sums[n][v] = s.fma(q, k[v], sums[n][v]);
                }
            }
        }
        for n in 0..N {
            for v in 0..V {
                s.store(out.add(n * BLOCK + v * LANES), sums[n][v]);
            }
        }
    }
}

/// [`scores`] for at most [`GROUP`] queries, of keys that lie in groups `[dk][16]` of the pool's
/// element type. Scores of a block beyond the groups are left as they are.
///
/// # Safety
/// Each group is readable.
#[inline(always)]
pub(super) unsafe fn score_groups<S: Lanes, E: KvElement>(
    s: S,
    groups: &[*const E],
    q: &[f32],
    dk: usize,
    queries: usize,
    out: &mut [f32],
) {
    assert!(queries <= GROUP && q.len() >= queries * dk && out.len() >= queries * BLOCK);
    // SAFETY: `q` and `out` hold `queries` rows; the groups are the caller's promise.
    unsafe {
        let (q, out) = (q.as_ptr(), out.as_mut_ptr());
        with_count!(queries, N => if S::WIDE && let Some(groups) = groups.first_chunk() {
            group_columns::<S, E, N, VECTORS>(s, groups, q, dk, out);
        } else {
            for (v, group) in groups.iter().enumerate() {
                group_columns::<S, E, N, 1>(s, &[*group], q, dk, out.add(v * LANES));
            }
        });
    }
}

/// Scores of N queries with V groups of 16 keys.
///
/// # Safety
/// The groups are readable, `q` holds N rows of `dk`, `out` N rows (BLOCK apart) of `16 * V`.
#[inline(always)]
unsafe fn group_columns<S: Lanes, E: KvElement, const N: usize, const V: usize>(
    s: S,
    groups: &[*const E; V],
    q: *const f32,
    dk: usize,
    out: *mut f32,
) {
    let mut sums = [[s.splat(0.0); V]; N];
    // SAFETY: all within what the caller promises.
    unsafe {
        for d in 0..dk {
            let mut k = [s.splat(0.0); V];
            for v in 0..V {
                k[v] = E::load(s, groups[v].add(d * LANES));
            }
            for n in 0..N {
                let q = s.splat(*q.add(n * dk + d));
                for v in 0..V {
                    sums[n][v] = s.fma(q, k[v], sums[n][v]);
                }
            }
        }
        for n in 0..N {
            for v in 0..V {
                s.store(out.add(n * BLOCK + v * LANES), sums[n][v]);
            }
        }
    }
}

/// Makes weights of a query's scores over a block: `exp(score - max)` where seen, zero elsewhere.
/// Brings `max` and `denominator` up to date and returns the factor on the sums so far. `seen`
/// is not empty.
#[inline(always)]
pub(super) fn softmax<S: Lanes>(
    s: S,
    scores: &mut [f32],
    seen: Range<usize>,
    max: &mut f32,
    denominator: &mut f32,
) -> f32 {
    assert!(scores.len() >= BLOCK);
    // Most blocks are seen whole.
    if seen.start == 0 && seen.end == BLOCK {
        return softmax_part::<S, true>(s, scores, seen, max, denominator);
    }
    softmax_part::<S, false>(s, scores, seen, max, denominator)
}

/// [`softmax`] of a block that is seen whole, or in part. `scores` is a whole block.
#[inline(always)]
fn softmax_part<S: Lanes, const WHOLE: bool>(
    s: S,
    scores: &mut [f32],
    seen: Range<usize>,
    max: &mut f32,
    denominator: &mut f32,
) -> f32 {
    let lowest = s.splat(f32::NEG_INFINITY);
    let zero = s.splat(0.0);
    let mut v = [lowest; VECTORS];
    for (i, v) in v.iter_mut().enumerate() {
        // SAFETY: the scores are a whole block.
        let x = unsafe { s.load(scores.as_ptr().add(i * LANES)) };
        *v = if WHOLE { x } else { only(s, seen.clone(), i, x, lowest) };
    }
    let pairs = [s.max(v[0], v[1]), s.max(v[2], v[3])];
    let greatest = s.greatest(s.max(pairs[0], pairs[1]));
    let new = if greatest > *max { greatest } else { *max };
    for (i, v) in v.iter_mut().enumerate() {
        let p = exp(s, s.sub(*v, s.splat(new)));
        *v = if WHOLE { p } else { only(s, seen.clone(), i, p, zero) };
        // SAFETY: as above.
        unsafe { s.store(scores.as_mut_ptr().add(i * LANES), *v) };
    }
    let sum = s.sum(s.add(s.add(v[0], v[1]), s.add(v[2], v[3])));
    // The exponential of zero, without computing it.
    let factor = if new - *max == 0.0 { 1.0 } else { s.to_array(exp(s, s.splat(*max - new)))[0] };
    *max = new;
    *denominator = *denominator * factor + sum;
    factor
}

/// Lanes of vector `i` of a block whose place in the block is in `seen` from `x`, others from
/// `other`.
#[inline(always)]
fn only<S: Lanes>(s: S, seen: Range<usize>, i: usize, x: S::F, other: S::F) -> S::F {
    let from = i * LANES;
    if seen.start <= from && from + LANES <= seen.end {
        return x;
    }
    let x = s.first(seen.end.saturating_sub(from), x, other);
    s.first(seen.start.saturating_sub(from), other, x)
}

/// Weights of some queries over a block, and the sums that they add values to.
pub(super) struct Sums<'a> {
    /// Columns of a value; a multiple of 16.
    pub(super) dv: usize,
    /// `[queries][BLOCK]`.
    pub(super) weights: &'a [f32],
    /// `[queries]`: factors on the sums so far.
    pub(super) factors: &'a [f32],
    /// `[queries][dv]`.
    pub(super) sums: &'a mut [f32],
}

impl Sums<'_> {
    pub(super) fn reborrow(&mut self) -> Sums<'_> {
        Sums { dv: self.dv, weights: self.weights, factors: self.factors, sums: self.sums }
    }
}

/// `sums[query] = sums[query] * factors[query] + sum over j in part of weights[query][j] *
/// values[j]`; the factors are left out if `first` is false.
///
/// # Safety
/// Rows `part` of `values` (`dv` elements each) are readable.
#[inline(always)]
pub(super) unsafe fn add_values<S: Lanes, E: KvElement>(
    s: S,
    values: *const E,
    first: bool,
    part: Range<usize>,
    to: Sums<'_>,
) {
    let (queries, dv) = (to.factors.len(), to.dv);
    assert!(dv.is_multiple_of(LANES) && part.end <= BLOCK);
    assert!(to.weights.len() >= queries * BLOCK && to.sums.len() >= queries * dv);
    let mut query = 0;
    while query < queries {
        let count = GROUP.min(queries - query);
        let mut d = 0;
        while d < dv {
            // SAFETY: `count` queries from `query` on exist in weights, factors and sums; the
            // columns `d..` taken at once end within `dv`.
            unsafe {
                let c = Columns {
                    values: values.wrapping_add(d),
                    dv,
                    part: part.clone(),
                    weights: to.weights.as_ptr().add(query * BLOCK),
                    factors: first.then(|| to.factors.as_ptr().add(query)),
                    sums: to.sums.as_mut_ptr().add(query * dv + d),
                };
                if S::WIDE && dv - d >= 4 * LANES {
                    with_count!(count, N => c.add::<S, N, 4>(s));
                    d += 4 * LANES;
                } else {
                    with_count!(count, N => c.add::<S, N, 1>(s));
                    d += LANES;
                }
            }
        }
        query += count;
    }
}

/// Some columns of [`add_values`], for as many queries as registers hold.
struct Columns<E> {
    values: *const E,
    /// Elements from row to row of values and sums.
    dv: usize,
    part: Range<usize>,
    weights: *const f32,
    factors: Option<*const f32>,
    sums: *mut f32,
}

impl<E: KvElement> Columns<E> {
    /// # Safety
    /// `values` has rows `part` of `16 * V` elements, `weights` N rows of BLOCK, `factors` N
    /// floats, `sums` N rows of `16 * V`.
    #[inline(always)]
    unsafe fn add<S: Lanes, const N: usize, const V: usize>(self, s: S) {
        let Self { values, dv, part, weights, factors, sums } = self;
        // SAFETY: all within what the caller promises.
        unsafe {
            let mut acc = [[s.splat(0.0); V]; N];
            for n in 0..N {
                for v in 0..V {
                    acc[n][v] = s.load(sums.add(n * dv + v * LANES));
                }
                if let Some(factors) = factors {
                    let factor = s.splat(*factors.add(n));
                    for v in 0..V {
                        acc[n][v] = s.mul(acc[n][v], factor);
                    }
                }
            }
            for j in part {
                let mut x = [s.splat(0.0); V];
                for v in 0..V {
                    x[v] = E::load(s, values.wrapping_add(j * dv + v * LANES));
                }
                for n in 0..N {
                    let p = s.splat(*weights.add(n * BLOCK + j));
                    for v in 0..V {
                        acc[n][v] = s.fma(p, x[v], acc[n][v]);
                    }
                }
            }
            for n in 0..N {
                for v in 0..V {
                    s.store(sums.add(n * dv + v * LANES), acc[n][v]);
                }
            }
        }
    }
}

/// Merges the state of a later split (`one`: max, denominator, values) into a query's state.
#[inline(always)]
pub(super) fn merge<S: Lanes>(s: S, max: &mut f32, denominator: &mut f32, values: &mut [f32], one: (f32, f32, &[f32])) {
    let (one_max, one_denominator, one_values) = one;
    assert!(one_values.len() >= values.len() && values.len().is_multiple_of(LANES));
    let new = if one_max > *max { one_max } else { *max };
    let factor = exp(s, s.splat(*max - new));
    let one_factor = exp(s, s.splat(one_max - new));
    let mut i = 0;
    while i < values.len() {
        // SAFETY: both are whole vectors of at least `values.len()` floats.
        unsafe {
            let p = values.as_mut_ptr().add(i);
            let old = s.mul(s.load(p), factor);
            s.store(p, s.fma(s.load(one_values.as_ptr().add(i)), one_factor, old));
        }
        i += LANES;
    }
    let old = s.mul(s.splat(*denominator), factor);
    *denominator = s.to_array(s.fma(s.splat(one_denominator), one_factor, old))[0];
    *max = new;
}

/// `out = values / denominator`, without the padding.
#[inline(always)]
pub(super) fn divide<S: Lanes>(s: S, values: &[f32], denominator: f32, out: &mut [f32]) {
    assert!(values.len().is_multiple_of(LANES) && values.len() >= out.len());
    let denominator = s.splat(denominator);
    for (values, out) in values.chunks_exact(LANES).zip(out.chunks_mut(LANES)) {
        // SAFETY: the chunk has 16 floats.
        let x = s.div(unsafe { s.load(values.as_ptr()) }, denominator);
        out.copy_from_slice(&s.to_array(x)[..out.len()]);
    }
}
