//! Chunks of a streamed chat answer.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use kvdock_models::Tokenizer;
use serde_json::{Value, json};

use super::super::sse::{Chunks, Frames};
use super::common::{self, Common, Counts};
use super::logprobs;
use crate::engine::{Event, TokenLogprobs};

/// Makes `chat.completion.chunk` objects.
pub(super) struct ChatChunks {
    common: Common,
    logprobs: bool,
    tokenizer: Arc<Tokenizer>,
    counts: Counts,
    /// Samples whose first chunk, the one with the role, is out.
    begun: BTreeSet<u32>,
}

impl ChatChunks {
    pub fn new(common: Common, logprobs: bool, tokenizer: Arc<Tokenizer>) -> Self {
        Self { common, logprobs, tokenizer, counts: Counts::default(), begun: BTreeSet::new() }
    }

    fn chunk(&self, choices: Value, usage: Option<Value>, out: &mut Frames) {
        let mut map = self.common.envelope("chat.completion.chunk");
        map.insert("choices".into(), choices);
        let running = || match self.common.continuous_usage {
            true => self.counts.tally().openai(),
            false => Value::Null,
        };
        if self.common.include_usage || self.common.continuous_usage {
            map.insert("usage".into(), usage.unwrap_or_else(running));
        }
        out.json(&Value::Object(map));
    }

    fn begin(&mut self, index: u32, out: &mut Frames) {
        if self.begun.insert(index) {
            let delta = json!({"role": "assistant", "content": ""});
            self.chunk(choice(index, delta, Value::Null), None, out);
        }
    }

    fn logprobs_of(&self, entries: &[TokenLogprobs]) -> Value {
        match self.logprobs && !entries.is_empty() {
            true => logprobs::chat(&self.tokenizer, entries),
            false => Value::Null,
        }
    }
}

fn choice(index: u32, delta: Value, logprobs: Value) -> Value {
    json!([{
        "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null,
        "matched_stop": null,
    }])
}

impl Chunks for ChatChunks {
    fn event(&mut self, prompt: usize, event: Event, out: &mut Frames) -> ControlFlow<()> {
        match event {
            Event::Prompt { .. } => {}
            Event::Delta { index, text, logprobs, usage, .. } => {
                self.counts.note(prompt, index, usage);
                self.begin(index, out);
                let logprobs = self.logprobs_of(&logprobs);
                if !text.is_empty() || !logprobs.is_null() {
                    self.chunk(choice(index, json!({"content": text}), logprobs), None, out);
                }
            }
            Event::Finished { index, reason, usage, .. } => {
                self.counts.note(prompt, index, usage);
                if let Some(error) = common::failure(&reason) {
                    out.json(&error.body());
                    return ControlFlow::Break(());
                }
                self.begin(index, out);
                let (finish_reason, matched_stop) = common::reason(&reason);
                let choices = json!([{
                    "index": index, "delta": {}, "logprobs": null,
                    "finish_reason": finish_reason, "matched_stop": matched_stop,
                }]);
                self.chunk(choices, None, out);
            }
        }
        ControlFlow::Continue(())
    }

    fn finish(&mut self, out: &mut Frames) {
        let tally = self.counts.tally();
        let mut details = self.common.envelope("chat.completion.chunk");
        details.insert("choices".into(), json!([]));
        self.common.add_details(&mut details, &tally);
        if details.contains_key("sglext") {
            out.json(&Value::Object(details));
        }
        if self.common.include_usage {
            self.chunk(json!([]), Some(tally.openai()), out);
        }
        out.done();
    }
}
