//! Requests about stored objects. These requests have a separate limit, so that they neither displace requests that
//! generate text nor are rejected because of them: a client that polls for a response gets it even if the server is
//! full.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Json;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::HeaderMap;
use axum::response::{IntoResponse as _, Response};
use hyper::body::{Frame, SizeHint};
use serde::Serialize;

use super::counted;
use crate::app::App;
use crate::dispatches::Dispatch;
use crate::error::Error;
use crate::limits::AdmittedRequest;
use crate::tenant::Tenant;

/// Size in bytes up to which an answer does not count toward the limit while it is sent, because it fits into the
/// buffers of the connection.
const UNCOUNTED_BYTES_MAX: u64 = 64 << 10;

/// Answers a request without a body, or whose body was read. A large answer counts toward the limit until it has been
/// sent.
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
        Ok(with_admission(work(tenant).await?, admitted))
    };
    let answer = answer.await;
    counted::answered(app, endpoint, dispatch, answer)
}

/// Answers with the result of `work` as JSON. `work` runs on a thread of the store, because it may block, and because
/// parsing records and serializing answers may take long.
pub(super) async fn json<T: Serialize>(
    app: &App,
    work: impl FnOnce(&App) -> Result<T, Error> + Send + 'static,
) -> Result<Response, Error> {
    let owned = app.clone();
    app.store().run(move |_| Ok(Json(work(&owned)?).into_response())).await
}

fn with_admission(response: Response, admitted: AdmittedRequest) -> Response {
    // A stream of events has no known size. It does not count, because it sends the available events and then waits for
    // more.
    let is_large = response.body().size_hint().exact().is_some_and(|bytes| bytes > UNCOUNTED_BYTES_MAX);
    if is_large {
        response.map(|body| Body::new(AdmittedBody { body, _admitted: admitted }))
    } else {
        response
    }
}

/// The body of an answer that counts toward the limit until it has been sent.
struct AdmittedBody {
    body: Body,
    _admitted: AdmittedRequest,
}

impl HttpBody for AdmittedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Admission;

    #[test]
    fn a_large_answer_counts_until_it_was_sent_and_a_small_one_does_not() {
        let admission = Admission::new(2);
        let large = "x".repeat(UNCOUNTED_BYTES_MAX as usize + 1).into_response();
        let large = with_admission(large, admission.admit().unwrap());
        let small = with_admission("x".into_response(), admission.admit().unwrap());
        assert_eq!(admission.requests(), 1);
        assert_eq!(large.body().size_hint().exact(), Some(UNCOUNTED_BYTES_MAX + 1));
        drop((large, small));
        assert_eq!(admission.requests(), 0);
    }
}
