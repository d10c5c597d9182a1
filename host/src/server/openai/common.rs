//! What chat and text completions share.

use std::collections::BTreeMap;
use std::time::SystemTime;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::fields::{Fields, Harmless, Unserved};
use super::super::sampling::{self, OpenAi};
use super::super::state::{Served, fresh_id, unix_seconds};
use super::super::usage::Tally;
use crate::engine::{AbortKind, Completion, FinishReason, MatchedStop, Request, RequestStream, SamplingParams, Usage};

/// Most samples a prompt that OpenAI allows.
const MAX_N: i64 = 128;

/// Fields of both endpoints that are known and not served.
const UNSERVED: &[Unserved] = &[
    Unserved { name: "response_format", harmless: Harmless::Type("text") },
    Unserved { name: "logit_processors", harmless: Harmless::Empty },
    Unserved { name: "custom_logit_processor", harmless: Harmless::Empty },
    Unserved { name: "lora_path", harmless: Harmless::Empty },
    Unserved { name: "lora", harmless: Harmless::Empty },
    Unserved { name: "session_params", harmless: Harmless::Empty },
    Unserved { name: "return_hidden_states", harmless: Harmless::Empty },
    Unserved { name: "return_token_ids", harmless: Harmless::Empty },
    Unserved { name: "bootstrap_host", harmless: Harmless::Empty },
    Unserved { name: "bootstrap_port", harmless: Harmless::Empty },
    Unserved { name: "bootstrap_room", harmless: Harmless::Empty },
    Unserved { name: "input_embeds", harmless: Harmless::Empty },
    Unserved { name: "user", harmless: Harmless::Any },
    Unserved { name: "safety_identifier", harmless: Harmless::Any },
    Unserved { name: "prompt_cache_key", harmless: Harmless::Any },
    Unserved { name: "metadata", harmless: Harmless::Any },
    Unserved { name: "service_tier", harmless: Harmless::Any },
];

/// The fields that both endpoints have.
pub(super) struct Common {
    /// `id` of the answer; also names the request for `/abort_request`.
    pub id: String,
    pub created: u64,
    pub model: String,
    pub n: u32,
    pub sampling: SamplingParams,
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    /// The attached backend's name, if the request asked for SGLang's details; `None` inside when
    /// no backend is attached.
    pub details: Option<Option<String>>,
    cache_salt: Option<String>,
    extra_key: Option<String>,
    session_id: Option<String>,
    priority: i32,
}

impl Common {
    /// Takes the shared fields.
    pub fn read(fields: &mut Fields, api: OpenAi, served: &Served) -> Result<Self, ApiError> {
        let model = read_model(fields, served)?;
        let id = match fields.name("rid")? {
            Some(rid) if rid.is_empty() => {
                return Err(ApiError::field("rid", "takes a text that is not empty"));
            }
            Some(rid) => rid,
            None => fresh_id(match api {
                OpenAi::Chat => "chatcmpl-",
                OpenAi::Completions => "cmpl-",
            }),
        };
        let stream = fields.bool("stream")?.unwrap_or(false);
        let (mut include_usage, mut continuous_usage) = (false, false);
        if let Some(mut options) = fields.object("stream_options")? {
            if !stream {
                return Err(ApiError::field("stream_options", "is only for \"stream\": true"));
            }
            include_usage = options.bool("include_usage")?.unwrap_or(false);
            continuous_usage = options.bool("continuous_usage_stats")?.unwrap_or(false);
        }
        let details = fields.bool("return_cached_tokens_details")?.unwrap_or(false);
        let priority = fields.integer_in("priority", i32::MIN.into(), i32::MAX.into())?;
        Ok(Self {
            id,
            created: unix_seconds(SystemTime::now()),
            model,
            n: fields.integer_in("n", 1, MAX_N)?.and_then(|n| u32::try_from(n).ok()).unwrap_or(1),
            sampling: sampling::openai(fields, api, &served.spec.generation)?,
            stream,
            include_usage,
            continuous_usage,
            details: details.then(|| served.storage_backend()),
            cache_salt: fields.name("cache_salt")?,
            extra_key: fields.name("extra_key")?,
            session_id: fields.name("session_id")?,
            priority: priority.and_then(|priority| i32::try_from(priority).ok()).unwrap_or(0),
        })
    }

    /// Whether each sample of so many prompts may have what the request says once for all.
    pub fn check_samples(&self, prompts: usize) -> Result<(), ApiError> {
        sampling::check_samples("", &self.sampling, prompts.saturating_mul(self.n as usize))
    }

    /// The engine's request for one prompt. `id` is unique among the prompts.
    pub fn request(&self, id: String, prompt_ids: Vec<u32>) -> Request {
        Request {
            n: self.n,
            cache_salt: self.cache_salt.clone(),
            extra_key: self.extra_key.clone(),
            session_id: self.session_id.clone(),
            priority: self.priority,
            stream: self.stream,
            ..Request::new(id, prompt_ids, self.sampling.clone())
        }
    }

    /// The head that answer and chunks share.
    pub fn envelope(&self, object: &str) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), self.id.as_str().into());
        map.insert("object".into(), object.into());
        map.insert("created".into(), self.created.into());
        map.insert("model".into(), self.model.as_str().into());
        map
    }

    /// Puts SGLang's cache details in, if they were asked for and there are any.
    pub fn add_details(&self, map: &mut Map<String, Value>, tally: &Tally) {
        let details = self.details.as_ref().and_then(|backend| tally.details(backend.as_deref()));
        if let Some(details) = details {
            map.insert("sglext".into(), json!({"cached_tokens_details": details}));
        }
    }
}

fn read_model(fields: &mut Fields, served: &Served) -> Result<String, ApiError> {
    let known =
        |name: &str| name == served.model_name || name == served.model_path || name == "default" || name.is_empty();
    match fields.text("model")? {
        Some(name) if !known(&name) => {
            let shown: String = name.chars().take(100).collect();
            Err(ApiError {
                param: Some("model".into()),
                ..ApiError::new(
                    StatusCode::NOT_FOUND,
                    format!("the model {shown:?} does not exist; this server serves {:?}", served.model_name),
                )
                .with_code("model_not_found")
            })
        }
        _ => Ok(served.model_name.clone()),
    }
}

/// Refuses and logs what is left of the fields.
pub(super) fn finish(
    fields: Fields,
    own: &[Unserved],
    unknown: &super::super::fields::UnknownFields,
) -> Result<(), ApiError> {
    if fields.is_empty() {
        return Ok(());
    }
    let all: Vec<Unserved> = own.iter().chain(UNSERVED).chain(sampling::UNSERVED_SAMPLING).copied().collect();
    fields.finish(&all, unknown)
}

/// Hands all prompts to the engine, or none.
pub(super) fn submit(
    served: &Served,
    requests: Vec<Request>,
    names: fn(&str) -> String,
) -> Result<Vec<RequestStream>, ApiError> {
    let n = requests.first().map_or(1, |request| request.n);
    served.engine.check_samples(requests.len(), n).map_err(|error| ApiError::from_submit(error, names))?;
    // Streams that are dropped on the way out cancel what was taken already.
    requests
        .into_iter()
        .map(|request| served.engine.submit(request).map_err(|error| ApiError::from_submit(error, names)))
        .collect()
}

/// Waits for all samples of all prompts.
///
/// # Errors
/// When one of them failed.
pub(super) async fn collect(streams: Vec<RequestStream>) -> Result<Vec<Vec<Completion>>, ApiError> {
    let mut all = Vec::with_capacity(streams.len());
    for stream in streams {
        let samples = stream.collect().await;
        if let Some(error) = samples.iter().find_map(|sample| failure(&sample.reason)) {
            return Err(error);
        }
        if samples.is_empty() {
            return Err(ApiError::unavailable("the engine has stopped"));
        }
        all.push(samples);
    }
    Ok(all)
}

/// The error that an end stands for; `None` for ends that are answers.
pub(in crate::server) fn failure(reason: &FinishReason) -> Option<ApiError> {
    match reason {
        FinishReason::Abort { kind, message } => match kind {
            AbortKind::Requested => None,
            AbortKind::ShuttingDown => Some(ApiError::unavailable(message.as_str())),
            AbortKind::ClientGone | AbortKind::Internal => Some(ApiError::internal(message.as_str())),
        },
        FinishReason::Stop(_) | FinishReason::Length { .. } => None,
    }
}

/// `finish_reason` and `matched_stop`.
pub(super) fn reason(reason: &FinishReason) -> (&'static str, Value) {
    match reason {
        FinishReason::Stop(MatchedStop::Token(token)) => ("stop", json!(token)),
        FinishReason::Stop(MatchedStop::Text(text)) => ("stop", json!(text)),
        FinishReason::Length { .. } => ("length", Value::Null),
        FinishReason::Abort { .. } => ("abort", Value::Null),
    }
}

/// A JSON answer.
pub(super) fn answer(map: Map<String, Value>) -> Response {
    Json(Value::Object(map)).into_response()
}

/// Latest token counts of every sample, while streaming.
#[derive(Debug, Default)]
pub(super) struct Counts(BTreeMap<usize, BTreeMap<u32, Usage>>);

impl Counts {
    /// Notes the counts of one sample.
    pub fn note(&mut self, prompt: usize, index: u32, usage: Usage) {
        self.0.entry(prompt).or_default().insert(index, usage);
    }

    /// All of them together.
    pub fn tally(&self) -> Tally {
        let mut tally = Tally::default();
        for samples in self.0.values() {
            let samples: Vec<_> = samples.values().copied().collect();
            tally.add(&samples);
        }
        tally
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_have_openais_words() {
        let stop = FinishReason::Stop(MatchedStop::Token(2));
        assert_eq!(reason(&stop), ("stop", json!(2)));
        let text = FinishReason::Stop(MatchedStop::Text("X".into()));
        assert_eq!(reason(&text), ("stop", json!("X")));
        assert_eq!(reason(&FinishReason::Length { length: 3 }).0, "length");
        assert!(failure(&stop).is_none());
    }

    #[test]
    fn aborts_are_errors_unless_asked_for() {
        let abort = |kind| FinishReason::Abort { kind, message: "m".into() };
        assert!(failure(&abort(AbortKind::Requested)).is_none());
        assert_eq!(reason(&abort(AbortKind::Requested)).0, "abort");
        let status = |kind| failure(&abort(kind)).map(|error| error.status.as_u16());
        assert_eq!(status(AbortKind::Internal), Some(500));
        assert_eq!(status(AbortKind::ShuttingDown), Some(503));
    }
}
