//! From a row of logits to a token.
//!
//! The order is that of [`SamplingParams`]: penalties, bias, mask, temperature, softmax, then
//! `top_k`, `top_p` and `min_p` judged on one sorted distribution, then the draw. Greedy decoding
//! stops after the mask and takes the largest logit, of equal ones the lowest id.

mod filter;
mod logprobs;
mod on_device;
mod random;

use std::collections::HashMap;

use thiserror::Error;

use super::params::SamplingParams;

pub(crate) use logprobs::LogprobReader;
pub(crate) use on_device::{DeviceDraw, chosen};

/// Why no token could be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum SampleError {
    #[error("the model's logits hold a value that is no number")]
    NotANumber,
    #[error("no token is left to sample: all logits are minus infinity")]
    NothingLeft,
}

/// What the choice of one token depends on beside its logits.
pub(crate) struct Draw<'a> {
    pub params: &'a SamplingParams,
    /// Seed of the sample.
    pub seed: i64,
    /// Absolute position of the token to be chosen.
    pub position: u64,
    /// How often each token was generated so far.
    pub generated: &'a HashMap<u32, u32>,
    /// Tokens that must not be chosen.
    pub masked: &'a [u32],
}

/// Chooses tokens; keeps its memory between calls.
#[derive(Default)]
pub(crate) struct Sampler {
    filter: filter::Filter,
}

impl Sampler {
    /// Chooses a token from `row`, which is left changed.
    pub fn sample(&mut self, row: &mut [f32], draw: &Draw<'_>) -> Result<u32, SampleError> {
        let params = draw.params;
        if params.has_penalties() {
            penalise(row, params, draw.generated);
        }
        for &(token, bias) in &params.logit_bias {
            if let Some(logit) = row.get_mut(token as usize) {
                *logit += bias;
            }
        }
        for &token in draw.masked {
            if let Some(logit) = row.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        let (best, max) = argmax(row)?;
        if params.is_greedy() {
            return Ok(best);
        }
        let uniform = random::uniform(draw.seed, draw.position);
        Ok(self.filter.draw(row, max, params, uniform).unwrap_or(best))
    }
}

/// Frequency and presence penalties are subtracted, then the repetition penalty scales.
fn penalise(row: &mut [f32], params: &SamplingParams, generated: &HashMap<u32, u32>) {
    for (&token, &count) in generated {
        let Some(logit) = row.get_mut(token as usize) else { continue };
        *logit -= params.frequency_penalty * count as f32 + params.presence_penalty;
        if *logit > 0.0 {
            *logit /= params.repetition_penalty;
        } else {
            *logit *= params.repetition_penalty;
        }
    }
}

/// Logits that are looked at together.
const BLOCK: usize = 512;
/// Logits that are compared at a time.
const LANES: usize = 16;

/// The largest logit and the lowest id that has it.
fn argmax(row: &[f32]) -> Result<(u32, f32), SampleError> {
    let (mut first, mut most) = (0, f32::NEG_INFINITY);
    let mut numbers = true;
    for (number, block) in row.chunks(BLOCK).enumerate() {
        let (largest, all_numbers) = largest(block);
        numbers &= all_numbers;
        if largest > most {
            (first, most) = (number * BLOCK, largest);
        }
    }
    if !numbers {
        return Err(SampleError::NotANumber);
    }
    // Where it is matters in one block alone, which keeps the others' way free of branches.
    let at = row.iter().skip(first).position(|logit| *logit == most).filter(|_| most > f32::NEG_INFINITY);
    at.map(|at| ((first + at) as u32, most)).ok_or(SampleError::NothingLeft)
}

/// The largest of a block, and whether all of it are numbers.
fn largest(block: &[f32]) -> (f32, bool) {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    // As wide as what is compared: masks of another width would have to be packed.
    let mut strange = [0u32; LANES];
    let mut take = |part: &[f32]| {
        for ((lane, strange), &logit) in lanes.iter_mut().zip(&mut strange).zip(part) {
            *lane = if logit > *lane { logit } else { *lane };
            *strange |= u32::from(logit.is_nan());
        }
    };
    let (parts, rest) = block.as_chunks::<LANES>();
    parts.iter().for_each(|part| take(part));
    take(rest);
    (lanes.into_iter().fold(f32::NEG_INFINITY, f32::max), strange.iter().all(|lane| *lane == 0))
}

#[cfg(test)]
mod tests;
