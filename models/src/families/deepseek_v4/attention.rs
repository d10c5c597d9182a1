//! Attention over a window of tokens and over compressed rows at once, with sinks.

use std::sync::Arc;

use kvdock_kernels::ops::{GroupedWeight, Picks, RowAttention, RowRun, Turn};
use kvdock_kernels::{Buf, Device, Rope};

use super::compressor::Compressor;
use super::step::V4Step;
use crate::ModelError;
use crate::families::blocks::Linear;
use crate::families::blocks::rows::row_pool;

/// A buffer of a pool.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) pool: usize,
    pub(super) buffer: usize,
}

/// What every layer has alike.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionSizes {
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    pub(super) eps: f32,
}

/// One layer's attention.
pub(super) struct Attention {
    pub(super) sizes: AttentionSizes,
    pub(super) q_a: Linear,
    pub(super) q_norm: Buf,
    pub(super) q_b: Linear,
    pub(super) kv: Linear,
    pub(super) kv_norm: Buf,
    pub(super) sinks: Buf,
    /// One for each group of heads.
    pub(super) o_a: GroupedWeight,
    pub(super) o_b: Linear,
    pub(super) rope: Arc<Rope>,
    /// Keys (which are values) of the window.
    pub(super) window: Place,
    pub(super) compressed: Option<Compressed>,
}

/// Compressed rows of a layer.
pub(super) struct Compressed {
    pub(super) compressor: Compressor,
    pub(super) rows: Place,
    pub(super) state: Place,
    /// `None`: all rows are attended to.
    pub(super) indexer: Option<Indexer>,
}

/// Picks compressed rows.
pub(super) struct Indexer {
    pub(super) q: Linear,
    pub(super) weights: Linear,
    pub(super) heads: usize,
    pub(super) dim: usize,
    pub(super) top_k: usize,
    pub(super) rope: Arc<Rope>,
    pub(super) compressor: Compressor,
    pub(super) keys: Place,
    pub(super) state: Place,
}

impl Attention {
    pub(super) fn apply(&self, step: &V4Step<'_>, x: &Buf) -> Result<Buf, ModelError> {
        let (device, pools) = (step.device, step.pools);
        let rows = step.step.rows();
        let AttentionSizes { heads, head_dim, eps } = self.sizes;
        let positions = step.positions.get()?;
        let low = self.q_a.apply(device, x, rows)?;
        let mut q_low = device.scratch(rows * self.q_a.rows())?;
        device.rms_norm(&low, &self.q_norm, eps, rows, &mut q_low)?;
        let mut q = self.q_b.apply(device, &q_low, rows)?;
        device.norm_rows(&mut q, None, head_dim, eps, rows * heads)?;
        device.rotate(&self.rope, positions, &mut q, heads, head_dim, Turn::Forth)?;
        let mut kv = self.kv.apply(device, x, rows)?;
        device.norm_rows(&mut kv, Some(&self.kv_norm), head_dim, eps, rows)?;
        device.rotate(&self.rope, positions, &mut kv, 1, head_dim, Turn::Forth)?;
        let picks = match &self.compressed {
            Some(compressed) => compressed.bring(step, x, &q_low)?,
            None => None,
        };

        let window = step.window()?;
        let pool = row_pool(pools, self.window.pool, self.window.buffer)?;
        let kv = step.dealt.gather(device, kv, head_dim)?;
        device.write_rows(&pool, &window.slots, &kv)?;
        let mut runs = vec![RowRun { pool, spans: &window.spans, picks: None }];
        if let Some(compressed) = &self.compressed {
            let pool = row_pool(pools, compressed.rows.pool, compressed.rows.buffer)?;
            let spans = &step.compressed(compressed.compressor.ratio)?.rows.spans;
            runs.push(RowRun { pool, spans, picks: picks.as_ref() });
        }
        let scale = (head_dim as f64).sqrt().recip() as f32;
        let spec = RowAttention { heads, width: head_dim, value: head_dim, scale, sinks: Some(&self.sinks) };
        let mut attended = device.scratch(rows * heads * head_dim)?;
        device.attend_rows(&q, &spec, &runs, &mut attended)?;
        // Values carry the rotation of keys.
        device.rotate(&self.rope, positions, &mut attended, heads, head_dim, Turn::Back)?;
        let mut low = device.scratch(rows * self.o_a.groups() * self.o_a.rows())?;
        device.linear_groups(&attended, &self.o_a, rows, &mut low)?;
        Ok(self.o_b.apply(device, &low, rows)?)
    }
}

impl Compressed {
    /// Brings compressed rows up to date; says which of them each row attends to, `None` for all that are complete.
    fn bring(&self, step: &V4Step<'_>, x: &Buf, q_low: &Buf) -> Result<Option<Picks>, ModelError> {
        self.compressor.compress(step, (self.rows, self.state), x)?;
        match &self.indexer {
            Some(indexer) => indexer.pick(step, x, q_low),
            None => Ok(None),
        }
    }
}

impl Indexer {
    /// For each row the compressed rows that it attends to, `None` for all that are complete.
    fn pick(&self, step: &V4Step<'_>, x: &Buf, q_low: &Buf) -> Result<Option<Picks>, ModelError> {
        let device: &dyn Device = step.device;
        let rows = step.step.rows();
        let (heads, dim) = (self.heads, self.dim);
        self.compressor.compress(step, (self.keys, self.state), x)?;
        let compressed = step.compressed(self.compressor.ratio)?;
        if compressed.most <= self.top_k {
            return Ok(None);
        }
        let mut q = self.q.apply(device, q_low, rows)?;
        device.rotate(&self.rope, step.positions.get()?, &mut q, heads, dim, Turn::Forth)?;
        let mut weights = self.weights.apply(device, x, rows)?;
        device.scale(&mut weights, ((dim * heads) as f64).sqrt().recip() as f32, rows * heads)?;
        let keys = row_pool(step.pools, self.keys.pool, self.keys.buffer)?;
        Ok(Some(device.pick(&keys, &compressed.rows.spans, &q, &weights, heads, self.top_k)?))
    }
}
