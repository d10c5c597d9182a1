//! A sample on its way through the scheduler.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;

use super::arrive::Arrival;
use crate::cache::{CacheNamespace, Grant, Miss, PageTables, RequestId, ReuseHints};
use crate::engine::memory::Slot;
use crate::engine::request::{AbortKind, Event, FinishReason, LogprobOptions, MatchedStop, TokenLogprobs, Usage};
use crate::engine::text::OutputText;
use crate::engine::{Request, SamplingParams};

/// What the samples of one request share.
pub(super) struct Group {
    /// Number of the request, rising in order of arrival.
    pub key: u64,
    pub id: String,
    pub sampling: SamplingParams,
    pub logprobs: LogprobOptions,
    pub namespace: CacheNamespace,
    pub session_id: Option<String>,
    pub samples: u32,
    pub priority: i32,
    pub stream: bool,
    pub events: UnboundedSender<Event>,
    pub submitted: Instant,
}

impl Group {
    pub fn new(key: u64, request: &mut Request, events: UnboundedSender<Event>, submitted: Instant) -> Self {
        Self {
            key,
            id: std::mem::take(&mut request.id),
            sampling: request.sampling.clone(),
            logprobs: request.logprobs.clone(),
            namespace: CacheNamespace::new(request.extra_key.take(), request.cache_salt.take()),
            session_id: request.session_id.take(),
            samples: request.n,
            priority: request.priority,
            stream: request.stream,
            events,
            submitted,
        }
    }

    /// Sends an event; a client that has gone is noticed elsewhere.
    pub fn send(&self, event: Event) {
        let _ = self.events.send(event);
    }

    /// Whether the stream was dropped.
    pub fn client_gone(&self) -> bool {
        self.events.is_closed()
    }
}

/// Where a sample stands with the cache while it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// The cache does not know it yet.
    New,
    /// Begun; storage may be fetching.
    Prefetch,
    /// Host pages are on their way to the device.
    Loading,
}

/// When things happened to a sample.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Times {
    /// First grant of pages.
    pub admitted: Option<Instant>,
    /// First forward pass.
    pub started: Option<Instant>,
    pub first_token: Option<Instant>,
    pub last_token: Option<Instant>,
}

/// Output that waits for the end of a sample whose client wants no deltas.
#[derive(Default)]
pub(super) struct Pending {
    pub text: String,
    pub token_ids: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
}

/// One sample of a request.
pub(super) struct Sequence {
    pub group: Arc<Group>,
    pub index: u32,
    /// Name inside the cache; rising in order of arrival.
    pub cache_id: RequestId,
    pub seed: i64,
    /// Prompt and output.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// `tokens` never grows beyond this.
    pub max_len: usize,
    /// Leading tokens whose KV is in `pages`.
    pub computed: usize,
    /// Its pages.
    pub tables: PageTables,
    /// What it was granted while it waits: the last of the pages still come from storage.
    pub early: Option<Grant>,
    /// The last of the pages that it was granted still come from storage.
    pub arrival: Option<Arrival>,
    /// Its own slot while it runs, where the model has pools of slots.
    pub slot: Option<Slot>,
    /// Tokens after which a recurrent state is worth saving, as others may branch off there.
    pub branch: Option<usize>,
    /// Tokens after which the last recurrent state was saved for others.
    pub saved: usize,
    pub wait: Wait,
    pub text: OutputText,
    /// Counts of generated tokens, kept only where penalties need them.
    pub generated: HashMap<u32, u32>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Whether the prompt's log-probabilities have been sent.
    pub prompt_told: bool,
    pub pending: Pending,
    pub usage: Usage,
    pub why: Vec<Miss>,
    pub preemptions: u32,
    pub times: Times,
    /// Set once it is to leave at the end of the step.
    pub ended: Option<FinishReason>,
    /// Whether what it computed last may be wrong.
    pub broken: bool,
    /// Whether its end has been told.
    pub reported: bool,
}

impl Drop for Sequence {
    /// A sample lost in a panic of the scheduler still tells its client.
    fn drop(&mut self) {
        if !self.reported {
            self.group.send(Event::Finished {
                index: self.index,
                reason: FinishReason::Abort { kind: AbortKind::Internal, message: "the scheduler failed".to_owned() },
                usage: self.usage,
                preemptions: self.preemptions,
                elapsed: self.group.submitted.elapsed(),
            });
        }
    }
}

impl Sequence {
    /// Tokens generated so far.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens whose KV is not computed yet; the last of them yields the next token.
    pub fn uncomputed(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Leading tokens whose KV is known to be right, not only promised.
    pub fn known(&self) -> usize {
        self.arrival.as_ref().map_or(self.computed, |arrival| arrival.known)
    }

    /// Whether the next step computes a single token after output.
    pub fn is_decoding(&self) -> bool {
        self.output_len() > 0 && self.uncomputed() == 1
    }

    /// First position whose row of logits is still needed for prompt log-probabilities; `None`
    /// if none is.
    pub fn next_prompt_row(&self) -> Option<usize> {
        let wanted = self.index == 0 && !self.prompt_told;
        let start = self.group.logprobs.prompt_start.filter(|_| wanted)?;
        // The token at position p is predicted by row p - 1. Position 0 has no row; its entry
        // is put in front at the end.
        let row = start.max(1) - 1 + self.prompt_logprobs.len();
        (row + 1 < self.prompt_len).then_some(row)
    }

    /// What the cache must know of the reuse of this sample.
    pub fn hints(&self) -> ReuseHints {
        ReuseHints {
            session_id: self.group.session_id.clone(),
            reuse_limit: self.next_prompt_row(),
            priority: self.group.priority,
        }
    }

    /// Tokens for which pages should be set aside: what is known and a part `ratio` of what may
    /// still be generated.
    pub fn expected_len(&self, ratio: f64) -> usize {
        /// An open end counts as no more than this.
        const MOST: usize = 2048;
        let rest = self.max_len.saturating_sub(self.tokens.len()).min(MOST);
        self.tokens.len() + (rest as f64 * ratio).ceil() as usize
    }

    /// Order of service: higher priority first, then order of arrival.
    pub fn rank(&self) -> (std::cmp::Reverse<i32>, RequestId) {
        (std::cmp::Reverse(self.group.priority), self.cache_id)
    }

    /// Sends what a step brought, or keeps it for the end.
    pub fn deliver(&mut self, text: String, token: u32, logprobs: Option<TokenLogprobs>) {
        self.usage.completion_tokens += 1;
        self.pending.text.push_str(&text);
        self.pending.token_ids.push(token);
        self.pending.logprobs.extend(logprobs);
        if self.group.stream {
            self.flush_pending();
        }
    }

    /// Sends what has been kept back, if anything.
    pub fn flush_pending(&mut self) {
        let Pending { text, token_ids, logprobs } = std::mem::take(&mut self.pending);
        if !text.is_empty() || !token_ids.is_empty() {
            let (index, usage) = (self.index, self.usage);
            self.group.send(Event::Delta { index, text, token_ids, logprobs, usage });
        }
    }

    /// Ends the sample with an error; what is computed and not yet in the tree is not kept.
    pub fn fail(&mut self, message: String) {
        tracing::error!(request = %self.group.id, sample = self.index, "{message}");
        self.broken = true;
        self.ended = Some(FinishReason::Abort { kind: AbortKind::Internal, message });
    }

    /// The reason if `matched` or the length ends the sample here.
    pub fn end_after(&self, matched: Option<MatchedStop>) -> Option<FinishReason> {
        match matched {
            Some(stop) => Some(FinishReason::Stop(stop)),
            None if self.tokens.len() >= self.max_len => {
                Some(FinishReason::Length { length: self.usage.completion_tokens })
            }
            None => None,
        }
    }
}
