//! The gated delta net: a causal convolution, then a recurrence over a matrix of state for each head.
//!
//! The recurrence runs in token order everywhere, prefill included. The form by chunks that other engines use for
//! prefill gives other roundings for other chunks, and a prefix that comes back from a saved state would not be the
//! prefix that was computed.

use kvdock_kernels::rowmath::{add_scaled, dot, exp, rms_norm, sigmoid, silu, softplus};
use kvdock_kernels::{Buf, KvDtype, decode_row, encode_row};

use super::run::{Pass, Place};
use crate::ModelError;
use crate::families::blocks::Linear;

/// One layer's net.
pub(super) struct DeltaNet {
    pub(super) place: Place,
    /// q, k and v in a row.
    pub(super) qkv: Linear,
    pub(super) z: Linear,
    pub(super) b: Linear,
    pub(super) a: Linear,
    pub(super) out: Linear,
    /// `[channels, kernel]`.
    pub(super) conv: Vec<f32>,
    pub(super) dt_bias: Vec<f32>,
    /// `-exp(A_log)`.
    pub(super) decay: Vec<f32>,
    /// `[value_dim]`.
    pub(super) norm: Vec<f32>,
    pub(super) sizes: DeltaSizes,
    pub(super) eps: f32,
}

/// The net's extents.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeltaSizes {
    pub(super) key_heads: usize,
    pub(super) value_heads: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    pub(super) kernel: usize,
}

impl DeltaSizes {
    /// Elements of q, k and v together.
    pub(super) fn channels(self) -> usize {
        2 * self.keys() + self.values()
    }

    /// A net of so many of these key heads, with their value heads.
    pub(super) fn of_key_heads(self, key_heads: usize) -> Self {
        Self { value_heads: self.value_heads / self.key_heads * key_heads, key_heads, ..self }
    }

    pub(super) fn keys(self) -> usize {
        self.key_heads * self.key_dim
    }

    pub(super) fn values(self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Elements of a state: the last inputs of the convolution, oldest first, then `[value_heads, key_dim, value_dim]`.
    pub(super) fn state(self) -> usize {
        (self.kernel - 1) * self.channels() + self.value_heads * self.key_dim * self.value_dim
    }
}

impl DeltaNet {
    pub(super) fn apply(&self, pass: &Pass<'_>, x: &Buf) -> Result<Buf, ModelError> {
        let device = pass.device;
        let rows = pass.rows();
        let sizes = self.sizes;
        let mixed = self.qkv.to_host(device, x, rows)?;
        let z = self.z.to_host(device, x, rows)?;
        let b = self.b.to_host(device, x, rows)?;
        let a = self.a.to_host(device, x, rows)?;
        let pool = pass.pools()?.pages(self.place.pool)?;
        let mut y = vec![0.0; rows * sizes.values()];
        for seq in &pass.step.seqs {
            let chunk = &seq.chunk;
            let slot = chunk.slot.unwrap_or_default();
            let mut state = vec![0.0; sizes.state()];
            if chunk.start > 0 {
                decode_row(KvDtype::F32, pool.read(self.place.buffer)?.page(slot)?, &mut state);
            }
            let put = |slot: u32, state: &[f32]| -> Result<(), ModelError> {
                encode_row(KvDtype::F32, state, pool.write(self.place.buffer)?.page(slot)?);
                Ok(())
            };
            for (row, position) in seq.rows() {
                let heads = sizes.value_heads;
                self.token(
                    &mut state,
                    &mixed[row * sizes.channels()..][..sizes.channels()],
                    &b[row * heads..][..heads],
                    &a[row * heads..][..heads],
                    &z[row * sizes.values()..][..sizes.values()],
                    &mut y[row * sizes.values()..][..sizes.values()],
                );
                for save in chunk.save.iter().filter(|save| save.tokens == position + 1) {
                    put(save.slot, &state)?;
                }
            }
            put(slot, &state)?;
        }
        Ok(self.out.apply(device, &device.upload(&y)?, rows)?)
    }

    /// Takes one token into the state and gives its output.
    fn token(&self, state: &mut [f32], mixed: &[f32], b: &[f32], a: &[f32], z: &[f32], y: &mut [f32]) {
        let DeltaSizes { key_heads, value_heads, key_dim, value_dim, kernel } = self.sizes;
        let channels = self.sizes.channels();
        let (history, matrices) = state.split_at_mut((kernel - 1) * channels);
        let mut u = vec![0.0; channels];
        for (channel, u) in u.iter_mut().enumerate() {
            let weights = &self.conv[channel * kernel..][..kernel];
            let mut sum = 0.0;
            for (weight, inputs) in weights.iter().zip(history.chunks_exact(channels)) {
                sum += weight * inputs[channel];
            }
            *u = silu(sum + weights[kernel - 1] * mixed[channel]);
        }
        if kernel > 1 {
            history.copy_within(channels.., 0);
            history[(kernel - 2) * channels..].copy_from_slice(mixed);
        }

        let (q, rest) = u.split_at_mut(self.sizes.keys());
        let (k, v) = rest.split_at_mut(self.sizes.keys());
        let scale = (key_dim as f64).sqrt().recip() as f32;
        q.chunks_exact_mut(key_dim).for_each(|head| unit(head, scale));
        k.chunks_exact_mut(key_dim).for_each(|head| unit(head, 1.0));
        for head in 0..value_heads {
            let from = head / (value_heads / key_heads) * key_dim;
            let (q, k) = (&q[from..][..key_dim], &k[from..][..key_dim]);
            let v = &v[head * value_dim..][..value_dim];
            let matrix = &mut matrices[head * key_dim * value_dim..][..key_dim * value_dim];
            let kept = exp(self.decay[head] * softplus(a[head] + self.dt_bias[head]));
            let rate = sigmoid(b[head]);
            matrix.iter_mut().for_each(|element| *element *= kept);
            let mut recalled = vec![0.0; value_dim];
            for (row, k) in matrix.chunks_exact(value_dim).zip(k) {
                add_scaled(&mut recalled, *k, row);
            }
            let change: Vec<f32> = v.iter().zip(&recalled).map(|(v, recalled)| rate * (v - recalled)).collect();
            let out = &mut y[head * value_dim..][..value_dim];
            out.fill(0.0);
            for ((row, k), q) in matrix.chunks_exact_mut(value_dim).zip(k).zip(q) {
                add_scaled(row, *k, &change);
                add_scaled(out, *q, row);
            }
            rms_norm(out, Some(&self.norm), self.eps);
            let gate = &z[head * value_dim..][..value_dim];
            out.iter_mut().zip(gate).for_each(|(out, gate)| *out *= silu(*gate));
        }
    }
}

/// Scales a head to length `scale`.
fn unit(head: &mut [f32], scale: f32) {
    let factor = scale / (dot(head, head) + 1e-6).sqrt();
    head.iter_mut().for_each(|element| *element *= factor);
}
