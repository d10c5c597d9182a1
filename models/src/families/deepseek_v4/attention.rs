//! Attention over a window of tokens and over compressed rows at once, with sinks.

use std::sync::Arc;

use kvdock_kernels::rowmath::{attend_shared, rms_norm, top_k};
use kvdock_kernels::{Buf, Device, Rotation};

use super::compressor::{Compressor, OVERLAPPING, State};
use crate::families::blocks::rows::RowBuffer;
use crate::families::blocks::step::{Seq, Step};
use crate::families::blocks::{Linear, map_rows, to_host};
use crate::families::decoder::index_score;
use crate::{ModelError, PoolSet};

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
    /// Keys that a query sees in the window, its own included.
    pub(super) window: usize,
    /// Groups of the output projection.
    pub(super) groups: usize,
    pub(super) eps: f32,
}

/// One layer's attention.
pub(super) struct Attention {
    pub(super) sizes: AttentionSizes,
    pub(super) q_a: Linear,
    pub(super) q_norm: Buf,
    pub(super) q_b: Linear,
    pub(super) kv: Linear,
    pub(super) kv_norm: Vec<f32>,
    pub(super) sinks: Vec<f32>,
    /// One for each group.
    pub(super) o_a: Vec<Linear>,
    pub(super) o_b: Linear,
    pub(super) rotation: Arc<Rotation>,
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
    pub(super) rotation: Rotation,
    pub(super) compressor: Compressor,
    pub(super) keys: Place,
    pub(super) state: Place,
}

/// Compressed rows of one step: for each sequence as many as are attended to whole, for each row of the step those picked.
struct Seen<'a> {
    buffer: RowBuffer<'a>,
    cached: Vec<Vec<f32>>,
    picked: Vec<Option<Vec<u32>>>,
}

fn state<'a>(pools: &'a PoolSet, place: Place, compressor: &Compressor) -> Result<State<'a>, ModelError> {
    if compressor.ratio == OVERLAPPING {
        return Ok(State::Ring(RowBuffer::of(pools, place.pool, place.buffer)?));
    }
    Ok(State::Slot { pool: pools.pages(place.pool)?, buffer: place.buffer })
}

/// Compresses the new tokens and writes the rows.
fn compress(
    device: &dyn Device,
    (compressor, rows, place): (&Compressor, Place, Place),
    step: &Step<'_>,
    pools: &PoolSet,
    x: &Buf,
) -> Result<(), ModelError> {
    let states = compressor.project(device, x, step.rows(), &step.seqs)?;
    let buffer = RowBuffer::of(pools, rows.pool, rows.buffer)?;
    let state = state(pools, place, compressor)?;
    for seq in &step.seqs {
        let rows = compressor.compress(seq, &states, state, pools.sizes().page_tokens)?;
        buffer.write(seq.chunk.pages, rows.iter().map(|(index, row)| (*index, row.as_slice())))?;
    }
    Ok(())
}

/// Rows that are complete once a sequence's chunk is taken in.
fn completed(seq: &Seq<'_>, ratio: usize) -> usize {
    (seq.chunk.start as usize + seq.chunk.tokens.len()) / ratio
}

impl Attention {
    pub(super) fn apply(
        &self,
        device: &dyn Device,
        step: &Step<'_>,
        pools: &PoolSet,
        x: &Buf,
    ) -> Result<Buf, ModelError> {
        let rows = step.rows();
        let AttentionSizes { heads, head_dim, window, eps, .. } = self.sizes;
        let low = self.q_a.apply(device, x, rows)?;
        let mut q_low = device.alloc(rows * self.q_a.rows())?;
        device.rms_norm(&low, &self.q_norm, eps, rows, &mut q_low)?;
        let mut q = self.q_b.to_host(device, &q_low, rows)?;
        let mut kv = self.kv.to_host(device, x, rows)?;
        for (row, position) in step.seqs.iter().flat_map(Seq::rows) {
            let angles = self.rotation.at(position);
            for head in q[row * heads * head_dim..][..heads * head_dim].chunks_exact_mut(head_dim) {
                rms_norm(head, None, eps);
                self.rotation.rotate(&angles, head);
            }
            let kv = &mut kv[row * head_dim..][..head_dim];
            rms_norm(kv, Some(&self.kv_norm), eps);
            self.rotation.rotate(&angles, kv);
        }
        let seen = match &self.compressed {
            Some(compressed) => Some(compressed.seen(device, step, pools, x, &q_low)?),
            None => None,
        };

        let buffer = RowBuffer::of(pools, self.window.pool, self.window.buffer)?;
        let scale = (head_dim as f64).sqrt().recip() as f32;
        let mut attended = Vec::with_capacity(rows * heads * head_dim);
        for (index, seq) in step.seqs.iter().enumerate() {
            let start = seq.chunk.start as usize;
            let table = seq.chunk.window;
            buffer.write(table, seq.rows().map(|(row, at)| (at as usize, &kv[row * head_dim..][..head_dim])))?;
            let first = (start + 1).saturating_sub(window);
            let cached = buffer.read(table, first..start + seq.chunk.tokens.len())?;
            let items: Vec<(usize, u32)> = seq.rows().collect();
            let outputs = map_rows(device, &items, |&(row, position)| {
                let end = position as usize + 1;
                let begin = end.saturating_sub(window);
                let mut keys = cached[(begin - first) * head_dim..(end - first) * head_dim].to_vec();
                if let (Some(seen), Some(compressed)) = (&seen, &self.compressed) {
                    match &seen.picked[row] {
                        None => {
                            let count = end / compressed.compressor.ratio;
                            keys.extend_from_slice(&seen.cached[index][..count * head_dim]);
                        }
                        Some(picked) => {
                            let entries = picked.iter().map(|entry| *entry as usize);
                            keys.extend(seen.buffer.read(seq.chunk.pages, entries)?);
                        }
                    }
                }
                let angles = self.rotation.at(position);
                let mut outs = vec![0.0; heads * head_dim];
                for (head, out) in outs.chunks_exact_mut(head_dim).enumerate() {
                    let query = &q[(row * heads + head) * head_dim..][..head_dim];
                    attend_shared(query, &keys, head_dim, scale, Some(self.sinks[head]), out);
                    // Values carry the rotation of keys.
                    self.rotation.rotate_back(&angles, out);
                }
                Ok(outs)
            })?;
            outputs.iter().for_each(|out| attended.extend_from_slice(out));
        }
        self.output(device, &attended, rows)
    }

    /// The output projection, by groups of heads first.
    fn output(&self, device: &dyn Device, attended: &[f32], rows: usize) -> Result<Buf, ModelError> {
        let AttentionSizes { heads, head_dim, groups, .. } = self.sizes;
        let (width, group) = (heads * head_dim, heads * head_dim / groups);
        let rank = self.o_b.weight.shape().cols / groups;
        let mut low = vec![0.0; rows * groups * rank];
        for (index, linear) in self.o_a.iter().enumerate() {
            let part: Vec<f32> =
                attended.chunks_exact(width).flat_map(|row| row[index * group..][..group].iter().copied()).collect();
            let part = linear.to_host(device, &device.upload(&part)?, rows)?;
            for (row, part) in part.chunks_exact(rank).enumerate() {
                low[(row * groups + index) * rank..][..rank].copy_from_slice(part);
            }
        }
        Ok(self.o_b.apply(device, &device.upload(&low)?, rows)?)
    }
}

impl Compressed {
    fn seen<'a>(
        &self,
        device: &dyn Device,
        step: &Step<'_>,
        pools: &'a PoolSet,
        x: &Buf,
        q_low: &Buf,
    ) -> Result<Seen<'a>, ModelError> {
        compress(device, (&self.compressor, self.rows, self.state), step, pools, x)?;
        let picked = match &self.indexer {
            Some(indexer) => indexer.pick(device, step, pools, x, q_low)?,
            None => vec![None; step.rows()],
        };
        let ratio = self.compressor.ratio;
        let buffer = RowBuffer::of(pools, self.rows.pool, self.rows.buffer)?;
        let whole = |seq: &Seq<'_>| {
            let rows = seq.rows().filter(|(row, _)| picked[*row].is_none());
            rows.map(|(_, position)| (position as usize + 1) / ratio).max().unwrap_or(0)
        };
        let cached = step.seqs.iter().map(|seq| buffer.read(seq.chunk.pages, 0..whole(seq)));
        Ok(Seen { cached: cached.collect::<Result<_, _>>()?, buffer, picked })
    }
}

impl Indexer {
    /// For each row the compressed rows that it attends to, `None` for all that are complete.
    fn pick(
        &self,
        device: &dyn Device,
        step: &Step<'_>,
        pools: &PoolSet,
        x: &Buf,
        q_low: &Buf,
    ) -> Result<Vec<Option<Vec<u32>>>, ModelError> {
        let rows = step.rows();
        let (heads, dim, ratio) = (self.heads, self.dim, self.compressor.ratio);
        compress(device, (&self.compressor, self.keys, self.state), step, pools, x)?;
        let q = self.q.to_host(device, q_low, rows)?;
        let weights = self.weights.apply(device, x, rows)?;
        let factor = ((dim * heads) as f64).sqrt().recip() as f32;
        let weights: Vec<f32> = to_host(device, &weights, rows * heads)?.iter().map(|weight| weight * factor).collect();
        let buffer = RowBuffer::of(pools, self.keys.pool, self.keys.buffer)?;
        let mut picked = vec![None; rows];
        for seq in &step.seqs {
            let count = completed(seq, ratio);
            if count <= self.top_k {
                continue;
            }
            let keys = buffer.read(seq.chunk.pages, 0..count)?;
            let items: Vec<(usize, u32)> =
                seq.rows().filter(|(_, position)| (*position as usize + 1) / ratio > self.top_k).collect();
            let entries = map_rows(device, &items, |&(row, position)| {
                let visible = (position as usize + 1) / ratio;
                let angles = self.rotation.at(position);
                let mut queries = q[row * heads * dim..][..heads * dim].to_vec();
                queries.chunks_exact_mut(dim).for_each(|head| self.rotation.rotate(&angles, head));
                let scores: Vec<f32> = keys[..visible * dim]
                    .chunks_exact(dim)
                    .map(|key| index_score(&queries, &weights[row * heads..][..heads], key))
                    .collect();
                let mut entries = top_k(&scores, self.top_k);
                entries.sort_unstable();
                Ok(entries)
            })?;
            for ((row, _), entries) in items.iter().zip(entries) {
                picked[*row] = Some(entries);
            }
        }
        Ok(picked)
    }
}
