//! Products with weights of four bits, by exact sums of integers.
//!
//! # Order of accumulation
//!
//! Rows are cut into blocks of 32 elements of k, each of which becomes 32 integers of 24 bits and a scale, a power of two
//! ([`rows`]). `y[r, n]` starts at +0 and takes, block by block in order of k,
//!
//! ```text
//! y = fma(float(sum of nibble * integer), factor[n] * scale[r], y)
//! y = fma(summand[n], scale[r] * float(sum of integers), y)
//! ```
//!
//! where a weight is `factor * nibble + summand`; the bias is added last. Sums of integers are exact (below 2^31), so it does not
//! matter who computes them how; everything else is one rounding at a time. The integers keep 22 bits below the power of two
//! above a block's greatest element, about what 24 bits of an f32 keep in sums of many terms, and there is one rounding a block
//! where f32 has one an element. A block with an element that is not finite makes its row NaN.
//!
//! # What it must cost
//!
//! A tile product of AMX takes 16 rows, 64 bytes and 16 outputs in 16 cycles. Integers are four digits, `q = 4096 a + b` with
//! `a = 16 a1 + a0` and `b = 16 b1 + b0`, and bytes hold a nibble or 16 times it, so two products do a block of 16 rows and 16
//! outputs: 256 multiply-adds a cycle. Then each row's 16 sums take six operations of which two start a cycle: 48 cycles beside the
//! tiles' 32 and their stores; together some 90 multiply-adds a cycle, three times what f32 can. On a core of 2.4 GHz a block in the nearest
//! cache takes 100 cycles, of which the tiles' loads and stores take 60 and hardly overlap with the sums; a block is multiplied before
//! the sums of the one before it are taken, as what was just stored is not to be had at once (a fifth). With many rows k is gone through
//! in parts that the nearest cache holds for a group of rows, and the sums are kept in between. AVX512-VNNI multiplies three digits
//! to the base of 256, 24 instructions a row and block, where f32 has 32 and unpacks besides.

mod few;
pub(super) mod rows;
#[cfg(target_arch = "x86_64")]
mod tiles;

use super::Target;
use crate::cpu::memory::FloatArray;
use crate::cpu::simd::Machine;
use crate::cpu::threads::ThreadPool;
use crate::error::KernelError;
use crate::format::WeightFormat;

/// Elements of k that share a scale.
const BLOCK: usize = 32;

/// Row groups of 16 that a task takes at most. Few, so that their integers stay in the nearest caches; not fewer, as weights are read anew
/// for each task.
const TASK_GROUPS: usize = 4;
/// The same where k is cut so that the nearest cache holds what is used at once ([`tiles`]): the more, the less often weights are unpacked.
#[cfg(target_arch = "x86_64")]
const CUT_GROUPS: usize = 16;

/// Calls `$body` with the type `$T` bound to the [`NibbleFormat`](crate::cpu::packed::tile::NibbleFormat) of `$format`.
macro_rules! with_nibble_format {
    ($format:expr, $T:ident => $body:expr) => {{
        use $crate::cpu::packed::tile;
        use $crate::format::WeightFormat;
        match $format {
            WeightFormat::Q4_0 => {
                type $T = tile::Q4_0;
                $body
            }
            WeightFormat::Q4_1 => {
                type $T = tile::Q4_1;
                $body
            }
            WeightFormat::Q4_K => {
                type $T = tile::Q4_K;
                $body
            }
            other => unreachable!("{other:?} has no nibbles alone"),
        }
    }};
}
use with_nibble_format;

/// Whether products with weights of this format are computed here.
pub(super) fn takes(format: WeightFormat) -> bool {
    matches!(format, WeightFormat::Q4_0 | WeightFormat::Q4_1 | WeightFormat::Q4_K)
}

/// Some tiles of a target and some groups of rows.
struct Task {
    target: usize,
    first_tile: usize,
    tiles: usize,
    first_group: usize,
    groups: usize,
}

/// Computes products of the same `x` with weights in formats that [`takes`] names.
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
    #[cfg(target_arch = "x86_64")]
    if let Machine::Amx(_, _, amx) = machine
        && rows > few::MAX_ROWS
    {
        rows::quantize::<rows::TileLayout>(machine, pool, scratch, x, rows, cols)?;
        let tasks = split(pool.threads(), rows, targets, CUT_GROUPS);
        return tiles::run(amx, machine, pool, scratch.as_slice(), rows, targets, &tasks);
    }
    rows::quantize::<rows::DigitLayout>(machine, pool, scratch, x, rows, cols)?;
    let tasks = split(pool.threads(), rows, targets, TASK_GROUPS);
    few::run(machine, pool, scratch.as_slice(), rows, targets, &tasks)
}

/// Tasks of about equal size and at most so many groups of rows, enough that the threads end at about the same time.
fn split(threads: usize, rows: usize, targets: &[Target<'_>], most_groups: usize) -> Vec<Task> {
    let groups = rows.div_ceil(rows::GROUP);
    let parts = groups.div_ceil(most_groups);
    let each = groups.div_ceil(parts.max(1)).max(1);
    let total: usize = targets.iter().map(|t| t.weight.tiles()).sum();
    let step = (total * parts).div_ceil(8 * threads).clamp(1, 16);
    let mut tasks = Vec::new();
    for first_group in (0..groups).step_by(each) {
        for (target, t) in targets.iter().enumerate() {
            for first_tile in (0..t.weight.tiles()).step_by(step) {
                let tiles = step.min(t.weight.tiles() - first_tile);
                tasks.push(Task { target, first_tile, tiles, first_group, groups: each.min(groups - first_group) });
            }
        }
    }
    tasks
}
