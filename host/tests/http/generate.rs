//! `/generate` and its helpers

use serde_json::{Value, json};

use crate::support::{Server, long_prompt, merge};

const PATH: &str = "/generate";

fn body(more: Value) -> Value {
    merge(json!({"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}), more)
}

#[test]
fn one_answer_is_an_object_and_a_batch_a_list() {
    let server = Server::start();
    let one = server.post(PATH, &body(json!({"rid": "mine"}))).ok();
    let meta = &one["meta_info"];
    assert_eq!(meta["id"], "mine");
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 8}));
    assert_eq!(meta["prompt_tokens"], 3);
    assert_eq!(meta["completion_tokens"], 8);
    assert_eq!(meta["cached_tokens_details"], json!({"device": 0, "host": 0, "storage": 0}));
    assert!(meta["e2e_latency"].as_f64().unwrap() > 0.0);
    assert_eq!(one["output_ids"].as_array().unwrap().len(), 8);

    let ids = server.post("/tokenize", &json!({"prompt": "abc"})).ok();
    assert_eq!(ids["count"], 3);
    assert_eq!(ids["max_model_len"], 4096);
    let by_ids = json!({"input_ids": ids["tokens"], "sampling_params": {"temperature": 0, "max_new_tokens": 8}});
    assert_eq!(server.post(PATH, &by_ids).ok()["text"], one["text"]);

    let batch = json!({"text": ["abc", "xyz"], "sampling_params": [
        {"temperature": 0, "max_new_tokens": 8}, {"temperature": 0, "max_new_tokens": 2}]});
    let batch = server.post(PATH, &batch).ok();
    assert_eq!(batch[0]["text"], one["text"]);
    assert_eq!(batch[1]["meta_info"]["completion_tokens"], 2);
    let samples = body(json!({"sampling_params": {"temperature": 0, "max_new_tokens": 8, "n": 2}}));
    let samples = server.post(PATH, &samples).ok();
    assert_eq!(samples.as_array().unwrap().len(), 2);
}

#[test]
fn streams_carry_the_text_so_far() {
    let server = Server::start();
    let whole = server.post(PATH, &body(json!({}))).ok();
    let frames = server.stream(PATH, &body(json!({"stream": true})));
    let mut before = String::new();
    for frame in &frames {
        let text = frame["text"].as_str().unwrap();
        assert!(text.starts_with(&before));
        before = text.to_owned();
    }
    assert_eq!(before, whole["text"].as_str().unwrap());
    let last = frames.last().unwrap();
    assert_eq!(last["output_ids"], whole["output_ids"]);
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "length");
    let inner = &frames[..frames.len() - 1];
    assert!(inner.iter().all(|frame| frame["meta_info"]["finish_reason"].is_null()));

    let batch = json!({"text": ["abc", "xyz"], "stream": true,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8}});
    let frames = server.stream(PATH, &batch);
    let last = frames.iter().rfind(|frame| frame["index"] == 0).unwrap();
    assert_eq!(last["text"], whole["text"]);
    assert!(frames.iter().any(|frame| frame["index"] == 1));
}

#[test]
fn logprobs_are_triples() {
    let server = Server::start();
    let request = body(json!({"return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 2,
        "token_ids_logprob": [5, 6], "return_text_in_logprobs": true}));
    let meta = server.post(PATH, &request).ok()["meta_info"].clone();
    let input = meta["input_token_logprobs"].as_array().unwrap();
    assert_eq!(input.len(), 3);
    assert_eq!(input[0], json!([null, 97, "a"]));
    assert!(input[1][0].as_f64().unwrap() < 0.0);
    let output = meta["output_token_logprobs"].as_array().unwrap();
    assert_eq!(output.len(), 8);
    assert_eq!(meta["input_top_logprobs"][0], Value::Null);
    assert_eq!(meta["output_top_logprobs"][0].as_array().unwrap().len(), 2);
    assert_eq!(meta["output_top_logprobs"][0][0][0], output[0][0]);
    assert_eq!(meta["output_token_ids_logprobs"][0][1][1], 6);
    let bare = server.post(PATH, &body(json!({"return_logprob": true}))).ok()["meta_info"].clone();
    assert_eq!(bare["input_token_logprobs"], json!([]));
    assert_eq!(bare["output_token_logprobs"][0][2], Value::Null);
}

#[test]
fn an_abort_ends_a_running_request() {
    let server = Server::slow(&[]);
    let request = json!({"text": "abc", "rid": "long", "stream": true,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4000}});
    let answer = server.begin(PATH, &request);
    let aborted = server.post("/abort_request", &json!({"rid": "long"})).ok();
    assert_eq!(aborted["aborted"], 1);
    let rest = answer.rest();
    assert!(rest.contains("\"finish_reason\":{\"type\":\"abort\""), "{rest}");
    assert_eq!(server.post("/abort_request", &json!({"rid": "long"})).ok()["aborted"], 0);

    let both = merge(request, json!({"text": ["abc", "def"]}));
    let answer = server.begin(PATH, &both);
    server.post(PATH, &both).error(400);
    assert_eq!(server.post("/abort_request", &json!({"rid": "long"})).ok()["aborted"], 2);
    answer.rest();
    assert_eq!(server.post("/abort_request", &json!({"abort_all": true})).ok()["aborted"], 0);
    server.post("/abort_request", &json!({})).error(400);
}

#[test]
fn text_goes_to_tokens_and_back() {
    let server = Server::start();
    let text = "héllo wörld 你好";
    let tokens = server.post("/tokenize", &json!({"prompt": text})).ok();
    let back = server.post("/detokenize", &json!({"tokens": tokens["tokens"]})).ok();
    assert_eq!(back["text"], text);
    let two = server.post("/tokenize", &json!({"prompt": ["a", "bc"]})).ok();
    assert_eq!(two["count"], json!([1, 2]));
    let back = server.post("/detokenize", &json!({"tokens": two["tokens"]})).ok();
    assert_eq!(back["text"], json!(["a", "bc"]));
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
    assert_eq!(server.post("/tokenize", &chat).ok()["count"], 20);
    server.post("/tokenize", &json!({})).error(400);
    let error = server.post("/detokenize", &json!({"tokens": [999]})).error(400);
    assert_eq!(error["param"], "tokens");
}

#[test]
fn a_flush_empties_device_and_host() {
    let server = Server::start();
    let request = json!({"text": long_prompt(200), "sampling_params": {"temperature": 0, "max_new_tokens": 2}});
    let cached = || server.post(PATH, &request).ok()["meta_info"]["cached_tokens"].as_u64().unwrap();
    assert_eq!((cached(), cached()), (0, 192));
    let reply = server.post("/flush_cache", &json!({}));
    assert_eq!(reply.status, 200);
    assert!(reply.text.starts_with("Cache flushed."), "{}", reply.text);
    assert!(reply.text.contains("emptied: device, host\nkept: storage\n"), "{}", reply.text);
    assert_eq!(cached(), 0);
    let device = server.get("/flush_cache?tiers=device");
    assert!(device.text.contains("emptied: device\nkept: host, storage\n"), "{}", device.text);
    let json = server.get_with("/flush_cache", ("accept", "application/json")).ok();
    assert_eq!(json["emptied"], json!(["device", "host"]));
    assert_eq!(server.get("/flush_cache?tiers=disk").error(400)["param"], "tiers");
}
