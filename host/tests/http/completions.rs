//! `/v1/completions`

use serde_json::{Value, json};

use crate::support::{Server, completion, merge};

const PATH: &str = "/v1/completions";

fn texts(answer: &Value) -> Vec<String> {
    let choices = answer["choices"].as_array().unwrap();
    choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
}

fn joined(chunks: &[Value], index: u64) -> String {
    chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().unwrap())
        .filter(|choice| choice["index"] == index)
        .filter_map(|choice| choice["text"].as_str())
        .collect()
}

#[test]
fn all_forms_of_prompts_agree() {
    let server = Server::start();
    let answer = server.post(PATH, &completion(json!("ab"), json!({}))).ok();
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["usage"]["prompt_tokens"], 2);
    let ids = server.post("/tokenize", &json!({"prompt": "ab"})).ok()["tokens"].clone();
    let by_ids = server.post(PATH, &completion(ids.clone(), json!({}))).ok();
    assert_eq!(texts(&by_ids), texts(&answer));
    let lists = server.post(PATH, &completion(json!([ids, ids]), json!({}))).ok();
    assert_eq!(texts(&lists), [texts(&answer), texts(&answer)].concat());
    let several = server.post(PATH, &completion(json!(["ab", "cd"]), json!({"n": 2}))).ok();
    assert_eq!(several["usage"]["prompt_tokens"], 4);
    assert_eq!(several["usage"]["completion_tokens"], 4 * 24);
    let indices: Vec<_> = several["choices"].as_array().unwrap().iter().map(|c| c["index"].clone()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(texts(&several)[0], texts(&answer)[0]);
    assert_eq!(texts(&several)[1], texts(&answer)[0], "greedy samples are alike");
    let default = server.post(PATH, &json!({"prompt": "ab", "temperature": 0})).ok();
    assert_eq!(default["usage"]["completion_tokens"], 16);
}

#[test]
fn streams_of_several_prompts_join_to_their_texts() {
    let server = Server::start();
    let body = completion(json!(["one", "two", "three"]), json!({"temperature": 1.2, "seed": 3, "n": 2}));
    let whole = server.post(PATH, &body).ok();
    let chunks = server.stream(PATH, &merge(body, json!({"stream": true})));
    for (index, text) in texts(&whole).iter().enumerate() {
        assert_eq!(&joined(&chunks, index as u64), text);
    }
}

#[test]
fn echo_and_logprobs_cover_the_prompt() {
    let server = Server::start();
    let body = completion(json!("abc"), json!({"echo": true, "logprobs": 2, "max_tokens": 3}));
    let answer = server.post(PATH, &body).ok();
    let choice = &answer["choices"][0];
    assert!(choice["text"].as_str().unwrap().starts_with("abc"));
    let logprobs = &choice["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), 6);
    assert_eq!(tokens[..3], ["a", "b", "c"]);
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    assert!(logprobs["token_logprobs"][1].as_f64().unwrap() < 0.0);
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    let top = logprobs["top_logprobs"][5].as_object().unwrap();
    assert!((2..=3).contains(&top.len()), "{top:?}");
    assert_eq!(logprobs["text_offset"].as_array().unwrap()[..4], [0, 1, 2, 3]);

    let scored = server.post(PATH, &merge(body.clone(), json!({"max_tokens": 0}))).ok();
    assert_eq!(scored["choices"][0]["text"], "abc");
    assert_eq!(scored["choices"][0]["logprobs"]["tokens"], json!(["a", "b", "c"]));
    assert_eq!(
        scored["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap()[..],
        logprobs["token_logprobs"].as_array().unwrap()[..3]
    );

    let chunks = server.stream(PATH, &merge(body, json!({"stream": true})));
    assert_eq!(joined(&chunks, 0), choice["text"].as_str().unwrap());
    let field = |name: &str| -> Vec<Value> {
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"][name].as_array()).flatten().cloned().collect()
    };
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(&json!(field(name)), &logprobs[name], "{name}");
    }
}

#[test]
fn a_seed_gives_the_same_text_whatever_runs_beside_it() {
    let server = Server::start();
    let body = completion(json!("seed"), json!({"temperature": 1.0, "seed": 11}));
    let alone = texts(&server.post(PATH, &body).ok());
    let other = completion(json!("noise"), json!({"temperature": 1.0, "max_tokens": 64, "n": 4}));
    let (beside, _) = std::thread::scope(|scope| {
        let noise = scope.spawn(|| server.post(PATH, &other).ok());
        let beside = texts(&server.post(PATH, &body).ok());
        (beside, noise.join().unwrap())
    });
    assert_eq!(beside, alone);
    let third = completion(json!("seed"), json!({"temperature": 1.0, "seed": 12}));
    assert_ne!(texts(&server.post(PATH, &third).ok()), alone);
}
