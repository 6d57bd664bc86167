//! Encodes server-sent events.

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures_util::Stream;
use serde::Serialize;

/// Encoded events that have not been sent yet.
#[derive(Debug, Default)]
pub(crate) struct Events(Vec<u8>);

impl Events {
    /// Adds an event.
    pub(crate) fn push(&mut self, data: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        serde_json::to_writer(&mut self.0, data).expect("invariant: wire types are JSON");
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

    pub(crate) fn take(&mut self) -> Bytes {
        std::mem::take(&mut self.0).into()
    }
}

/// Answers with events that are sent as they arrive.
pub(crate) fn response(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    use futures_util::StreamExt as _;
    of_body(Body::from_stream(events.fuse().map(Ok::<_, std::convert::Infallible>)))
}

/// Answers with the events in `body`.
pub(crate) fn of_body(body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Disable buffering of this answer in proxies such as nginx.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
