//! Counts requests in the metrics.

use axum::response::{IntoResponse as _, Response};

use crate::app::App;
use crate::dispatches::Dispatch;
use crate::error::Error;

/// Marks a response to a request that its endpoint has already counted.
#[derive(Clone, Copy)]
pub(super) struct CountedResponse;

/// Marks a response as counted.
pub(super) fn mark(mut response: Response) -> Response {
    response.extensions_mut().insert(CountedResponse);
    response
}

/// Counts a rejected request, and returns its response.
pub(super) fn rejected(app: &App, endpoint: &'static str, error: Error) -> Response {
    app.metrics().count(endpoint, error.label(), error.status());
    tracing::debug!(endpoint, outcome = error.label(), "request rejected");
    error.into_response()
}

/// Counts a request that generates no tokens, and returns its response.
pub(super) fn answered(
    app: &App,
    endpoint: &'static str,
    dispatch: Option<Dispatch>,
    result: Result<Response, Error>,
) -> Response {
    if let Some(dispatch) = dispatch {
        app.dispatches().record(dispatch, None);
    }
    mark(match result {
        Ok(response) => {
            app.metrics().count(endpoint, "ok", response.status());
            response
        }
        Err(error) => rejected(app, endpoint, error),
    })
}
