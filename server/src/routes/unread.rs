//! Large answers, which count toward limits until they have been sent. An answer that the client does not read remains
//! in memory.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use hyper::body::{Frame, SizeHint};

use crate::app::App;
use crate::error::{Error, Resource};
use crate::limits::{BudgetExhausted, ByteBudget};

/// Maximum size in bytes of an answer that does not count toward limits while it is sent, because it fits into the
/// buffers of the connection.
const UNCOUNTED_BYTES_MAX: u64 = 64 << 10;
/// Size in bytes of the pieces in which a large answer is passed to its connection. The connection takes a piece only
/// when there is room in its buffers. If the answer were not divided, the connection would take all of it at once, and
/// the answer would no longer count toward limits.
const PIECE_BYTES_MAX: usize = 64 << 10;

/// Returns a response that holds `guard` until it has been sent. If the response is small, drops `guard` immediately.
pub(super) fn hold_until_sent(response: Response, guard: impl Send + Unpin + 'static) -> Response {
    if large_bytes(&response) == 0 {
        return response;
    }
    response.map(|body| Body::new(GuardedBody { body, rest: Bytes::new(), _guard: guard }))
}

/// Like [`hold_until_sent`], but a large response also reserves its size in the budget for unread answers until it has
/// been sent.
///
/// # Errors
/// The response is larger than the budget, or the budget is exhausted.
pub(super) fn reserve_until_sent(
    app: &App,
    response: Response,
    guard: impl Send + Unpin + 'static,
) -> Result<Response, Error> {
    reserve(response, guard, app.unread_answer_bytes()).map_err(|refusal| match refusal {
        Refusal::TooLarge { bytes, bytes_max } => Error::AnswerTooLarge { bytes, bytes_max },
        Refusal::Exhausted => app.overloaded(Resource::UnreadAnswers),
    })
}

/// The reason why a large response cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    TooLarge { bytes: usize, bytes_max: usize },
    Exhausted,
}

impl From<BudgetExhausted> for Refusal {
    fn from(_: BudgetExhausted) -> Self {
        Self::Exhausted
    }
}

fn reserve(
    response: Response,
    guard: impl Send + Unpin + 'static,
    budget: &Arc<ByteBudget>,
) -> Result<Response, Refusal> {
    let (bytes, bytes_max) = (large_bytes(&response), budget.large_bytes_max());
    if bytes > bytes_max {
        return Err(Refusal::TooLarge { bytes, bytes_max });
    }
    let mut reservation = budget.empty_reservation();
    reservation.grow_to(bytes)?;
    Ok(hold_until_sent(response, (guard, reservation)))
}

/// Returns the size of a response in bytes if the response counts toward limits while it is sent, otherwise 0.
fn large_bytes(response: &Response) -> usize {
    // The event stream of a response in progress has no known size. It does not count toward the limits, because it
    // sends the available events and then waits for more.
    let bytes = response.body().size_hint().exact().unwrap_or_default();
    if bytes > UNCOUNTED_BYTES_MAX { usize::try_from(bytes).unwrap_or(usize::MAX) } else { 0 }
}

/// The body of an answer that counts toward limits until it has been sent.
struct GuardedBody<G> {
    body: Body,
    /// The bytes that were taken from `body` and have not been passed to the connection.
    rest: Bytes,
    _guard: G,
}

impl<G: Unpin> HttpBody for GuardedBody<G> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            let frame = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => frame,
                end => return Poll::Ready(end),
            };
            match frame.into_data() {
                Ok(bytes) => self.rest = bytes,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
        let bytes = self.rest.len().min(PIECE_BYTES_MAX);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (hint, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut whole = SizeHint::new();
        whole.set_lower(hint.lower() + rest);
        if let Some(upper) = hint.upper() {
            whole.set_upper(upper + rest);
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use axum::response::IntoResponse as _;
    use futures_util::FutureExt as _;
    use http_body_util::BodyExt as _;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::limits::Admission;
    use crate::listen::connection_builder;

    /// Returns an admitted answer of this size.
    fn answer(bytes: usize, admission: &Admission, budget: &Arc<ByteBudget>) -> Response {
        reserve("x".repeat(bytes).into_response(), admission.admit().unwrap(), budget).unwrap()
    }

    #[test]
    fn a_large_answer_counts_until_it_was_sent_and_a_small_one_does_not() {
        const BYTES: usize = UNCOUNTED_BYTES_MAX as usize + 1;
        let (admission, budget) = (Admission::new(2), ByteBudget::new(BYTES, BYTES));
        let (large, small) = (answer(BYTES, &admission, &budget), answer(1, &admission, &budget));
        assert_eq!(admission.requests(), 1);
        assert_eq!(large.body().size_hint().exact(), Some(BYTES as u64));
        let second = reserve("x".repeat(BYTES).into_response(), admission.admit().unwrap(), &budget);
        assert_eq!(second.unwrap_err(), Refusal::Exhausted);
        drop((large, small));
        assert_eq!(admission.requests(), 0);
        answer(BYTES, &admission, &budget);
    }

    #[test]
    fn an_answer_that_never_fits_is_rejected_for_its_size() {
        const BYTES_MAX: usize = 2 * UNCOUNTED_BYTES_MAX as usize;
        let budget = ByteBudget::new(BYTES_MAX, BYTES_MAX);
        let whole = reserve("x".repeat(BYTES_MAX).into_response(), (), &budget).unwrap();
        let larger = reserve("x".repeat(BYTES_MAX + 1).into_response(), (), &budget);
        let refusal = Refusal::TooLarge { bytes: BYTES_MAX + 1, bytes_max: BYTES_MAX };
        assert_eq!(larger.unwrap_err(), refusal);
        drop(whole);
        let error = Error::AnswerTooLarge { bytes: BYTES_MAX + 1, bytes_max: BYTES_MAX }.into_response();
        assert_eq!(error.status(), 400);
        assert!(!error.headers().contains_key("retry-after"));
    }

    #[tokio::test]
    async fn a_large_answer_is_passed_to_its_connection_in_pieces() {
        const BYTES: usize = 3 * PIECE_BYTES_MAX + 1;
        let (admission, budget) = (Admission::new(1), ByteBudget::new(BYTES, BYTES));
        let mut body = answer(BYTES, &admission, &budget).into_body();
        let mut taken = 0;
        while let Some(piece) = body.frame().await {
            let piece = piece.unwrap().into_data().unwrap();
            assert!(piece.len() <= PIECE_BYTES_MAX);
            taken += piece.len();
            assert_eq!(body.is_end_stream(), taken == BYTES);
            assert_eq!(body.size_hint().exact(), Some((BYTES - taken) as u64));
        }
        assert_eq!((taken, admission.requests()), (BYTES, 1));
        drop(body);
        assert_eq!(admission.requests(), 0);
    }

    /// The answer has three pieces, because a connection drops a body as soon as it has taken the last piece, even if
    /// the client does not read.
    #[tokio::test]
    async fn an_answer_of_three_pieces_counts_while_the_client_does_not_read() {
        const BYTES: usize = 3 * PIECE_BYTES_MAX;
        let (admission, budget) = (Admission::new(1), ByteBudget::new(BYTES, BYTES));
        let admission = Arc::new(admission);
        let admitting = Arc::clone(&admission);
        let service = service_fn(move |_| {
            let answer = answer(BYTES, &admitting, &budget);
            async { Ok::<_, Infallible>(answer) }
        });
        let (mut client, server) = tokio::io::duplex(1024);
        client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        let builder = connection_builder(Duration::from_secs(60));
        let mut connection = Box::pin(builder.serve_connection(TokioIo::new(server), service));
        assert!(connection.as_mut().now_or_never().is_none());
        assert_eq!(admission.requests(), 1);
        let mut read = Vec::new();
        drop(tokio::join!(connection, async {
            while read.len() <= BYTES {
                client.read_buf(&mut read).await.unwrap();
            }
            drop(client);
        }));
        assert_eq!(admission.requests(), 0);
    }
}
