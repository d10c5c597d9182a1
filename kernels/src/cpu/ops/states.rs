//! Recurrences, compressors and hyper-connections.

use super::super::device::{CpuDevice, product};
use crate::device::Buf;
use crate::error::KernelError;
use crate::kv::KvDtype;
use crate::ops::{
    Compress, CompressPlan, DeltaInput, DeltaSeq, DeltaSizes, DeltaWeights, HyperMix, HyperOut, STREAMS, StateOps,
    StateSource,
};
use crate::pages::{PagePool, decode_row, encode_row};
use crate::rowmath::{add_scaled, dot, exp, rms_norm, sigmoid, silu, softmax, softplus};

/// Values of a mix: into the sublayer, out of it, and among the streams.
const MIXES: usize = (2 + STREAMS) * STREAMS;
/// How a sublayer's output goes back: what each stream takes of it, then what stream k takes of stream j at
/// `STREAMS + STREAMS * j + k`.
const BACKS: usize = (1 + STREAMS) * STREAMS;

/// Weights of a delta net in host memory.
struct Delta<'a> {
    conv: &'a [f32],
    dt_bias: &'a [f32],
    decay: &'a [f32],
    norm: &'a [f32],
    eps: f32,
    sizes: DeltaSizes,
}

/// One token's part of the inputs.
struct Token<'a> {
    mixed: &'a [f32],
    b: &'a [f32],
    a: &'a [f32],
    z: &'a [f32],
}

impl Delta<'_> {
    /// Takes one token into the state and gives its output.
    fn token(&self, state: &mut [f32], token: &Token<'_>, y: &mut [f32]) {
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
            *u = silu(sum + weights[kernel - 1] * token.mixed[channel]);
        }
        if kernel > 1 {
            history.copy_within(channels.., 0);
            history[(kernel - 2) * channels..].copy_from_slice(token.mixed);
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
            let kept = exp(self.decay[head] * softplus(token.a[head] + self.dt_bias[head]));
            let rate = sigmoid(token.b[head]);
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
            rms_norm(out, Some(self.norm), self.eps);
            let gate = &token.z[head * value_dim..][..value_dim];
            out.iter_mut().zip(gate).for_each(|(out, gate)| *out *= silu(*gate));
        }
    }
}

/// Scales a head to length `scale`.
fn unit(head: &mut [f32], scale: f32) {
    let factor = scale / (dot(head, head) + 1e-6).sqrt();
    head.iter_mut().for_each(|element| *element *= factor);
}

/// For each channel the mean of the tokens' values by the softmax of their scores. A token comes with the channel that its
/// half begins at.
fn combine(tokens: &[(&[f32], usize)], width: usize, out: &mut [f32]) {
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

/// A row's mixes over its root mean square.
fn over_rms(mixes: &[f32], row: &[f32], eps: f32) -> Vec<f32> {
    let factor = 1.0 / (dot(row, row) / row.len() as f32 + eps).sqrt();
    mixes.iter().map(|mix| mix * factor).collect()
}

impl StateOps for CpuDevice {
    fn delta_net(
        &self,
        sizes: DeltaSizes,
        weights: &DeltaWeights<'_>,
        input: &DeltaInput<'_>,
        (pool, layer): (&PagePool, usize),
        seqs: &[DeltaSeq],
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "delta_net";
        let rows = sizes.check(pool, layer, seqs)?;
        let (channels, values, heads) = (sizes.channels(), sizes.values(), sizes.value_heads);
        let net = Delta {
            conv: self.floats(op, "conv", weights.conv, channels * sizes.kernel)?,
            dt_bias: self.floats(op, "dt_bias", weights.dt_bias, heads)?,
            decay: self.floats(op, "decay", weights.decay, heads)?,
            norm: self.floats(op, "norm", weights.norm, sizes.value_dim)?,
            eps: weights.eps,
            sizes,
        };
        let mixed = self.floats(op, "mixed", input.mixed, product(op, &[rows, channels])?)?;
        let z = self.floats(op, "z", input.z, product(op, &[rows, values])?)?;
        let b = self.floats(op, "b", input.b, product(op, &[rows, heads])?)?;
        let a = self.floats(op, "a", input.a, product(op, &[rows, heads])?)?;
        let y = self.floats_mut(op, "out", out, product(op, &[rows, values])?)?;
        for seq in seqs {
            let mut state = vec![0.0; sizes.state()];
            if seq.resumes {
                decode_row(KvDtype::F32, pool.read(layer)?.page(seq.slot)?, &mut state);
            }
            let put = |slot: u32, state: &[f32]| -> Result<(), KernelError> {
                encode_row(KvDtype::F32, state, pool.write(layer)?.page(slot)?);
                Ok(())
            };
            for taken in 0..seq.rows {
                let row = seq.first + taken;
                let token = Token {
                    mixed: &mixed[row * channels..][..channels],
                    b: &b[row * heads..][..heads],
                    a: &a[row * heads..][..heads],
                    z: &z[row * values..][..values],
                };
                net.token(&mut state, &token, &mut y[row * values..][..values]);
                for (_, slot) in seq.saves.iter().filter(|(after, _)| *after == taken + 1) {
                    put(*slot, &state)?;
                }
            }
            put(seq.slot, &state)?;
        }
        Ok(())
    }

    fn compress(
        &self,
        spec: &Compress<'_>,
        plan: &CompressPlan,
        values: &Buf,
        scores: &Buf,
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "compress";
        let (width, dim) = (spec.width(), spec.dim);
        let positions = self.indices(op, "positions", spec.positions)?;
        let rows = positions.len();
        spec.check(plan, rows)?;
        let need = product(op, &[rows, width])?;
        let values = self.floats(op, "values", values, need)?;
        let scores = self.floats(op, "scores", scores, need)?;
        let ape = self.floats(op, "ape", spec.ape, product(op, &[spec.ratio, width])?)?;
        let mut states = vec![0.0; 2 * need];
        for (row, state) in states.chunks_exact_mut(2 * width).enumerate() {
            state[..width].copy_from_slice(&values[row * width..][..width]);
            let ape = &ape[positions[row] as usize % spec.ratio * width..][..width];
            for ((out, score), ape) in state[width..].iter_mut().zip(&scores[row * width..]).zip(ape) {
                *out = score + ape;
            }
        }
        let layout = spec.states.layout();
        let out = self.floats_mut(op, "out", out, product(op, &[plan.rows(), dim])?)?;
        let layer = spec.states.pool().read(spec.states.layer())?;
        for (sources, out) in plan.sources.chunks_exact(plan.tokens.max(1)).zip(out.chunks_exact_mut(dim)) {
            let mut tokens: Vec<(Vec<f32>, usize)> = Vec::with_capacity(sources.len());
            for (index, source) in sources.iter().enumerate() {
                let half = if spec.overlapping && index >= sources.len() / 2 { dim } else { 0 };
                match source {
                    StateSource::None => {}
                    StateSource::New(row) => {
                        tokens.push((states[*row as usize * 2 * width..][..2 * width].to_vec(), half))
                    }
                    StateSource::Kept(slot) => {
                        let mut state = vec![0.0; 2 * width];
                        let (page, index) = (*slot / layout.page_rows as u32, *slot as usize % layout.page_rows);
                        layout.get(layer.page(page)?, index, &mut state);
                        tokens.push((state, half));
                    }
                }
            }
            let tokens: Vec<(&[f32], usize)> = tokens.iter().map(|(state, half)| (state.as_slice(), *half)).collect();
            combine(&tokens, width, out);
        }
        drop(layer);
        let mut layer = spec.states.pool().write(spec.states.layer())?;
        for (row, slot) in &plan.kept {
            let (page, index) = (*slot / layout.page_rows as u32, *slot as usize % layout.page_rows);
            layout.put(layer.page(page)?, index, &states[*row as usize * 2 * width..][..2 * width]);
        }
        Ok(())
    }

    fn hyper_enter(
        &self,
        streams: &Buf,
        mixes: &Buf,
        mix: &HyperMix<'_>,
        (rows, hidden): (usize, usize),
        input: &mut Buf,
        backs: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "hyper_enter";
        let streams = self.floats(op, "streams", streams, product(op, &[rows, STREAMS, hidden])?)?;
        let mixes = self.floats(op, "mixes", mixes, product(op, &[rows, MIXES])?)?;
        let base = self.floats(op, "base", mix.base, MIXES)?;
        let scale = self.floats(op, "scale", mix.scale, 3)?;
        let input = self.floats_mut(op, "input", input, rows * hidden)?;
        let backs = self.floats_mut(op, "backs", backs, product(op, &[rows, BACKS])?)?;
        for row in 0..rows {
            let streams = &streams[row * STREAMS * hidden..][..STREAMS * hidden];
            let mixes = over_rms(&mixes[row * MIXES..][..MIXES], streams, mix.norm_eps);
            let at = |index: usize, kind: usize| mixes[index] * scale[kind] + base[index];
            let input = &mut input[row * hidden..][..hidden];
            input.fill(0.0);
            for (stream, x) in streams.chunks_exact(hidden).enumerate() {
                add_scaled(input, sigmoid(at(stream, 0)) + mix.eps, x);
            }
            let logits = std::array::from_fn(|j| std::array::from_fn(|k| at((2 + j) * STREAMS + k, 2)));
            let (post, among) = backs[row * BACKS..][..BACKS].split_at_mut(STREAMS);
            post.iter_mut().enumerate().for_each(|(stream, post)| *post = 2.0 * sigmoid(at(STREAMS + stream, 1)));
            among.copy_from_slice(doubly_stochastic(logits, mix.rounds, mix.eps).as_flattened());
        }
        Ok(())
    }

    fn hyper_leave(
        &self,
        streams: &mut Buf,
        backs: &Buf,
        y: &Buf,
        (rows, hidden): (usize, usize),
    ) -> Result<(), KernelError> {
        let op = "hyper_leave";
        let backs = self.floats(op, "backs", backs, product(op, &[rows, BACKS])?)?;
        let y = self.floats(op, "y", y, product(op, &[rows, hidden])?)?;
        let width = STREAMS * hidden;
        let streams = self.floats_mut(op, "streams", streams, rows * width)?;
        self.each_row(op, streams, width, rows, &|row, streams| {
            let (y, back) = (&y[row * hidden..][..hidden], &backs[row * BACKS..][..BACKS]);
            let before = streams.to_vec();
            for (k, stream) in streams.chunks_exact_mut(hidden).enumerate() {
                for (out, y) in stream.iter_mut().zip(y) {
                    *out = back[k] * y;
                }
                for (j, x) in before.chunks_exact(hidden).enumerate() {
                    add_scaled(stream, back[STREAMS + STREAMS * j + k], x);
                }
            }
        })
    }

    fn hyper_head(
        &self,
        streams: &Buf,
        mixes: &Buf,
        mix: &HyperOut<'_>,
        (rows, hidden): (usize, usize),
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "hyper_head";
        let streams = self.floats(op, "streams", streams, rows * STREAMS * hidden)?;
        let mixes = self.floats(op, "mixes", mixes, product(op, &[rows, STREAMS])?)?;
        let base = self.floats(op, "base", mix.base, STREAMS)?;
        let out = self.floats_mut(op, "out", out, rows * hidden)?;
        for row in 0..rows {
            let streams = &streams[row * STREAMS * hidden..][..STREAMS * hidden];
            let mixes = over_rms(&mixes[row * STREAMS..][..STREAMS], streams, mix.norm_eps);
            let out = &mut out[row * hidden..][..hidden];
            out.fill(0.0);
            for (stream, x) in streams.chunks_exact(hidden).enumerate() {
                add_scaled(out, sigmoid(mixes[stream] * mix.scale + base[stream]) + mix.eps, x);
            }
        }
        Ok(())
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
