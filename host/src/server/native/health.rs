//! `GET /health` and `GET /health_generate`

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;

use super::super::state::{Served, Server, fresh_id};
use crate::engine::{Event, FinishReason, Request, SamplingParams, SubmitError};

/// How long a probe may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);

/// 200 while requests are served; 503 before, and while shutting down.
pub(in crate::server) fn health(server: &Server) -> StatusCode {
    match server.is_ready() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// 200 when a token was generated just now, by a probe or by traffic.
pub(in crate::server) async fn health_generate(server: Arc<Server>) -> StatusCode {
    let (true, Ok(served)) = (server.is_ready(), server.accepting()) else {
        return StatusCode::SERVICE_UNAVAILABLE;
    };
    match tokio::time::timeout(PROBE_TIMEOUT, probe(&served)).await {
        Ok(true) => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

async fn probe(served: &Served) -> bool {
    let token = served.spec.bos.or(served.spec.eos.first().copied()).unwrap_or(0);
    let sampling =
        SamplingParams { max_new_tokens: Some(1), temperature: 0.0, ignore_eos: true, ..SamplingParams::default() };
    let before = served.engine.stats().steps_total;
    match served.engine.submit(Request::new(fresh_id("health-"), vec![token], sampling)) {
        Ok(mut stream) => {
            while let Some(event) = stream.next().await {
                if let Event::Finished { reason, .. } = event {
                    return !matches!(reason, FinishReason::Abort { .. });
                }
            }
            false
        }
        // A full queue that moves is a healthy one.
        Err(SubmitError::QueueFull { .. }) => {
            while served.engine.is_alive() {
                tokio::time::sleep(Duration::from_millis(50)).await;
                if served.engine.stats().steps_total > before {
                    return true;
                }
            }
            false
        }
        Err(_) => false,
    }
}
