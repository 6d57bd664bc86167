//! OVMS's API where it differs from OpenAI's, for clients that were written for OVMS: `--ovms-compat`. Errors are
//! `{"error": "what is wrong"}`, in answers and in streams alike; OVMS's other paths answer; and requests that OVMS accepts
//! follow its rules. Statuses stay as they are, and so do the events of `/responses`, whose shape goes by their types.
//! What still differs is in `docs/reference/ovms.md`.

use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use server_openai::{Content, Generation, Message};

use crate::app::App;
use crate::error::Error;
use crate::sse::Events;

/// Whose rules requests follow where OpenAI's and OVMS's differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApiRules {
    /// OpenAI's.
    #[default]
    OpenAi,
    /// OVMS's.
    Ovms,
}

impl ApiRules {
    /// Adds to a request what it implies.
    pub(crate) fn complete(self, generation: &mut Generation) {
        // With OVMS `best_of` is the width of a beam search.
        if self == Self::Ovms && generation.best_of.is_some_and(|width| width > 1) {
            generation.use_beam_search.get_or_insert(true);
        }
    }

    /// Adds to the messages of a request what they imply.
    pub(crate) fn complete_messages(self, messages: &mut [Message]) {
        // With OVMS content that is missing is empty. The assistant's may be missing anyway.
        if self == Self::Ovms {
            for message in messages.iter_mut().filter(|message| message.role != "assistant") {
                message.content.get_or_insert_with(|| Content::Text(String::new()));
            }
        }
    }

    /// The most tokens of a completion whose request does not say; `None` for as many as there is room for.
    pub(crate) fn completion_tokens_default(self) -> Option<u32> {
        match self {
            Self::OpenAi => Some(16),
            Self::Ovms => None,
        }
    }
}

/// Bytes of an error; ours are far less.
const ERROR_BYTES_MAX: usize = 1 << 20;

/// The same API with OVMS's errors and its other paths.
pub fn ovms_api(router: Router, app: App) -> Router {
    let paths = Router::new()
        .route("/v2/models/{*path}", get(model_ready))
        .route("/v1/config", get(config))
        .method_not_allowed_fallback(method)
        .with_state(app);
    // Paths are rewritten before they are routed: the API is a service of its own here.
    Router::new()
        .fallback_service(router.merge(paths))
        .layer(middleware::from_fn(rewrite))
        .layer(middleware::from_fn(told_by_ovms))
}

/// Leads OVMS's other spellings of a path to the path: `/v3/v1/models` and `/v3/models/` to `/v3/models`.
async fn rewrite(mut request: Request, next: Next) -> Response {
    if let Some(uri) = respelled(request.uri()) {
        *request.uri_mut() = uri;
    }
    next.run(request).await
}

fn respelled(uri: &Uri) -> Option<Uri> {
    let path = uri.path();
    let short = path.strip_suffix('/').filter(|short| !short.is_empty()).unwrap_or(path);
    let rest = short.strip_prefix("/v3/v1").filter(|rest| rest.starts_with('/'));
    let new = match rest {
        Some(rest) => format!("/v3{rest}"),
        None if short.len() < path.len() => short.to_owned(),
        None => return None,
    };
    let new = match uri.query() {
        Some(query) => format!("{new}?{query}"),
        None => new,
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(new.parse().ok()?);
    Uri::from_parts(parts).ok()
}

/// `GET /v2/models/{name}/ready` and `GET /v2/models/{name}/versions/{version}/ready`. Names may have slashes in them.
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
    let serving = app.serving()?;
    match (serving.model.has_name(name), app.is_ready()) {
        (true, true) => Ok(StatusCode::OK),
        (true, false) => Ok(StatusCode::SERVICE_UNAVAILABLE),
        (false, _) => Err(Error::UnknownModel(name.to_owned())),
    }
}

/// `GET /v1/config`: the state of each model. Models have one version here. While the model is loaded its names are not
/// known yet.
async fn config(State(app): State<App>) -> Json<Value> {
    let state = if app.is_ready() { "AVAILABLE" } else { "UNLOADING" };
    let status = json!({"model_version_status": [
        {"version": "1", "state": state, "status": {"error_code": "OK", "error_message": "OK"}},
    ]});
    let names = app.serving().into_iter().flat_map(|serving| serving.model.served_names());
    Json(Value::Object(names.map(|name| (name.to_owned(), status.clone())).collect()))
}

async fn method(method: Method, uri: Uri) -> Error {
    Error::Method { method: method.to_string(), path: uri.path().to_owned() }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_spellings_lead_to_the_path() {
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
            assert_eq!(respelled(&uri).map(|uri| uri.to_string()).as_deref(), path, "{given}");
        }
    }
}
