//! Health, model, server and metrics

use serde_json::{Value, json};

use crate::support::{Server, completion};

#[test]
fn health_and_models() {
    let server = Server::start();
    assert_eq!((server.get("/health").status, server.get("/health").text.as_str()), (200, ""));
    assert_eq!(server.get("/health_generate").status, 200);
    let models = server.get("/v1/models").ok();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(models["data"][0]["max_model_len"], 4096);
    assert_eq!(server.get("/v1/models/tiny").ok()["id"], "tiny");
    for path in ["/get_model_info", "/model_info"] {
        let info = server.get(path).ok();
        assert_eq!(info["served_model_name"], "tiny");
        assert_eq!(info["architectures"], json!(["LlamaForCausalLM"]));
        assert_eq!(info["is_generation"], true);
    }
    for path in ["/get_server_info", "/server_info"] {
        let info = server.get(path).ok();
        assert_eq!(info["max_total_num_tokens"], 4096);
        assert_eq!(info["page_size"], 16);
        assert_eq!(info["hicache_storage_backend"], Value::Null);
        assert_eq!(info["internal_states"][0]["memory_usage"]["token_capacity"], 4096);
    }
}

#[test]
fn metrics_bear_sglangs_names_and_count() {
    let server = Server::start();
    let reply = server.get("/metrics");
    assert_eq!(reply.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let body = completion(json!("0123456789abcdefghij"), json!({"max_tokens": 5}));
    server.post("/v1/completions", &body).ok();
    server.post("/v1/completions", &body).ok();
    // Gauges follow a step after the answer.
    server.wait_until("nothing runs", |server| {
        server.metric("sglang:num_running_reqs") == 0.0 && server.metric("sglang:token_usage") == 0.0
    });
    for (name, value) in [
        ("sglang:num_requests_total", 2.0),
        ("sglang:prompt_tokens_total", 40.0),
        ("sglang:generation_tokens_total", 10.0),
        ("sglang:cached_tokens_total", 16.0),
        ("sglang:num_queue_reqs", 0.0),
        ("sglang:max_total_num_tokens", 4096.0),
        ("sglang:cache_hit_rate", 0.4),
        ("sglang:e2e_request_latency_seconds_count", 2.0),
        ("sglang:time_to_first_token_seconds_count", 2.0),
        ("sglang:inter_token_latency_seconds_count", 8.0),
        ("sglang:num_aborted_requests_total", 0.0),
    ] {
        assert_eq!(server.metric(name), value, "{name}");
    }
    let text = server.get("/metrics").text;
    for line in [
        "sglang:cached_tokens_total{cache_source=\"device\",model_name=\"tiny\"} 16",
        "sglang:http_responses_total{endpoint=\"/v1/completions\",method=\"POST\",status_code=\"200\"} 2",
        "# TYPE sglang:time_to_first_token_seconds histogram",
    ] {
        let same = |found: &str| {
            let parts = |text: &str| {
                let mut parts: Vec<_> = text.split(['{', '}', ',']).map(str::to_owned).collect();
                parts.sort();
                parts
            };
            parts(found) == parts(line)
        };
        assert!(text.lines().any(same), "{line} is not in\n{text}");
    }
    assert!(text.contains("le=\"+Inf\""));
    let types: Vec<_> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
    let mut unique = types.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), types.len(), "a metric is declared twice");
}
