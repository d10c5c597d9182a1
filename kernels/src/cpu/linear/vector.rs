//! A few rows: weights are decoded in registers and used at once.

use std::marker::PhantomData;

use super::Target;
use crate::cpu::packed::tile::{STEP, TileFormat};
use crate::cpu::packed::with_float_format;
use crate::cpu::simd::{Kernel, Lanes, Machine, prefetch};
use crate::cpu::threads::ThreadPool;
use crate::error::KernelError;

/// Rows up to which this way is faster than storing the decoded weights.
pub(super) const MAX_ROWS: usize = 4;

/// Bytes of a tile's stream to fetch ahead of use.
const AHEAD: usize = 1024;

/// Tiles `first..first + count` of one target.
struct Task {
    target: usize,
    first: usize,
    count: usize,
}

pub(super) fn run(
    machine: Machine,
    pool: &ThreadPool,
    x: &[f32],
    rows: usize,
    targets: &[Target<'_>],
) -> Result<(), KernelError> {
    let total: usize = targets.iter().map(|t| t.weight.tiles()).sum();
    // About four tasks a thread, so that a thread that is held up does not hold up the others.
    let share = total.div_ceil(4 * pool.threads());
    let step = share.next_multiple_of(2).clamp(2, 32);
    let mut tasks = Vec::new();
    for (target, t) in targets.iter().enumerate() {
        for first in (0..t.weight.tiles()).step_by(step) {
            let count = step.min(t.weight.tiles() - first);
            tasks.push(Task { target, first, count });
        }
    }
    pool.run_streams("linear", tasks.len(), &|index| {
        let task = &tasks[index];
        let target = &targets[task.target];
        with_float_format!(target.weight.format, T => machine.run(Vector::<T> {
            target,
            x,
            rows,
            first: task.first,
            count: task.count,
            format: PhantomData,
        }));
    })
}

struct Vector<'a, T> {
    target: &'a Target<'a>,
    x: &'a [f32],
    rows: usize,
    first: usize,
    count: usize,
    format: PhantomData<T>,
}

impl<T: TileFormat> Kernel for Vector<'_, T> {
    type Output = ();

    /// An FMA takes 4 cycles, and a tile has one chain of them a row, so a single chain would
    /// wait for itself: a few tiles are worked on at once, as many as the registers hold.
    #[inline(always)]
    fn call<S: Lanes>(self, s: S) {
        match (self.rows, S::WIDE) {
            (1, true) => self.all::<S, 1, 4>(s),
            (2, true) => self.all::<S, 2, 4>(s),
            (3, true) => self.all::<S, 3, 2>(s),
            (4, true) => self.all::<S, 4, 2>(s),
            (1, false) => self.all::<S, 1, 2>(s),
            (2, false) => self.all::<S, 2, 1>(s),
            (3, false) => self.all::<S, 3, 1>(s),
            (4, false) => self.all::<S, 4, 1>(s),
            (rows, _) => unreachable!("{rows} rows"),
        }
    }
}

impl<T: TileFormat> Vector<'_, T> {
    /// All tiles of the task, N at once.
    #[inline(always)]
    fn all<S: Lanes, const R: usize, const N: usize>(&self, s: S) {
        let mut tile = self.first;
        let end = self.first + self.count;
        while end - tile >= N {
            self.tiles::<S, R, N>(s, tile);
            tile += N;
        }
        while tile < end {
            self.tiles::<S, R, 1>(s, tile);
            tile += 1;
        }
    }

    #[inline(always)]
    fn tiles<S: Lanes, const R: usize, const N: usize>(&self, s: S, first: usize) {
        let weight = self.target.weight;
        let cols = weight.shape.cols;
        assert!(self.x.len() >= R * cols && first + N <= weight.tiles());
        let base = weight.tile(first).as_ptr();
        let tile_bytes = weight.tile_bytes();
        let x = self.x.as_ptr();
        let mut sums = [[s.splat(0.0); R]; N];

        // SAFETY: tiles `first..first + N` lie one after another from `base` on, each with all
        // blocks of `cols` elements, and `x` has R rows of `cols` elements.
        unsafe {
            for b in 0..cols / T::BLOCK {
                let mut blocks = [base; N];
                let mut headers = [[s.splat(0.0); 2]; N];
                for t in 0..N {
                    blocks[t] = base.add(t * tile_bytes + b * T::BLOCK_BYTES);
                    headers[t] = T::header(s, blocks[t]);
                }
                for sub in 0..T::BLOCK / T::SUB {
                    let at = T::HEADER + sub * T::SUB_BYTES;
                    let x = x.add(b * T::BLOCK + sub * T::SUB);
                    let mut scales = headers;
                    for t in 0..N {
                        let sub = blocks[t].add(at);
                        let mut line = 0;
                        while line < T::SUB_BYTES {
                            prefetch(sub, AHEAD + line);
                            line += 64;
                        }
                        scales[t] = T::scales(s, headers[t], sub);
                    }
                    for step in 0..T::SUB / STEP {
                        for t in 0..N {
                            let w = T::weights(s, scales[t], blocks[t].add(at), step);
                            let mut j = 0;
                            while j < STEP {
                                for r in 0..R {
                                    let x = s.splat(*x.add(r * cols + step * STEP + j));
                                    sums[t][r] = s.fma(x, w[j], sums[t][r]);
                                }
                                j += 1;
                            }
                        }
                    }
                }
            }
            let whole = cols / T::BLOCK * T::BLOCK;
            if T::ELEMENT_BYTES > 0 {
                for k in whole..cols {
                    let at = whole / T::BLOCK * T::BLOCK_BYTES + (k - whole) * T::ELEMENT_BYTES;
                    for t in 0..N {
                        let w = T::element(s, base.add(t * tile_bytes + at));
                        for r in 0..R {
                            let x = s.splat(*x.add(r * cols + k));
                            sums[t][r] = s.fma(x, w, sums[t][r]);
                        }
                    }
                }
            }
        }
        for (t, sums) in sums.into_iter().enumerate() {
            for (r, sums) in sums.into_iter().enumerate() {
                // SAFETY: row and tile exist, and this task alone has them.
                unsafe { self.target.put(r, first + t, &s.to_array(sums)) };
            }
        }
    }
}
