//! One row: weights are decoded in registers and used at once.

use std::marker::PhantomData;

use super::Target;
use crate::cpu::packed::tile::{STEP, TileFormat};
use crate::cpu::packed::with_tile_format;
use crate::cpu::simd::{Kernel, LANES, Lanes, Machine, prefetch};
use crate::cpu::threads::ThreadPool;
use crate::error::KernelError;

/// Tiles that a kernel works on at once. An FMA takes 4 cycles and a tile has one chain of them,
/// so a single tile would wait for itself.
const TOGETHER: usize = 4;

/// Bytes of a tile's stream to fetch ahead of use.
const AHEAD: usize = 1024;

/// Tiles `first..first + count` of one target.
struct Task {
    target: usize,
    first: usize,
    count: usize,
}

pub(super) fn run(machine: Machine, pool: &ThreadPool, x: &[f32], targets: &[Target<'_>]) -> Result<(), KernelError> {
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
    pool.run("linear", tasks.len(), &|index| {
        let task = &tasks[index];
        let target = &targets[task.target];
        with_tile_format!(target.weight.format, T => machine.run(Vector::<T> {
            target,
            x,
            first: task.first,
            count: task.count,
            format: PhantomData,
        }));
    })
}

struct Vector<'a, T> {
    target: &'a Target<'a>,
    x: &'a [f32],
    first: usize,
    count: usize,
    format: PhantomData<T>,
}

impl<T: TileFormat> Kernel for Vector<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call<S: Lanes>(self, s: S) {
        let mut tile = self.first;
        let end = self.first + self.count;
        while tile < end {
            if S::WIDE && end - tile >= TOGETHER {
                self.tiles::<S, TOGETHER>(s, tile);
                tile += TOGETHER;
            } else if end - tile >= 2 {
                self.tiles::<S, 2>(s, tile);
                tile += 2;
            } else {
                self.tiles::<S, 1>(s, tile);
                tile += 1;
            }
        }
    }
}

impl<T: TileFormat> Vector<'_, T> {
    #[inline(always)]
    fn tiles<S: Lanes, const N: usize>(&self, s: S, first: usize) {
        let weight = self.target.weight;
        let cols = weight.shape.cols;
        assert!(self.x.len() >= cols && first + N <= weight.tiles());
        let base = weight.tile(first).as_ptr();
        let tile_bytes = weight.tile_bytes();
        let x = self.x.as_ptr();
        let mut sums = [s.splat(0.0); N];

        // SAFETY: tiles `first..first + N` lie one after another from `base` on, each with all
        // blocks of `cols` elements, and `x` has `cols` elements.
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
                                let x = s.splat(*x.add(step * STEP + j));
                                sums[t] = s.fma(x, w[j], sums[t]);
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
                    let x = s.splat(*x.add(k));
                    for t in 0..N {
                        let w = T::element(s, base.add(t * tile_bytes + at));
                        sums[t] = s.fma(x, w, sums[t]);
                    }
                }
            }
        }
        for (t, sums) in sums.into_iter().enumerate() {
            // SAFETY: there is one row, the tile exists, and this task alone has it.
            unsafe { self.target.put(0, first + t, &s.to_array(sums)) };
        }
        const { assert!(LANES == 16) };
    }
}
