//! Encodes server-sent events, and sends comments on idle streams.

use std::convert::Infallible;
use std::task::Poll;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_util::{Stream, StreamExt as _, stream};
use serde::Serialize;
use tokio::time::Instant;

/// Time without an event after which a stream sends [`KEEP_ALIVE`]. It is shorter than the usual timeouts of proxies,
/// including the default `--idle-timeout` of the router. A write also shows whether the client is still connected.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// A comment, which clients ignore.
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// Encoded events that have not been sent yet.
#[derive(Debug, Default)]
pub(crate) struct Events(Vec<u8>);

impl Events {
    /// Adds an event.
    pub(crate) fn push(&mut self, data: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        serde_json::to_writer(&mut self.0, data).expect("invariant: wire types can be written as JSON");
        self.0.extend_from_slice(b"\n\n");
    }

    /// Adds an encoded event.
    pub(crate) fn push_raw(&mut self, event: &str) {
        self.0.extend_from_slice(event.as_bytes());
    }

    /// Adds the event that ends a stream.
    pub(crate) fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn take(&mut self) -> Bytes {
        std::mem::take(&mut self.0).into()
    }
}

/// Returns a response that sends events as they arrive. While no events arrive, the server sends comments.
pub(crate) fn response(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    of_body(Body::from_stream(with_keep_alives(events).map(Ok::<_, Infallible>)))
}

/// Returns a response with the events in `body`.
pub(crate) fn of_body(body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Disable buffering of this answer in proxies such as nginx.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Adds a comment whenever `events` has yielded no event for [`KEEP_ALIVE_INTERVAL`]. Empty events are skipped.
fn with_keep_alives(events: impl Stream<Item = Bytes>) -> impl Stream<Item = Bytes> {
    let mut events = Box::pin(events.filter(|event| std::future::ready(!event.is_empty())).fuse());
    let mut timer = Box::pin(tokio::time::sleep(KEEP_ALIVE_INTERVAL));
    let mut silent_since = None;
    stream::poll_fn(move |context| {
        if let Poll::Ready(event) = events.poll_next_unpin(context) {
            silent_since = None;
            return Poll::Ready(event);
        }
        let deadline = *silent_since.get_or_insert_with(Instant::now) + KEEP_ALIVE_INTERVAL;
        // Resetting the timer locks a part of the runtime, so it is reset only after it has expired, not for each
        // event.
        while timer.as_mut().poll(context).is_ready() {
            if Instant::now() >= deadline {
                silent_since = None;
                return Poll::Ready(Some(Bytes::from_static(KEEP_ALIVE)));
            }
            timer.as_mut().reset(deadline);
        }
        Poll::Pending
    })
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use http_body_util::BodyExt as _;
    use tokio::sync::mpsc;

    use super::*;

    /// Returns the next bytes of a body, which must be sent within the interval.
    async fn next(body: &mut Body) -> Bytes {
        // Timers have a resolution of 1 ms.
        let limit = KEEP_ALIVE_INTERVAL + Duration::from_millis(2);
        let frame = tokio::time::timeout(limit, body.frame()).await.expect("the body is silent");
        frame.expect("the body has ended").unwrap().into_data().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_has_comments_and_events_are_sent_immediately() {
        let (sender, mut events) = mpsc::unbounded_channel::<Bytes>();
        let mut body = response(stream::poll_fn(move |context| events.poll_recv(context))).into_body();
        for _ in 0..2 {
            assert_eq!(next(&mut body).await, KEEP_ALIVE);
        }
        for second in 0..30 {
            let event = Bytes::from(format!("data: {second}\n\n"));
            sender.send(event.clone()).unwrap();
            assert_eq!(next(&mut body).await, event);
            assert!(body.frame().now_or_never().is_none());
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(next(&mut body).await, KEEP_ALIVE);
        drop(sender);
        assert!(body.frame().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn events_without_bytes_do_not_count() {
        let empty = stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Some((Bytes::new(), ()))
        });
        let mut body = response(empty).into_body();
        for _ in 0..3 {
            assert_eq!(next(&mut body).await, KEEP_ALIVE);
        }
    }
}
