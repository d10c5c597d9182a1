//! Errors in OpenAI's shape.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::engine::SubmitError;

/// An error as a client sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// What was wrong and what would be right.
    pub message: String,
    /// The field that was wrong.
    pub param: Option<String>,
    /// A short stable name for programs.
    pub code: Option<&'static str>,
    /// Sent as `Retry-After`.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// An error of `status` that says `message`.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// 400.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400 about one field.
    pub fn field(param: impl Into<String>, message: impl std::fmt::Display) -> Self {
        let param = param.into();
        Self { param: Some(param.clone()), ..Self::bad_request(format!("{param}: {message}")) }
    }

    /// 503.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { retry_after: Some(Duration::from_secs(1)), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// 500.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The same error with a `code`.
    pub fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            503 => "service_unavailable_error",
            500.. => "internal_server_error",
            _ => "invalid_request_error",
        }
    }

    /// The body: `{"error": {"message", "type", "param", "code"}}`.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind(),
            "param": self.param,
            "code": self.code,
        }})
    }

    /// The body inside of a stream of the native API, which also says whether a retry can help.
    pub fn stream_body(&self) -> Value {
        let mut body = self.body();
        if let Some(Value::Object(error)) = body.get_mut("error") {
            error.insert("retryable".into(), (self.status.as_u16() >= 500).into());
        }
        body
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl ApiError {
    /// What a client is told when the engine does not take its request. `names` turns the
    /// engine's names of parameters into those of the API that was used.
    pub fn from_submit(error: SubmitError, names: fn(&str) -> String) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::QueueFull { retry_after, .. } => Self {
                retry_after: Some(retry_after),
                code: Some("queue_full"),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, message)
            },
            SubmitError::Param(param) => Self::field(names(param.field), param.message),
            SubmitError::ContextTooLong { .. } | SubmitError::PoolTooSmall { .. } | SubmitError::TextTooLong { .. } => {
                Self::bad_request(message).with_code("context_length_exceeded")
            }
            SubmitError::ShuttingDown => Self::unavailable(message),
            SubmitError::EmptyPrompt | SubmitError::UnknownToken { .. } | SubmitError::DuplicateId(_) => {
                Self::bad_request(message)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openai_shape() {
        let error = ApiError::field("top_p", "takes a number").with_code("bad");
        assert_eq!(
            error.body(),
            json!({"error": {"message": "top_p: takes a number",
                "type": "invalid_request_error", "param": "top_p", "code": "bad"}})
        );
    }

    #[test]
    fn a_full_queue_is_429_with_retry_after() {
        let error = ApiError::from_submit(
            SubmitError::QueueFull { queued: 3, retry_after: Duration::from_millis(2500) },
            str::to_owned,
        );
        assert_eq!(error.body()["error"]["type"], "rate_limit_error");
        let response = error.into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "3");
    }

    #[test]
    fn parameters_bear_the_names_of_the_api() {
        let error = ApiError::from_submit(
            SubmitError::Param(crate::engine::ParamError { field: "max_new_tokens", message: "too few".into() }),
            |_| "max_tokens".to_owned(),
        );
        assert_eq!(error.param.as_deref(), Some("max_tokens"));
        assert_eq!(error.message, "max_tokens: too few");
    }
}
