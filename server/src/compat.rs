//! Implements parts of OVMS's API that differ from OpenAI's, for clients that were written for OVMS (`--ovms-compat`).
//! Errors are `{"error": "message"}`, both in answers and in streams, and the server serves OVMS's additional paths.
//! The HTTP statuses and the events of `/responses` remain those of OpenAI's API. `docs/reference/ovms.md` lists the
//! remaining differences.

use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use proto::path::standard_path;
use serde_json::{Value, json};

use crate::app::App;
use crate::error::Error;
use crate::sse::Events;

/// An upper bound for the size of an error body. The server's error bodies are much smaller.
const ERROR_BYTES_MAX: usize = 1 << 20;

/// Returns the API of `router` with OVMS's errors and additional paths.
pub fn ovms_api(router: Router, app: App) -> Router {
    let paths = Router::new()
        .route("/v2/models/{*path}", get(model_ready))
        .route("/v1/config", get(config))
        .method_not_allowed_fallback(method)
        .with_state(app);
    // The layers of a router run after it has matched the path. Therefore, the API is the fallback of an outer router,
    // whose layers rewrite the path before the API matches it.
    Router::new()
        .fallback_service(router.merge(paths))
        .layer(middleware::from_fn(rewrite))
        .layer(middleware::from_fn(translate_errors))
}

/// Maps OVMS's alternative spellings of a path to the standard one: for example, `/v3/v1/models` and `/v3/models/` to
/// `/v3/models`.
async fn rewrite(mut request: Request, next: Next) -> Response {
    if let Some(uri) = standard_uri(request.uri()) {
        *request.uri_mut() = uri;
    }
    next.run(request).await
}

/// Returns the URI with the standard spelling of its path; `None` if it already has this spelling.
fn standard_uri(uri: &Uri) -> Option<Uri> {
    let path = standard_path(uri.path());
    if path == uri.path() {
        return None;
    }
    let new = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.into_owned(),
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(new.parse().ok()?);
    Uri::from_parts(parts).ok()
}

/// Handles `GET /v2/models/{name}/ready` and `GET /v2/models/{name}/versions/{version}/ready`. Names may contain
/// slashes.
async fn model_ready(State(app): State<App>, Path(path): Path<String>) -> Result<StatusCode, Error> {
    let Some(name) = path.strip_suffix("/ready") else {
        return Err(Error::UnknownPath(format!("/v2/models/{path}")));
    };
    let is_version =
        |version: &str| !version.is_empty() && version.bytes().all(|digit| digit.is_ascii_digit());
    let name = match name.rsplit_once("/versions/") {
        Some((name, version)) if is_version(version) => name,
        _ => name,
    };
    let served = app.served()?;
    match (served.model.has_name(name), app.is_ready()) {
        (true, true) => Ok(StatusCode::OK),
        (true, false) => Ok(StatusCode::SERVICE_UNAVAILABLE),
        (false, _) => Err(Error::UnknownModel(name.to_owned())),
    }
}

/// Handles `GET /v1/config`, which returns the state of each model. Every model has one version. The object is empty
/// until the model is loaded, because [`App`] does not contain the names of the model before that. It is empty again
/// while the server is stopping.
async fn config(State(app): State<App>) -> Json<Value> {
    let state = if app.is_ready() { "AVAILABLE" } else { "UNLOADING" };
    let status = json!({"model_version_status": [
        {"version": "1", "state": state, "status": {"error_code": "OK", "error_message": "OK"}},
    ]});
    let names = app.served().into_iter().flat_map(|served| served.model.served_names());
    Json(Value::Object(names.map(|name| (name.to_owned(), status.clone())).collect()))
}

async fn method(method: Method, uri: Uri) -> Error {
    Error::MethodNotAllowed { method: method.to_string(), path: uri.path().to_owned() }
}

/// The format of the errors of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorFormat {
    OpenAi,
    Ovms,
}

impl ErrorFormat {
    /// Returns the format that the API of this request uses.
    pub(crate) fn of(request: &Request) -> Self {
        request.extensions().get().copied().unwrap_or(Self::OpenAi)
    }

    /// Adds the event for an error to a stream.
    pub(crate) fn push_error(self, error: &Error, events: &mut Events) {
        match self {
            Self::OpenAi => events.push(&error.body()),
            Self::Ovms => events.push(&ovms_error(&error.message())),
        }
    }
}

fn ovms_error(message: &str) -> Value {
    json!({"error": message})
}

async fn translate_errors(mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(ErrorFormat::Ovms);
    translate(next.run(request).await).await
}

async fn translate(response: Response) -> Response {
    if !is_json(&response) || !(response.status().is_client_error() || response.status().is_server_error()) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let Ok(bytes) = to_bytes(body, ERROR_BYTES_MAX).await else {
        return (parts.status, "failed to read the error").into_response();
    };
    let error = serde_json::from_slice::<Value>(&bytes).ok();
    let message = error.as_ref().and_then(|error| error.pointer("/error/message")?.as_str());
    let Some(message) = message else { return Response::from_parts(parts, Body::from(bytes)) };
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, Body::from(ovms_error(message).to_string()))
}

fn is_json(response: &Response) -> bool {
    let value = response.headers().get(header::CONTENT_TYPE);
    value.and_then(|value| value.to_str().ok()).is_some_and(|value| value.starts_with("application/json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternative_spellings_map_to_the_path() {
        for (given, path) in [
            ("/v3/v1/chat/completions", Some("/v3/chat/completions")),
            ("/v3/v1/models/", Some("/v3/models")),
            ("/v3/responses/resp_1/input_items/?limit=2", Some("/v3/responses/resp_1/input_items?limit=2")),
            ("/v2/health/ready/", Some("/v2/health/ready")),
            ("/v3/v1", None),
            ("/v3/v1x/models", None),
            ("/v1/models", None),
            ("/", None),
        ] {
            let uri: Uri = given.parse().unwrap();
            assert_eq!(standard_uri(&uri).map(|uri| uri.to_string()).as_deref(), path, "{given}");
        }
    }
}
