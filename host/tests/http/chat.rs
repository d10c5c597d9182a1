//! `/v1/chat/completions`

use serde_json::{Value, json};

use crate::support::{Server, chat, long_prompt, merge};

const PATH: &str = "/v1/chat/completions";

fn content(answer: &Value) -> String {
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

fn joined(chunks: &[Value], index: u64) -> String {
    chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().unwrap())
        .filter(|choice| choice["index"] == index)
        .filter_map(|choice| choice["delta"]["content"].as_str())
        .collect()
}

#[test]
fn an_answer_has_openais_shape_and_usage_by_tier() {
    let server = Server::start();
    let answer = server.post(PATH, &chat("Hello", json!({}))).ok();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "tiny");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["logprobs"], Value::Null);
    // "user: Hello\nassistant: ", a token a byte.
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens"], 23);
    assert_eq!(usage["completion_tokens"], 24);
    assert_eq!(usage["total_tokens"], 47);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(usage["kvdock"], json!({"device": 0, "host": 0, "storage": 0}));

    let again = server.post(PATH, &chat("Hello", json!({}))).ok();
    assert_eq!(content(&again), content(&answer));
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 16);
    assert_eq!(again["usage"]["kvdock"], json!({"device": 16, "host": 0, "storage": 0}));
}

#[test]
fn streamed_deltas_joined_are_the_unstreamed_text() {
    let server = Server::start();
    for seed in 0..4 {
        let body = chat("Tell me", json!({"temperature": 1.5, "seed": seed, "max_tokens": 80, "n": 2}));
        let whole = server.post(PATH, &body).ok();
        let chunks = server.stream(PATH, &merge(body, json!({"stream": true})));
        for index in 0..2 {
            let text = whole["choices"][index as usize]["message"]["content"].as_str().unwrap();
            assert_eq!(joined(&chunks, index), text, "seed {seed}");
        }
    }
}

#[test]
fn stop_strings_end_both_forms_at_the_same_byte() {
    let server = Server::start();
    let base = chat("Go on", json!({"temperature": 1.0, "seed": 7, "max_tokens": 60}));
    let text = content(&server.post(PATH, &base).ok());
    let middle: Vec<char> = text.chars().collect();
    let stop: String = middle[middle.len() / 2..middle.len() / 2 + 4].iter().collect();
    let expected = text.split(&stop).next().unwrap();
    let body = merge(base, json!({"stop": [stop, "never seen in there"]}));
    let whole = server.post(PATH, &body).ok();
    assert_eq!(content(&whole), expected);
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert_eq!(whole["choices"][0]["matched_stop"], stop);
    let chunks = server.stream(PATH, &merge(body, json!({"stream": true})));
    assert_eq!(joined(&chunks, 0), expected);
}

#[test]
fn a_stream_begins_with_the_role_and_ends_with_usage() {
    let server = Server::start();
    let body = chat("Hi", json!({"stream": true, "stream_options": {"include_usage": true}, "n": 2}));
    let chunks = server.stream(PATH, &body);
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], chunks[0]["id"]);
        assert_eq!(chunk["created"], chunks[0]["created"]);
    }
    for index in 0..2 {
        let own: Vec<_> = chunks
            .iter()
            .flat_map(|chunk| chunk["choices"].as_array().unwrap())
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(own[0]["delta"], json!({"role": "assistant", "content": ""}));
        let last = own.last().unwrap();
        assert_eq!(last["delta"], json!({}));
        assert_eq!(last["finish_reason"], "length");
        assert!(own[..own.len() - 1].iter().all(|choice| choice["finish_reason"].is_null()));
    }
    let (last, others) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 48);
    assert_eq!(last["usage"]["prompt_tokens"], 20);
    let tiers = last["usage"]["kvdock"].as_object().unwrap();
    let sum: u64 = tiers.values().map(|tokens| tokens.as_u64().unwrap()).sum();
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], sum);
    assert!(others.iter().all(|chunk| chunk["usage"].is_null()));

    let running = chat("Hi", json!({"stream": true, "stream_options": {"continuous_usage_stats": true}}));
    let chunks = server.stream(PATH, &running);
    assert!(chunks.iter().all(|chunk| chunk["usage"]["prompt_tokens"] == 20), "{chunks:?}");
    let plain = server.stream(PATH, &chat("Hi", json!({"stream": true})));
    assert!(plain.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[test]
fn logprobs_cover_every_token_in_both_forms() {
    let server = Server::start();
    let body = chat("Hi", json!({"logprobs": true, "top_logprobs": 3, "max_tokens": 12}));
    let answer = server.post(PATH, &body).ok();
    let entries = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(entries.len(), 12);
    for entry in &entries {
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        assert_eq!(top[0]["bytes"], entry["bytes"], "greedy takes the likeliest");
        assert_eq!(top[0]["logprob"], entry["logprob"]);
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
    }
    let chunks = server.stream(PATH, &merge(body, json!({"stream": true})));
    let streamed: Vec<Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(streamed, entries);
}

#[test]
fn content_parts_and_template_arguments_reach_the_prompt() {
    let server = Server::start();
    let text = server.post(PATH, &chat("a b", json!({}))).ok();
    let parts = json!([{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]);
    let body = chat("", json!({"messages": parts, "chat_template_kwargs": {"enable_thinking": false}}));
    let same = server.post(PATH, &body).ok();
    assert_eq!(content(&same), content(&text));
    assert_eq!(same["usage"]["prompt_tokens"], text["usage"]["prompt_tokens"]);
}

#[test]
fn a_salt_separates_tenants_and_details_follow_sglang() {
    let server = Server::start();
    let prompt = long_prompt(100);
    let cached = |salt: &str| {
        let body = chat(&prompt, json!({"cache_salt": salt, "return_cached_tokens_details": true}));
        server.post(PATH, &body).ok()
    };
    assert!(cached("a").get("sglext").is_none(), "nothing cached, nothing said");
    assert_eq!(cached("b")["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let hit = cached("a");
    assert_eq!(hit["usage"]["prompt_tokens_details"]["cached_tokens"], 112);
    assert_eq!(hit["sglext"]["cached_tokens_details"], json!({"device": 112, "host": 0}));
    let key = |extra: &str| {
        let body = chat(&prompt, json!({"extra_key": extra}));
        server.post(PATH, &body).ok()["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    assert_eq!((key("x"), key("y"), key("x")), (json!(0), json!(0), json!(112)));
}
