//! `POST /tokenize` and `POST /detokenize`

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::fields::{Fields, as_texts, as_tokens, name_of};
use super::super::openai::tokenize_chat;
use super::super::reading::{self, Client};
use super::super::state::{Served, Server};

/// Text, texts or a conversation to token ids.
pub(in crate::server) async fn tokenize(server: Arc<Server>, fields: Fields) -> Result<Response, ApiError> {
    let served = server.served()?;
    reading::reading(fields.bytes(), move |client| read_tokenize(fields, &served, &server, client)).await
}

fn read_tokenize(mut fields: Fields, served: &Served, server: &Server, client: &Client) -> Result<Response, ApiError> {
    let add_special = fields.bool("add_special_tokens")?.unwrap_or(true);
    let prompt = fields.take("prompt");
    let messages = fields.take("messages");
    fields.text("model")?;
    fields.finish(&[], &server.unknown)?;
    let encode = |text: &str| reading::tokenize(served, client, "prompt", text, add_special);
    let (tokens, count) = match (prompt, messages) {
        (Some(_), Some(_)) => {
            return Err(ApiError::field("messages", "and prompt exclude each other"));
        }
        (None, None) => {
            return Err(ApiError::field("prompt", "is missing; give prompt or messages"));
        }
        (None, Some(messages)) => {
            let ids = tokenize_chat(served, messages, &Map::new(), client)?;
            (json!(ids), json!(ids.len()))
        }
        (Some(Value::String(text)), None) => {
            let ids = encode(&text)?;
            (json!(ids), json!(ids.len()))
        }
        (Some(value), None) => match as_texts(&value) {
            Some(texts) => {
                let lists: Result<Vec<_>, _> = texts.iter().map(|text| encode(text)).collect();
                let lists = lists?;
                let counts: Vec<_> = lists.iter().map(Vec::len).collect();
                (json!(lists), json!(counts))
            }
            None => {
                return Err(ApiError::field(
                    "prompt",
                    format!("takes a text or a list of texts; found {}", name_of(&value)),
                ));
            }
        },
    };
    let limit = served.engine.max_request_tokens();
    Ok(Json(json!({"tokens": tokens, "count": count, "max_model_len": limit})).into_response())
}

/// Token ids, or lists of them, to text.
pub(in crate::server) async fn detokenize(server: Arc<Server>, mut fields: Fields) -> Result<Response, ApiError> {
    let served = server.served()?;
    let skip_special = fields.bool("skip_special_tokens")?.unwrap_or(true);
    let Some(tokens) = fields.take("tokens") else {
        return Err(ApiError::field("tokens", "is missing"));
    };
    fields.text("model")?;
    fields.finish(&[], &server.unknown)?;
    let decode = |value: &Value| {
        let ids = as_tokens(value)?;
        let outside = |id: &u32| *id as usize >= served.spec.vocab_size;
        Some(match ids.iter().find(|id| outside(id)) {
            Some(id) => Err(ApiError::field(
                "tokens",
                format!("token {id} is outside the vocabulary of {}", served.spec.vocab_size),
            )),
            None => Ok(served.tokenizer.decode(&ids, skip_special)),
        })
    };
    let text = match decode(&tokens) {
        Some(text) => json!(text?),
        None => {
            let lists = tokens.as_array().and_then(|items| items.iter().map(decode).collect::<Option<Vec<_>>>());
            match lists {
                Some(lists) => json!(lists.into_iter().collect::<Result<Vec<_>, _>>()?),
                None => {
                    return Err(ApiError::field("tokens", "takes a list of token ids or a list of such lists"));
                }
            }
        }
    };
    Ok(Json(json!({"text": text})).into_response())
}
