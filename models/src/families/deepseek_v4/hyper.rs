//! Hyper-connections: the residual state is several streams, which a sublayer reads as one mix and is added back to by
//! another.

use kvdock_kernels::rowmath::{add_scaled, dot, sigmoid, softmax};
use kvdock_kernels::{Device, KernelError};

use crate::families::blocks::Linear;

/// Streams of the residual state.
pub(super) const STREAMS: usize = 4;

/// Values of a mix: into the sublayer, out of it, and among the streams.
pub(super) const MIXES: usize = (2 + STREAMS) * STREAMS;

/// The mixes around one sublayer.
pub(super) struct Hyper {
    /// `[MIXES, STREAMS * hidden]`.
    pub(super) mix: Linear,
    pub(super) base: Vec<f32>,
    pub(super) scale: [f32; 3],
    pub(super) eps: f32,
    pub(super) norm_eps: f32,
    /// Normalisations of the mix among the streams.
    pub(super) rounds: usize,
}

/// How one row's sublayer output goes back into the streams.
pub(super) struct Back {
    post: [f32; STREAMS],
    /// Stream `k` takes `among[j][k]` of stream `j`.
    among: [[f32; STREAMS]; STREAMS],
}

/// `x` times `mix`, over the root mean square of each row.
fn mixes(device: &dyn Device, mix: &Linear, streams: &[f32], rows: usize, eps: f32) -> Result<Vec<f32>, KernelError> {
    let mut mixes = mix.to_host(device, &device.upload(streams)?, rows)?;
    let width = streams.len() / rows.max(1);
    for (mixes, row) in mixes.chunks_exact_mut(mix.rows()).zip(streams.chunks_exact(width)) {
        let factor = 1.0 / (dot(row, row) / width as f32 + eps).sqrt();
        mixes.iter_mut().for_each(|mix| *mix *= factor);
    }
    Ok(mixes)
}

impl Hyper {
    /// The sublayer's input `[rows, hidden]` for streams `[rows, STREAMS, hidden]`, and the way back for each row.
    pub(super) fn enter(
        &self,
        device: &dyn Device,
        streams: &[f32],
        rows: usize,
    ) -> Result<(Vec<f32>, Vec<Back>), KernelError> {
        let hidden = streams.len() / rows.max(1) / STREAMS;
        let mixes = mixes(device, &self.mix, streams, rows, self.norm_eps)?;
        let mut input = vec![0.0; rows * hidden];
        let mut backs = Vec::with_capacity(rows);
        for (row, mix) in mixes.chunks_exact(MIXES).enumerate() {
            let at = |index: usize, kind: usize| mix[index] * self.scale[kind] + self.base[index];
            let input = &mut input[row * hidden..][..hidden];
            for (stream, x) in streams[row * STREAMS * hidden..][..STREAMS * hidden].chunks_exact(hidden).enumerate() {
                add_scaled(input, sigmoid(at(stream, 0)) + self.eps, x);
            }
            let logits = std::array::from_fn(|j| std::array::from_fn(|k| at((2 + j) * STREAMS + k, 2)));
            backs.push(Back {
                post: std::array::from_fn(|stream| 2.0 * sigmoid(at(STREAMS + stream, 1))),
                among: doubly_stochastic(logits, self.rounds, self.eps),
            });
        }
        Ok((input, backs))
    }
}

impl Back {
    /// The streams of a row after its sublayer gave `y`.
    pub(super) fn apply(&self, streams: &mut [f32], y: &[f32]) {
        let hidden = y.len();
        let before = streams.to_vec();
        for (k, stream) in streams.chunks_exact_mut(hidden).enumerate() {
            for (out, y) in stream.iter_mut().zip(y) {
                *out = self.post[k] * y;
            }
            for (j, x) in before.chunks_exact(hidden).enumerate() {
                add_scaled(stream, self.among[j][k], x);
            }
        }
    }
}

/// Softmax by rows, then columns and rows brought to a sum of 1 in turns, columns first and last.
fn doubly_stochastic(logits: [[f32; STREAMS]; STREAMS], rounds: usize, eps: f32) -> [[f32; STREAMS]; STREAMS] {
    let mut c = logits;
    for row in &mut c {
        softmax(row);
        row.iter_mut().for_each(|x| *x += eps);
    }
    let columns = |c: &mut [[f32; STREAMS]; STREAMS]| {
        for k in 0..STREAMS {
            let sum = (0..STREAMS).map(|j| c[j][k]).sum::<f32>() + eps;
            c.iter_mut().for_each(|row| row[k] /= sum);
        }
    };
    columns(&mut c);
    for _ in 1..rounds {
        for row in &mut c {
            let sum = row.iter().sum::<f32>() + eps;
            row.iter_mut().for_each(|x| *x /= sum);
        }
        columns(&mut c);
    }
    c
}

/// The mix of the streams that the output matrix sees.
pub(super) struct HyperHead {
    /// `[STREAMS, STREAMS * hidden]`.
    pub(super) mix: Linear,
    pub(super) base: Vec<f32>,
    pub(super) scale: f32,
    pub(super) eps: f32,
    pub(super) norm_eps: f32,
}

impl HyperHead {
    /// `[rows, hidden]` for streams `[rows, STREAMS, hidden]`.
    pub(super) fn apply(&self, device: &dyn Device, streams: &[f32], rows: usize) -> Result<Vec<f32>, KernelError> {
        let hidden = streams.len() / rows.max(1) / STREAMS;
        let mixes = mixes(device, &self.mix, streams, rows, self.norm_eps)?;
        let mut out = vec![0.0; rows * hidden];
        for (row, mix) in mixes.chunks_exact(STREAMS).enumerate() {
            let out = &mut out[row * hidden..][..hidden];
            for (stream, x) in streams[row * STREAMS * hidden..][..STREAMS * hidden].chunks_exact(hidden).enumerate() {
                add_scaled(out, sigmoid(mix[stream] * self.scale + self.base[stream]) + self.eps, x);
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mix_becomes_doubly_stochastic_by_columns_first() {
        let logits = [[0.0, 1.0, 2.0, 3.0], [3.0, 0.0, -1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [-2.0, 0.0, 2.0, 4.0]];
        let expected = [
            [0.033014, 0.283947, 0.399926, 0.28311],
            [0.80299, 0.1265, 0.024114, 0.046399],
            [0.160499, 0.507839, 0.263134, 0.068527],
            [0.003496, 0.081712, 0.312825, 0.601963],
        ];
        let got = doubly_stochastic(logits, 20, 1e-6);
        for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
            assert!((got - expected).abs() < 2e-6, "{got} is not {expected}");
        }
    }
}
