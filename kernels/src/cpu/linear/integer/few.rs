//! A few rows at a time, with weights unpacked in registers: for decode, and for all where there are no tiles.

use std::marker::PhantomData;

use super::rows::{DigitLayout, GROUP, Layout};
use super::{BLOCK, Target, Task, with_nibble_format};
use crate::cpu::packed::tile::NibbleFormat;
use crate::cpu::simd::{Kernel, Lanes, Machine, prefetch};
use crate::cpu::threads::ThreadPool;
use crate::error::KernelError;

/// Rows that share unpacked weights.
pub(super) const MAX_ROWS: usize = 4;

/// Bytes of a thread's stream to fetch ahead of use: some 13 blocks, as long as the last cache takes to answer while its neighbours ask it, too.
/// A tile is often shorter; what follows it is the thread's next tile.
const AHEAD: usize = 4096;

pub(super) fn run(
    machine: Machine,
    pool: &ThreadPool,
    x: &[f32],
    rows: usize,
    targets: &[Target<'_>],
    tasks: &[Task],
) -> Result<(), KernelError> {
    pool.run_streams("linear", tasks.len(), &|index| {
        let task = &tasks[index];
        let target = &targets[task.target];
        with_nibble_format!(target.weight.format, T => machine.run_on_bytes(Few::<T> {
            target,
            task,
            x,
            rows,
            format: PhantomData,
        }));
    })
}

struct Few<'a, T> {
    target: &'a Target<'a>,
    task: &'a Task,
    /// All rows in [`DigitLayout`].
    x: &'a [f32],
    rows: usize,
    format: PhantomData<T>,
}

impl<T: NibbleFormat> Kernel for Few<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call<S: Lanes>(self, s: S) {
        let Task { first_tile, tiles, first_group, groups, .. } = *self.task;
        let end = self.rows.min((first_group + groups) * GROUP);
        for tile in first_tile..first_tile + tiles {
            let mut row = first_group * GROUP;
            while row < end {
                match end - row {
                    1 => self.rows::<S, 1>(s, tile, row),
                    2 => self.rows::<S, 2>(s, tile, row),
                    3 => self.rows::<S, 3>(s, tile, row),
                    _ => self.rows::<S, 4>(s, tile, row),
                }
                row += MAX_ROWS;
            }
        }
    }
}

impl<T: NibbleFormat> Few<'_, T> {
    /// R rows from `first` on for the outputs of a tile.
    #[inline(always)]
    fn rows<S: Lanes, const R: usize>(&self, s: S, tile: usize, first: usize) {
        const FLOATS: usize = DigitLayout::FLOATS;
        let weight = self.target.weight;
        let blocks = weight.shape.cols / BLOCK;
        assert!(first + R <= self.rows && self.x.len() >= self.rows * blocks * FLOATS);
        assert!(T::SUB == BLOCK && weight.shape.cols.is_multiple_of(T::BLOCK));
        let base = weight.tile(tile).as_ptr();
        let x = self.x[first * blocks * FLOATS..].as_ptr();
        let mut sums = [s.splat(0.0); R];
        // SAFETY: the tile has all blocks of its columns, and `x` all blocks of R rows from the first on.
        unsafe {
            for b in 0..weight.shape.cols / T::BLOCK {
                let block = base.add(b * T::BLOCK_BYTES);
                let header = T::header(s, block);
                for sub in 0..T::BLOCK / BLOCK {
                    let bytes = block.add(T::HEADER + sub * T::SUB_BYTES);
                    let mut line = 0;
                    while line < T::SUB_BYTES {
                        prefetch(bytes, AHEAD + line);
                        line += 64;
                    }
                    let [factor, summand] = T::scales(s, header, bytes);
                    let at = b * (T::BLOCK / BLOCK) + sub;
                    let rows: [*const f32; R] = std::array::from_fn(|r| x.add((r * blocks + at) * FLOATS));
                    let products = s.nibble_sums(bytes.add(T::WORDS), rows.map(|row| row.cast::<u8>()));
                    for r in 0..R {
                        let (scale, sum) = (*rows[r].add(DigitLayout::SCALE), *rows[r].add(DigitLayout::SCALE + 1));
                        let factor = s.mul(factor, s.splat(scale));
                        sums[r] = s.fma(s.to_float(products[r]), factor, sums[r]);
                        sums[r] = s.fma(summand, s.splat(sum), sums[r]);
                    }
                }
            }
            for (r, sums) in sums.into_iter().enumerate() {
                // Row and tile exist, and this task alone has them.
                self.target.put(first + r, tile, &s.to_array(sums));
            }
        }
    }
}
