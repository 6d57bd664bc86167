//! Answers requests for stored objects. These requests have a separate limit, so that they do not displace requests
//! that generate text. Conversely, a client that polls for a response receives it even while the server rejects further
//! requests that generate text.

use axum::Json;
use axum::http::HeaderMap;
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;

use super::{counted, unread};
use crate::app::App;
use crate::dispatches::Dispatch;
use crate::error::Error;
use crate::tenant::Tenant;

/// Answers a request that has no body or whose body has been read. A large answer counts toward the limit until it has
/// been sent.
pub(super) async fn answered(
    app: &App,
    endpoint: &'static str,
    headers: &HeaderMap,
    work: impl AsyncFnOnce(Tenant) -> Result<Response, Error>,
) -> Response {
    let dispatch = Dispatch::of(headers);
    let answer = async {
        let tenant = Tenant::of(headers)?;
        let admitted = app.stored_objects().admit()?;
        unread::reserve_until_sent(app, work(tenant).await?, admitted)
    };
    let answer = answer.await;
    counted::answered(app, endpoint, dispatch, answer)
}

/// Answers with the result of `work` as JSON. `work` runs on a thread of the store, because it may block, and because
/// parsing records and serializing answers may take a long time.
pub(super) async fn json<T: Serialize>(
    app: &App,
    work: impl FnOnce(&App) -> Result<T, Error> + Send + 'static,
) -> Result<Response, Error> {
    let owned = app.clone();
    app.store().run(move |_| Ok(Json(work(&owned)?).into_response())).await
}
