//! Errors as OVMS tells them: `{"error": "what is wrong"}`, for clients that read a string there. Statuses stay as
//! they are, and so does the event of an error within a stream.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::header;
use axum::middleware;
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

/// Bytes of an error; ours are far less.
const ERROR_BYTES_MAX: usize = 1 << 20;

/// The same API with OVMS's errors.
pub fn ovms_errors(router: Router) -> Router {
    router.layer(middleware::map_response(translate))
}

async fn translate(response: Response) -> Response {
    if !is_json(&response) || !(response.status().is_client_error() || response.status().is_server_error()) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let Ok(bytes) = to_bytes(body, ERROR_BYTES_MAX).await else {
        return (parts.status, "the error could not be told").into_response();
    };
    let told = serde_json::from_slice::<Value>(&bytes).ok();
    let message = told.as_ref().and_then(|told| told.pointer("/error/message")?.as_str());
    let Some(message) = message else { return Response::from_parts(parts, Body::from(bytes)) };
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, Body::from(json!({"error": message}).to_string()))
}

fn is_json(response: &Response) -> bool {
    let value = response.headers().get(header::CONTENT_TYPE);
    value.and_then(|value| value.to_str().ok()).is_some_and(|value| value.starts_with("application/json"))
}
