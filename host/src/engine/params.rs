//! Sampling parameters of a request and the rules they must obey.

use thiserror::Error;

/// Temperatures below this are greedy decoding.
const GREEDY_TEMPERATURE: f32 = 1e-6;

/// Most stop strings a request may carry.
const MAX_STOP_STRINGS: usize = 32;

/// A sampling parameter outside its range.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{field}: {message}")]
pub struct ParamError {
    /// Native name of the parameter, such as `top_p`.
    pub field: &'static str,
    /// What was found and what would be right.
    pub message: String,
}

/// How the next token is chosen and when generation stops.
///
/// Order of operations on a row of logits: frequency, presence and repetition penalties (over
/// *generated* tokens, as SGLang counts them), then `logit_bias`, then the mask of
/// `min_new_tokens`, then division by the temperature and softmax; `top_k`, `top_p` and `min_p`
/// are all judged on that one sorted distribution, and the sample is drawn from what all three
/// keep.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Most tokens to generate; `None` is as many as the context (or the pool) holds. 0 only
    /// processes the prompt.
    pub max_new_tokens: Option<u32>,
    /// End-of-sequence and stop tokens are not sampled before this many tokens.
    pub min_new_tokens: u32,
    /// At least 0 and finite; below 1e-6 is greedy.
    pub temperature: f32,
    /// In (0, 1]: keeps a token while the probability of all likelier ones is at most this.
    pub top_p: f32,
    /// Number of likeliest tokens kept; `None` keeps all.
    pub top_k: Option<u32>,
    /// In [0, 1]: drops tokens less likely than this fraction of the likeliest.
    pub min_p: f32,
    /// In [-2, 2]: subtracted once for each time a token was generated.
    pub frequency_penalty: f32,
    /// In [-2, 2]: subtracted from tokens that were generated at all.
    pub presence_penalty: f32,
    /// In (0, 2]: divides positive and multiplies negative logits of generated tokens.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens; each bias in [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// Same seed, prompt and position: same token, whatever else is in the batch. `None` draws
    /// a seed when the request is submitted. Sample `i` of `n` uses `seed + i`.
    pub seed: Option<i64>,
    /// Texts that end the generation; not part of the output unless `no_stop_trim`.
    pub stop: Vec<String>,
    /// Tokens that end the generation, beside the model's own end tokens.
    pub stop_token_ids: Vec<u32>,
    /// Generate on past the model's own end tokens (`stop_token_ids` still stop).
    pub ignore_eos: bool,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
    /// Keep the matched stop string or stop token in the text.
    pub no_stop_trim: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_new_tokens: None,
            min_new_tokens: 0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            skip_special_tokens: true,
            no_stop_trim: false,
        }
    }
}

impl SamplingParams {
    /// Whether the likeliest token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_TEMPERATURE || self.top_k == Some(1)
    }

    /// Whether penalties need the counts of generated tokens.
    pub(crate) fn has_penalties(&self) -> bool {
        self.frequency_penalty != 0.0 || self.presence_penalty != 0.0 || self.repetition_penalty != 1.0
    }

    /// Checks every range; `vocab_size` bounds the token ids.
    pub fn validate(&self, vocab_size: usize) -> Result<(), ParamError> {
        let in_range = |field, value: f32, low: f32, high: f32| {
            if value.is_finite() && value >= low && value <= high {
                return Ok(());
            }
            bad(field, format!("{value} is not between {low} and {high}"))
        };
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return bad("temperature", format!("{} is not a finite number of at least 0", self.temperature));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad("top_p", format!("{} is not above 0 and at most 1", self.top_p));
        }
        if self.top_k == Some(0) {
            return bad("top_k", "0 keeps no token; use -1 for all or at least 1".into());
        }
        in_range("min_p", self.min_p, 0.0, 1.0)?;
        in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty <= 2.0) {
            return bad("repetition_penalty", format!("{} is not above 0 and at most 2", self.repetition_penalty));
        }
        if let Some(max) = self.max_new_tokens
            && self.min_new_tokens > max
        {
            return bad("min_new_tokens", format!("{} is more than max_new_tokens, {max}", self.min_new_tokens));
        }
        for &(token, bias) in &self.logit_bias {
            if token as usize >= vocab_size {
                return bad("logit_bias", format!("token {token} is outside the vocabulary of {vocab_size}"));
            }
            in_range("logit_bias", bias, -100.0, 100.0)?;
        }
        if let Some(token) = self.stop_token_ids.iter().find(|&&t| t as usize >= vocab_size) {
            return bad("stop_token_ids", format!("token {token} is outside the vocabulary of {vocab_size}"));
        }
        if self.stop.len() > MAX_STOP_STRINGS {
            return bad("stop", format!("{} stop strings; at most {MAX_STOP_STRINGS}", self.stop.len()));
        }
        if self.stop.iter().any(String::is_empty) {
            return bad("stop", "an empty stop string would stop everything".into());
        }
        Ok(())
    }
}

fn bad(field: &'static str, message: String) -> Result<(), ParamError> {
    Err(ParamError { field, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field_of(change: impl FnOnce(&mut SamplingParams)) -> Option<&'static str> {
        let mut params = SamplingParams::default();
        change(&mut params);
        params.validate(100).err().map(|e| e.field)
    }

    #[test]
    fn defaults_are_valid() {
        assert_eq!(field_of(|_| ()), None);
    }

    #[test]
    fn each_range_is_checked_and_named() {
        assert_eq!(field_of(|p| p.temperature = -0.1), Some("temperature"));
        assert_eq!(field_of(|p| p.temperature = f32::INFINITY), Some("temperature"));
        assert_eq!(field_of(|p| p.top_p = 0.0), Some("top_p"));
        assert_eq!(field_of(|p| p.top_p = f32::NAN), Some("top_p"));
        assert_eq!(field_of(|p| p.top_k = Some(0)), Some("top_k"));
        assert_eq!(field_of(|p| p.min_p = 1.5), Some("min_p"));
        assert_eq!(field_of(|p| p.frequency_penalty = 2.5), Some("frequency_penalty"));
        assert_eq!(field_of(|p| p.presence_penalty = -2.5), Some("presence_penalty"));
        assert_eq!(field_of(|p| p.repetition_penalty = 0.0), Some("repetition_penalty"));
        assert_eq!(field_of(|p| p.logit_bias = vec![(100, 1.0)]), Some("logit_bias"));
        assert_eq!(field_of(|p| p.logit_bias = vec![(1, 101.0)]), Some("logit_bias"));
        assert_eq!(field_of(|p| p.stop_token_ids = vec![100]), Some("stop_token_ids"));
        assert_eq!(field_of(|p| p.stop = vec![String::new()]), Some("stop"));
        assert_eq!(field_of(|p| p.stop = vec!["x".into(); 33]), Some("stop"));
        let min_over_max = field_of(|p| {
            p.max_new_tokens = Some(3);
            p.min_new_tokens = 4;
        });
        assert_eq!(min_over_max, Some("min_new_tokens"));
    }

    #[test]
    fn greedy_by_temperature_or_top_k() {
        let mut params = SamplingParams { temperature: 0.0, ..Default::default() };
        assert!(params.is_greedy());
        params.temperature = 1.0;
        assert!(!params.is_greedy());
        params.top_k = Some(1);
        assert!(params.is_greedy());
    }
}
