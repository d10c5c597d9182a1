//! The HTTP faces of a server, as a client uses them.

use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::metrics::Metrics;

/// A client of one server.
#[derive(Clone)]
pub struct Client {
    base: String,
    agent: ureq::Agent,
}

/// A status and a JSON body.
#[derive(Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// The body; null if it is empty.
    pub json: Value,
}

/// One generation through `/generate`, with everything in it that two runs must have in common.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The text.
    pub text: String,
    /// Token ids and the log-probabilities of the chosen and the likeliest tokens, as the server wrote them.
    pub logprobs: Value,
}

impl Generation {
    /// The tokens.
    pub fn token_ids(&self) -> Vec<u32> {
        let chosen = self.logprobs[0].as_array().map_or(&[][..], Vec::as_slice);
        chosen.iter().filter_map(|token| u32::try_from(token[1].as_u64()?).ok()).collect()
    }
}

/// Prompt tokens by where their KV came from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: u64,
    /// From device pages.
    pub device: u64,
    /// From host pages.
    pub host: u64,
    /// From storage.
    pub storage: u64,
}

impl Usage {
    /// Of all tiers.
    pub fn cached(&self) -> u64 {
        self.device + self.host + self.storage
    }
}

impl Client {
    /// A client of the server at `base`.
    pub fn new(base: &str) -> Self {
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(Duration::from_secs(120)))
            .http_status_as_error(false)
            .build()
            .into();
        Self { base: base.to_owned(), agent }
    }

    /// A client that waits for as long as it takes. It starts no thread for a request, as one with a limit does to look up its server's name.
    pub fn without_limit(base: &str) -> Self {
        let agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        Self { base: base.to_owned(), agent }
    }

    /// GET of a path.
    pub fn get(&self, path: &str) -> Reply {
        let response = self.agent.get(format!("{}{path}", self.base)).call();
        Self::reply(path, response)
    }

    /// POST of a JSON body.
    pub fn post(&self, path: &str, body: &Value) -> Reply {
        let response = self.agent.post(format!("{}{path}", self.base)).send_json(body);
        Self::reply(path, response)
    }

    /// PUT of a JSON body.
    pub fn put(&self, path: &str, body: &Value) -> Reply {
        let response = self.agent.put(format!("{}{path}", self.base)).send_json(body);
        Self::reply(path, response)
    }

    /// PUT of a text that says it is JSON.
    pub fn put_text(&self, path: &str, text: &str) -> Reply {
        let request = self.agent.put(format!("{}{path}", self.base)).content_type("application/json");
        Self::reply(path, request.send(text))
    }

    /// DELETE of a path.
    pub fn delete(&self, path: &str) -> Reply {
        let response = self.agent.delete(format!("{}{path}", self.base)).call();
        Self::reply(path, response)
    }

    fn reply(path: &str, response: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Reply {
        let mut response = response.unwrap_or_else(|error| panic!("{path}: {error}"));
        let status = response.status().as_u16();
        let text = response.body_mut().read_to_string().unwrap_or_else(|error| panic!("{path}: {error}"));
        let json = match text.as_str() {
            "" => Value::Null,
            text => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned())),
        };
        Reply { status, json }
    }

    /// The metrics now.
    pub fn metrics(&self) -> Metrics {
        Metrics::parse(&self.metrics_text())
    }

    /// The text of the metrics now.
    pub fn metrics_text(&self) -> String {
        let mut response = self.agent.get(format!("{}/metrics", self.base)).call().expect("/metrics answers");
        response.body_mut().read_to_string().expect("/metrics is text")
    }

    /// Greedy generation of `new_tokens` after `prompt`, with the log-probabilities of five tokens each.
    pub fn generate(&self, prompt: &[u32], new_tokens: u32) -> (Generation, Usage) {
        self.generate_salted(prompt, new_tokens, None)
    }

    /// As `generate`, in the namespace of a `cache_salt`.
    pub fn generate_salted(&self, prompt: &[u32], new_tokens: u32, salt: Option<&str>) -> (Generation, Usage) {
        let reply = self.post(
            "/generate",
            &json!({
                "input_ids": prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": true},
                "return_logprob": true,
                "top_logprobs_num": 5,
                "cache_salt": salt,
            }),
        );
        assert_eq!(reply.status, 200, "/generate: {}", reply.json);
        let meta = &reply.json["meta_info"];
        let generation = Generation {
            text: reply.json["text"].as_str().unwrap_or_else(|| panic!("no text in {}", reply.json)).to_owned(),
            logprobs: json!([meta["output_token_logprobs"], meta["output_top_logprobs"]]),
        };
        let chosen = meta["output_token_logprobs"].as_array().map_or(0, Vec::len);
        assert_eq!(chosen, new_tokens as usize, "one log-probability a new token: {}", reply.json);
        (generation, usage_of_generate(&reply.json))
    }

    /// A completion through the OpenAI API: text and where the prompt came from.
    pub fn completion(&self, body: &Value) -> (String, Usage) {
        let reply = self.post("/v1/completions", body);
        assert_eq!(reply.status, 200, "/v1/completions: {}", reply.json);
        let text = reply.json["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {}", reply.json));
        (text.to_owned(), usage(&reply.json["usage"]))
    }

    /// Starts a streamed completion.
    pub fn stream(&self, path: &str, body: &Value) -> Stream {
        self.try_stream(path, body).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// As `stream`, for a server that may end meanwhile.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn try_stream(&self, path: &str, body: &Value) -> Result<Stream, ureq::Error> {
        let response = self.agent.post(format!("{}{path}", self.base)).send_json(body)?;
        let status = response.status().as_u16();
        Ok(Stream { status, lines: BufReader::new(response.into_body().into_reader()) })
    }

    /// Empties the device and host tiers; every page must go. Pages that copies or storage calls still hold are
    /// waited for.
    pub fn flush(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let request = self.agent.post(format!("{}/flush_cache", self.base)).header("Accept", "application/json");
            let reply = Self::reply("/flush_cache", request.send_empty());
            assert_eq!(reply.status, 200, "/flush_cache: {}", reply.json);
            let kept = |field: &str| reply.json[field].as_u64().unwrap_or_else(|| panic!("no {field}: {}", reply.json));
            if kept("device_pages_kept") + kept("host_pages_kept") == 0 {
                return;
            }
            assert!(Instant::now() < deadline, "pages are still held: {}", reply.json);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A streamed reply. Dropped before its end, the connection is closed.
pub struct Stream {
    /// HTTP status.
    pub status: u16,
    lines: BufReader<ureq::BodyReader<'static>>,
}

impl Stream {
    /// The next event's data; none at `[DONE]` or at the end.
    ///
    /// # Errors
    /// When the connection broke or an event is no JSON.
    pub fn next_event(&mut self) -> Result<Option<Value>, String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.lines.read_line(&mut line).map_err(|error| error.to_string())? == 0 {
                return Ok(None);
            }
            if let Some(data) = line.trim_end().strip_prefix("data: ") {
                if data == "[DONE]" {
                    return Ok(None);
                }
                return serde_json::from_str(data).map(Some).map_err(|error| format!("{error} in {data:?}"));
            }
        }
    }
}

/// The `usage` object of the OpenAI API.
pub fn usage(usage: &Value) -> Usage {
    let number = |value: &Value, what: &str| value.as_u64().unwrap_or_else(|| panic!("no {what} in {usage}"));
    let tiers = &usage["kvdock"];
    let parsed = Usage {
        prompt: number(&usage["prompt_tokens"], "prompt_tokens"),
        device: number(&tiers["device"], "kvdock.device"),
        host: number(&tiers["host"], "kvdock.host"),
        storage: number(&tiers["storage"], "kvdock.storage"),
    };
    let cached = number(&usage["prompt_tokens_details"]["cached_tokens"], "cached_tokens");
    assert_eq!(parsed.cached(), cached, "the tiers add up to cached_tokens: {usage}");
    parsed
}

/// The counts in an answer of `/generate`.
pub fn usage_of_generate(reply: &Value) -> Usage {
    let meta = &reply["meta_info"];
    let number = |value: &Value, what: &str| value.as_u64().unwrap_or_else(|| panic!("no {what} in {reply}"));
    let tiers = &meta["cached_tokens_details"];
    let parsed = Usage {
        prompt: number(&meta["prompt_tokens"], "prompt_tokens"),
        device: number(&tiers["device"], "device"),
        host: number(&tiers["host"], "host"),
        storage: number(&tiers["storage"], "storage"),
    };
    assert_eq!(parsed.cached(), number(&meta["cached_tokens"], "cached_tokens"), "the tiers add up: {reply}");
    parsed
}
