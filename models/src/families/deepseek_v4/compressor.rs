//! The compressor: one row for every few tokens, a softmax-weighted mean of them for each channel.
//!
//! At ratio 4 rows overlap: a row takes the tokens of the window before it through the first half of the channels, those
//! of its own window through the second. What later rows need of earlier tokens is kept in a ring of state.

use std::sync::Arc;

use kvdock_kernels::ops::{Compress, RowFormat, RowLayout, RowPool, Turn};
use kvdock_kernels::{Buf, KvDtype, Rope};

use super::attention::Place;
use super::step::V4Step;
use crate::families::blocks::Linear;
use crate::families::blocks::rows::row_pool;
use crate::{ModelError, PoolSet};

/// Rows of the ring of an overlapping compressor: two windows.
pub(super) const RING: usize = 8;

/// The ratio whose rows overlap.
pub(super) const OVERLAPPING: usize = 4;

/// One layer's compressor.
pub(super) struct Compressor {
    pub(super) ratio: usize,
    /// Elements of a row.
    pub(super) dim: usize,
    /// Added to scores, `[ratio, width]`.
    pub(super) ape: Buf,
    pub(super) kv: Linear,
    pub(super) gate: Linear,
    pub(super) norm: Buf,
    pub(super) rope: Arc<Rope>,
    pub(super) eps: f32,
}

impl Compressor {
    /// Where the state of a sequence's last tokens is: a ring in every window page, position p in row `p % RING` of its
    /// page; or rows of a slot, position p in row `p % ratio`.
    fn states<'a>(&self, pools: &'a PoolSet, place: Place) -> Result<RowPool<'a>, ModelError> {
        if self.ratio == OVERLAPPING {
            return row_pool(pools, place.pool, place.buffer);
        }
        let layout =
            RowLayout { format: RowFormat::Plain(KvDtype::F32), page_rows: self.ratio, elements: 2 * self.dim };
        Ok(RowPool::new(pools.pages(place.pool)?, place.buffer, layout)?)
    }

    /// Compresses the step's tokens, writes the rows that they complete, and brings the state up to date.
    pub(super) fn compress(&self, step: &V4Step<'_>, (rows, state): (Place, Place), x: &Buf) -> Result<(), ModelError> {
        let (device, pools) = (step.device, step.pools);
        let count = step.step.rows();
        let values = step.dealt.gather(device, self.kv.apply(device, x, count)?, self.kv.rows())?;
        let scores = step.dealt.gather(device, self.gate.apply(device, x, count)?, self.gate.rows())?;
        let made = step.compressed(self.ratio)?;
        let spec = Compress {
            ratio: self.ratio,
            dim: self.dim,
            overlapping: self.ratio == OVERLAPPING,
            ape: &self.ape,
            positions: step.all_positions.get()?,
            states: self.states(pools, state)?,
        };
        let completed = made.plan.rows();
        let mut out = device.scratch(completed * self.dim)?;
        device.compress(&spec, &made.plan, &values, &scores, &mut out)?;
        if completed == 0 {
            return Ok(());
        }
        device.norm_rows(&mut out, Some(&self.norm), self.dim, self.eps, completed)?;
        device.rotate(&self.rope, &made.positions, &mut out, 1, self.dim, Turn::Forth)?;
        Ok(device.write_rows(&row_pool(pools, rows.pool, rows.buffer)?, &made.rows.slots, &out)?)
    }
}
