//! Feed-forward blocks: the gated MLP, and experts behind a router.

use kvdock_kernels::rowmath::{add_scaled, sigmoid, silu, softmax, softplus, top_k};
use kvdock_kernels::{Buf, Device, Projection};

use super::{Linear, to_host};
use crate::ModelError;

/// How gate and up are put together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Activation {
    /// `silu(gate) · up`.
    Silu,
    /// `silu(min(gate, limit)) · clamp(up, -limit, limit)`.
    ClampedSilu { limit: f32 },
    /// `gate · sigmoid(alpha · gate) · (up + 1)`, gate at most `limit`, up within ±`limit`.
    GptOss { alpha: f32, limit: f32 },
}

/// A gated MLP.
pub(crate) struct Mlp {
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(crate) activation: Activation,
}

impl Mlp {
    pub(crate) fn apply(&self, device: &dyn Device, x: &Buf, rows: usize) -> Result<Buf, ModelError> {
        let width = self.gate.rows();
        let len = rows * width;
        let (mut gate, mut up) = (device.alloc(len)?, device.alloc(len)?);
        let mut products = [
            Projection { weight: &self.gate.weight, bias: self.gate.bias.as_ref(), out: &mut gate },
            Projection { weight: &self.up.weight, bias: self.up.bias.as_ref(), out: &mut up },
        ];
        device.linear(x, rows, &mut products)?;
        match self.activation {
            Activation::Silu => device.silu_mul(&mut gate, &up, len)?,
            Activation::ClampedSilu { limit } => {
                combine(device, &mut gate, &up, len, |gate, up| silu(gate.min(limit)) * up.clamp(-limit, limit))?
            }
            Activation::GptOss { alpha, limit } => combine(device, &mut gate, &up, len, |gate, up| {
                let gate = gate.min(limit);
                (up.clamp(-limit, limit) + 1.0) * (gate * sigmoid(gate * alpha))
            })?,
        }
        Ok(self.down.apply(device, &gate, rows)?)
    }
}

fn combine(
    device: &dyn Device,
    gate: &mut Buf,
    up: &Buf,
    len: usize,
    of: impl Fn(f32, f32) -> f32,
) -> Result<(), ModelError> {
    let (mut g, u) = (to_host(device, gate, len)?, to_host(device, up, len)?);
    g.iter_mut().zip(&u).for_each(|(gate, up)| *gate = of(*gate, *up));
    Ok(device.write(gate, 0, &g)?)
}

/// What a router's logits become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// The highest logits are chosen, and softmax is over those.
    SoftmaxOfChosen,
    Sigmoid,
    /// `sqrt(softplus(logit))`.
    SqrtSoftplus,
}

/// Picks experts for each row.
pub(crate) struct Router {
    /// `[experts, hidden]`.
    pub(crate) gate: Linear,
    pub(crate) scoring: Scoring,
    pub(crate) top_k: usize,
    /// Added to scores for the choice only.
    pub(crate) bias: Option<Vec<f32>>,
    /// Groups of experts, and how many groups are chosen from.
    pub(crate) groups: Option<(usize, usize)>,
    /// Chosen weights are divided by their sum.
    pub(crate) renormalize: bool,
    /// Factor on the weights.
    pub(crate) factor: f32,
    /// The experts of each token id, instead of a choice.
    pub(crate) by_token: Option<Vec<u32>>,
}

impl Router {
    /// The experts of one row and their weights.
    fn choose(&self, logits: &mut [f32], token: u32) -> (Vec<u32>, Vec<f32>) {
        match self.scoring {
            Scoring::Softmax => softmax(logits),
            Scoring::SoftmaxOfChosen => {}
            Scoring::Sigmoid => logits.iter_mut().for_each(|x| *x = sigmoid(*x)),
            Scoring::SqrtSoftplus => logits.iter_mut().for_each(|x| *x = softplus(*x).sqrt()),
        }
        let scores = &*logits;
        let experts = match &self.by_token {
            Some(table) => table[token as usize * self.top_k..][..self.top_k].to_vec(),
            None => {
                let mut biased = scores.to_vec();
                if let Some(bias) = &self.bias {
                    biased.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
                }
                if let Some((groups, chosen)) = self.groups {
                    keep_groups(&mut biased, groups, chosen);
                }
                top_k(&biased, self.top_k)
            }
        };
        let mut weights: Vec<f32> = experts.iter().map(|expert| scores[*expert as usize]).collect();
        if self.scoring == Scoring::SoftmaxOfChosen {
            softmax(&mut weights);
        }
        if self.renormalize {
            let sum = weights.iter().sum::<f32>() + 1e-20;
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        weights.iter_mut().for_each(|weight| *weight *= self.factor);
        (experts, weights)
    }
}

/// Leaves only the `chosen` groups whose two best scores add up to most.
fn keep_groups(scores: &mut [f32], groups: usize, chosen: usize) {
    let size = scores.len() / groups;
    let sums: Vec<f32> = scores
        .chunks_exact(size)
        .map(|group| top_k(group, 2).iter().map(|expert| group[*expert as usize]).sum())
        .collect();
    let kept = top_k(&sums, chosen);
    for (index, group) in scores.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&(index as u32)) {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

/// Experts behind a router, and an MLP that all rows share.
pub(crate) struct Moe {
    pub(crate) router: Router,
    /// Experts of the ranks before this one.
    pub(crate) first: usize,
    /// The experts that this rank holds.
    pub(crate) experts: Vec<Mlp>,
    /// This rank's columns of the shared MLP.
    pub(crate) shared: Option<Mlp>,
    /// `[1, hidden]`: the shared MLP is weighted with the sigmoid of its product.
    pub(crate) shared_gate: Option<Linear>,
}

impl Moe {
    /// `y = shared(x) + Σ weight · expert(x)`, of what this rank holds. A row's experts are added in order of their numbers, whatever
    /// else is in the step. `ids` are the rows' tokens.
    pub(crate) fn apply(&self, device: &dyn Device, x: &Buf, rows: usize, ids: &[u32]) -> Result<Buf, ModelError> {
        let count = self.router.gate.rows();
        let hidden = x.len() / rows.max(1);
        let mut logits = self.router.gate.to_host(device, x, rows)?;
        let mut parts: Vec<Vec<(u32, f32)>> = vec![Vec::new(); count];
        for (row, (logits, token)) in logits.chunks_exact_mut(count).zip(ids).enumerate() {
            let (experts, weights) = self.router.choose(logits, *token);
            for (expert, weight) in experts.iter().zip(weights) {
                parts[*expert as usize].push((row as u32, weight));
            }
        }
        let hidden = self.experts.first().map_or(hidden, |expert| expert.down.rows());
        let mut y = vec![0.0; rows * hidden];
        for (expert, part) in
            self.experts.iter().zip(parts.iter().skip(self.first)).filter(|(_, part)| !part.is_empty())
        {
            let picked: Vec<u32> = part.iter().map(|(row, _)| *row).collect();
            let mut input = device.alloc(picked.len() * hidden)?;
            device.gather_rows(x, hidden, &picked, &mut input)?;
            let output = expert.apply(device, &input, picked.len())?;
            let output = to_host(device, &output, picked.len() * hidden)?;
            for ((row, weight), output) in part.iter().zip(output.chunks_exact(hidden)) {
                add_scaled(&mut y[*row as usize * hidden..][..hidden], *weight, output);
            }
        }
        if let Some(shared) = &self.shared {
            let output = shared.apply(device, x, rows)?;
            let output = to_host(device, &output, rows * hidden)?;
            let weights = match &self.shared_gate {
                Some(gate) => gate.to_host(device, x, rows)?.into_iter().map(sigmoid).collect(),
                None => vec![1.0; rows],
            };
            for ((y, output), weight) in y.chunks_exact_mut(hidden).zip(output.chunks_exact(hidden)).zip(weights) {
                add_scaled(y, weight, output);
            }
        }
        Ok(device.upload(&y)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_kept_by_the_sum_of_their_two_best() {
        let mut scores = [0.9, 0.0, 0.0, 0.5, 0.5, 0.1, 0.2, 0.3, 0.1];
        keep_groups(&mut scores, 3, 1);
        let none = f32::NEG_INFINITY;
        assert_eq!(scores, [none, none, none, 0.5, 0.5, 0.1, none, none, none]);
        let mut scores = [0.1, 0.1, 0.1, 0.1];
        keep_groups(&mut scores, 2, 1);
        assert_eq!(scores, [0.1, 0.1, none, none], "the lower group among equals");
    }
}
