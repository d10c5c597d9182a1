//! The same choice on a device that makes it itself.

use std::collections::BTreeMap;

use kvdock_kernels::{SampleRow, Sampled};

use super::{Draw, SampleError, random};

/// What a device is told of the choice of one token.
pub(crate) struct DeviceDraw {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    uniform: f64,
    penalties: [f32; 3],
    counts: Vec<(u32, u32)>,
    biases: Vec<(u32, f32)>,
}

impl DeviceDraw {
    /// The choice that [`super::Sampler::sample`] would make, among `vocab` tokens.
    pub fn new(draw: &Draw<'_>, vocab: usize) -> Self {
        let params = draw.params;
        let known = |token: u32| (token as usize) < vocab;
        let greedy = params.is_greedy();
        let mut counts = Vec::new();
        if params.has_penalties() {
            counts.extend(
                draw.generated.iter().map(|(token, count)| (*token, *count)).filter(|(token, _)| known(*token)),
            );
        }
        // A device takes each token once.
        let mut biases = BTreeMap::new();
        for &(token, bias) in params.logit_bias.iter().filter(|(token, _)| known(*token)) {
            *biases.entry(token).or_insert(0.0) += bias;
        }
        biases.extend(draw.masked.iter().filter(|token| known(**token)).map(|token| (*token, f32::NEG_INFINITY)));
        Self {
            temperature: if greedy { 0.0 } else { params.temperature },
            top_k: params.top_k.unwrap_or(0),
            top_p: params.top_p,
            min_p: params.min_p,
            uniform: if greedy { 0.0 } else { random::uniform(draw.seed, draw.position) },
            penalties: [params.frequency_penalty, params.presence_penalty, params.repetition_penalty],
            counts,
            biases: biases.into_iter().collect(),
        }
    }

    /// The largest of a row that nobody asks for.
    pub fn unwanted() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            uniform: 0.0,
            penalties: [0.0, 0.0, 1.0],
            counts: Vec::new(),
            biases: Vec::new(),
        }
    }

    /// As the device takes it.
    pub fn row(&self) -> SampleRow<'_> {
        SampleRow {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            uniform: self.uniform,
            penalties: self.penalties,
            counts: &self.counts,
            biases: &self.biases,
        }
    }
}

/// The token that a device has chosen.
pub(crate) fn chosen(sampled: Sampled) -> Result<u32, SampleError> {
    match sampled {
        Sampled::Token(token) => Ok(token),
        Sampled::NotANumber => Err(SampleError::NotANumber),
        Sampled::NothingLeft => Err(SampleError::NothingLeft),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::engine::params::SamplingParams;

    #[test]
    fn a_device_is_told_each_token_once_and_none_beyond_the_vocabulary() {
        let params = SamplingParams {
            temperature: 0.5,
            top_k: Some(3),
            frequency_penalty: 0.25,
            logit_bias: vec![(4, 1.0), (4, 0.5), (2, -1.0), (99, 5.0)],
            ..SamplingParams::default()
        };
        let generated = HashMap::from([(1, 2), (98, 1)]);
        let draw = Draw { params: &params, seed: 7, position: 3, generated: &generated, masked: &[2, 97] };
        let told = DeviceDraw::new(&draw, 10);
        let row = told.row();
        assert_eq!(row.counts, [(1, 2)]);
        assert_eq!(row.biases, [(2, f32::NEG_INFINITY), (4, 1.5)]);
        assert_eq!((row.temperature, row.top_k, row.penalties[0]), (0.5, 3, 0.25));
        assert_eq!(row.uniform, random::uniform(7, 3));
        let greedy = SamplingParams { temperature: 0.0, ..params.clone() };
        let row = DeviceDraw::new(&Draw { params: &greedy, ..draw }, 10);
        assert_eq!((row.row().temperature, row.row().uniform), (0.0, 0.0));
    }

    #[test]
    fn marks_of_a_device_are_errors() {
        assert_eq!(chosen(Sampled::Token(5)), Ok(5));
        assert_eq!(chosen(Sampled::NotANumber), Err(SampleError::NotANumber));
        assert_eq!(chosen(Sampled::NothingLeft), Err(SampleError::NothingLeft));
        assert_eq!(DeviceDraw::unwanted().row().temperature, 0.0);
    }
}
