//! Requests about stored objects. They have a limit of their own, so that they neither take the place of generations nor
//! are refused because of them: whoever polls for a response is answered while the server is full.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::HeaderMap;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};

use super::responses::told;
use crate::app::App;
use crate::dispatches::Dispatch;
use crate::error::Error;
use crate::limits::Admitted;
use crate::tenant::Tenant;

/// Bytes of an answer that does not count any longer once it is complete: smaller ones fit into buffers anyway.
const UNCOUNTED_BYTES_MAX: u64 = 64 << 10;

/// Answers a request that has no body, or whose body has been read. A large answer counts until it has been sent.
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
        Ok(counted(work(tenant).await?, admitted))
    };
    let answer = answer.await;
    told(app, endpoint, dispatch, answer)
}

fn counted(response: Response, admitted: Admitted) -> Response {
    // A stream of events has no size: it sends what it has and waits.
    let is_large = response.body().size_hint().exact().is_some_and(|bytes| bytes > UNCOUNTED_BYTES_MAX);
    if is_large { response.map(|body| Body::new(Counted { body, _admitted: admitted })) } else { response }
}

/// The body of an answer that counts until it has been sent.
struct Counted {
    body: Body,
    _admitted: Admitted,
}

impl HttpBody for Counted {
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
    use axum::response::IntoResponse as _;

    use super::*;
    use crate::limits::Admission;

    #[test]
    fn a_large_answer_counts_until_it_has_been_sent_and_a_small_one_does_not() {
        let admission = Admission::new(2);
        let large = "x".repeat(UNCOUNTED_BYTES_MAX as usize + 1).into_response();
        let large = counted(large, admission.admit().unwrap());
        let small = counted("x".into_response(), admission.admit().unwrap());
        assert_eq!(admission.requests(), 1);
        assert_eq!(large.body().size_hint().exact(), Some(UNCOUNTED_BYTES_MAX + 1));
        drop((large, small));
        assert_eq!(admission.requests(), 0);
    }
}
