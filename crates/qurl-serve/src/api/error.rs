//! Errors as OpenAI's clients read them: a status, and `{"error": {"message", "type", "param", "code"}}`.

use crate::http::BodyError;
use crate::http::guard::Refusal;
use crate::service::Refused;
use axum::Json;
use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Why a request gets no answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    status: u16,
    message: String,
    /// The key that is wrong.
    param: Option<String>,
    /// Whether it is worth to try again.
    retry: bool,
}

impl ApiError {
    fn new(status: u16, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, retry: false }
    }

    /// A key has a wrong value.
    pub fn invalid(key: &str, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(key.to_string()), ..ApiError::new(400, message) }
    }

    /// The request as a whole is wrong.
    pub fn bad(message: impl Into<String>) -> ApiError {
        ApiError::new(400, message)
    }

    /// It is not allowed.
    pub fn forbidden(message: impl Into<String>) -> ApiError {
        ApiError::new(403, message)
    }

    /// There is no such thing.
    pub fn not_found(message: impl Into<String>) -> ApiError {
        ApiError::new(404, message)
    }

    /// There is, but not in this way.
    pub fn method() -> ApiError {
        ApiError::new(405, "this address is not for this method")
    }

    /// The server cannot do it.
    pub fn broken(message: impl Into<String>) -> ApiError {
        ApiError::new(500, message)
    }

    /// There is no room for it now.
    pub fn busy(message: impl Into<String>) -> ApiError {
        ApiError { retry: true, ..ApiError::new(429, message) }
    }

    /// Nobody can be served now.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError::new(503, message)
    }

    /// It took too long.
    pub fn too_slow(message: impl Into<String>) -> ApiError {
        ApiError::new(504, message)
    }

    /// What the client gets to read.
    pub fn to_json(&self) -> Value {
        let kind = match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        let (message, param, code) = (&self.message, &self.param, self.status);
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }

    /// What is wrong.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> ApiError {
        match refused {
            Refused::Full { .. } => ApiError { retry: true, ..ApiError::new(429, refused.to_string()) },
            Refused::TooMany { .. } => ApiError::invalid("n", refused.to_string()),
            Refused::Ended => ApiError::new(503, refused.to_string()),
        }
    }
}

impl From<BodyError> for ApiError {
    fn from(error: BodyError) -> ApiError {
        let status = match error {
            BodyError::TooLong(_) => 413,
            BodyError::TooSlow(_) => 408,
            BodyError::Busy => 429,
            BodyError::Broken => 400,
        };
        ApiError { retry: error == BodyError::Busy, ..ApiError::new(status, error.to_string()) }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        let (status, message) = refusal.answer();
        ApiError::new(status, message)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut answer = (status, Json(self.to_json())).into_response();
        if self.retry {
            answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == 401 {
            answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        answer
    }
}
