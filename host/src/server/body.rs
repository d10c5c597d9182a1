//! Receiving request bodies, bounded in size and time.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use tokio_stream::StreamExt;

use super::error::ApiError;
use super::fields::{Fields, parse_body};
use super::reading;
use super::state::Server;

/// Most time for a body to arrive.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(120);
/// Bodies above this are parsed away from the threads that answer requests.
const LARGE: usize = 1 << 18;

/// Receives the body and parses it as one JSON object.
pub(super) async fn fields(server: &Server, request: Request) -> Result<Fields, ApiError> {
    let (parts, body) = request.into_parts();
    let bytes = receive(&parts.headers, body, server.max_body).await?;
    if bytes.len() <= LARGE {
        return parse_body(&parts.headers, &bytes);
    }
    reading::in_turn(move || parse_body(&parts.headers, &bytes)).await
}

async fn receive(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let too_large = || {
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {limit} bytes (server.max_body)"))
    };
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok())
        .and_then(|length| length.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let collect = async {
        let mut stream = body.into_data_stream();
        let mut bytes = Vec::new();
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|error| ApiError::bad_request(format!("the body broke off: {error}")))?;
            if bytes.len() + chunk.len() > limit {
                return Err(too_large());
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(Bytes::from(bytes))
    };
    match tokio::time::timeout(RECEIVE_TIMEOUT, collect).await {
        Ok(result) => result,
        Err(_) => Err(ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            format!("the body did not arrive within {} s", RECEIVE_TIMEOUT.as_secs()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bodies_are_bounded_with_and_without_a_length() {
        let body = || Body::from(vec![b'x'; 10]);
        let none = HeaderMap::new();
        assert_eq!(receive(&none, body(), 10).await.unwrap().len(), 10);
        let error = receive(&none, body(), 9).await.unwrap_err();
        assert_eq!(error.status, StatusCode::PAYLOAD_TOO_LARGE);
        let mut announced = HeaderMap::new();
        announced.insert(header::CONTENT_LENGTH, 11.into());
        let error = receive(&announced, Body::empty(), 10).await.unwrap_err();
        assert_eq!(error.status, StatusCode::PAYLOAD_TOO_LARGE);
    }
}
