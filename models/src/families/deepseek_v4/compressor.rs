//! The compressor: one row for every few tokens, a softmax-weighted mean of them for each channel.
//!
//! At ratio 4 rows overlap: a row takes the tokens of the window before it through the first half of the channels, those
//! of its own window through the second. What later rows need of earlier tokens is kept in a ring of state.

use kvdock_kernels::rowmath::{exp, rms_norm};
use kvdock_kernels::{Buf, Device, KvDtype, PagePool, Rotation};

use crate::ModelError;
use crate::families::blocks::Linear;
use crate::families::blocks::rows::RowBuffer;
use crate::families::blocks::step::Seq;

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
    pub(super) ape: Vec<f32>,
    pub(super) kv: Linear,
    pub(super) gate: Linear,
    pub(super) norm: Vec<f32>,
    pub(super) rotation: Rotation,
    pub(super) eps: f32,
}

/// Where the state of a sequence's last tokens is.
#[derive(Clone, Copy)]
pub(super) enum State<'a> {
    /// A ring in every window page: position p in row `p % RING` of its page.
    Ring(RowBuffer<'a>),
    /// Rows of a slot: position p in row `p % ratio`.
    Slot { pool: &'a PagePool, buffer: usize },
}

impl Compressor {
    /// Channels of a token: both halves where rows overlap.
    pub(super) fn width(&self) -> usize {
        if self.ratio == OVERLAPPING { 2 * self.dim } else { self.dim }
    }

    /// Elements of a token's state: values, then scores with `ape` added.
    pub(super) fn state_width(&self) -> usize {
        2 * self.width()
    }

    /// The tokens' states, `[rows, state_width]`.
    pub(super) fn project(
        &self,
        device: &dyn Device,
        x: &Buf,
        rows: usize,
        seqs: &[Seq<'_>],
    ) -> Result<Vec<f32>, ModelError> {
        let width = self.width();
        let kv = self.kv.to_host(device, x, rows)?;
        let scores = self.gate.to_host(device, x, rows)?;
        let mut states = vec![0.0; rows * 2 * width];
        for (row, position) in seqs.iter().flat_map(Seq::rows) {
            let state = &mut states[row * 2 * width..][..2 * width];
            state[..width].copy_from_slice(&kv[row * width..][..width]);
            let ape = &self.ape[position as usize % self.ratio * width..][..width];
            for ((out, score), ape) in state[width..].iter_mut().zip(&scores[row * width..]).zip(ape) {
                *out = score + ape;
            }
        }
        Ok(states)
    }

    /// The rows that a sequence's new tokens complete, with their indices; the state is brought up to date.
    pub(super) fn compress(
        &self,
        seq: &Seq<'_>,
        states: &[f32],
        state: State<'_>,
        page_tokens: usize,
    ) -> Result<Vec<(usize, Vec<f32>)>, ModelError> {
        let width = self.state_width();
        let start = seq.chunk.start as usize;
        let end = start + seq.chunk.tokens.len();
        let first = start / self.ratio;
        // The first token whose state a completed row needs.
        let from = if self.ratio == OVERLAPPING { first.saturating_sub(1) } else { first } * self.ratio;
        let mut known = self.read(seq, state, from..start, page_tokens)?;
        known.extend_from_slice(&states[seq.first * width..][..(end - start) * width]);
        let at = |position: usize| &known[(position - from) * width..][..width];
        let mut rows = Vec::new();
        for index in first..end / self.ratio {
            let begin = index * self.ratio;
            let mut row = vec![0.0; self.dim];
            if self.ratio == OVERLAPPING {
                let before = (begin.saturating_sub(self.ratio)..begin).map(|position| (at(position), 0));
                let own = (begin..begin + self.ratio).map(|position| (at(position), self.dim));
                self.combine(&before.chain(own).collect::<Vec<_>>(), &mut row);
            } else {
                let own = (begin..begin + self.ratio).map(|position| (at(position), 0));
                self.combine(&own.collect::<Vec<_>>(), &mut row);
            }
            rms_norm(&mut row, Some(&self.norm), self.eps);
            self.rotation.rotate(&self.rotation.at(begin as u32), &mut row);
            rows.push((index, row));
        }
        self.write(seq, state, &states[seq.first * width..][..(end - start) * width], page_tokens)?;
        Ok(rows)
    }

    /// For each channel the mean of the tokens' values by the softmax of their scores. A token comes with the channel
    /// that its half begins at.
    fn combine(&self, tokens: &[(&[f32], usize)], out: &mut [f32]) {
        let width = self.width();
        for (channel, out) in out.iter_mut().enumerate() {
            let score = |(state, half): &(&[f32], usize)| state[width + half + channel];
            let most = tokens.iter().map(score).fold(f32::NEG_INFINITY, f32::max);
            let (mut sum, mut total) = (0.0, 0.0);
            for token in tokens {
                let weight = exp(score(token) - most);
                sum += weight * token.0[token.1 + channel];
                total += weight;
            }
            *out = sum / total;
        }
    }

    fn read(
        &self,
        seq: &Seq<'_>,
        state: State<'_>,
        range: std::ops::Range<usize>,
        page_tokens: usize,
    ) -> Result<Vec<f32>, ModelError> {
        let width = self.state_width();
        let mut out = Vec::with_capacity(range.len() * width);
        match state {
            State::Ring(ring) => {
                for position in range {
                    let row = position / page_tokens * RING + position % RING;
                    out.extend(ring.read(seq.chunk.window, row..row + 1)?);
                }
            }
            State::Slot { pool, buffer } => {
                let layer = pool.read(buffer)?;
                let bytes = layer.page(seq.chunk.slot.unwrap_or_default())?;
                let mut row = vec![0.0; width];
                for position in range {
                    let at = position % self.ratio * width * size_of::<f32>();
                    kvdock_kernels::decode_row(KvDtype::F32, &bytes[at..], &mut row);
                    out.extend_from_slice(&row);
                }
            }
        }
        Ok(out)
    }

    /// Every position is written: so each page's ring ends with the page's own last tokens, and every page's end can be
    /// gone on from.
    fn write(&self, seq: &Seq<'_>, state: State<'_>, states: &[f32], page_tokens: usize) -> Result<(), ModelError> {
        let width = self.state_width();
        let start = seq.chunk.start as usize;
        let rows = states.chunks_exact(width).enumerate().map(|(index, row)| (start + index, row));
        match state {
            State::Ring(ring) => {
                let row = |position: usize| position / page_tokens * RING + position % RING;
                ring.write(seq.chunk.window, rows.map(|(position, state)| (row(position), state)))
            }
            State::Slot { pool, buffer } => {
                let mut layer = pool.write(buffer)?;
                let bytes = layer.page(seq.chunk.slot.unwrap_or_default())?;
                for (position, state) in rows {
                    let at = position % self.ratio * width * size_of::<f32>();
                    kvdock_kernels::encode_row(KvDtype::F32, state, &mut bytes[at..]);
                }
                Ok(())
            }
        }
    }
}
