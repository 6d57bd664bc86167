//! Errors as OVMS tells them: `{"error": "what is wrong"}`, for clients that read a string there, in answers and in
//! streams alike. Statuses stay as they are, and so do the events of `/responses`, whose shape goes by their types.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::header;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use crate::error::Error;
use crate::sse::Events;

/// Bytes of an error; ours are far less.
const ERROR_BYTES_MAX: usize = 1 << 20;

/// The same API with OVMS's errors.
pub fn ovms_errors(router: Router) -> Router {
    router.layer(middleware::from_fn(told_by_ovms))
}

/// How the errors of a request are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorShape {
    OpenAi,
    Ovms,
}

impl ErrorShape {
    /// Whatever the router of the API was made for.
    pub(crate) fn of(request: &Request) -> Self {
        request.extensions().get().copied().unwrap_or(Self::OpenAi)
    }

    /// Adds an error as an event of a stream.
    pub(crate) fn put(self, error: &Error, events: &mut Events) {
        match self {
            Self::OpenAi => events.push(&error.body()),
            Self::Ovms => events.push(&told(&error.message())),
        }
    }
}

fn told(message: &str) -> Value {
    json!({"error": message})
}

async fn told_by_ovms(mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(ErrorShape::Ovms);
    translate(next.run(request).await).await
}

async fn translate(response: Response) -> Response {
    if !is_json(&response) || !(response.status().is_client_error() || response.status().is_server_error()) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let Ok(bytes) = to_bytes(body, ERROR_BYTES_MAX).await else {
        return (parts.status, "the error could not be told").into_response();
    };
    let error = serde_json::from_slice::<Value>(&bytes).ok();
    let message = error.as_ref().and_then(|error| error.pointer("/error/message")?.as_str());
    let Some(message) = message else { return Response::from_parts(parts, Body::from(bytes)) };
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, Body::from(told(message).to_string()))
}

fn is_json(response: &Response) -> bool {
    let value = response.headers().get(header::CONTENT_TYPE);
    value.and_then(|value| value.to_str().ok()).is_some_and(|value| value.starts_with("application/json"))
}
