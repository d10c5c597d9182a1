//! Bad input

use kvdock_models::testing::{TinyKind, TinyModel};
use serde_json::json;

use crate::support::{Server, chat, completion, long_prompt};

#[test]
fn wrong_requests_are_told_what_and_where() {
    let server = Server::with(&["server.max_body=\"4KiB\""]);
    let chat_path = "/v1/chat/completions";
    let text_path = "/v1/completions";
    for (path, body, param) in [
        (chat_path, chat("x", json!({"temperature": "hot"})), "temperature"),
        (chat_path, chat("x", json!({"temperature": -1})), "temperature"),
        (chat_path, chat("x", json!({"top_p": 0})), "top_p"),
        (chat_path, chat("x", json!({"n": 0})), "n"),
        (chat_path, chat("x", json!({"min_tokens": 99})), "min_tokens"),
        (chat_path, chat("x", json!({"max_tokens": -1})), "max_tokens"),
        (chat_path, chat("x", json!({"logit_bias": {"9999": 1}})), "logit_bias"),
        (chat_path, chat("x", json!({"top_logprobs": 2})), "top_logprobs"),
        (chat_path, chat("x", json!({"stream_options": {"include_usage": true}})), "stream_options"),
        (chat_path, chat("x", json!({"messages": []})), "messages"),
        (chat_path, json!({"model": "tiny"}), "messages"),
        (text_path, json!({"model": "tiny"}), "prompt"),
        (text_path, completion(json!([1, -1]), json!({})), "prompt"),
        (text_path, completion(json!("a"), json!({"logprobs": 99})), "logprobs"),
        ("/generate", json!({"text": "a", "input_ids": [1]}), "input_ids"),
        ("/generate", json!({}), "text"),
        ("/generate", json!({"text": "a", "sampling_params": {"top_k": 0}}), "sampling_params.top_k"),
        ("/generate", json!({"text": "a", "sampling_params": {"min_p": 2}}), "sampling_params.min_p"),
        ("/generate", json!({"text": ["a", "b"], "rid": ["x"]}), "rid"),
        ("/generate", json!({"text": "a", "return_logprob": true, "logprob_start_len": 5}), "logprob_start_len"),
    ] {
        let error = server.post(path, &body).error(400);
        assert!(error["param"].as_str().unwrap().ends_with(param), "{path} {body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().contains(param));
    }
    let error = server.post_text(chat_path, "application/json", "{\"model\":\n }").error(400);
    assert!(error["message"].as_str().unwrap().contains("line 2 column 2"), "{error}");
    server.post_text(chat_path, "application/json", "[]").error(400);
    server.post_text(chat_path, "text/plain", "{}").error(415);
    server.post(text_path, &completion(json!("x".repeat(5000)), json!({}))).error(413);
    // The server lives on.
    server.post(chat_path, &chat("x", json!({}))).ok();
}

#[test]
fn a_text_that_can_not_fit_was_tokenized_first() {
    // Every byte has a token, so that the length of a text bounds its tokens.
    let dir = tempfile::tempdir().unwrap();
    TinyModel { vocab: 256, ..TinyModel::new(TinyKind::Llama) }.write_hf(dir.path()).unwrap();
    let server = Server::serving(dir, &[]);
    let text = "x".repeat(2_000_000);
    for (path, body) in [
        ("/v1/completions", completion(json!(text), json!({}))),
        ("/v1/chat/completions", chat(&text, json!({}))),
        ("/generate", json!({"text": ["a", text]})),
        ("/tokenize", json!({"prompt": text})),
    ] {
        let error = server.post(path, &body).error(400);
        assert_eq!(error["code"], "context_length_exceeded", "{path}: {error}");
        // What tokenizing counts would stand there without "at least".
        assert!(error["message"].as_str().unwrap().starts_with("the prompt has at least "), "{path}: {error}");
    }
}

#[test]
fn samples_that_no_server_has_places_for_were_to_be_tried_again() {
    let server = Server::with(&["engine.max_running_requests=2", "engine.max_queued_requests=4"]);
    let native = json!({"text": ["a", "b", "c"], "sampling_params": {"n": 3, "max_new_tokens": 1}});
    let error = server.post("/generate", &native).error(400);
    assert_eq!(error["param"], "sampling_params.n");
    assert!(error["message"].as_str().unwrap().contains("are 9 in all, more than the 6 "), "{error}");
    let prompts = json!(["a", "b", "c", "d", "e", "f", "g"]);
    let error = server.post("/v1/completions", &completion(prompts, json!({}))).error(400);
    assert_eq!(error["param"], "n", "{error}");
    let fits = completion(json!(["a", "b", "c"]), json!({"n": 2, "max_tokens": 1}));
    server.post("/v1/completions", &fits).ok();
}

#[test]
fn known_fields_that_are_not_served_are_named_and_harmless_ones_pass() {
    let server = Server::start();
    let path = "/v1/chat/completions";
    let tool = json!({"type": "function", "function": {"name": "f"}});
    for (more, param) in [
        (json!({"tools": [tool]}), "tools"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"regex": "a+"}), "regex"),
        (json!({"ebnf": "x"}), "ebnf"),
        (json!({"stop_regex": "x"}), "stop_regex"),
        (json!({"lora_path": "x"}), "lora_path"),
        (json!({"logit_processors": ["x"]}), "logit_processors"),
        (json!({"modalities": ["audio"]}), "modalities"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
            "messages[0].content[0].type",
        ),
    ] {
        let error = server.post(path, &chat("x", more)).error(400);
        assert_eq!(error["param"], param);
        assert_eq!(error["code"], "unsupported_field");
    }
    for (more, param) in [
        (json!({"best_of": 2}), "best_of"),
        (json!({"suffix": "x"}), "suffix"),
        (json!({"json_schema": "{}"}), "json_schema"),
    ] {
        let error = server.post("/v1/completions", &completion(json!("x"), more)).error(400);
        assert_eq!(error["param"], param);
    }
    let harmless = json!({"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "me",
        "n": 1, "logit_bias": {}, "stop": null, "parallel_tool_calls": true, "metadata": {"a": "b"},
        "service_tier": "auto", "modalities": ["text"], "lora_path": null, "separate_reasoning": true,
        "store": false, "seed": null});
    server.post(path, &chat("x", harmless)).ok();
    server.post("/v1/completions", &completion(json!("x"), json!({"best_of": 1, "suffix": null}))).ok();
}

#[test]
fn unknown_fields_are_ignored_and_logged_once() {
    let mut server = Server::start();
    for _ in 0..3 {
        server.post("/v1/completions", &completion(json!("x"), json!({"flux_capacitor": 1}))).ok();
    }
    server.post("/v1/completions", &completion(json!("x"), json!({"last_of_all": 1}))).ok();
    assert!(server.wait_for_line("is not known and is ignored").contains("flux_capacitor"));
    assert!(server.wait_for_line("is not known and is ignored").contains("last_of_all"));
}

#[test]
fn unknown_models_paths_and_methods() {
    let server = Server::start();
    let error = server.post("/v1/completions", &completion(json!("x"), json!({"model": "gpt"}))).error(404);
    assert_eq!(error["code"], "model_not_found");
    assert_eq!(error["param"], "model");
    server.get("/v1/models/gpt").error(404);
    let error = server.get("/v2/nothing").error(404);
    assert!(error["message"].as_str().unwrap().contains("/v2/nothing"));
    let reply = server.get("/v1/completions");
    reply.error(405);
    assert!(reply.headers["allow"].to_str().unwrap().contains("POST"));
    server.delete("/generate").error(405);
}

#[test]
fn prompts_that_do_not_fit_are_refused_at_once() {
    let server = Server::with(&["cache.device_tokens=256"]);
    let error = server.post("/v1/completions", &completion(json!(long_prompt(300)), json!({}))).error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    let error = server.post("/v1/completions", &completion(json!(long_prompt(5000)), json!({}))).error(400);
    assert!(error["message"].as_str().unwrap().contains("context length"), "{error}");
    let error = server.post("/v1/completions", &completion(json!([[]]), json!({}))).error(400);
    assert!(error["message"].as_str().unwrap().contains("no tokens"), "{error}");
    let error = server.post("/v1/completions", &completion(json!([300]), json!({}))).error(400);
    assert!(error["message"].as_str().unwrap().contains("vocabulary"), "{error}");
}

#[test]
fn a_full_queue_is_429_with_retry_after() {
    let server = Server::slow(&["engine.max_running_requests=1", "engine.max_queued_requests=1"]);
    let long = |rid: &str| {
        json!({"text": "a", "rid": rid, "stream": true,
            "sampling_params": {"temperature": 0, "max_new_tokens": 4000}})
    };
    let running = server.begin("/generate", &long("one"));
    let queued = std::thread::scope(|scope| {
        let queued = scope.spawn(|| server.post("/generate", &long("two")));
        server.wait_until("one is queued", |server| server.metric("sglang:num_queue_reqs") == 1.0);
        let reply = server.post("/v1/completions", &completion(json!("x"), json!({})));
        let error = reply.error(429);
        assert_eq!(error["code"], "queue_full");
        assert!(reply.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
        assert_eq!(server.post("/abort_request", &json!({"abort_all": true})).ok()["aborted"], 2);
        queued.join().unwrap()
    });
    assert_eq!(queued.status, 200);
    drop(running);
    server.post("/v1/completions", &completion(json!("x"), json!({}))).ok();
}
