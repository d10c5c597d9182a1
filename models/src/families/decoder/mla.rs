//! Latent attention (MLA): a row of cache holds one compressed latent for all heads and one rotated key, and an indexer
//! picks which rows a query attends to.
//!
//! Queries are brought into the space of the latents, so that rows are used as they lie: key and value of all heads.

use kvdock_kernels::rowmath::{attend_shared, dot, layer_norm, rms_norm, top_k};
use kvdock_kernels::{Buf, Device, Rotation};

use super::run::{Pass, Place};
use crate::ModelError;
use crate::families::blocks::rows::RowBuffer;
use crate::families::blocks::{Linear, map_rows, to_host};

/// One layer's attention.
pub(super) struct Latent {
    pub(super) place: Place,
    pub(super) q_a: Linear,
    pub(super) q_a_norm: Buf,
    pub(super) q_b: Linear,
    pub(super) kv_a: Linear,
    pub(super) kv_a_norm: Vec<f32>,
    /// For each head, from its query without position to the latent: `[latent, nope]`.
    pub(super) to_latent: Vec<Linear>,
    /// For each head, from the latent to its value: `[value, latent]`.
    pub(super) from_latent: Vec<Linear>,
    pub(super) o: Linear,
    pub(super) sizes: LatentSizes,
    pub(super) rotation: Rotation,
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
    pub(super) k_norm: (Vec<f32>, Vec<f32>),
    pub(super) weights: Linear,
    pub(super) heads: usize,
    pub(super) dim: usize,
    pub(super) top_k: usize,
    pub(super) rotation: Rotation,
}

impl Latent {
    pub(super) fn apply(&self, pass: &mut Pass<'_>, x: &Buf) -> Result<Buf, ModelError> {
        let device = pass.device;
        let rows = pass.rows();
        let LatentSizes { heads, nope, rope, value, latent } = self.sizes;
        let (width, q_width) = (self.sizes.width(), nope + rope);

        let low = self.q_a.apply(device, x, rows)?;
        let mut q_low = device.alloc(rows * self.q_a.rows())?;
        device.rms_norm(&low, &self.q_a_norm, INNER_EPS, rows, &mut q_low)?;
        let q = self.q_b.to_host(device, &q_low, rows)?;
        let mut kv = self.kv_a.to_host(device, x, rows)?;
        if let Some(indexer) = &self.indexer {
            indexer.pick(pass, x, &q_low)?;
        }

        // Queries in the space of the rows, `[rows, heads, latent + rope]`.
        let mut queries = vec![0.0; rows * heads * width];
        for (head, to_latent) in self.to_latent.iter().enumerate() {
            let part: Vec<f32> =
                q.chunks_exact(heads * q_width).flat_map(|row| row[head * q_width..][..nope].iter().copied()).collect();
            let mapped = to_latent.to_host(device, &device.upload(&part)?, rows)?;
            for (row, mapped) in mapped.chunks_exact(latent).enumerate() {
                queries[(row * heads + head) * width..][..latent].copy_from_slice(mapped);
            }
        }
        for seq in &pass.step.seqs {
            for (row, position) in seq.rows() {
                let angles = self.rotation.at(position);
                let (compressed, key) = kv[row * width..][..width].split_at_mut(latent);
                rms_norm(compressed, Some(&self.kv_a_norm), INNER_EPS);
                self.rotation.rotate(&angles, key);
                for head in 0..heads {
                    let query = &mut queries[(row * heads + head) * width + latent..][..rope];
                    query.copy_from_slice(&q[(row * heads + head) * q_width + nope..][..rope]);
                    self.rotation.rotate(&angles, query);
                }
            }
        }

        let buffer = RowBuffer::of(pass.pools()?, self.place.pool, self.place.buffer)?;
        let mut attended = Vec::with_capacity(rows * heads * latent);
        for seq in &pass.step.seqs {
            let chunk = &seq.chunk;
            buffer.write(chunk.pages, seq.rows().map(|(row, at)| (at as usize, &kv[row * width..][..width])))?;
            // All rows only for those that attend to all of them.
            let picks = |row: usize| pass.picked.get(row).and_then(Option::as_ref);
            let whole = seq.rows().filter(|(row, _)| picks(*row).is_none()).map(|(_, at)| at as usize + 1).max();
            let cached = buffer.read(chunk.pages, 0..whole.unwrap_or(0))?;
            let items: Vec<(usize, u32)> = seq.rows().collect();
            let outputs = map_rows(device, &items, |(row, position)| {
                let picked;
                let seen = match picks(*row) {
                    Some(positions) => {
                        picked = buffer.read(chunk.pages, positions.iter().map(|at| *at as usize))?;
                        picked.as_slice()
                    }
                    None => &cached[..(*position as usize + 1) * width],
                };
                let mut out = vec![0.0; heads * latent];
                for (head, out) in out.chunks_exact_mut(latent).enumerate() {
                    let query = &queries[(row * heads + head) * width..][..width];
                    attend_shared(query, seen, width, self.scale, None, out);
                }
                Ok(out)
            })?;
            outputs.iter().for_each(|out| attended.extend_from_slice(out));
        }
        self.output(device, &attended, rows, value)
    }

    /// From attended latents to the layer's output.
    fn output(&self, device: &dyn Device, attended: &[f32], rows: usize, value: usize) -> Result<Buf, ModelError> {
        let LatentSizes { heads, latent, .. } = self.sizes;
        let mut values = vec![0.0; rows * heads * value];
        for (head, from_latent) in self.from_latent.iter().enumerate() {
            let part: Vec<f32> = attended
                .chunks_exact(heads * latent)
                .flat_map(|row| row[head * latent..][..latent].iter().copied())
                .collect();
            let mapped = from_latent.to_host(device, &device.upload(&part)?, rows)?;
            for (row, mapped) in mapped.chunks_exact(value).enumerate() {
                values[(row * heads + head) * value..][..value].copy_from_slice(mapped);
            }
        }
        Ok(self.o.apply(device, &device.upload(&values)?, rows)?)
    }
}

impl Indexer {
    /// Writes the new rows' index keys, and notes in the pass which positions each row attends to. Keys are written also
    /// where everything is picked: later rows need them.
    fn pick(&self, pass: &mut Pass<'_>, x: &Buf, q_low: &Buf) -> Result<(), ModelError> {
        let device = pass.device;
        let rows = pass.rows();
        let (heads, dim) = (self.heads, self.dim);
        let mut q = self.q.to_host(device, q_low, rows)?;
        let mut k = self.k.to_host(device, x, rows)?;
        let mut weights = to_host(device, &self.weights.apply(device, x, rows)?, rows * heads)?;
        let factor = ((dim * heads) as f64).sqrt().recip() as f32;
        weights.iter_mut().for_each(|weight| *weight *= factor);
        let buffer = RowBuffer::of(pass.pools()?, self.place.pool, self.place.buffer)?;
        pass.picked = vec![None; rows];
        for seq in &pass.step.seqs {
            for (row, position) in seq.rows() {
                let angles = self.rotation.at(position);
                let key = &mut k[row * dim..][..dim];
                layer_norm(key, &self.k_norm.0, &self.k_norm.1, 1e-6);
                self.rotation.rotate(&angles, key);
                q[row * heads * dim..][..heads * dim]
                    .chunks_exact_mut(dim)
                    .for_each(|head| self.rotation.rotate(&angles, head));
            }
            let chunk = &seq.chunk;
            buffer.write(chunk.pages, seq.rows().map(|(row, at)| (at as usize, &k[row * dim..][..dim])))?;
            let end = chunk.start as usize + chunk.tokens.len();
            if end <= self.top_k {
                continue;
            }
            let keys = buffer.read(chunk.pages, 0..end)?;
            let items: Vec<(usize, u32)> =
                seq.rows().filter(|(_, position)| *position as usize >= self.top_k).collect();
            let picked = map_rows(device, &items, |(row, position)| {
                let queries = &q[row * heads * dim..][..heads * dim];
                let scores: Vec<f32> = keys[..(*position as usize + 1) * dim]
                    .chunks_exact(dim)
                    .map(|key| index_score(queries, &weights[row * heads..][..heads], key))
                    .collect();
                let mut positions = top_k(&scores, self.top_k);
                positions.sort_unstable();
                Ok(positions)
            })?;
            for ((row, _), positions) in items.iter().zip(picked) {
                pass.picked[*row] = Some(positions);
            }
        }
        Ok(())
    }
}

/// `Σ weight · relu(query · key)` over the index heads.
pub(crate) fn index_score(queries: &[f32], weights: &[f32], key: &[f32]) -> f32 {
    queries.chunks_exact(key.len()).zip(weights).map(|(query, weight)| weight * dot(query, key).max(0.0)).sum()
}
