//! Experts: each one's rows together, and their outputs added in order of the experts' numbers.

use super::super::device::{CpuDevice, product, shape};
use crate::device::{Buf, Device, Projection, Weight};
use crate::error::KernelError;
use crate::ops::{Activation, ElementOps, ExpertOps, ExpertWeights, Experts, RouteSpec, Routing, Scoring};
use crate::rowmath::{add_scaled, sigmoid, softmax, softplus, top_k};

/// Experts of each row and their weights, row by row.
struct Chosen {
    experts: Vec<u32>,
    weights: Vec<f32>,
}

struct Group {
    experts: Vec<ExpertWeights>,
    activation: Activation,
}

/// The experts of one row and their weights.
fn choose(
    spec: &RouteSpec<'_>,
    bias: Option<&[f32]>,
    given: Option<&[u32]>,
    logits: &mut [f32],
) -> (Vec<u32>, Vec<f32>) {
    match spec.scoring {
        Scoring::Softmax => softmax(logits),
        Scoring::SoftmaxOfChosen => {}
        Scoring::Sigmoid => logits.iter_mut().for_each(|x| *x = sigmoid(*x)),
        Scoring::SqrtSoftplus => logits.iter_mut().for_each(|x| *x = softplus(*x).sqrt()),
    }
    let scores = &*logits;
    let experts = match given {
        Some(given) => given.to_vec(),
        None => {
            let mut biased = scores.to_vec();
            if let Some(bias) = bias {
                biased.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
            }
            if let Some((groups, chosen)) = spec.groups {
                keep_groups(&mut biased, groups, chosen);
            }
            top_k(&biased, spec.top_k)
        }
    };
    let mut weights: Vec<f32> = experts.iter().map(|expert| scores[*expert as usize]).collect();
    if spec.scoring == Scoring::SoftmaxOfChosen {
        softmax(&mut weights);
    }
    if spec.renormalize {
        let sum = weights.iter().sum::<f32>() + 1e-20;
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }
    weights.iter_mut().for_each(|weight| *weight *= spec.factor);
    (experts, weights)
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

fn projection<'a>((weight, bias): &'a (Weight, Option<Buf>), out: &'a mut Buf) -> Projection<'a> {
    Projection { weight, bias: bias.as_ref(), out }
}

impl CpuDevice {
    fn expert(&self, expert: &ExpertWeights, activation: Activation, x: &Buf, rows: usize) -> Result<Buf, KernelError> {
        let len = rows * expert.gate.0.shape().rows;
        let (mut gate, mut up) = (self.alloc(len)?, self.alloc(len)?);
        self.linear(x, rows, &mut [projection(&expert.gate, &mut gate), projection(&expert.up, &mut up)])?;
        self.activate(activation, &mut gate, &up, len)?;
        let mut out = self.alloc(rows * expert.down.0.shape().rows)?;
        self.linear(&gate, rows, &mut [projection(&expert.down, &mut out)])?;
        Ok(out)
    }
}

impl ExpertOps for CpuDevice {
    fn group_experts(
        &self,
        experts: Vec<ExpertWeights>,
        activation: Activation,
        first: usize,
    ) -> Result<Experts, KernelError> {
        let hidden = ExpertWeights::check_alike(&experts)?;
        Ok(Experts::from_parts(first, experts.len(), hidden, Box::new(Group { experts, activation })))
    }

    fn route(&self, logits: &Buf, rows: usize, spec: &RouteSpec<'_>, ids: &[u32]) -> Result<Routing, KernelError> {
        let op = "route";
        spec.check(rows, ids)?;
        let RouteSpec { count, top_k, .. } = *spec;
        let logits = self.floats(op, "logits", logits, product(op, &[rows, count])?)?;
        let bias = match spec.bias {
            Some(bias) => Some(self.floats(op, "bias", bias, count)?),
            None => None,
        };
        let table = match spec.by_token {
            Some(table) => Some(self.indices(op, "the experts by token", table)?),
            None => None,
        };
        let mut chosen = Chosen { experts: Vec::new(), weights: Vec::new() };
        for row in 0..rows {
            let given = match table {
                Some(table) => {
                    let index = ids[row];
                    let given = table.get(index as usize * top_k..).and_then(|rest| rest.get(..top_k));
                    let rows = table.len() / top_k;
                    Some(given.ok_or(KernelError::Index { op, row, index, rows })?)
                }
                None => None,
            };
            let mut logits = logits[row * count..][..count].to_vec();
            let (experts, weights) = choose(spec, bias, given, &mut logits);
            chosen.experts.extend(experts);
            chosen.weights.extend(weights);
        }
        Ok(Routing::from_parts(rows, top_k, Box::new(chosen)))
    }

    fn run_experts(
        &self,
        x: &Buf,
        rows: usize,
        routing: &Routing,
        experts: &Experts,
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "run_experts";
        let chosen: &Chosen = routing.downcast_ref().ok_or_else(|| self.foreign(op, "routing"))?;
        let group: &Group = experts.downcast_ref().ok_or_else(|| self.foreign(op, "experts"))?;
        if routing.rows() != rows {
            return Err(shape(op, "rows", routing.rows().to_string(), rows.to_string()));
        }
        let hidden = experts.hidden();
        let need = product(op, &[rows, hidden])?;
        self.floats(op, "x", x, need)?;
        let mut parts: Vec<Vec<(u32, f32)>> = vec![Vec::new(); experts.count()];
        for (pair, (expert, weight)) in chosen.experts.iter().zip(&chosen.weights).enumerate() {
            let held = (*expert as usize).checked_sub(experts.first());
            if let Some(part) = held.and_then(|held| parts.get_mut(held)) {
                part.push(((pair / routing.top_k()) as u32, *weight));
            }
        }
        let mut y = vec![0.0; need];
        for (expert, part) in group.experts.iter().zip(&parts).filter(|(_, part)| !part.is_empty()) {
            let picked: Vec<u32> = part.iter().map(|(row, _)| *row).collect();
            let mut input = self.alloc(picked.len() * hidden)?;
            self.gather_rows(x, hidden, &picked, &mut input)?;
            let output = self.expert(expert, group.activation, &input, picked.len())?;
            let output = self.floats(op, "output", &output, picked.len() * hidden)?;
            for ((row, weight), output) in part.iter().zip(output.chunks_exact(hidden)) {
                add_scaled(&mut y[*row as usize * hidden..][..hidden], *weight, output);
            }
        }
        self.floats_mut(op, "out", out, need)?.copy_from_slice(&y);
        Ok(())
    }

    fn add_gated(
        &self,
        y: &mut Buf,
        x: &Buf,
        gates: Option<&Buf>,
        rows: usize,
        width: usize,
    ) -> Result<(), KernelError> {
        let op = "add_gated";
        let need = product(op, &[rows, width])?;
        let x = self.floats(op, "x", x, need)?;
        let gates = match gates {
            Some(gates) => Some(self.floats(op, "gates", gates, rows)?),
            None => None,
        };
        let y = self.floats_mut(op, "y", y, need)?;
        self.each_row(op, y, width, rows, &|row, y| {
            let factor = gates.map_or(1.0, |gates| sigmoid(gates[row]));
            add_scaled(y, factor, &x[row * width..][..width]);
        })
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
