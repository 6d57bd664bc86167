//! Serves the probes and the metrics.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::metrics::Exposition;

/// Handles the liveness probe, which succeeds as long as the process answers.
pub(super) async fn live() -> StatusCode {
    StatusCode::OK
}

/// Handles the readiness probe, which succeeds if the server should receive requests.
pub(super) async fn ready(State(app): State<App>) -> StatusCode {
    if app.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

pub(super) async fn metrics(State(app): State<App>, headers: HeaderMap) -> Response {
    let format = Exposition::preferred(&headers);
    let text = format.convert_openmetrics(app.scrape());
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}
