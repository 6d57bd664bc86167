//! The paths of the API. Requests for unknown paths are rejected with errors in OpenAI's format.

mod body;
mod chat;
mod completions;
mod conversations;
mod counted;
mod generate;
mod health;
mod media;
mod models;
mod openapi;
mod preparation;
mod probabilities;
mod responses;
mod sleep;
mod stored_objects;
mod stream;
mod submission;
mod tokenize;
mod unread;

use axum::Router;
use axum::extract::Request;
use axum::http::{Method, Uri};
use axum::middleware;
use axum::response::IntoResponse as _;
use axum::routing::{get, post};
use percent_encoding::percent_decode_str;

use crate::app::App;
use crate::error::Error;

pub use sleep::SleepApi;

/// Returns the API without the paths that flags enable.
pub fn router(app: App) -> Router {
    router_with(app, SleepApi::Disabled)
}

/// Returns the API, with vLLM's paths for sleep if they are enabled.
pub fn router_with(app: App, sleep: SleepApi) -> Router {
    let api = Router::new()
        .route("/chat/completions", post(chat::chat))
        .route("/completions", post(completions::completions))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/responses", post(responses::create))
        .route("/responses/input_tokens", post(responses::input_tokens))
        .route("/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/responses/{id}/cancel", post(responses::cancel))
        .route("/responses/{id}/input_items", get(responses::input_items))
        .route("/conversations", post(conversations::create))
        .route(
            "/conversations/{id}",
            get(conversations::retrieve).post(conversations::update).delete(conversations::delete),
        )
        .route("/conversations/{id}/items", get(conversations::items).post(conversations::add))
        .route("/conversations/{id}/items/{item}", get(conversations::item).delete(conversations::remove))
        .route("/models", get(models::list))
        .route("/models/{*id}", get(models::retrieve));
    sleep::routes(sleep)
        .nest("/v1", api.clone())
        .nest("/v3", api)
        // These are vLLM's paths.
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/openapi.json", get(openapi::openapi))
        .merge(health_routes())
        .fallback(unknown_path)
        .method_not_allowed_fallback(method)
        .layer(middleware::from_fn(decodable_path))
        .layer(middleware::from_fn_with_state(app.clone(), count_unrouted))
        .with_state(app)
}

/// Returns only the probes and the metrics, for a port that clients do not use.
pub(crate) fn admin_router(app: App) -> Router {
    Router::new()
        .merge(health_routes())
        .fallback(unknown_path)
        .method_not_allowed_fallback(method)
        .with_state(app)
}

fn health_routes() -> Router<App> {
    Router::new()
        .route("/v2/health/live", get(health::live))
        .route("/v2/health/ready", get(health::ready))
        .route("/metrics", get(health::metrics))
}

async fn unknown_path(uri: Uri) -> Error {
    Error::UnknownPath(uri.path().to_owned())
}

async fn method(method: Method, uri: Uri) -> Error {
    Error::MethodNotAllowed { method: method.to_string(), path: uri.path().to_owned() }
}

/// Rejects paths whose percent-encoded bytes are not UTF-8, because all names in paths are UTF-8.
async fn decodable_path(request: Request, next: middleware::Next) -> axum::response::Response {
    if percent_decode_str(request.uri().path()).decode_utf8().is_ok() {
        next.run(request).await
    } else {
        Error::MalformedHttp("the path is not UTF-8 after percent-decoding").into_response()
    }
}

/// Counts the client errors that no endpoint has counted, all under the endpoint name `other`, regardless of the path.
async fn count_unrouted(
    axum::extract::State(app): axum::extract::State<App>,
    request: Request,
    next: middleware::Next,
) -> axum::response::Response {
    let response = next.run(request).await;
    match response.status() {
        status
            if response.extensions().get::<counted::CountedResponse>().is_none()
                && status.is_client_error() =>
        {
            app.metrics().count("other", "unrouted", status);
        }
        _ => {}
    }
    response
}
