//! `POST /v1/chat/completions`

use std::sync::Arc;

use axum::response::Response;
use kvdock_models::ModelError;
use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::fields::{Fields, Harmless, Unserved};
use super::super::reading::{self, Client};
use super::super::sampling::{self, OpenAi, chat_name};
use super::super::sse;
use super::super::state::{Served, Server};
use super::super::usage::Tally;
use super::chat_stream::ChatChunks;
use super::common::{self, Common};
use super::{logprobs, messages};
use crate::engine::{Completion, LogprobOptions, Request};

/// Most alternatives a token that OpenAI allows.
const MAX_TOP_LOGPROBS: i64 = 20;

const UNSERVED: &[Unserved] = &[
    Unserved { name: "tools", harmless: Harmless::Empty },
    Unserved { name: "tool_choice", harmless: Harmless::Words(&["none", "auto"]) },
    Unserved { name: "parallel_tool_calls", harmless: Harmless::Any },
    Unserved { name: "functions", harmless: Harmless::Empty },
    Unserved { name: "function_call", harmless: Harmless::Words(&["none", "auto"]) },
    Unserved { name: "best_of", harmless: Harmless::Number(1) },
    Unserved { name: "echo", harmless: Harmless::Empty },
    Unserved { name: "input_ids", harmless: Harmless::Empty },
    Unserved { name: "continue_final_message", harmless: Harmless::Empty },
    Unserved { name: "audio", harmless: Harmless::Empty },
    Unserved { name: "prediction", harmless: Harmless::Empty },
    Unserved { name: "web_search_options", harmless: Harmless::Empty },
    Unserved { name: "store", harmless: Harmless::Empty },
    // Reasoning is not split off by this build, so there is nothing to switch.
    Unserved { name: "separate_reasoning", harmless: Harmless::Any },
    Unserved { name: "stream_reasoning", harmless: Harmless::Any },
];

/// A chat request, read and tokenized.
pub(super) struct Chat {
    pub common: Common,
    pub logprobs: bool,
    pub request: Request,
}

/// Answers a chat request.
pub(in crate::server) async fn chat_completions(server: Arc<Server>, fields: Fields) -> Result<Response, ApiError> {
    let served = server.accepting()?;
    let reading = served.clone();
    let Chat { common, logprobs, request } =
        reading::reading(fields.bytes(), move |client| read(fields, &reading, &server, client)).await?;
    let streams = common::submit(&served, vec![request], chat_name)?;
    if common.stream {
        let chunks = ChatChunks::new(common, logprobs, served.tokenizer.clone());
        return Ok(sse::respond(streams, chunks));
    }
    let prompts = common::collect(streams).await?;
    let mut tally = Tally::default();
    let mut choices = Vec::new();
    for samples in &prompts {
        let usages: Vec<_> = samples.iter().map(|sample| sample.usage).collect();
        tally.add(&usages);
        choices.extend(samples.iter().map(|sample| choice(&served, sample, logprobs)));
    }
    let mut map = common.envelope("chat.completion");
    map.insert("choices".into(), choices.into());
    map.insert("usage".into(), tally.openai());
    common.add_details(&mut map, &tally);
    Ok(common::answer(map))
}

fn choice(served: &Served, sample: &Completion, with_logprobs: bool) -> Value {
    let (finish_reason, matched_stop) = common::reason(&sample.reason);
    json!({
        "index": sample.index,
        "message": {
            "role": "assistant",
            "content": sample.text,
            "reasoning_content": null,
            "tool_calls": null,
        },
        "logprobs": with_logprobs
            .then(|| logprobs::chat(&served.tokenizer, &sample.logprobs)),
        "finish_reason": finish_reason,
        "matched_stop": matched_stop,
    })
}

fn read(mut fields: Fields, served: &Served, server: &Server, client: &Client) -> Result<Chat, ApiError> {
    let common = Common::read(&mut fields, OpenAi::Chat, served)?;
    common.check_samples(1)?;
    let with_logprobs = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer_in("top_logprobs", 0, MAX_TOP_LOGPROBS)?;
    if top.is_some_and(|top| top > 0) && !with_logprobs {
        return Err(ApiError::field("top_logprobs", "needs \"logprobs\": true"));
    }
    let modalities = fields.texts("modalities")?.unwrap_or_default();
    if let Some(other) = modalities.iter().find(|kind| *kind != "text") {
        return Err(ApiError::field("modalities", format!("{other:?} is not served by this build; only \"text\" is"))
            .with_code("unsupported_field"));
    }
    let Some(conversation) = fields.take("messages") else {
        return Err(ApiError::field("messages", "is missing"));
    };
    let mut variables = match fields.object("chat_template_kwargs")? {
        Some(kwargs) => kwargs.into_map(),
        None => Map::new(),
    };
    if let Some(effort) = fields.text("reasoning_effort")? {
        variables.entry("reasoning_effort").or_insert_with(|| effort.into());
    }
    common::finish(fields, UNSERVED, &server.unknown)?;
    let prompt_ids = tokenize_chat(served, conversation, &variables, client)?;
    let mut request = Request {
        logprobs: LogprobOptions {
            output: with_logprobs,
            top: top.and_then(|top| usize::try_from(top).ok()).unwrap_or(0),
            ..LogprobOptions::default()
        },
        ..common.request(common.id.clone(), prompt_ids)
    };
    let room = served.engine.max_request_tokens();
    sampling::bound_logprobs("top_logprobs", std::slice::from_mut(&mut request), room)?;
    Ok(Chat { common, logprobs: with_logprobs, request })
}

/// Renders a conversation up to where the answer begins, and tokenizes it.
pub(in crate::server) fn tokenize_chat(
    served: &Served,
    conversation: Value,
    variables: &Map<String, Value>,
    client: &Client,
) -> Result<Vec<u32>, ApiError> {
    let Some(template) = &served.template else {
        return Err(ApiError::bad_request("this model has no chat template; use /v1/completions or /generate"));
    };
    let messages = messages::normalise(conversation, template.knows_developer())?;
    let text = template.render(&messages, true, variables).map_err(|error| match error {
        // The template's own words: it refuses this conversation.
        ModelError::Template { reason, .. } => {
            ApiError::field("messages", format!("the model's chat template refuses them: {reason}"))
        }
        other => ApiError::internal(other.to_string()),
    })?;
    // The template has put the special tokens in already.
    reading::tokenize(served, client, "messages", &text, false)
}
