//! Log-probabilities in the forms of the OpenAI API.

use std::sync::Arc;

use kvdock_models::{DecodeStream, Tokenizer};
use serde_json::{Map, Value, json};

use crate::engine::TokenLogprobs;

/// Stands for minus infinity, which JSON has not.
const LEAST: f64 = -9999.0;

/// A log-probability as JSON: the shortest digits that give the same f32.
pub(in crate::server) fn number(logprob: f32) -> Value {
    if logprob.is_finite() {
        let shortest = logprob.to_string().parse::<f64>();
        json!(shortest.unwrap_or(f64::from(logprob)))
    } else {
        json!(LEAST)
    }
}

/// A token's text in a chat answer: its bytes, with U+FFFD for what is no UTF-8.
fn chat_entry(tokenizer: &Tokenizer, id: u32, logprob: f32) -> Map<String, Value> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    let mut entry = Map::new();
    entry.insert("token".into(), String::from_utf8_lossy(bytes).into());
    entry.insert("bytes".into(), json!(bytes));
    entry.insert("logprob".into(), number(logprob));
    entry
}

/// `logprobs` of a chat choice.
pub(super) fn chat(tokenizer: &Tokenizer, entries: &[TokenLogprobs]) -> Value {
    let content: Vec<Value> = entries
        .iter()
        .map(|entry| {
            let logprob = entry.logprob.unwrap_or(f32::NEG_INFINITY);
            let mut json = chat_entry(tokenizer, entry.token_id, logprob);
            let top: Vec<Value> =
                entry.top.iter().map(|&(id, logprob)| Value::Object(chat_entry(tokenizer, id, logprob))).collect();
            json.insert("top_logprobs".into(), top.into());
            Value::Object(json)
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// A token's text in a text completion: OpenAI's `bytes:\x..` where it is no UTF-8 by itself.
fn completion_token(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let escaped: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            format!("bytes:{escaped}")
        }
    }
}

/// Builds `logprobs` of a completions choice, piece by piece, with running text offsets.
pub(super) struct CompletionLogprobs {
    tokenizer: Arc<Tokenizer>,
    decode: DecodeStream,
    /// Characters of the text before the next token.
    offset: usize,
    /// Likeliest tokens that were asked for.
    top: usize,
}

impl CompletionLogprobs {
    /// For a choice whose request asked for `top` alternatives.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool, top: usize) -> Self {
        Self { decode: DecodeStream::new(tokenizer.clone(), skip_special), tokenizer, offset: 0, top }
    }

    /// Counts text that comes before the tokens and has no entries.
    pub fn skip(&mut self, text: &str) {
        self.offset += text.chars().count();
    }

    /// The object for the next tokens of the choice.
    pub fn next(&mut self, entries: &[TokenLogprobs]) -> Value {
        let mut tokens = Vec::with_capacity(entries.len());
        let mut logprobs = Vec::with_capacity(entries.len());
        let mut tops = Vec::with_capacity(entries.len());
        let mut offsets = Vec::with_capacity(entries.len());
        for entry in entries {
            let text = completion_token(&self.tokenizer, entry.token_id);
            offsets.push(self.offset);
            self.offset += self.decode.push(entry.token_id).chars().count();
            logprobs.push(entry.logprob.map_or(Value::Null, number));
            tops.push(match (self.top, entry.logprob) {
                (0, _) | (_, None) => Value::Null,
                (_, Some(logprob)) => {
                    let mut map: Map<String, Value> = entry
                        .top
                        .iter()
                        .map(|&(id, logprob)| (completion_token(&self.tokenizer, id), number(logprob)))
                        .collect();
                    map.insert(text.clone(), number(logprob));
                    Value::Object(map)
                }
            });
            tokens.push(text);
        }
        json!({
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": if self.top == 0 { Value::Null } else { tops.into() },
            "text_offset": offsets,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_finite() {
        assert_eq!(number(-0.258).to_string(), "-0.258");
        assert_eq!(number(f32::NEG_INFINITY), json!(-9999.0));
        assert_eq!(number(0.0), json!(0.0));
    }
}
