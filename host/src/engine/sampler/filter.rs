//! Temperature, softmax, `top_k`, `top_p`, `min_p`, and the draw.

use crate::engine::params::SamplingParams;

/// A token that may be drawn.
#[derive(Clone, Copy)]
struct Candidate {
    token: u32,
    logit: f32,
    /// `exp((logit - max) / temperature)`: probability up to the common divisor.
    weight: f32,
}

/// Scratch memory of the draw.
#[derive(Default)]
pub(super) struct Filter {
    weights: Vec<f32>,
    candidates: Vec<Candidate>,
}

impl Filter {
    /// Draws from `row`, whose largest value is `max`, with a uniform number in [0, 1). `None`
    /// only if no token has any weight.
    pub fn draw(&mut self, row: &[f32], max: f32, params: &SamplingParams, uniform: f64) -> Option<u32> {
        let total = self.softmax(row, max, params.temperature);
        if params.top_k.is_none() && params.top_p >= 1.0 && params.min_p <= 0.0 {
            let weights = (0u32..).zip(self.weights.iter().copied());
            return pick(weights, total * uniform);
        }
        self.keep(row, params, total);
        // In order of ids, as without filters, and as devices that choose by themselves do it.
        self.candidates.sort_unstable_by_key(|candidate| candidate.token);
        let kept: f64 = self.candidates.iter().map(|c| f64::from(c.weight)).sum();
        pick(self.candidates.iter().map(|c| (c.token, c.weight)), kept * uniform)
    }

    /// Fills the weights and returns their sum. The largest weight is 1.
    fn softmax(&mut self, row: &[f32], max: f32, temperature: f32) -> f64 {
        self.weights.clear();
        if max == f32::INFINITY {
            // Infinite logits share all of the probability.
            self.weights.extend(row.iter().map(|&l| f32::from(u8::from(l == max))));
        } else {
            self.weights.extend(row.iter().map(|&l| ((l - max) / temperature).exp()));
        }
        self.weights.iter().map(|&w| f64::from(w)).sum()
    }

    /// Leaves in `candidates` what `top_k`, `top_p` and `min_p` all keep, likeliest first, equal
    /// ones by lowest id. Each keeps a front part of that order, so together they keep the
    /// shortest of the three.
    fn keep(&mut self, row: &[f32], params: &SamplingParams, total: f64) {
        // Tokens rarer than this are too rare to be in the nucleus even if all of the rest of the
        // vocabulary were like them; not sorting them changes nothing. Half of it is margin
        // for rounding.
        let rarest = 0.5 * (1.0 - f64::from(params.top_p)) * total / self.weights.len().max(1) as f64;
        let candidates = &mut self.candidates;
        candidates.clear();
        candidates.extend(
            (0u32..)
                .zip(row.iter().zip(&self.weights))
                .filter(|(_, (_, w))| **w >= params.min_p && f64::from(**w) >= rarest)
                .map(|(token, (&logit, &weight))| Candidate { token, logit, weight }),
        );
        let order = |a: &Candidate, b: &Candidate| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token));
        if let Some(k) = params.top_k {
            let k = k as usize;
            if k < candidates.len() {
                candidates.select_nth_unstable_by(k, order);
                candidates.truncate(k);
            }
        }
        candidates.sort_unstable_by(order);
        if params.top_p < 1.0 {
            let nucleus = f64::from(params.top_p) * total;
            let mut before = 0.0;
            let kept = candidates
                .iter()
                .take_while(|c| {
                    let keep = before <= nucleus;
                    before += f64::from(c.weight);
                    keep
                })
                .count();
            candidates.truncate(kept);
        }
    }
}

/// The first token at which the running sum of weights passes `point`; the last with any weight
/// where rounding leaves `point` beyond the sum.
fn pick(weights: impl Iterator<Item = (u32, f32)>, point: f64) -> Option<u32> {
    let mut sum = 0.0;
    let mut last = None;
    for (token, weight) in weights {
        if weight > 0.0 {
            sum += f64::from(weight);
            last = Some(token);
            if sum > point {
                break;
            }
        }
    }
    last
}
