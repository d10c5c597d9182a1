//! Chunks of a streamed text completion.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use kvdock_models::Tokenizer;
use serde_json::{Value, json};

use super::super::sse::{Chunks, Frames};
use super::common::{self, Counts};
use super::completions::TextRequest;
use super::logprobs::CompletionLogprobs;
use crate::engine::{Event, TokenLogprobs};

/// Makes streamed `text_completion` objects.
pub(super) struct CompletionChunks {
    text: TextRequest,
    tokenizer: Arc<Tokenizer>,
    counts: Counts,
    /// Choices that have begun, by prompt and sample.
    begun: BTreeMap<(usize, u32), Option<CompletionLogprobs>>,
}

impl CompletionChunks {
    pub fn new(text: TextRequest, tokenizer: Arc<Tokenizer>) -> Self {
        Self { text, tokenizer, counts: Counts::default(), begun: BTreeMap::new() }
    }

    fn chunk(&self, choices: Value, usage: Option<Value>, out: &mut Frames) {
        let common = &self.text.common;
        let mut map = common.envelope("text_completion");
        map.insert("choices".into(), choices);
        let running = || match common.continuous_usage {
            true => self.counts.tally().openai(),
            false => Value::Null,
        };
        if common.include_usage || common.continuous_usage {
            map.insert("usage".into(), usage.unwrap_or_else(running));
        }
        out.json(&Value::Object(map));
    }

    fn index(&self, prompt: usize, sample: u32) -> u64 {
        prompt as u64 * u64::from(self.text.common.n) + u64::from(sample)
    }

    /// Sends the echoed prompt before anything else of a choice.
    fn begin(&mut self, key: (usize, u32), prompt: &[TokenLogprobs], out: &mut Frames) {
        if self.begun.contains_key(&key) {
            return;
        }
        let skip_special = self.text.common.sampling.skip_special_tokens;
        let mut builder =
            self.text.logprobs.map(|top| CompletionLogprobs::new(self.tokenizer.clone(), skip_special, top));
        if let Some(echo) = self.text.echo.get(key.0) {
            let logprobs = builder.as_mut().map(|builder| {
                if prompt.is_empty() {
                    builder.skip(echo);
                }
                builder.next(prompt)
            });
            let choices = choice(self.index(key.0, key.1), echo, logprobs.into());
            self.chunk(choices, None, out);
        }
        self.begun.insert(key, builder);
    }
}

fn choice(index: u64, text: &str, logprobs: Value) -> Value {
    json!([{
        "index": index, "text": text, "logprobs": logprobs, "finish_reason": null,
        "matched_stop": null,
    }])
}

impl Chunks for CompletionChunks {
    fn event(&mut self, prompt: usize, event: Event, out: &mut Frames) -> ControlFlow<()> {
        match event {
            Event::Prompt { index, logprobs } => self.begin((prompt, index), &logprobs, out),
            Event::Delta { index, text, logprobs, usage, .. } => {
                self.counts.note(prompt, index, usage);
                self.begin((prompt, index), &[], out);
                let builder = self.begun.get_mut(&(prompt, index)).and_then(Option::as_mut);
                let logprobs = match builder {
                    Some(builder) if !logprobs.is_empty() => builder.next(&logprobs),
                    _ => Value::Null,
                };
                if !text.is_empty() || !logprobs.is_null() {
                    let choices = choice(self.index(prompt, index), &text, logprobs);
                    self.chunk(choices, None, out);
                }
            }
            Event::Finished { index, reason, usage, .. } => {
                self.counts.note(prompt, index, usage);
                if let Some(error) = common::failure(&reason) {
                    out.json(&error.body());
                    return ControlFlow::Break(());
                }
                self.begin((prompt, index), &[], out);
                let (finish_reason, matched_stop) = common::reason(&reason);
                let choices = json!([{
                    "index": self.index(prompt, index), "text": "", "logprobs": null,
                    "finish_reason": finish_reason, "matched_stop": matched_stop,
                }]);
                self.chunk(choices, None, out);
            }
        }
        ControlFlow::Continue(())
    }

    fn finish(&mut self, out: &mut Frames) {
        let tally = self.counts.tally();
        let mut details = self.text.common.envelope("text_completion");
        details.insert("choices".into(), json!([]));
        self.text.common.add_details(&mut details, &tally);
        if details.contains_key("sglext") {
            out.json(&Value::Object(details));
        }
        if self.text.common.include_usage {
            self.chunk(json!([]), Some(tally.openai()), out);
        }
        out.done();
    }
}
