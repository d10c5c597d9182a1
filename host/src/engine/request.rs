//! What goes into the engine and what comes out of it.

use std::time::Duration;

use thiserror::Error;

use super::params::{ParamError, SamplingParams};

/// One request: a prompt and how to continue it.
#[derive(Debug, Clone)]
pub struct Request {
    /// Name of the request, unique among those in flight; abort goes by it.
    pub id: String,
    /// The prompt's tokens, at least one.
    pub prompt_ids: Vec<u32>,
    /// How tokens are chosen and when to stop.
    pub sampling: SamplingParams,
    /// Number of samples; they share the prompt's pages and carry the indices `0..n`.
    pub n: u32,
    /// Separates tenants: prefixes are shared only between requests of one salt.
    pub cache_salt: Option<String>,
    /// Further namespace of the cache, such as an adapter's name.
    pub extra_key: Option<String>,
    /// Conversation the request belongs to; handed to storage backends as a hint.
    pub session_id: Option<String>,
    /// Which log-probabilities are wanted.
    pub logprobs: LogprobOptions,
    /// Higher is admitted earlier; equal ones in order of arrival.
    pub priority: i32,
    /// Whether deltas are sent as tokens come. Without it the whole text comes in one
    /// [`Event::Delta`] before [`Event::Finished`].
    pub stream: bool,
}

impl Request {
    /// A request for one streamed sample with everything else at its default.
    pub fn new(id: impl Into<String>, prompt_ids: Vec<u32>, sampling: SamplingParams) -> Self {
        Self {
            id: id.into(),
            prompt_ids,
            sampling,
            n: 1,
            cache_salt: None,
            extra_key: None,
            session_id: None,
            logprobs: LogprobOptions::default(),
            priority: 0,
            stream: true,
        }
    }
}

/// Log-probabilities wanted. They are of the model's own distribution: log-softmax of the
/// logits before penalties, bias and temperature.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogprobOptions {
    /// For each generated token.
    pub output: bool,
    /// For prompt tokens from this position on. Pages before it may still come from the cache;
    /// from it on, the prompt is computed.
    pub prompt_start: Option<usize>,
    /// Likeliest tokens reported at each position, beside the chosen one.
    pub top: usize,
    /// Tokens reported at each position whatever their rank.
    pub token_ids: Vec<u32>,
}

/// Log-probabilities at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token at this position.
    pub token_id: u32,
    /// Its log-probability; `None` for the first token of a prompt, which nothing precedes.
    pub logprob: Option<f32>,
    /// The likeliest tokens, likeliest first, equal ones by lowest id.
    pub top: Vec<(u32, f32)>,
    /// The tokens of [`LogprobOptions::token_ids`], in its order.
    pub token_ids: Vec<(u32, f32)>,
}

/// What a request's stream carries. Every index of `0..n` gets at most one `Prompt`, any number
/// of `Delta`s and exactly one `Finished`; the stream ends when all are finished.
#[derive(Debug, Clone)]
pub enum Event {
    /// Log-probabilities of the prompt from [`LogprobOptions::prompt_start`] on; only if asked
    /// for, and before the first delta of that index.
    Prompt {
        /// Sample.
        index: u32,
        /// One entry a prompt token from `prompt_start` on.
        logprobs: Vec<TokenLogprobs>,
    },
    /// More output. The texts of one index joined are the whole text, to the byte.
    Delta {
        /// Sample.
        index: u32,
        /// New text; empty while it may still become a stop string or half a character.
        text: String,
        /// New tokens, with a matched stop token. `Delta`s joined are all completion tokens.
        token_ids: Vec<u32>,
        /// One entry for each of `token_ids` if output log-probabilities are wanted.
        logprobs: Vec<TokenLogprobs>,
        /// Tokens so far.
        usage: Usage,
    },
    /// The sample is complete.
    Finished {
        /// Sample.
        index: u32,
        /// Why it ended.
        reason: FinishReason,
        /// Token counts.
        usage: Usage,
        /// How often it was preempted for want of pages.
        preemptions: u32,
        /// Time from submission.
        elapsed: Duration,
    },
}

/// Why a sample ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop string, stop token or the model's end token.
    Stop(MatchedStop),
    /// `max_new_tokens`, the context or the pool was reached.
    Length {
        /// Completion tokens.
        length: u32,
    },
    /// It was ended from outside or failed.
    Abort {
        /// Who or what ended it.
        kind: AbortKind,
        /// For a person.
        message: String,
    },
}

/// What ended a sample that stopped by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MatchedStop {
    /// This token.
    Token(u32),
    /// This text.
    Text(String),
}

/// Why a request was aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbortKind {
    /// [`EngineHandle::abort`](super::EngineHandle::abort) was called.
    Requested,
    /// The stream was dropped.
    ClientGone,
    /// The engine stopped before the request was done.
    ShuttingDown,
    /// The forward pass, the sampler or the cache failed for it.
    Internal,
}

/// Token counts of a sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated, with a matched stop token.
    pub completion_tokens: u32,
    /// Prompt tokens whose KV was found in device pages.
    pub cached_device: u32,
    /// Prompt tokens whose KV was found in host pages.
    pub cached_host: u32,
    /// Prompt tokens whose KV came from storage.
    pub cached_storage: u32,
}

impl Usage {
    /// Prompt tokens that were not computed, from any tier.
    pub fn cached_tokens(&self) -> u32 {
        self.cached_device + self.cached_host + self.cached_storage
    }
}

/// A sample as a whole, from [`RequestStream::collect`](super::RequestStream::collect).
#[derive(Debug, Clone)]
pub struct Completion {
    /// Sample.
    pub index: u32,
    /// The whole text.
    pub text: String,
    /// All completion tokens.
    pub token_ids: Vec<u32>,
    /// One entry a completion token if wanted.
    pub logprobs: Vec<TokenLogprobs>,
    /// One entry a prompt token from `prompt_start` on if wanted.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    pub reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
    /// How often it was preempted for want of pages.
    pub preemptions: u32,
    /// Time from submission.
    pub elapsed: Duration,
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum SubmitError {
    /// The queue is full; answer 429.
    #[error("{queued} requests are queued, as many as engine.max_queued_requests allows; try again in {} s", retry_after.as_secs())]
    QueueFull {
        /// Requests waiting.
        queued: usize,
        /// Estimate of when a place is free, in whole seconds, at least one.
        retry_after: Duration,
    },
    /// A parameter is outside its range.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// The prompt has no tokens.
    #[error("the prompt has no tokens; at least one is needed")]
    EmptyPrompt,
    /// A prompt token is not in the vocabulary.
    #[error("prompt token {token} at position {position} is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// Its position in the prompt.
        position: usize,
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// Prompt and at least one new token do not fit in the context.
    #[error(
        "the prompt has {prompt_tokens} tokens, which with the tokens to generate is longer than the model's context length of {context_length}"
    )]
    ContextTooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens the model can attend to.
        context_length: usize,
    },
    /// Prompt and at least one new token do not fit in the device pool.
    #[error(
        "the prompt has {prompt_tokens} tokens, which with the tokens to generate is more than the device pool's {pool_tokens} (cache.device_tokens)"
    )]
    PoolTooSmall {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens the device pool holds.
        pool_tokens: usize,
    },
    /// A text that has more tokens than a prompt may have, whatever they are.
    #[error(
        "the prompt has at least {fewest} tokens, more than the {most} that a prompt may have (the model's context length, or cache.device_tokens \
         where that is less)"
    )]
    TextTooLong {
        /// A lower bound of its tokens.
        fewest: usize,
        /// Most tokens of a request.
        most: usize,
    },
    /// A request of this name is in flight.
    #[error("a request with the id {0:?} is already in flight")]
    DuplicateId(String),
    /// The engine takes no more requests.
    #[error("the server is shutting down")]
    ShuttingDown,
}
