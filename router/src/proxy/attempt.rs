//! Makes one attempt to send a request to a replica, up to the first byte that the client receives.

use std::time::Instant;

use bytes::Bytes;
use http::response::Parts;
use http::{HeaderValue, Response, StatusCode, header};
use process::error::chain;

use super::failure::{Failure, is_failure};
use super::headers;
use super::outgoing::OutgoingRequest;
use super::relay::StreamedAnswer;
use super::retry_safety::RetrySafety;
use super::upstream::{ReplicaConnection, SendError, rejects_router};
use super::worker::Worker;
use crate::dispatch::Placement;

/// Size up to which the router buffers a non-streaming response completely before forwarding it, so that it can retry
/// the request if the replica fails. Streams are forwarded as they arrive.
///
/// If exceeded: the response is forwarded as it arrives, and is aborted if the replica fails. The same applies to a
/// response without `Content-Length`. Of a larger 429 or 5xx response, the client does not receive the body.
const WHOLE_BYTES_MAX: u64 = 1 << 20;

/// An answer that has begun.
pub(super) enum Answer {
    /// The answer was received completely.
    Whole(Response<Bytes>),
    /// The rest of the answer has not arrived yet.
    Streamed(Box<StreamedAnswer>),
}

/// Sends a request to a replica.
///
/// # Errors
/// Not enough of an answer arrived in time, the replica rejected the router, or the status means that another replica
/// may still answer the request.
pub(super) async fn attempt(
    worker: &Worker,
    placement: &Placement,
    outgoing: &OutgoingRequest,
) -> Result<Answer, Failure> {
    let monitor = FirstByteMonitor::new(worker, placement, outgoing);
    let (mut connection, mut parts) = monitor.wait(exchange(worker, placement, outgoing)).await??;
    // The replica has answered, so it had not closed the connection while the connection was idle.
    let broken = Failure::Broken { was_reused: false };
    placement.record_first_token();
    parts.headers.insert(headers::REPLICA, placement.replica.name.clone());
    if rejects_router(&parts) {
        return Err(Failure::Unauthenticated);
    }
    let status = parts.status;
    let is_events = is_event_stream(&parts.headers);
    if is_events {
        // The length changes if the router adds an error event or removes the usage.
        parts.headers.remove(header::CONTENT_LENGTH);
    }
    let is_small = !is_events && connection.body_bytes().is_some_and(|size| size <= WHOLE_BYTES_MAX);
    if is_small || is_failure(status) {
        let Ok(received) = monitor.wait(receive_whole(&mut connection)).await? else { return Err(broken) };
        let bytes = received.unwrap_or_else(|| {
            // These headers describe the body, which is too large to buffer.
            for name in [header::CONTENT_LENGTH, header::CONTENT_TYPE, header::CONTENT_ENCODING] {
                parts.headers.remove(name);
            }
            Bytes::new()
        });
        // The pool drops a connection whose answer was not read to its end.
        worker.pool.put(placement.replica.discovered.http, connection);
        let response = Response::from_parts(parts, bytes);
        return match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Err(Failure::Busy(response)),
            status if is_failure(status) => Err(Failure::Status(response)),
            _ => Ok(Answer::Whole(response)),
        };
    }
    // Until the first event of a stream has arrived, another replica can still answer.
    let first = if is_events {
        let Ok(first) = monitor.wait(connection.next()).await?.transpose() else { return Err(broken) };
        first
    } else {
        None
    };
    Ok(Answer::Streamed(Box::new(StreamedAnswer { parts, connection, first, is_events })))
}

fn is_event_stream(headers: &http::HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    content_type.is_some_and(|value| value.starts_with(b"text/event-stream"))
}

/// Sends the request over an idle connection, or over a new one if there is none. Another connection is tried only if
/// no byte of the request was written to the first connection, or if sending the request twice makes no difference.
///
/// If a replica closes an idle connection at the moment when a request is written to it, the router cannot know whether
/// the replica has received the request. A request that is not safe to retry therefore gets a new connection, which is
/// used only once.
async fn exchange(
    worker: &Worker,
    placement: &Placement,
    outgoing: &OutgoingRequest,
) -> Result<(ReplicaConnection, Parts), Failure> {
    let address = placement.replica.discovered.http;
    let replica = &placement.replica.discovered.name;
    let replicas = &worker.app.dispatcher().replicas;
    let is_single_use = outgoing.retry_safety == RetrySafety::Unsafe;
    while !is_single_use && let Some(mut connection) = worker.pool.get(address).await {
        match connection.send(outgoing.to_replica(placement, replicas)).await {
            Ok(parts) => return Ok((connection, parts)),
            Err(SendError::Unsent) => {}
            Err(SendError::Sent(_)) if outgoing.retry_safety == RetrySafety::Idempotent => break,
            Err(SendError::Sent(error)) => {
                tracing::debug!(replica, error = chain(&error), "failed to receive an answer");
                return Err(Failure::Broken { was_reused: true });
            }
        }
    }
    let timeout = worker.app.settings().connect_timeout;
    let mut connection = ReplicaConnection::connect(address, timeout).await.map_err(|error| {
        tracing::debug!(replica, %error, "failed to connect");
        Failure::Connect
    })?;
    connection.is_single_use = is_single_use;
    let parts = connection.send(outgoing.to_replica(placement, replicas)).await.map_err(|error| {
        tracing::debug!(replica, error = chain(&error), "failed to receive an answer");
        match error {
            SendError::Unsent => Failure::Connect,
            SendError::Sent(_) => Failure::Broken { was_reused: false },
        }
    })?;
    Ok((connection, parts))
}

/// Receives the rest of a body. Returns `None` if more data arrives after more than [`WHOLE_BYTES_MAX`] bytes have been
/// received.
async fn receive_whole(connection: &mut ReplicaConnection) -> std::io::Result<Option<Bytes>> {
    let Some(first) = connection.next().await.transpose()? else { return Ok(Some(Bytes::new())) };
    let Some(second) = connection.next().await.transpose()? else { return Ok(Some(first)) };
    let mut all = [first, second].concat();
    while let Some(bytes) = connection.next().await.transpose()? {
        if all.len() as u64 > WHOLE_BYTES_MAX {
            return Ok(None);
        }
        all.extend_from_slice(&bytes);
    }
    Ok(Some(all.into()))
}

/// Monitors a replica until the router can forward its answer: checks the deadline, and whether the replica still
/// reports its load.
struct FirstByteMonitor<'a> {
    worker: &'a Worker,
    placement: &'a Placement,
    deadline: Instant,
}

impl<'a> FirstByteMonitor<'a> {
    fn new(worker: &'a Worker, placement: &'a Placement, outgoing: &OutgoingRequest) -> Self {
        let settings = worker.app.settings();
        let timeout = if outgoing.is_stream { settings.first_token_timeout } else { settings.answer_timeout };
        Self { worker, placement, deadline: Instant::now() + timeout }
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
                return Err(Failure::Hung);
            }
        }
    }

    /// Whether the replica has stopped reporting, and another replica of the model has not.
    fn hangs(&self) -> bool {
        let limit = self.worker.app.settings().hang_timeout;
        let now = Instant::now();
        self.placement.replica.hangs(now, limit)
            && self.placement.served_model.replicas().iter().any(|replica| !replica.hangs(now, limit))
    }
}
