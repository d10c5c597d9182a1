//! Answers of `/generate`, whole and streamed.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use kvdock_models::Tokenizer;
use serde_json::{Map, Value, json};

use super::super::openai::failure;
use super::super::openai::logprob_number as number;
use super::super::sse::{Chunks, Frames};
use super::super::state::Group;
use super::super::usage::native_details;
use crate::engine::{Completion, Event, FinishReason, LogprobOptions, MatchedStop, TokenLogprobs, Usage};

/// How the answers to one prompt are written.
pub(super) struct Rules {
    /// Name of the request.
    pub id: String,
    /// What was asked for.
    pub logprobs: LogprobOptions,
    /// Whether log-probabilities carry their token's text.
    pub return_text: bool,
    /// The prompt's tokens, if they are to be sent back.
    pub prompt_ids: Option<Vec<u32>>,
}

/// One sample, as far as it is known.
#[derive(Default)]
pub(super) struct Sample {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    prompt_logprobs: Vec<TokenLogprobs>,
    usage: Usage,
    end: Option<(FinishReason, u32, Duration)>,
}

impl From<Completion> for Sample {
    fn from(whole: Completion) -> Self {
        Self {
            text: whole.text,
            token_ids: whole.token_ids,
            logprobs: whole.logprobs,
            prompt_logprobs: whole.prompt_logprobs,
            usage: whole.usage,
            end: Some((whole.reason, whole.preemptions, whole.elapsed)),
        }
    }
}

impl Sample {
    /// The answer's object.
    pub fn json(&self, rules: &Rules, tokenizer: &Tokenizer) -> Value {
        let usage = &self.usage;
        let mut meta = Map::new();
        let mut put = |name: &str, value: Value| meta.insert(name.to_owned(), value);
        put("id", rules.id.as_str().into());
        put("finish_reason", self.end.as_ref().map_or(Value::Null, |(reason, ..)| finish_reason(reason)));
        put("prompt_tokens", usage.prompt_tokens.into());
        put("completion_tokens", usage.completion_tokens.into());
        put("cached_tokens", usage.cached_tokens().into());
        put("cached_tokens_details", native_details(usage));
        put("reasoning_tokens", 0.into());
        put("weight_version", "default".into());
        if let Some((_, preemptions, elapsed)) = &self.end {
            put("num_retractions", (*preemptions).into());
            put("e2e_latency", json!(elapsed.as_secs_f64()));
        }
        if let Some(ids) = &rules.prompt_ids {
            put("prompt_token_ids", json!(ids));
        }
        if rules.logprobs.output {
            let triples = Triples { tokenizer, with_text: rules.return_text };
            put("input_token_logprobs", triples.chosen(&self.prompt_logprobs));
            put("output_token_logprobs", triples.chosen(&self.logprobs));
            if rules.logprobs.top > 0 {
                put("input_top_logprobs", triples.others(&self.prompt_logprobs, |e| &e.top));
                put("output_top_logprobs", triples.others(&self.logprobs, |e| &e.top));
            }
            if !rules.logprobs.token_ids.is_empty() {
                put("input_token_ids_logprobs", triples.others(&self.prompt_logprobs, |e| &e.token_ids));
                put("output_token_ids_logprobs", triples.others(&self.logprobs, |e| &e.token_ids));
            }
        }
        json!({"text": self.text, "output_ids": self.token_ids, "meta_info": meta})
    }
}

/// SGLang's object for the end of a sample.
fn finish_reason(reason: &FinishReason) -> Value {
    match reason {
        FinishReason::Stop(MatchedStop::Token(token)) => json!({"type": "stop", "matched": token}),
        FinishReason::Stop(MatchedStop::Text(text)) => json!({"type": "stop", "matched": text}),
        FinishReason::Length { length } => json!({"type": "length", "length": length}),
        FinishReason::Abort { message, .. } => {
            json!({"type": "abort", "message": message, "status_code": null, "err_type": null})
        }
    }
}

/// Writes `[log-probability, token, text or null]`.
struct Triples<'a> {
    tokenizer: &'a Tokenizer,
    with_text: bool,
}

impl Triples<'_> {
    fn one(&self, token: u32, logprob: Option<f32>) -> Value {
        let text = self.with_text.then(|| {
            let bytes = self.tokenizer.token_bytes(token).unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        });
        json!([logprob.map(number), token, text])
    }

    fn chosen(&self, entries: &[TokenLogprobs]) -> Value {
        let triples: Vec<_> = entries.iter().map(|entry| self.one(entry.token_id, entry.logprob)).collect();
        triples.into()
    }

    fn others(&self, entries: &[TokenLogprobs], list: impl Fn(&TokenLogprobs) -> &Vec<(u32, f32)>) -> Value {
        let lists: Vec<_> = entries
            .iter()
            .map(|entry| match entry.logprob {
                // Nothing precedes the first token of a prompt.
                None => Value::Null,
                Some(_) => list(entry).iter().map(|&(token, logprob)| self.one(token, Some(logprob))).collect(),
            })
            .collect();
        lists.into()
    }
}

/// Frames of a streamed answer: each carries the whole text so far.
pub(super) struct GenerateChunks {
    rules: Vec<Rules>,
    /// Whether frames carry the number of their sample.
    list: bool,
    tokenizer: Arc<Tokenizer>,
    samples: BTreeMap<(usize, u32), Sample>,
    /// Keeps several prompts together under one name.
    _group: Option<Group>,
    /// Samples a prompt.
    n: u32,
}

impl GenerateChunks {
    pub fn new(rules: Vec<Rules>, n: u32, list: bool, tokenizer: Arc<Tokenizer>, group: Option<Group>) -> Self {
        Self { rules, list, tokenizer, samples: BTreeMap::new(), _group: group, n }
    }

    fn send(&self, prompt: usize, index: u32, out: &mut Frames) {
        let key = (prompt, index);
        let (Some(rules), Some(sample)) = (self.rules.get(prompt), self.samples.get(&key)) else {
            return;
        };
        let mut frame = sample.json(rules, &self.tokenizer);
        if self.list
            && let Value::Object(map) = &mut frame
        {
            let number = prompt as u64 * u64::from(self.n) + u64::from(index);
            map.insert("index".into(), number.into());
        }
        out.json(&frame);
    }
}

impl Chunks for GenerateChunks {
    fn event(&mut self, prompt: usize, event: Event, out: &mut Frames) -> ControlFlow<()> {
        match event {
            Event::Prompt { index, logprobs } => {
                self.samples.entry((prompt, index)).or_default().prompt_logprobs = logprobs;
            }
            Event::Delta { index, text, token_ids, logprobs, usage } => {
                let sample = self.samples.entry((prompt, index)).or_default();
                sample.text.push_str(&text);
                sample.token_ids.extend(token_ids);
                sample.logprobs.extend(logprobs);
                sample.usage = usage;
                self.send(prompt, index, out);
            }
            Event::Finished { index, reason, usage, preemptions, elapsed } => {
                if let Some(error) = failure(&reason) {
                    out.json(&error.stream_body());
                    return ControlFlow::Break(());
                }
                let sample = self.samples.entry((prompt, index)).or_default();
                sample.usage = usage;
                sample.end = Some((reason, preemptions, elapsed));
                self.send(prompt, index, out);
                self.samples.remove(&(prompt, index));
            }
        }
        ControlFlow::Continue(())
    }

    fn finish(&mut self, out: &mut Frames) {
        out.done();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_objects() {
        assert_eq!(finish_reason(&FinishReason::Stop(MatchedStop::Token(2))), json!({"type": "stop", "matched": 2}));
        assert_eq!(finish_reason(&FinishReason::Length { length: 4 }), json!({"type": "length", "length": 4}));
    }
}
