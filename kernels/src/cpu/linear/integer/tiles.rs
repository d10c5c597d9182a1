//! Many rows, 16 at a time, with AMX.

use std::cell::RefCell;
use std::marker::PhantomData;

use super::rows::{GROUP, Layout, TileLayout};
use super::{BLOCK, Target, Task, with_nibble_format};
use crate::cpu::memory::FloatArray;
use crate::cpu::packed::tile::NibbleFormat;
use crate::cpu::simd::amx::{Amx, Session};
use crate::cpu::simd::{Kernel, LANES, Lanes, Machine};
use crate::cpu::threads::ThreadPool;
use crate::error::KernelError;

/// Floats of an unpacked block of weights: a tile of bytes, `[16][16][4]`, the first eight rows 16 times the nibbles of the eight
/// groups and the others the nibbles; then factors and summands.
const WEIGHTS: usize = TILE + 2 * LANES;
/// Floats, or words, of a tile.
const TILE: usize = 256;
/// Pairs of products in turn, so that one is stored while another is read.
const PAIRS: usize = 2;

thread_local! {
    /// Weights of a tile, then products.
    static WORK: RefCell<FloatArray> = const { RefCell::new(FloatArray::empty()) };
}

/// `x` is in [`TileLayout`].
pub(super) fn run(
    amx: Amx,
    machine: Machine,
    pool: &ThreadPool,
    x: &[f32],
    rows: usize,
    targets: &[Target<'_>],
    tasks: &[Task],
) -> Result<(), KernelError> {
    pool.run("linear", tasks.len(), &|index| {
        let task = &tasks[index];
        let target = &targets[task.target];
        WORK.with_borrow_mut(|work| {
            let weights = target.weight.shape.cols / BLOCK * WEIGHTS;
            if let Err(e) = work.reserve(weights + PAIRS * 2 * TILE, "the weights of a product") {
                // Becomes this call's error; a task has no other way to fail.
                std::panic::panic_any(e.to_string());
            }
            let (weights, products) = work.as_mut_slice().split_at_mut(weights);
            with_nibble_format!(target.weight.format, T => machine.run(Tiles::<T> {
                amx,
                target,
                task,
                x,
                rows,
                weights,
                products,
                format: PhantomData,
            }));
        });
    })
}

struct Tiles<'a, T> {
    amx: Amx,
    target: &'a Target<'a>,
    task: &'a Task,
    x: &'a [f32],
    rows: usize,
    weights: &'a mut [f32],
    products: &'a mut [f32],
    format: PhantomData<T>,
}

impl<T: NibbleFormat> Kernel for Tiles<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call<S: Lanes>(mut self, s: S) {
        let Task { first_tile, tiles, first_group, groups, .. } = *self.task;
        let half = self.rows <= GROUP / 2;
        let session = self.amx.begin(if half { GROUP / 2 } else { GROUP });
        for tile in first_tile..first_tile + tiles {
            self.unpack(s, tile);
            for group in first_group..first_group + groups {
                if half {
                    self.group::<S, { GROUP / 2 }>(s, &session, tile, group);
                } else {
                    self.group::<S, GROUP>(s, &session, tile, group);
                }
            }
        }
    }
}

impl<T: NibbleFormat> Tiles<'_, T> {
    /// Unpacks a tile's weights.
    #[inline(always)]
    fn unpack<S: Lanes>(&mut self, s: S, tile: usize) {
        let weight = self.target.weight;
        assert!(T::SUB == BLOCK && weight.shape.cols.is_multiple_of(T::BLOCK));
        assert!(self.weights.len() >= weight.shape.cols / BLOCK * WEIGHTS);
        let base = weight.tile(tile).as_ptr();
        let (low, high) = (s.splat_int(0x0F0F_0F0F), s.splat_int(0xF0F0_F0F0_u32 as i32));
        let mut out = self.weights.as_mut_ptr();
        // SAFETY: the tile has all blocks of its columns, and `weights` room for each.
        unsafe {
            for b in 0..weight.shape.cols / T::BLOCK {
                let block = base.add(b * T::BLOCK_BYTES);
                let header = T::header(s, block);
                for sub in 0..T::BLOCK / BLOCK {
                    let bytes = block.add(T::HEADER + sub * T::SUB_BYTES);
                    let [factor, summand] = T::scales(s, header, bytes);
                    for i in 0..4 {
                        let word = s.load_u32(bytes.add(T::WORDS + 64 * i).cast());
                        let row = |index: usize| out.add(index * LANES).cast::<u32>();
                        s.store_int(row(2 * i), s.and_int(s.shift_left(word, 4), high));
                        s.store_int(row(2 * i + 1), s.and_int(word, high));
                        s.store_int(row(8 + 2 * i), s.and_int(word, low));
                        s.store_int(row(8 + 2 * i + 1), s.and_int(s.shift_right(word, 4), low));
                    }
                    s.store(out.add(TILE), factor);
                    s.store(out.add(TILE + LANES), summand);
                    out = out.add(WEIGHTS);
                }
            }
        }
    }

    /// The first R rows of a group for the outputs of an unpacked tile.
    #[inline(always)]
    fn group<S: Lanes, const R: usize>(&mut self, s: S, session: &Session, tile: usize, group: usize) {
        const FLOATS: usize = TileLayout::FLOATS;
        let blocks = self.target.weight.shape.cols / BLOCK;
        let x = self.x[group * blocks * FLOATS..][..blocks * FLOATS].as_ptr();
        assert!(self.weights.len() >= blocks * WEIGHTS && self.products.len() >= PAIRS * 2 * TILE);
        let weights = self.weights.as_ptr();
        let products = self.products.as_mut_ptr();
        let mut sums = [s.splat(0.0); R];
        // SAFETY: `x` has all blocks of the group, `weights` all of the tile, `products` room for each pair.
        unsafe {
            let multiply = |b: usize| {
                let pair = products.add(b % PAIRS * 2 * TILE);
                session.multiply_pair(x.add(b * FLOATS).cast(), weights.add(b * WEIGHTS).cast(), pair.cast());
                pair.cast::<u32>()
            };
            let mut next = multiply(0);
            for b in 0..blocks {
                let pair = next;
                if b + 1 < blocks {
                    next = multiply(b + 1);
                }
                let x = x.add(b * FLOATS);
                let weights = weights.add(b * WEIGHTS);
                let (factor, summand) = (s.load(weights.add(TILE)), s.load(weights.add(TILE + LANES)));
                for r in 0..R {
                    let upper = s.load_u32(pair.add(r * LANES));
                    let lower = s.load_u32(pair.add(TILE + r * LANES));
                    let product = s.to_float(s.add_int(s.shift_left(upper, 12), lower));
                    let (scale, sum) = (*x.add(TileLayout::SCALES + r), *x.add(TileLayout::SCALES + GROUP + r));
                    sums[r] = s.fma(product, s.mul(factor, s.splat(scale)), sums[r]);
                    sums[r] = s.fma(summand, s.splat(sum), sums[r]);
                }
            }
            let first = group * GROUP;
            for (r, sums) in sums.into_iter().enumerate() {
                if first + r < self.rows {
                    // Row and tile exist, and this task alone has them.
                    self.target.put(first + r, tile, &s.to_array(sums));
                }
            }
        }
    }
}
