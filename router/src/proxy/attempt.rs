//! One attempt at one replica, up to the first byte that is the client's.

use std::time::Instant;

use bytes::Bytes;
use http::response::Parts;
use http::{HeaderValue, Response, StatusCode, header};

use super::failure::{Failure, is_refusal};
use super::relay::Streamed;
use super::repeat::Repeat;
use super::upstream::{Link, SendError, rejects_router};
use super::{Body, Outgoing, Worker, headers};
use crate::dispatch::Placed;

/// Size of an answer that the router receives completely before it passes any of it on, so that another replica can
/// still answer if this one dies. Streams are passed on as they arrive.
///
/// Beyond it: the answer is passed on as it arrives, and is cut off if the replica dies.
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
    // Whether the replica closed the connection before the request came is settled: it has answered.
    let broken = Failure::Broken { was_reused: false };
    placed.first_token();
    parts.headers.insert(headers::REPLICA, placed.replica.name.clone());
    if rejects_router(&parts) {
        return Err(Failure::Unauthenticated);
    }
    let status = parts.status;
    let is_stream = is_event_stream(&parts.headers);
    let is_small = !is_stream && link.body_bytes().is_some_and(|size| size <= WHOLE_BYTES_MAX);
    if is_small || is_refusal(status) {
        let Ok(bytes) = watch.wait(whole(&mut link)).await? else { return Err(broken) };
        worker.pool.give(placed.replica.found.http, link);
        let response = Response::from_parts(parts, Body::whole(bytes.clone()));
        return match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Err(Failure::Busy(response)),
            status if is_refusal(status) => Err(Failure::Failed(response)),
            _ => Ok(Answer::Whole(response, bytes)),
        };
    }
    // Until its first event a stream may still come from elsewhere.
    let first = if is_stream {
        let Ok(first) = watch.wait(link.next()).await?.transpose() else { return Err(broken) };
        first
    } else {
        None
    };
    Ok(Answer::Stream(Box::new(Streamed { parts, link, first, is_events: is_stream })))
}

fn is_event_stream(headers: &http::HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    content_type.is_some_and(|value| value.starts_with(b"text/event-stream"))
}

/// Sends the request over an idle connection, or over a new one if there is none. It is sent over another connection
/// only if no byte of it was written to the first, or if sending it twice makes no difference.
///
/// A replica may close an idle connection at the moment at which a request is written to it, and then it is not known
/// whether it has the request. So a request that must not be repeated gets a connection of its own.
async fn exchange(worker: &Worker, placed: &Placed, outgoing: &Outgoing) -> Result<(Link, Parts), Failure> {
    let address = placed.replica.found.http;
    let replicas = &worker.app.dispatch().replicas;
    let is_single_use = outgoing.repeat == Repeat::Never;
    while !is_single_use && let Some(mut link) = worker.pool.take(address).await {
        match link.send(outgoing.request(placed, replicas)).await {
            Ok(parts) => return Ok((link, parts)),
            Err(SendError::Unsent) => {}
            Err(SendError::Sent(_)) if outgoing.repeat == Repeat::Idempotent => break,
            Err(SendError::Sent(error)) => {
                tracing::debug!(replica = placed.replica.found.name, %error, "failed to get an answer");
                return Err(Failure::Broken { was_reused: true });
            }
        }
    }
    let timeout = worker.app.settings().connect_timeout;
    let mut link = Link::connect(address, timeout).await.map_err(|error| {
        tracing::debug!(replica = placed.replica.found.name, %error, "failed to connect");
        Failure::Connect
    })?;
    link.is_single_use = is_single_use;
    let parts = link.send(outgoing.request(placed, replicas)).await.map_err(|error| {
        tracing::debug!(replica = placed.replica.found.name, %error, "failed to get an answer");
        match error {
            SendError::Unsent => Failure::Connect,
            SendError::Sent(_) => Failure::Broken { was_reused: false },
        }
    })?;
    Ok((link, parts))
}

/// All of a body, unless it is larger than what is gathered.
async fn whole(link: &mut Link) -> std::io::Result<Bytes> {
    let Some(first) = link.next().await.transpose()? else { return Ok(Bytes::new()) };
    let Some(second) = link.next().await.transpose()? else { return Ok(first) };
    let mut all = [first, second].concat();
    while let Some(bytes) = link.next().await.transpose()? {
        if all.len() as u64 > WHOLE_BYTES_MAX {
            return Err(std::io::Error::other("the answer is larger than what is gathered of it"));
        }
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
