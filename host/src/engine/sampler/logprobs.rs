//! Log-probabilities of the model's own distribution.

use crate::engine::request::TokenLogprobs;

/// Reads log-probabilities out of rows of logits as the model gave them.
#[derive(Default)]
pub(crate) struct LogprobReader {
    order: Vec<(u32, f32)>,
}

impl LogprobReader {
    /// Log-probabilities at one position: of `token`, of the `top` likeliest and of `token_ids`.
    pub fn read(&mut self, row: &[f32], token: u32, top: usize, token_ids: &[u32]) -> TokenLogprobs {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&l| f64::from(l - max).exp()).sum();
        let log_sum = sum.ln();
        let of = |logit: f32| (f64::from(logit - max) - log_sum) as f32;
        let of_token = |t: u32| row.get(t as usize).map_or(f32::NEG_INFINITY, |&logit| of(logit));
        TokenLogprobs {
            token_id: token,
            logprob: Some(of_token(token)),
            top: self.likeliest(row, top).iter().map(|&(t, logit)| (t, of(logit))).collect(),
            token_ids: token_ids.iter().map(|&t| (t, of_token(t))).collect(),
        }
    }

    /// The `n` largest logits, largest first, equal ones by lowest id.
    fn likeliest(&mut self, row: &[f32], n: usize) -> &[(u32, f32)] {
        self.order.clear();
        if n == 0 {
            return &self.order;
        }
        let compare = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        self.order.extend((0u32..).zip(row.iter().copied()));
        if n < self.order.len() {
            self.order.select_nth_unstable_by(n, compare);
            self.order.truncate(n);
        }
        self.order.sort_unstable_by(compare);
        &self.order
    }
}
