//! For who looks after the process: probes and metrics.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::app::App;

/// The process is there. Whether it is of use is for readiness to say.
pub(super) async fn live() -> StatusCode {
    StatusCode::OK
}

/// Requests should be sent here.
pub(super) async fn ready(State(app): State<App>) -> StatusCode {
    if app.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

pub(super) async fn metrics(State(app): State<App>) -> Response {
    const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], app.metrics().scrape(&app)).into_response()
}
