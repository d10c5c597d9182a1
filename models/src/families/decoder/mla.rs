//! Latent attention (MLA): a row of cache holds one compressed latent for all heads and one rotated key, and an indexer
//! picks which rows a query attends to.
//!
//! Queries are brought into the space of the latents, so that rows are used as they lie: key and value of all heads.

use std::sync::Arc;

use kvdock_kernels::ops::{Columns, GroupedWeight, RowAttention, RowRun, Turn};
use kvdock_kernels::{Buf, Rope};

use super::run::{Pass, Place};
use crate::ModelError;
use crate::families::blocks::Linear;
use crate::families::blocks::rows::row_pool;

/// One layer's attention.
pub(super) struct Latent {
    pub(super) place: Place,
    pub(super) q_a: Linear,
    pub(super) q_a_norm: Buf,
    pub(super) q_b: Linear,
    pub(super) kv_a: Linear,
    pub(super) kv_a_norm: Buf,
    /// For each head, from its query without position to the latent: `[latent, nope]`.
    pub(super) to_latent: GroupedWeight,
    /// For each head, from the latent to its value: `[value, latent]`.
    pub(super) from_latent: GroupedWeight,
    pub(super) o: Linear,
    pub(super) sizes: LatentSizes,
    /// Of what lies behind the latent.
    pub(super) rope: Arc<Rope>,
    pub(super) scale: f32,
    /// `None`: the layer attends to what the indexer before it has picked.
    pub(super) indexer: Option<Indexer>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct LatentSizes {
    pub(super) heads: usize,
    pub(super) nope: usize,
    pub(super) rope: usize,
    pub(super) value: usize,
    pub(super) latent: usize,
}

/// What these norms add to mean squares, whatever the configuration says of the others.
const INNER_EPS: f32 = 1e-6;

impl LatentSizes {
    fn width(self) -> usize {
        self.latent + self.rope
    }
}

/// Picks the rows that a query attends to.
pub(super) struct Indexer {
    pub(super) place: Place,
    pub(super) q: Linear,
    pub(super) k: Linear,
    /// Weight and bias.
    pub(super) k_norm: (Buf, Buf),
    pub(super) weights: Linear,
    pub(super) heads: usize,
    pub(super) dim: usize,
    pub(super) top_k: usize,
    pub(super) rope: Arc<Rope>,
}

/// All columns of rows of `stride` elements from `at` on.
const fn columns(stride: usize, at: usize) -> Columns {
    Columns { stride, at }
}

impl Latent {
    pub(super) fn apply(&self, pass: &mut Pass<'_>, x: &Buf) -> Result<Buf, ModelError> {
        let device = pass.device;
        let rows = pass.rows();
        let LatentSizes { heads, nope, rope, value, latent } = self.sizes;
        let (width, q_width) = (self.sizes.width(), nope + rope);

        let low = self.q_a.apply(device, x, rows)?;
        let mut q_low = device.scratch(rows * self.q_a.rows())?;
        device.rms_norm(&low, &self.q_a_norm, INNER_EPS, rows, &mut q_low)?;
        let q = self.q_b.apply(device, &q_low, rows)?;
        let mut kv = self.kv_a.apply(device, x, rows)?;
        if let Some(indexer) = &self.indexer {
            indexer.pick(pass, x, &q_low)?;
        }

        // Queries in the space of the rows, `[rows, heads, latent + rope]`.
        let each = rows * heads;
        let mut plain = device.scratch(each * nope)?;
        device.copy_columns(&q, columns(q_width, 0), &mut plain, columns(nope, 0), nope, each)?;
        let mut mapped = device.scratch(each * latent)?;
        device.linear_groups(&plain, &self.to_latent, rows, &mut mapped)?;
        let mut queries = device.scratch(each * width)?;
        device.copy_columns(&mapped, columns(latent, 0), &mut queries, columns(width, 0), latent, each)?;
        device.copy_columns(&q, columns(q_width, nope), &mut queries, columns(width, latent), rope, each)?;
        let positions = pass.positions.get()?;
        device.rotate(&self.rope, positions, &mut queries, heads, width, Turn::Forth)?;

        let mut compressed = device.scratch(rows * latent)?;
        device.copy_columns(&kv, columns(width, 0), &mut compressed, columns(latent, 0), latent, rows)?;
        device.norm_rows(&mut compressed, Some(&self.kv_a_norm), latent, INNER_EPS, rows)?;
        device.copy_columns(&compressed, columns(latent, 0), &mut kv, columns(width, 0), latent, rows)?;
        device.rotate(&self.rope, positions, &mut kv, 1, width, Turn::Forth)?;

        let pool = row_pool(pass.pools()?, self.place.pool, self.place.buffer)?;
        let tokens = pass.tokens()?;
        let kv = pass.dealt.gather(device, kv, width)?;
        device.write_rows(&pool, &tokens.slots, &kv)?;
        let spec = RowAttention { heads, width, value: latent, scale: self.scale, sinks: None };
        let run = RowRun { pool, spans: &tokens.spans, picks: pass.picked.as_ref() };
        let mut attended = device.scratch(each * latent)?;
        device.attend_rows(&queries, &spec, &[run], &mut attended)?;
        let mut values = device.scratch(each * value)?;
        device.linear_groups(&attended, &self.from_latent, rows, &mut values)?;
        Ok(self.o.apply(device, &values, rows)?)
    }
}

impl Indexer {
    /// Writes the new rows' index keys, and notes in the pass which positions each row attends to. Keys are written also
    /// where everything is picked: later rows need them.
    fn pick(&self, pass: &mut Pass<'_>, x: &Buf, q_low: &Buf) -> Result<(), ModelError> {
        let device = pass.device;
        let rows = pass.rows();
        let (heads, dim) = (self.heads, self.dim);
        let positions = pass.positions.get()?;
        let mut k = self.k.apply(device, x, rows)?;
        device.layer_norm(&mut k, &self.k_norm.0, &self.k_norm.1, 1e-6, rows)?;
        device.rotate(&self.rope, positions, &mut k, 1, dim, Turn::Forth)?;
        let pool = row_pool(pass.pools()?, self.place.pool, self.place.buffer)?;
        let k = pass.dealt.gather(device, k, dim)?;
        device.write_rows(&pool, &pass.tokens()?.slots, &k)?;
        let longest = pass.dealt.whole().seqs.iter().map(|seq| seq.chunk.start as usize + seq.chunk.tokens.len()).max();
        if longest.unwrap_or(0) <= self.top_k {
            pass.picked = None;
            return Ok(());
        }
        let mut q = self.q.apply(device, q_low, rows)?;
        device.rotate(&self.rope, positions, &mut q, heads, dim, Turn::Forth)?;
        let mut weights = self.weights.apply(device, x, rows)?;
        device.scale(&mut weights, ((dim * heads) as f64).sqrt().recip() as f32, rows * heads)?;
        let picked = device.pick(&pool, &pass.tokens()?.spans, &q, &weights, heads, self.top_k)?;
        pass.picked = Some(picked);
        Ok(())
    }
}
