//! `GET /v1/models` and `GET /v1/models/{id}`

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::super::error::ApiError;
use super::super::state::{Served, Server, unix_seconds};

fn card(served: &Served, server: &Server) -> Value {
    let created = SystemTime::now() - server.started.elapsed();
    json!({
        "id": served.model_name,
        "object": "model",
        "created": unix_seconds(created),
        "owned_by": "kvdock",
        "root": served.model_name,
        "parent": null,
        "max_model_len": served.engine.max_request_tokens(),
    })
}

/// Lists the one model.
pub(in crate::server) fn list_models(server: &Arc<Server>) -> Result<Response, ApiError> {
    let served = server.served()?;
    Ok(Json(json!({"object": "list", "data": [card(&served, server)]})).into_response())
}

/// Shows the model of this name.
pub(in crate::server) fn one_model(server: &Arc<Server>, id: &str) -> Result<Response, ApiError> {
    let served = server.served()?;
    if id == served.model_name {
        return Ok(Json(card(&served, server)).into_response());
    }
    let shown: String = id.chars().take(100).collect();
    Err(ApiError::new(
        StatusCode::NOT_FOUND,
        format!("the model {shown:?} does not exist; this server serves {:?}", served.model_name),
    )
    .with_code("model_not_found"))
}
