//! Many rows: a block of weights is decoded once and used by all rows of a block.

use std::cell::RefCell;
use std::marker::PhantomData;

use super::Target;
use crate::cpu::memory::FloatArray;
use crate::cpu::packed::tile::TileFormat;
use crate::cpu::packed::{decode, with_float_format};
use crate::cpu::simd::{Kernel, LANES, Lanes, Machine};
use crate::cpu::threads::ThreadPool;
use crate::error::KernelError;

/// Rows that a kernel holds in registers.
const GROUP: usize = 6;

/// Tiles that a kernel holds in registers, where there are registers enough; otherwise one.
const WIDE_TILES: usize = 4;

/// Elements of k decoded at once: with four tiles 32 KiB. A multiple of every block.
const CHUNK: usize = 256;

/// Row groups of a task; 192 rows.
const TASK_GROUPS: usize = 32;

thread_local! {
    /// Decoded weights `[CHUNK][tiles * 16]`, then sums `[groups][6][tiles * 16]`.
    static WORK: RefCell<FloatArray> = const { RefCell::new(FloatArray::empty()) };
}

struct Task {
    target: usize,
    tile: usize,
    tiles: usize,
    first_group: usize,
    groups: usize,
}

pub(super) fn run(
    machine: Machine,
    pool: &ThreadPool,
    scratch: &mut FloatArray,
    x: &[f32],
    rows: usize,
    targets: &[Target<'_>],
) -> Result<(), KernelError> {
    let Some(first) = targets.first() else {
        return Ok(());
    };
    let cols = first.weight.shape.cols;
    let groups = rows.div_ceil(GROUP);
    scratch.reserve(groups * GROUP * cols, "the rows of a product")?;
    interleave(pool, x, rows, cols, scratch.as_mut_slice())?;
    let x = scratch.as_slice();

    let tasks = split(machine, pool.threads(), groups, targets);
    pool.run("linear", tasks.len(), &|index| {
        let task = &tasks[index];
        let target = &targets[task.target];
        WORK.with_borrow_mut(|work| {
            let width = task.tiles * LANES;
            let need = CHUNK * width + task.groups * GROUP * width;
            if let Err(e) = work.reserve(need, "the sums of a product") {
                // Becomes this call's error; a task has no other way to fail.
                std::panic::panic_any(e.to_string());
            }
            let (weights, sums) = work.as_mut_slice().split_at_mut(CHUNK * width);
            with_float_format!(target.weight.format, T => machine.run(Matrix::<T> {
                target,
                task,
                x,
                rows,
                weights,
                sums,
                format: PhantomData,
            }));
        });
    })
}

/// Tasks of about equal size: blocks of tiles by blocks of row groups, and enough of them that
/// the threads end at about the same time.
fn split(machine: Machine, threads: usize, groups: usize, targets: &[Target<'_>]) -> Vec<Task> {
    let mut block_tiles = if machine.is_wide() { WIDE_TILES } else { 1 };
    let total: usize = targets.iter().map(|t| t.weight.tiles()).sum();
    let mut block_groups = groups.min(TASK_GROUPS);
    let wanted = 8 * threads;
    let count = |tiles: usize, groups_each: usize| total.div_ceil(tiles) * groups.div_ceil(groups_each);
    while block_groups > 8 && count(block_tiles, block_groups) < wanted {
        block_groups = block_groups.div_ceil(2);
    }
    if block_tiles > 2 && count(block_tiles, block_groups) < wanted {
        block_tiles = 2;
    }
    // Even blocks rather than full ones and a rest.
    let block_groups = groups.div_ceil(groups.div_ceil(block_groups));

    let mut tasks = Vec::new();
    for first_group in (0..groups).step_by(block_groups) {
        for (target, t) in targets.iter().enumerate() {
            for tile in (0..t.weight.tiles()).step_by(block_tiles) {
                tasks.push(Task {
                    target,
                    tile,
                    tiles: block_tiles.min(t.weight.tiles() - tile),
                    first_group,
                    groups: block_groups.min(groups - first_group),
                });
            }
        }
    }
    tasks
}

/// Rearranges `[rows, cols]` into groups of six rows, `[group][cols][6]`, so that a kernel reads
/// one stream. The last group has only the rows that are left.
fn interleave(pool: &ThreadPool, x: &[f32], rows: usize, cols: usize, out: &mut [f32]) -> Result<(), KernelError> {
    struct Out(*mut f32);
    // SAFETY: each task writes a group of its own.
    unsafe impl Sync for Out {}
    impl Out {
        /// # Safety
        /// `at + len` lies within the array, and no other task uses that part.
        unsafe fn part<'a>(&self, at: usize, len: usize) -> &'a mut [f32] {
            // SAFETY: as promised by the caller.
            unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
        }
    }
    assert!(x.len() >= rows * cols && out.len() >= rows * cols);
    let out = Out(out.as_mut_ptr());
    pool.run("linear", rows.div_ceil(GROUP), &|group| {
        let first = group * GROUP;
        let count = GROUP.min(rows - first);
        let x = &x[first * cols..][..count * cols];
        // SAFETY: groups are disjoint and end within `rows * cols`.
        let out = unsafe { out.part(first * cols, count * cols) };
        if count == GROUP {
            interleave_rows::<GROUP>(x, cols, out);
        } else {
            for (k, out) in out.chunks_exact_mut(count).enumerate() {
                for (r, out) in out.iter_mut().enumerate() {
                    *out = x[r * cols + k];
                }
            }
        }
    })
}

fn interleave_rows<const N: usize>(x: &[f32], cols: usize, out: &mut [f32]) {
    let rows: [&[f32]; N] = std::array::from_fn(|r| &x[r * cols..][..cols]);
    for (k, out) in out.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        *out = std::array::from_fn(|r| rows[r][k]);
    }
}

struct Matrix<'a, T> {
    target: &'a Target<'a>,
    task: &'a Task,
    /// All rows of the step, interleaved by groups.
    x: &'a [f32],
    rows: usize,
    weights: &'a mut [f32],
    sums: &'a mut [f32],
    format: PhantomData<T>,
}

impl<T: TileFormat> Kernel for Matrix<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call<S: Lanes>(self, s: S) {
        match self.task.tiles {
            4 => self.blocks::<S, 4>(s),
            3 => self.blocks::<S, 3>(s),
            2 => self.blocks::<S, 2>(s),
            _ => self.blocks::<S, 1>(s),
        }
    }
}

impl<T: TileFormat> Matrix<'_, T> {
    #[inline(always)]
    fn blocks<S: Lanes, const TILES: usize>(self, s: S) {
        let weight = self.target.weight;
        let cols = weight.shape.cols;
        let width = TILES * LANES;
        let group_sums = GROUP * width;
        assert!(self.weights.len() >= CHUNK * width);
        assert!(self.sums.len() >= self.task.groups * group_sums);
        assert!(self.task.tile + TILES <= weight.tiles());
        assert!(self.x.len() >= self.rows * cols);
        let base = weight.tile(self.task.tile).as_ptr();
        self.sums[..self.task.groups * group_sums].fill(0.0);

        let mut k = 0;
        while k < cols {
            let n = CHUNK.min(cols - k);
            for t in 0..TILES {
                // SAFETY: the tile lies `t` tiles after the first; CHUNK is a multiple of every
                // block; `weights` has room for CHUNK rows of `width` floats.
                unsafe {
                    let tile = base.add(t * weight.tile_bytes());
                    let out = self.weights.as_mut_ptr().add(t * LANES);
                    decode::<S, T>(s, tile, cols, k, n, out, width);
                }
            }
            for g in 0..self.task.groups {
                let first = (self.task.first_group + g) * GROUP;
                let count = GROUP.min(self.rows - first);
                // SAFETY: `x` holds the group's rows, `n` elements of k from `k` on; the sums
                // have room for a group.
                unsafe {
                    let w = self.weights.as_ptr();
                    let x = self.x.as_ptr().add(first * cols + k * count);
                    let sums = self.sums.as_mut_ptr().add(g * group_sums);
                    match count {
                        6 => multiply::<S, 6, TILES>(s, w, x, n, sums),
                        5 => multiply::<S, 5, TILES>(s, w, x, n, sums),
                        4 => multiply::<S, 4, TILES>(s, w, x, n, sums),
                        3 => multiply::<S, 3, TILES>(s, w, x, n, sums),
                        2 => multiply::<S, 2, TILES>(s, w, x, n, sums),
                        _ => multiply::<S, 1, TILES>(s, w, x, n, sums),
                    }
                }
            }
            k += n;
        }

        for g in 0..self.task.groups {
            let first = (self.task.first_group + g) * GROUP;
            for r in 0..GROUP.min(self.rows - first) {
                let sums = &self.sums[g * group_sums + r * width..][..width];
                for (t, sums) in sums.as_chunks::<LANES>().0.iter().enumerate() {
                    // SAFETY: row and tile exist, and this task alone has them.
                    unsafe { self.target.put(first + r, self.task.tile + t, sums) };
                }
            }
        }
    }
}

/// `sums[r][n] += x[k][r] * w[k][n]` for `n` elements of k in order, for R rows and TILES tiles.
///
/// # Safety
///
/// `w` holds `n` rows of `16 * TILES` floats, `x` `n` rows of `R` floats, `sums` R rows of
/// `16 * TILES` floats.
#[inline(always)]
unsafe fn multiply<S: Lanes, const R: usize, const TILES: usize>(
    s: S,
    w: *const f32,
    x: *const f32,
    n: usize,
    sums: *mut f32,
) {
    let width = TILES * LANES;
    // SAFETY: all indices lie within what the caller promises.
    unsafe {
        let mut acc = [[s.splat(0.0); TILES]; R];
        for r in 0..R {
            for t in 0..TILES {
                acc[r][t] = s.load(sums.add(r * width + t * LANES));
            }
        }
        for k in 0..n {
            let mut weights = [s.splat(0.0); TILES];
            for t in 0..TILES {
                weights[t] = s.load(w.add(k * width + t * LANES));
            }
            for r in 0..R {
                let x = s.splat(*x.add(k * R + r));
                for t in 0..TILES {
                    acc[r][t] = s.fma(x, weights[t], acc[r][t]);
                }
            }
        }
        for r in 0..R {
            for t in 0..TILES {
                s.store(sums.add(r * width + t * LANES), acc[r][t]);
            }
        }
    }
}
