//! For who looks after the process: probes and metrics.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::metrics::Exposition;

/// The process is there. Whether it is of use is for readiness to say.
pub(super) async fn live() -> StatusCode {
    StatusCode::OK
}

/// Requests should be sent here.
pub(super) async fn ready(State(app): State<App>) -> StatusCode {
    if app.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

pub(super) async fn metrics(State(app): State<App>, headers: HeaderMap) -> Response {
    let format = Exposition::preferred(&headers);
    let text = format.convert_openmetrics(app.metrics().scrape(&app));
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}
