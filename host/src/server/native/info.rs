//! `/get_model_info` and `/get_server_info`

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::super::error::ApiError;
use super::super::state::Server;

/// What the model is.
pub(in crate::server) fn model_info(server: &Arc<Server>) -> Result<Response, ApiError> {
    let served = server.served()?;
    let spec = &served.spec;
    let format = match served.model_path.to_ascii_lowercase().ends_with(".gguf") {
        true => "gguf",
        false => "safetensors",
    };
    Ok(Json(json!({
        "model_path": served.model_path,
        "served_model_name": served.model_name,
        "tokenizer_path": served.model_path,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": "default",
        "load_format": format,
        "reasoning_parser": null,
        "tool_call_parser": null,
        "disaggregation_mode": "null",
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": spec.family,
        "architectures": [spec.architecture],
        "context_length": spec.context_length,
        "vocab_size": spec.vocab_size,
        "weights_sha256": spec.weights_digest_hex(),
        "numerics_id": spec.numerics_id,
    }))
    .into_response())
}

/// How the server was started and how it is.
pub(in crate::server) fn server_info(server: &Arc<Server>) -> Result<Response, ApiError> {
    let served = server.served()?;
    let stats = served.engine.stats();
    let status = served.storage.as_ref().map(|storage| storage.status());
    let mut info = served.settings.as_object().cloned().unwrap_or_default();
    let mut put = |name: &str, value: Value| info.insert(name.to_owned(), value);
    put("model_path", served.model_path.as_str().into());
    put("served_model_name", served.model_name.as_str().into());
    put("context_length", served.spec.context_length.into());
    put("page_size", served.page_size.into());
    put("max_running_requests", stats.max_running.into());
    put("max_total_num_tokens", served.device_tokens.into());
    put("max_req_input_len", served.engine.max_request_tokens().saturating_sub(1).into());
    put("hicache_host_total_tokens", served.host_tokens.into());
    put("hicache_storage_backend", served.storage_backend().into());
    if let Some(status) = status {
        put("hicache_storage_prefetch_policy", status.prefetch_policy.into());
        put("hicache_write_policy", status.write_policy.into());
    }
    put(
        "internal_states",
        json!([{
            "last_gen_throughput": stats.generation_throughput,
            "memory_usage": {"token_capacity": served.device_tokens},
            "effective_max_running_requests_per_dp": stats.max_running,
            "num_running_reqs": stats.running,
            "num_queue_reqs": stats.queued,
            "world_size": served.spec.ranks,
            "startup_time": served.startup_seconds,
        }]),
    );
    put("startup_time", served.startup_seconds.into());
    put("uptime", server.started.elapsed().as_secs_f64().into());
    put("version", env!("CARGO_PKG_VERSION").into());
    put("frontend", "kvdock".into());
    Ok(Json(Value::Object(info)).into_response())
}
