//! One attempt at one replica, up to the first byte that is the client's.

use std::time::Instant;

use bytes::Bytes;
use http::response::Parts;
use http::{HeaderValue, Method, Response, StatusCode, header};

use super::failure::Failure;
use super::relay::Streamed;
use super::upstream::Link;
use super::{Body, Outgoing, Worker, headers};
use crate::dispatch::Placed;

/// An answer of no more bytes is gathered before any of it is passed on, so that it may still come from
/// another replica if this one dies within it. Streams are not.
const WHOLE_BYTES_MAX: u64 = 1 << 20;

/// An answer that has begun.
pub(super) enum Answer {
    /// All of it, and its body once more.
    Whole(Response<Body>, Bytes),
    /// Its beginning.
    Stream(Box<Streamed>),
}

/// Sends a request to a replica.
///
/// # Errors
/// It gave no answer to pass on; nothing was.
pub(super) async fn attempt(
    worker: &Worker,
    placed: &Placed,
    outgoing: &Outgoing,
) -> Result<Answer, Failure> {
    let watch = Watch::new(worker, placed, outgoing);
    let (mut link, mut parts) = watch.wait(exchange(worker, placed, outgoing)).await??;
    placed.first_token();
    parts.headers.insert(headers::REPLICA, placed.replica.name.clone());
    let is_stream = is_event_stream(&parts.headers);
    let status = parts.status;
    if !is_stream && link.body_bytes().is_some_and(|size| size <= WHOLE_BYTES_MAX) {
        let bytes = watch.wait(whole(&mut link)).await?.map_err(|_| Failure::Broken)?;
        worker.pool.give(placed.replica.found.http, link);
        let response = Response::from_parts(parts, Body::whole(bytes.clone()));
        return match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Err(Failure::Busy(response)),
            status if status.is_server_error() => Err(Failure::Failed(response)),
            _ => Ok(Answer::Whole(response, bytes)),
        };
    }
    // Until its first event a stream may still come from elsewhere.
    let first = if is_stream {
        watch.wait(link.next()).await?.transpose().map_err(|_| Failure::Broken)?
    } else {
        None
    };
    Ok(Answer::Stream(Box::new(Streamed { parts, link, first, is_events: is_stream })))
}

fn is_event_stream(headers: &http::HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    content_type.is_some_and(|value| value.starts_with(b"text/event-stream"))
}

/// Sends the request over an idle connection, or a new one if there is none or it proves to be closed.
async fn exchange(worker: &Worker, placed: &Placed, outgoing: &Outgoing) -> Result<(Link, Parts), Failure> {
    let address = placed.replica.found.http;
    let has_body = outgoing.method != Method::HEAD;
    let head = |output: &mut Vec<u8>| {
        output.extend_from_slice(&outgoing.head);
        headers::line(output, header::HOST.as_str(), placed.replica.authority.as_bytes());
        headers::line(output, headers::DISPATCH.as_str(), placed.header().as_bytes());
        output.extend_from_slice(b"\r\n");
    };
    if let Some(mut link) = worker.pool.take(address).await
        && let Ok(parts) = link.send(head, &outgoing.body, has_body).await
    {
        return Ok((link, parts));
    }
    let timeout = worker.app.settings().connect_timeout;
    let mut link = Link::connect(address, timeout).await.map_err(|error| {
        tracing::debug!(replica = placed.replica.found.name, %error, "failed to connect");
        Failure::Connect
    })?;
    let parts = link.send(head, &outgoing.body, has_body).await.map_err(|error| {
        tracing::debug!(replica = placed.replica.found.name, %error, "failed to get an answer");
        Failure::Broken
    })?;
    Ok((link, parts))
}

/// All of a body.
async fn whole(link: &mut Link) -> std::io::Result<Bytes> {
    let Some(first) = link.next().await.transpose()? else { return Ok(Bytes::new()) };
    let Some(second) = link.next().await.transpose()? else { return Ok(first) };
    let mut all = [first, second].concat();
    while let Some(bytes) = link.next().await.transpose()? {
        all.extend_from_slice(&bytes);
    }
    Ok(all.into())
}

/// The time that a replica has for the first byte, and whether it still lives.
struct Watch<'a> {
    worker: &'a Worker,
    placed: &'a Placed,
    deadline: Instant,
}

impl<'a> Watch<'a> {
    fn new(worker: &'a Worker, placed: &'a Placed, outgoing: &Outgoing) -> Self {
        let settings = worker.app.settings();
        let time = if outgoing.stream { settings.first_token_timeout } else { settings.answer_timeout };
        Self { worker, placed, deadline: Instant::now() + time }
    }

    async fn wait<T>(&self, future: impl Future<Output = T>) -> Result<T, Failure> {
        let mut future = std::pin::pin!(future);
        loop {
            tokio::select! {
                biased;
                output = future.as_mut() => return Ok(output),
                () = self.worker.tick.notified() => {}
            }
            if Instant::now() >= self.deadline {
                return Err(Failure::TimedOut);
            }
            if self.hangs() {
                return Err(Failure::Hangs);
            }
        }
    }

    /// Whether the replica has stopped to report, and another has not.
    fn hangs(&self) -> bool {
        let limit = self.worker.app.settings().hang_timeout;
        let now = Instant::now();
        self.placed.replica.hangs(now, limit)
            && self.placed.fleet.replicas().iter().any(|replica| !replica.hangs(now, limit))
    }
}
