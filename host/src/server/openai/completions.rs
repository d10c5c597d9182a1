//! `POST /v1/completions`

use std::sync::Arc;

use axum::response::Response;
use serde_json::{Value, json};

use super::super::error::ApiError;
use super::super::fields::{Fields, Harmless, Unserved, as_integer, as_tokens, name_of};
use super::super::reading::{self, Client};
use super::super::sampling::{self, OpenAi, completions_name};
use super::super::sse;
use super::super::state::{Group, Served, Server};
use super::super::usage::Tally;
use super::common::{self, Common};
use super::completions_stream::CompletionChunks;
use super::logprobs::CompletionLogprobs;
use crate::engine::{Completion, LogprobOptions, Request};

/// Most alternatives a token; OpenAI's own limit is 5.
const MAX_LOGPROBS: i64 = 20;
/// Most prompts in one request.
const MAX_PROMPTS: usize = 1024;

const UNSERVED: &[Unserved] = &[
    Unserved { name: "best_of", harmless: Harmless::Number(1) },
    Unserved { name: "suffix", harmless: Harmless::Empty },
];

/// A completions request, read and tokenized.
pub(super) struct TextRequest {
    pub common: Common,
    /// Alternatives asked for, if log-probabilities are.
    pub logprobs: Option<usize>,
    /// The prompts' own texts, to stand before the answers; empty without `echo`.
    pub echo: Vec<String>,
    requests: Vec<Request>,
    /// Keeps several prompts together under one name.
    group: Option<Group>,
}

/// Answers a completions request.
pub(in crate::server) async fn completions(server: Arc<Server>, fields: Fields) -> Result<Response, ApiError> {
    let served = server.accepting()?;
    let (reading, reader) = (served.clone(), server.clone());
    let mut text = reading::reading(fields.bytes(), move |client| read(fields, &reading, &reader, client)).await?;
    if text.requests.len() > 1 {
        let members = text.requests.iter().map(|request| request.id.clone()).collect();
        text.group = Some(server.group(&text.common.id, members)?);
    }
    let streams = common::submit(&served, std::mem::take(&mut text.requests), completions_name)?;
    if text.common.stream {
        let chunks = CompletionChunks::new(text, served.tokenizer.clone());
        return Ok(sse::respond(streams, chunks));
    }
    let prompts = common::collect(streams).await?;
    let mut tally = Tally::default();
    let mut choices = Vec::new();
    for (number, samples) in prompts.iter().enumerate() {
        let usages: Vec<_> = samples.iter().map(|sample| sample.usage).collect();
        tally.add(&usages);
        let echo = text.echo.get(number).map_or("", String::as_str);
        for sample in samples {
            let index = number as u64 * u64::from(text.common.n) + u64::from(sample.index);
            choices.push(choice(&served, &text, echo, index, sample));
        }
    }
    let mut map = text.common.envelope("text_completion");
    map.insert("choices".into(), choices.into());
    map.insert("usage".into(), tally.openai());
    text.common.add_details(&mut map, &tally);
    Ok(common::answer(map))
}

fn choice(served: &Served, text: &TextRequest, echo: &str, index: u64, sample: &Completion) -> Value {
    let (finish_reason, matched_stop) = common::reason(&sample.reason);
    let logprobs = text.logprobs.map(|top| {
        let skip_special = text.common.sampling.skip_special_tokens;
        let mut builder = CompletionLogprobs::new(served.tokenizer.clone(), skip_special, top);
        let mut entries = sample.prompt_logprobs.clone();
        if entries.is_empty() {
            builder.skip(echo);
        }
        entries.extend(sample.logprobs.iter().cloned());
        builder.next(&entries)
    });
    json!({
        "index": index,
        "text": format!("{echo}{}", sample.text),
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "matched_stop": matched_stop,
    })
}

fn read(mut fields: Fields, served: &Served, server: &Server, client: &Client) -> Result<TextRequest, ApiError> {
    let common = Common::read(&mut fields, OpenAi::Completions, served)?;
    let echo = fields.bool("echo")?.unwrap_or(false);
    let logprobs = match fields.take("logprobs") {
        None | Some(Value::Bool(false)) => None,
        Some(value) => match as_integer(&value).filter(|n| (0..=MAX_LOGPROBS).contains(n)) {
            Some(top) => usize::try_from(top).ok(),
            None => {
                return Err(ApiError::field(
                    "logprobs",
                    format!("takes an integer from 0 to {MAX_LOGPROBS}; found {value}"),
                ));
            }
        },
    };
    let Some(prompt) = fields.take("prompt") else {
        return Err(ApiError::field("prompt", "is missing"));
    };
    common::finish(fields, UNSERVED, &server.unknown)?;
    let prompts = read_prompts(prompt)?;
    common.check_samples(prompts.len())?;
    let many = prompts.len() > 1;
    let mut requests = Vec::with_capacity(prompts.len());
    let mut echoes = Vec::new();
    for (number, prompt) in prompts.into_iter().enumerate() {
        let ids = match &prompt {
            Prompt::Text(text) => reading::tokenize(served, client, "prompt", text, true)?,
            Prompt::Tokens(ids) => ids.clone(),
        };
        if echo {
            echoes.push(match prompt {
                Prompt::Text(text) => text,
                Prompt::Tokens(ids) => {
                    let skip_special = common.sampling.skip_special_tokens;
                    served.tokenizer.decode(&ids, skip_special)
                }
            });
        }
        let id = match many {
            true => format!("{}-{number}", common.id),
            false => common.id.clone(),
        };
        requests.push(Request {
            logprobs: LogprobOptions {
                output: logprobs.is_some(),
                prompt_start: (echo && logprobs.is_some()).then_some(0),
                top: logprobs.unwrap_or(0),
                ..LogprobOptions::default()
            },
            ..common.request(id, ids)
        });
    }
    sampling::bound_logprobs("logprobs", &mut requests, served.engine.max_request_tokens())?;
    Ok(TextRequest { common, logprobs, echo: echoes, requests, group: None })
}

#[derive(Debug, PartialEq)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// A prompt is a text, a list of texts, a list of token ids, or a list of such lists.
fn read_prompts(prompt: Value) -> Result<Vec<Prompt>, ApiError> {
    let wrong = |message: String| Err(ApiError::field("prompt", message));
    let items = match prompt {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(items) => items,
        other => {
            return wrong(format!(
                "takes a text, a list of texts, a list of token ids or a list of such lists; \
                 found {}",
                name_of(&other)
            ));
        }
    };
    if items.is_empty() {
        return wrong("is empty".into());
    }
    if items.iter().all(Value::is_number) {
        let ids = as_tokens(&Value::Array(items));
        return match ids {
            Some(ids) => Ok(vec![Prompt::Tokens(ids)]),
            None => wrong("takes token ids: integers of at least 0".into()),
        };
    }
    if items.len() > MAX_PROMPTS {
        return wrong(format!("has {} prompts; at most {MAX_PROMPTS} are taken", items.len()));
    }
    items
        .into_iter()
        .enumerate()
        .map(|(at, item)| match item {
            Value::String(text) => Ok(Prompt::Text(text)),
            item => match as_tokens(&item) {
                Some(ids) => Ok(Prompt::Tokens(ids)),
                None => Err(ApiError::field(
                    format!("prompt[{at}]"),
                    format!("takes a text or a list of token ids; found {}", name_of(&item)),
                )),
            },
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_in_all_forms() {
        let read = |value| read_prompts(value).unwrap();
        assert_eq!(read(json!("a")), [Prompt::Text("a".into())]);
        assert_eq!(read(json!([1, 2])), [Prompt::Tokens(vec![1, 2])]);
        assert_eq!(read(json!([[1], [2, 3]])), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]);
        assert_eq!(read(json!(["a", "b"])).len(), 2);
    }

    #[test]
    fn wrong_prompts_name_their_place() {
        for (value, param) in [
            (json!(3), "prompt"),
            (json!([]), "prompt"),
            (json!([1, -2]), "prompt"),
            (json!(["a", 1]), "prompt[1]"),
            (json!([[1], ["a"]]), "prompt[1]"),
        ] {
            assert_eq!(read_prompts(value).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
