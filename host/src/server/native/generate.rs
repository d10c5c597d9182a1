//! `POST /generate`

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use super::super::error::ApiError;
use super::super::fields::{Fields, Harmless, UnknownFields, Unserved, as_texts, as_tokens, check_name, name_of};
use super::super::openai::failure;
use super::super::reading::{self, Client};
use super::super::sampling::{self, UNSERVED_SAMPLING, integer_value, native_name, per_request};
use super::super::sse;
use super::super::state::{Served, Server, fresh_id};
use super::generate_answer::{GenerateChunks, Rules, Sample};
use crate::engine::{LogprobOptions, Request, SamplingParams};

/// Most prompts in one request.
const MAX_PROMPTS: usize = 1024;
/// Most samples a prompt.
const MAX_N: i64 = 128;
/// Most alternatives a token.
const MAX_TOP: i64 = 1024;

const UNSERVED: &[Unserved] = &[
    Unserved { name: "input_embeds", harmless: Harmless::Empty },
    Unserved { name: "image_data", harmless: Harmless::Empty },
    Unserved { name: "audio_data", harmless: Harmless::Empty },
    Unserved { name: "video_data", harmless: Harmless::Empty },
    Unserved { name: "modalities", harmless: Harmless::Words(&["text"]) },
    Unserved { name: "lora_path", harmless: Harmless::Empty },
    Unserved { name: "lora_id", harmless: Harmless::Empty },
    Unserved { name: "session_params", harmless: Harmless::Empty },
    Unserved { name: "custom_logit_processor", harmless: Harmless::Empty },
    Unserved { name: "return_hidden_states", harmless: Harmless::Empty },
    Unserved { name: "bootstrap_host", harmless: Harmless::Empty },
    Unserved { name: "bootstrap_port", harmless: Harmless::Empty },
    Unserved { name: "bootstrap_room", harmless: Harmless::Empty },
    Unserved { name: "data_parallel_rank", harmless: Harmless::Number(0) },
    Unserved { name: "log_metrics", harmless: Harmless::Any },
    Unserved { name: "background", harmless: Harmless::Empty },
];

/// A native request, read and tokenized.
struct Generate {
    requests: Vec<Request>,
    /// How each prompt's answers are written.
    rules: Vec<Rules>,
    /// The name that several prompts were given together.
    name: Option<String>,
    /// Samples a prompt.
    n: u32,
    /// Whether the answer is a list.
    list: bool,
    stream: bool,
}

/// Answers a native request.
pub(in crate::server) async fn generate(server: Arc<Server>, fields: Fields) -> Result<Response, ApiError> {
    let served = server.accepting()?;
    let (reading, reader) = (served.clone(), server.clone());
    let job = reading::reading(fields.bytes(), move |client| read(fields, &reading, &reader.unknown, client)).await?;
    served
        .engine
        .check_samples(job.requests.len(), job.n)
        .map_err(|error| ApiError::from_submit(error, native_name))?;
    let members = || job.requests.iter().map(|request| request.id.clone()).collect();
    let group = job.name.as_deref().map(|name| server.group(name, members())).transpose()?;
    let mut streams = Vec::with_capacity(job.requests.len());
    for request in job.requests {
        // Streams that are dropped on the way out cancel what was taken already.
        let stream = served.engine.submit(request);
        streams.push(stream.map_err(|error| ApiError::from_submit(error, native_name))?);
    }
    if job.stream {
        let chunks = GenerateChunks::new(job.rules, job.n, job.list, served.tokenizer.clone(), group);
        return Ok(sse::respond(streams, chunks));
    }
    let mut answers: Vec<Value> = Vec::new();
    for (stream, rules) in streams.into_iter().zip(&job.rules) {
        let samples = stream.collect().await;
        if samples.is_empty() {
            return Err(ApiError::unavailable("the engine has stopped"));
        }
        for sample in samples {
            if let Some(error) = failure(&sample.reason) {
                return Err(error);
            }
            answers.push(Sample::from(sample).json(rules, &served.tokenizer));
        }
    }
    let answer = match (job.list, answers.pop()) {
        (false, Some(only)) => only,
        (_, last) => {
            answers.extend(last);
            Value::Array(answers)
        }
    };
    Ok(Json(answer).into_response())
}

fn read(mut fields: Fields, served: &Served, unknown: &UnknownFields, client: &Client) -> Result<Generate, ApiError> {
    let (prompts, batch) = read_prompts(&mut fields, served, client)?;
    let count = prompts.len();
    let stream = fields.bool("stream")?.unwrap_or(false);
    let sampling = read_sampling(&mut fields, count, unknown)?;
    let n = sampling.first().map_or(1, |(_, n)| *n);
    if sampling.iter().any(|(_, other)| *other != n) {
        return Err(ApiError::field("sampling_params.n", "takes the same number for all prompts of a request"));
    }
    let samples = count.saturating_mul(n as usize);
    sampling.iter().try_for_each(|(params, _)| sampling::check_samples("sampling_params.", params, samples))?;
    let (ids, name) = read_ids(&mut fields, count)?;
    let return_logprob = bools(&mut fields, "return_logprob", count)?;
    let starts = integers(&mut fields, "logprob_start_len", count, -1, i64::from(u32::MAX))?;
    let tops = integers(&mut fields, "top_logprobs_num", count, 0, MAX_TOP)?;
    let token_ids =
        per_request("token_ids_logprob", fields.take("token_ids_logprob"), count, |value| as_tokens(value).is_some())?;
    let return_text = fields.bool("return_text_in_logprobs")?.unwrap_or(false);
    let return_prompt = fields.bool("return_prompt_token_ids")?.unwrap_or(false);
    let session_id = fields.name("session_id")?;
    let priority = fields.integer_in("priority", i32::MIN.into(), i32::MAX.into())?;
    let is_text = |value: &Value| value.is_string();
    let salts = per_request("cache_salt", fields.take("cache_salt"), count, is_text)?;
    let keys = per_request("extra_key", fields.take("extra_key"), count, is_text)?;
    fields.finish(UNSERVED, unknown)?;

    let mut requests = Vec::with_capacity(count);
    let mut rules = Vec::with_capacity(count);
    let texts = |name: &str, value: Option<Value>| match value {
        None => Ok(None),
        Some(Value::String(text)) => check_name(name, &text).map(|()| Some(text)),
        Some(other) => Err(ApiError::field(name, format!("takes texts; found {}", name_of(&other)))),
    };
    let options = return_logprob.into_iter().zip(starts).zip(tops).zip(token_ids);
    let spaces = salts.into_iter().zip(keys);
    for ((((prompt, id), (params, n)), (((logprob, start), top), token_ids)), (salt, key)) in
        prompts.into_iter().zip(ids).zip(sampling).zip(options).zip(spaces)
    {
        let logprobs = match logprob {
            false => LogprobOptions::default(),
            true => LogprobOptions {
                output: true,
                prompt_start: start.and_then(|start| usize::try_from(start).ok()),
                top: top.and_then(|top| usize::try_from(top).ok()).unwrap_or(0),
                token_ids: token_ids.as_ref().and_then(as_tokens).unwrap_or_default(),
            },
        };
        if let Some(start) = logprobs.prompt_start
            && start >= prompt.len()
        {
            return Err(ApiError::field(
                "logprob_start_len",
                format!("{start} is not less than the prompt's {} tokens", prompt.len()),
            ));
        }
        rules.push(Rules {
            id: id.clone(),
            logprobs: logprobs.clone(),
            return_text,
            prompt_ids: return_prompt.then(|| prompt.clone()),
        });
        requests.push(Request {
            n,
            cache_salt: texts("cache_salt", salt)?,
            extra_key: texts("extra_key", key)?,
            session_id: session_id.clone(),
            logprobs,
            priority: priority.and_then(|p| i32::try_from(p).ok()).unwrap_or(0),
            stream,
            ..Request::new(id, prompt, params)
        });
    }
    sampling::bound_logprobs("top_logprobs_num", &mut requests, served.engine.max_request_tokens())?;
    Ok(Generate { requests, rules, name, n, list: batch || n > 1, stream })
}

/// The prompts' tokens, and whether they came as a list.
fn read_prompts(fields: &mut Fields, served: &Served, client: &Client) -> Result<(Vec<Vec<u32>>, bool), ApiError> {
    let encode = |text: &str| reading::tokenize(served, client, "text", text, true);
    let (prompts, batch) = match (fields.take("text"), fields.take("input_ids")) {
        (Some(_), Some(_)) => {
            return Err(ApiError::field("input_ids", "and text exclude each other"));
        }
        (Some(Value::String(text)), None) => (vec![encode(&text)?], false),
        (Some(value), None) => match as_texts(&value) {
            Some(texts) => {
                let prompts: Result<_, _> = texts.iter().map(|text| encode(text)).collect();
                (prompts?, true)
            }
            None => {
                return Err(ApiError::field(
                    "text",
                    format!("takes a text or a list of texts; found {}", name_of(&value)),
                ));
            }
        },
        (None, Some(value)) => match read_ids_prompt(&value) {
            Some(read) => read,
            None => {
                return Err(ApiError::field("input_ids", "takes a list of token ids or a list of such lists"));
            }
        },
        (None, None) => {
            return Err(ApiError::field("text", "is missing; give text or input_ids"));
        }
    };
    if prompts.is_empty() || prompts.len() > MAX_PROMPTS {
        return Err(ApiError::bad_request(format!("{} prompts; from 1 to {MAX_PROMPTS} are taken", prompts.len())));
    }
    Ok((prompts, batch))
}

fn read_ids_prompt(value: &Value) -> Option<(Vec<Vec<u32>>, bool)> {
    let items = value.as_array()?;
    if items.iter().any(Value::is_array) {
        let lists: Option<Vec<_>> = items.iter().map(as_tokens).collect();
        return Some((lists?, true));
    }
    Some((vec![as_tokens(value)?], false))
}

fn read_sampling(
    fields: &mut Fields,
    count: usize,
    unknown: &UnknownFields,
) -> Result<Vec<(SamplingParams, u32)>, ApiError> {
    let given = fields.take("sampling_params");
    per_request("sampling_params", given, count, Value::is_object)?
        .into_iter()
        .map(|value| {
            let mut inner = match value {
                None => Fields::default(),
                Some(Value::Object(map)) => Fields::new(map).under("sampling_params"),
                Some(other) => {
                    return Err(ApiError::field(
                        "sampling_params",
                        format!("takes an object; found {}", name_of(&other)),
                    ));
                }
            };
            let n = inner.integer_in("n", 1, MAX_N)?.unwrap_or(1);
            let params = sampling::native(&mut inner)?;
            inner.finish(UNSERVED_SAMPLING, unknown)?;
            Ok((params, u32::try_from(n).unwrap_or(1)))
        })
        .collect()
}

/// The prompts' names, and the one name they were given together, if they were.
fn read_ids(fields: &mut Fields, count: usize) -> Result<(Vec<String>, Option<String>), ApiError> {
    let given = match fields.take("rid") {
        // One name for several prompts would not be a name.
        Some(Value::String(rid)) if count > 1 => {
            check_name("rid", &rid)?;
            let ids = (0..count).map(|at| format!("{rid}_{at}")).collect();
            return Ok((ids, Some(rid)));
        }
        other => per_request("rid", other, count, Value::is_string)?,
    };
    let ids: Result<_, _> = given
        .into_iter()
        .map(|rid| match rid {
            None => Ok(fresh_id("")),
            Some(Value::String(rid)) if !rid.is_empty() => check_name("rid", &rid).map(|()| rid),
            Some(_) => Err(ApiError::field("rid", "takes texts that are not empty")),
        })
        .collect();
    Ok((ids?, None))
}

fn bools(fields: &mut Fields, name: &str, count: usize) -> Result<Vec<bool>, ApiError> {
    per_request(name, fields.take(name), count, Value::is_boolean)?
        .into_iter()
        .map(|value| match value {
            None => Ok(false),
            Some(Value::Bool(value)) => Ok(value),
            Some(other) => Err(ApiError::field(name, format!("takes true or false; found {}", name_of(&other)))),
        })
        .collect()
}

fn integers(fields: &mut Fields, name: &str, count: usize, low: i64, high: i64) -> Result<Vec<Option<i64>>, ApiError> {
    per_request(name, fields.take(name), count, Value::is_number)?
        .into_iter()
        .map(|value| integer_value(name, value, low, high))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn input_ids_single_and_batch() {
        assert_eq!(read_ids_prompt(&json!([1, 2])), Some((vec![vec![1, 2]], false)));
        assert_eq!(read_ids_prompt(&json!([[1], [2]])), Some((vec![vec![1], vec![2]], true)));
        assert_eq!(read_ids_prompt(&json!([[1], 2])), None);
        assert_eq!(read_ids_prompt(&json!("a")), None);
    }

    #[test]
    fn one_rid_for_several_prompts_is_numbered() {
        let mut fields = Fields::new(json!({"rid": "r"}).as_object().cloned().unwrap());
        let expected = (vec!["r_0".to_owned(), "r_1".to_owned()], Some("r".to_owned()));
        assert_eq!(read_ids(&mut fields, 2).unwrap(), expected);
        let mut fields = Fields::new(json!({"rid": ["a", "b"]}).as_object().cloned().unwrap());
        assert_eq!(read_ids(&mut fields, 2).unwrap().0, ["a", "b"]);
        let mut fields = Fields::new(json!({"rid": ["a"]}).as_object().cloned().unwrap());
        assert!(read_ids(&mut fields, 2).is_err());
    }

    #[test]
    fn sampling_errors_name_their_path() {
        let body = json!({"sampling_params": {"temperature": "x"}});
        let mut fields = Fields::new(body.as_object().cloned().unwrap());
        let error = read_sampling(&mut fields, 1, &UnknownFields::default()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("sampling_params.temperature"));
        let body = json!({"sampling_params": {"regex": "a+"}});
        let mut fields = Fields::new(body.as_object().cloned().unwrap());
        let error = read_sampling(&mut fields, 1, &UnknownFields::default()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("sampling_params.regex"));
    }
}
