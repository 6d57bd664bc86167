//! Connections to replicas: opens them, sends requests over them, and pools idle ones for later requests.
//!
//! A connection has no task of its own. hyper's client connection is polled by the task that waits for the answer, so
//! that a token passes from one socket to the other without waking another task. Dropping the answer closes the
//! connection immediately, which is how a replica notices that its client has disconnected. See
//! `docs/decisions/0068-hyper-client.md`.

use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::response::Parts;
use http::{Request, Response, StatusCode, header};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use process::error::chain;
use proto::replica_token::SCHEME;
use tokio::net::TcpStream;

use super::headers;
use super::request_body::RequestBody;

/// Number of idle connections that each thread keeps open to one replica.
///
/// If exceeded: further idle connections are closed.
const IDLE_MAX: usize = 256;
/// Time for which a connection to a replica may be idle. By default, a replica closes its side after 30 s
/// (`--read-timeout`), and a request must not be sent at that moment.
///
/// If exceeded: the connection is closed.
const IDLE_AGE_MAX: Duration = Duration::from_secs(20);
/// Size of the buffer for the head and the body of an answer, in bytes.
const BUFFER_BYTES_MAX: usize = 64 * 1024;
/// Number of bytes up to which the router joins parts of an answer that arrived together.
const JOINED_BYTES_MAX: usize = 16 * 1024;
/// The time without traffic after which a connection is probed.
const PROBE_AFTER: Duration = Duration::from_secs(15);
/// The interval between probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// Number of probes without a reply after which a connection is closed. Without probes, the router would wait minutes
/// for an answer from a machine that has failed.
const PROBES_MAX: u32 = 3;

/// The reason why a request was not answered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    /// The connection was closed before a byte of the request was written.
    #[error("the connection was closed before the request was sent")]
    Unsent,
    /// The replica may have received the request.
    #[error("the replica sent no valid answer")]
    Sent(#[source] io::Error),
}

/// A connection to a replica.
pub(crate) struct ReplicaConnection {
    sender: SendRequest<RequestBody>,
    /// `None` after the connection has ended.
    driver: Option<Connection<TokioIo<TcpStream>, RequestBody>>,
    /// The rest of the answer. `None` before the head of an answer has arrived, and after the whole answer was
    /// returned.
    body: Option<Incoming>,
    /// An error that will be returned after the data that arrived before it.
    failure: Option<io::Error>,
    /// Whether the connection is closed after one request.
    pub(crate) is_single_use: bool,
}

impl ReplicaConnection {
    /// Connects to `address`.
    ///
    /// # Errors
    /// The connection was refused, or was not established within `timeout`.
    pub(crate) async fn connect(address: SocketAddr, timeout: Duration) -> io::Result<Self> {
        let stream = open(address, timeout).await?;
        let (sender, driver) = http1::Builder::new()
            .max_buf_size(BUFFER_BYTES_MAX)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(io::Error::other)?;
        Ok(Self { sender, driver: Some(driver), body: None, failure: None, is_single_use: false })
    }

    /// Sends a request, waits for the head of its answer, and returns the head without hop-by-hop headers.
    ///
    /// # Errors
    /// The connection broke, or the answer is not valid HTTP/1.
    ///
    /// # Cancel safety
    /// This method is not cancel safe: a connection whose `send` was dropped cannot be used again.
    pub(crate) async fn send(&mut self, request: Request<RequestBody>) -> Result<Parts, SendError> {
        let mut answer = pin!(self.sender.try_send_request(request));
        let driver = &mut self.driver;
        let response = poll_fn(|context| {
            drive(driver, context);
            answer.as_mut().poll(context)
        });
        let response = response.await.map_err(|mut error| match error.take_message() {
            Some(_) => SendError::Unsent,
            None => SendError::Sent(io::Error::other(error.into_error())),
        })?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let message = "the replica switched protocols without a request to do so";
            return Err(SendError::Sent(io::Error::new(io::ErrorKind::InvalidData, message)));
        }
        let (head, body) = response.into_parts();
        self.body = (!body.is_end_stream()).then_some(body);
        // Do not forward hyper's extensions, such as the reason phrase.
        let (mut parts, ()) = Response::new(()).into_parts();
        parts.status = head.status;
        parts.headers = head.headers;
        headers::remove_hop_by_hop(&mut parts.headers);
        Ok(parts)
    }

    /// The number of remaining bytes of the body, if it is known.
    pub(crate) fn body_bytes(&self) -> Option<u64> {
        self.body.as_ref().map_or(Some(0), |body| body.size_hint().exact())
    }

    /// The next part of the body. A part is never empty.
    ///
    /// # Errors
    /// The connection broke before the end, or the framing is invalid.
    pub(crate) fn poll_body(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let first = match ready!(self.poll_data(context)) {
            Some(Ok(first)) => first,
            ended => return Poll::Ready(ended),
        };
        // Join small parts that arrived together, so that the router processes and forwards fewer parts.
        let mut joined = BytesMut::new();
        while first.len() + joined.len() < JOINED_BYTES_MAX {
            match self.poll_data(context) {
                Poll::Ready(Some(Ok(more))) => {
                    if joined.is_empty() {
                        joined.reserve(first.len() + more.len());
                        joined.extend_from_slice(&first);
                    }
                    joined.extend_from_slice(&more);
                }
                Poll::Ready(Some(Err(error))) => {
                    self.failure = Some(error);
                    break;
                }
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        Poll::Ready(Some(Ok(if joined.is_empty() { first } else { joined.freeze() })))
    }

    /// Waits for the result of [`Self::poll_body`].
    pub(crate) async fn next(&mut self) -> Option<io::Result<Bytes>> {
        poll_fn(|context| self.poll_body(context)).await
    }

    fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if let Some(error) = self.failure.take() {
            return Poll::Ready(Some(Err(error)));
        }
        let mut is_driven = false;
        while let Some(body) = &mut self.body {
            match Pin::new(body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) if !data.is_empty() => return Poll::Ready(Some(Ok(data))),
                    // Trailers are not forwarded.
                    _ => {}
                },
                Poll::Ready(Some(Err(error))) => {
                    self.body = None;
                    self.driver = None;
                    return Poll::Ready(Some(Err(io::Error::other(error))));
                }
                Poll::Ready(None) => self.body = None,
                Poll::Pending if is_driven => return Poll::Pending,
                Poll::Pending => {
                    is_driven = true;
                    drive(&mut self.driver, context);
                }
            }
        }
        Poll::Ready(None)
    }

    /// Whether the connection can be used for another request. This requires that the last answer was read to its end
    /// and that, as far as the router knows, the replica has neither closed the connection nor sent unsolicited data.
    fn is_idle(&self) -> bool {
        self.driver.is_some() && self.body.is_none() && self.failure.is_none() && self.sender.is_ready()
    }
}

/// Whether a replica answered 401 because it rejected the router itself. Any other 401 concerns the client's own key
/// and is forwarded.
pub(crate) fn rejects_router(answer: &Parts) -> bool {
    let mut schemes = answer.headers.get_all(header::WWW_AUTHENTICATE).iter();
    answer.status == StatusCode::UNAUTHORIZED && schemes.any(|scheme| scheme == SCHEME)
}

async fn open(address: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let stream = tokio::time::timeout(timeout, TcpStream::connect(address))
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "timed out"))??;
    // Disable Nagle's algorithm: a request must not wait for the acknowledgment of earlier data.
    stream.set_nodelay(true)?;
    let probes = socket2::TcpKeepalive::new()
        .with_time(PROBE_AFTER)
        .with_interval(PROBE_INTERVAL)
        .with_retries(PROBES_MAX);
    socket2::SockRef::from(&stream).set_tcp_keepalive(&probes)?;
    Ok(stream)
}

/// Lets hyper write pending data and read available data.
fn drive(driver: &mut Option<Connection<TokioIo<TcpStream>, RequestBody>>, context: &mut Context<'_>) {
    if let Some(open) = driver
        && let Poll::Ready(ended) = Pin::new(open).poll(context)
    {
        if let Err(error) = ended {
            tracing::trace!(error = chain(&error), "a connection to a replica ended");
        }
        // If hyper has not begun to write the request, it returns the request when the connection is dropped.
        *driver = None;
    }
}

impl std::fmt::Debug for ReplicaConnection {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("ReplicaConnection")
            .field("is_open", &self.driver.is_some())
            .finish_non_exhaustive()
    }
}

/// The idle connections of one thread.
#[derive(Default)]
pub(crate) struct Pool(Mutex<HashMap<SocketAddr, Vec<(ReplicaConnection, Instant)>>>);

impl Pool {
    /// Removes and returns the most recently used idle connection to `address`.
    pub(crate) async fn get(&self, address: SocketAddr) -> Option<ReplicaConnection> {
        loop {
            let (mut connection, since) = self.lock().get_mut(&address)?.pop()?;
            if since.elapsed() > IDLE_AGE_MAX {
                // If this connection is too old, so are the others.
                self.lock().remove(&address);
                return None;
            }
            // The replica may have closed the connection in the meantime.
            poll_fn(|context| {
                drive(&mut connection.driver, context);
                Poll::Ready(())
            })
            .await;
            if connection.is_idle() {
                return Some(connection);
            }
        }
    }

    /// Adds `connection` to the pool if it can be used for another request.
    pub(crate) fn put(&self, address: SocketAddr, mut connection: ReplicaConnection) {
        if connection.is_single_use {
            return;
        }
        if !connection.is_idle() {
            // hyper may not have noticed yet that the answer is complete. An idle connection needs no waker.
            drive(&mut connection.driver, &mut Context::from_waker(Waker::noop()));
            if !connection.is_idle() {
                return;
            }
        }
        let mut idle = self.lock();
        let idle = idle.entry(address).or_default();
        if idle.len() < IDLE_MAX {
            idle.push((connection, Instant::now()));
        }
    }

    /// Closes connections that have been idle for too long.
    pub(crate) fn sweep(&self) {
        self.lock().retain(|_, idle| {
            idle.retain(|(_, since)| since.elapsed() <= IDLE_AGE_MAX);
            !idle.is_empty()
        });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<SocketAddr, Vec<(ReplicaConnection, Instant)>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Pool").field("replicas", &self.lock().len()).finish()
    }
}

#[cfg(test)]
mod tests;
