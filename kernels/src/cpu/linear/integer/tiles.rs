//! Many rows, 16 at a time, with AMX.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use super::rows::{GROUP, Layout, TileLayout};
use super::{BLOCK, Target, Task, with_nibble_format};
use crate::cpu::memory::FloatArray;
use crate::cpu::packed::tile::{NibbleFormat, TileFormat};
use crate::cpu::simd::amx::{Amx, Session};
use crate::cpu::simd::{Kernel, LANES, Lanes, Machine, prefetch};
use crate::cpu::threads::ThreadPool;
use crate::error::KernelError;

/// Floats of an unpacked block of weights: a tile of bytes, `[16][16][4]`, the first eight rows 16 times the nibbles of the eight
/// groups and the others the nibbles; then factors and summands.
const WEIGHTS: usize = TILE + 2 * LANES;
/// Floats, or words, of a tile.
const TILE: usize = 256;
/// Pairs of products in turn, so that one is stored while another is read.
const PAIRS: usize = 2;
/// Blocks of k that are gone through at once where there are several groups of rows: those of a group (2 KiB each) stay in the nearest
/// cache while the weights of all tiles pass by.
const CHUNK: usize = 9;

thread_local! {
    /// Weights of some tiles, then products, then sums.
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
            with_nibble_format!(target.weight.format, T => {
                let cut = Cut::new(task, target.weight.shape.cols / BLOCK, T::BLOCK / BLOCK);
                if let Err(e) = work.reserve(cut.floats(task.groups).iter().sum(), "the weights of a product") {
                    // Becomes this call's error; a task has no other way to fail.
                    std::panic::panic_any(e.to_string());
                }
                let mut work = work.as_mut_slice();
                let mut take = |floats| work.split_off_mut(..floats).unwrap_or_default();
                let [weights, products, sums] = cut.floats(task.groups).map(&mut take);
                machine.run(Tiles::<T> {
                    amx,
                    target,
                    task,
                    x,
                    rows,
                    cut,
                    weights,
                    products,
                    sums,
                    format: PhantomData,
                });
            });
        });
    })
}

/// How a task's product is cut. Sums of a part of k are kept and gone on from, so it decides nothing but what is in which cache.
#[derive(Clone, Copy)]
struct Cut {
    /// Blocks of k at once.
    blocks: usize,
    /// Tiles of weights at once.
    tiles: usize,
}

impl Cut {
    /// For `blocks` blocks of k, of which `least` cannot be parted.
    fn new(task: &Task, blocks: usize, least: usize) -> Self {
        if task.groups < 3 {
            // Each unpacked tile is used about once.
            return Self { blocks, tiles: 1 };
        }
        let each = blocks.div_ceil(blocks.div_ceil(CHUNK).max(1));
        Self { blocks: each.next_multiple_of(least).min(blocks), tiles: task.tiles }
    }

    /// Floats of weights, products and sums.
    fn floats(self, groups: usize) -> [usize; 3] {
        [self.tiles * self.blocks * WEIGHTS, PAIRS * 2 * TILE, groups * self.tiles * TILE]
    }
}

struct Tiles<'a, T> {
    amx: Amx,
    target: &'a Target<'a>,
    task: &'a Task,
    x: &'a [f32],
    rows: usize,
    cut: Cut,
    /// `[tile][block]` of the part that is at hand.
    weights: &'a mut [f32],
    products: &'a mut [f32],
    /// `[group][tile][row][16]`.
    sums: &'a mut [f32],
    format: PhantomData<T>,
}

impl<T: NibbleFormat> Kernel for Tiles<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call<S: Lanes>(mut self, s: S) {
        let half = self.rows <= GROUP / 2;
        let session = self.amx.begin(if half { GROUP / 2 } else { GROUP });
        if half {
            self.all::<S, { GROUP / 2 }>(s, &session);
        } else {
            self.all::<S, GROUP>(s, &session);
        }
    }
}

impl<T: NibbleFormat> Tiles<'_, T> {
    /// The first R rows of each group.
    #[inline(always)]
    fn all<S: Lanes, const R: usize>(&mut self, s: S, session: &Session) {
        let Task { first_tile, tiles, groups, .. } = *self.task;
        let blocks = self.target.weight.shape.cols / BLOCK;
        for first in (0..tiles).step_by(self.cut.tiles) {
            let tiles = self.cut.tiles.min(tiles - first);
            for from in (0..blocks).step_by(self.cut.blocks) {
                let part = from..blocks.min(from + self.cut.blocks);
                for tile in 0..tiles {
                    self.unpack(s, first_tile + first + tile, tile, part.clone());
                }
                for group in 0..groups {
                    for tile in 0..tiles {
                        self.group::<S, R>(s, session, group, (first_tile + first + tile, tile), part.clone());
                    }
                }
            }
        }
    }

    /// Unpacks the weights of a tile for some blocks of k to place `to`.
    #[inline(always)]
    fn unpack<S: Lanes>(&mut self, s: S, tile: usize, to: usize, part: Range<usize>) {
        let weight = self.target.weight;
        let subs = T::BLOCK / BLOCK;
        assert!(T::SUB == BLOCK && part.start.is_multiple_of(subs) && part.len().is_multiple_of(subs));
        assert!(part.len() <= self.cut.blocks && part.end * BLOCK <= weight.shape.cols);
        let base = weight.tile(tile).as_ptr();
        let (low, high) = (s.splat_int(0x0F0F_0F0F), s.splat_int(0xF0F0_F0F0_u32 as i32));
        let mut out = self.weights[to * self.cut.blocks * WEIGHTS..][..part.len() * WEIGHTS].as_mut_ptr();
        // SAFETY: the tile has all blocks of its columns, and `weights` room for each of the part.
        unsafe {
            for b in part.start / subs..part.end / subs {
                let block = base.add(b * T::BLOCK_BYTES);
                let header = T::header(s, block);
                for sub in 0..subs {
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

    /// The first R rows of a group for the outputs of a tile that is unpacked at `place`: adds some blocks of k to their sums, which
    /// become outputs with the last block.
    #[inline(always)]
    fn group<S: Lanes, const R: usize>(
        &mut self,
        s: S,
        session: &Session,
        group: usize,
        (tile, place): (usize, usize),
        part: Range<usize>,
    ) {
        const FLOATS: usize = TileLayout::FLOATS;
        let blocks = self.target.weight.shape.cols / BLOCK;
        let x =
            self.x[((self.task.first_group + group) * blocks + part.start) * FLOATS..][..part.len() * FLOATS].as_ptr();
        let weights = self.weights[place * self.cut.blocks * WEIGHTS..][..part.len() * WEIGHTS].as_ptr();
        assert!(self.products.len() >= PAIRS * 2 * TILE);
        let products = self.products.as_mut_ptr();
        let kept = self.sums[(group * self.cut.tiles + place) * TILE..][..TILE].as_mut_ptr();
        let first_row = (self.task.first_group + group) * GROUP;
        let count = R.min(self.rows.saturating_sub(first_row));
        let ends = part.end == blocks;
        if ends {
            // Outputs of a row lie far from those of the next one: they are asked for now and written when the sums are done.
            for row in first_row..first_row + count {
                let at = row * self.target.weight.shape.rows + tile * LANES;
                prefetch(self.target.out.wrapping_add(at).cast(), 0);
            }
        }
        let mut sums = [s.splat(0.0); R];
        // SAFETY: `x` has the part's blocks of the group, `weights` those of the tile, `products` room for each pair and `kept` for all sums.
        unsafe {
            if part.start > 0 {
                for r in 0..R {
                    sums[r] = s.load(kept.add(r * LANES));
                }
            }
            let pair = |b: usize| products.add(b % PAIRS * 2 * TILE).cast::<u32>();
            let multiply = |b: usize| {
                session.multiply_pair(x.add(b * FLOATS).cast(), weights.add(b * WEIGHTS).cast(), pair(b).cast())
            };
            // What was just stored is not to be had at once, so the next block is multiplied first.
            multiply(0);
            for b in 1..part.len() {
                multiply(b);
                add_block(s, x.add((b - 1) * FLOATS), weights.add((b - 1) * WEIGHTS), pair(b - 1), &mut sums);
            }
            let last = part.len() - 1;
            add_block(s, x.add(last * FLOATS), weights.add(last * WEIGHTS), pair(last), &mut sums);
            if ends {
                for (r, sums) in sums.into_iter().enumerate().take(count) {
                    // Row and tile exist, and this task alone has them.
                    self.target.put(first_row + r, tile, &s.to_array(sums));
                }
            } else {
                for r in 0..R {
                    s.store(kept.add(r * LANES), sums[r]);
                }
            }
        }
    }
}

/// Adds the products of a block, the upper ones before the lower ones, to the sums of R rows.
///
/// # Safety
/// A block of [`TileLayout`] at `x`, one of weights, and two tiles of products are readable.
#[inline(always)]
unsafe fn add_block<S: Lanes, const R: usize>(
    s: S,
    x: *const f32,
    weights: *const f32,
    products: *const u32,
    sums: &mut [S::F; R],
) {
    // SAFETY: all within what the caller promises.
    unsafe {
        let (factor, summand) = (s.load(weights.add(TILE)), s.load(weights.add(TILE + LANES)));
        for r in 0..R {
            let upper = s.load_u32(products.add(r * LANES));
            let lower = s.load_u32(products.add(TILE + r * LANES));
            let product = s.to_float(s.add_int(s.shift_left(upper, 12), lower));
            let (scale, sum) = (*x.add(TileLayout::SCALES + r), *x.add(TileLayout::SCALES + GROUP + r));
            sums[r] = s.fma(product, s.mul(factor, s.splat(scale)), sums[r]);
            sums[r] = s.fma(summand, s.splat(sum), sums[r]);
        }
    }
}
