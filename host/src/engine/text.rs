//! From tokens to the text of a sample.

use std::sync::Arc;

use kvdock_models::{DecodeStream, Tokenizer};

use super::params::SamplingParams;
use super::request::MatchedStop;
use super::stop::StopMatcher;

/// Turns tokens into text as they come, never giving out half a character.
pub(crate) trait TokenDecoder: Send {
    /// Takes the next token and returns the text that is now certain.
    fn push(&mut self, token: u32) -> String;
    /// Ends the text: what is still incomplete becomes U+FFFD.
    fn finish(&mut self) -> String;
}

impl TokenDecoder for DecodeStream {
    fn push(&mut self, token: u32) -> String {
        Self::push(self, token)
    }

    fn finish(&mut self) -> String {
        Self::finish(self)
    }
}

/// Makes the decoder of a sample; the argument says whether special tokens are left out.
pub(crate) type MakeDecoder = Box<dyn Fn(bool) -> Box<dyn TokenDecoder> + Send>;

/// Decoders of a model's own tokenizer.
pub(crate) fn tokenizer_decoders(tokenizer: Arc<Tokenizer>) -> MakeDecoder {
    Box::new(move |skip_special| Box::new(DecodeStream::new(Arc::clone(&tokenizer), skip_special)))
}

/// Decodes a sample's tokens and looks for its stop strings and stop tokens.
pub(crate) struct OutputText {
    decoder: Box<dyn TokenDecoder>,
    stops: StopMatcher,
    /// Tokens that end the sample.
    stop_tokens: Vec<u32>,
    keep_match: bool,
    /// Tokens during which stop strings are not looked for.
    min_new_tokens: u32,
    tokens: u32,
}

/// What a token added.
pub(crate) struct TextStep {
    /// Text that is now certain.
    pub text: String,
    /// What ended the sample.
    pub matched: Option<MatchedStop>,
}

impl OutputText {
    /// `stop_tokens` are all tokens that end the sample.
    pub fn new(decoder: Box<dyn TokenDecoder>, params: &SamplingParams, stop_tokens: Vec<u32>) -> Self {
        Self {
            decoder,
            stops: StopMatcher::new(params.stop.clone(), params.no_stop_trim),
            stop_tokens,
            keep_match: params.no_stop_trim,
            min_new_tokens: params.min_new_tokens,
            tokens: 0,
        }
    }

    /// Tokens that must not be chosen next, because it is too early to stop.
    pub fn masked(&self) -> &[u32] {
        if self.tokens < self.min_new_tokens { &self.stop_tokens } else { &[] }
    }

    /// Takes the next token.
    pub fn push(&mut self, token: u32) -> TextStep {
        self.tokens += 1;
        if self.stop_tokens.contains(&token) {
            // A stop token is no part of the text, unless it is to be kept.
            let last = if self.keep_match { self.decoder.push(token) } else { String::new() };
            let mut text = self.stops.pass(&last);
            text.push_str(&self.finish());
            return TextStep { text, matched: Some(MatchedStop::Token(token)) };
        }
        let piece = self.decoder.push(token);
        if self.tokens <= self.min_new_tokens {
            return TextStep { text: self.stops.pass(&piece), matched: None };
        }
        let step = self.stops.push(&piece);
        TextStep { text: step.text, matched: step.matched.map(MatchedStop::Text) }
    }

    /// Ends the text without a match: gives out what was held back.
    pub fn finish(&mut self) -> String {
        let tail = self.decoder.finish();
        self.stops.pass(&tail)
    }
}
