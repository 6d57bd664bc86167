//! Connections to replicas: how one is made, asked, read and kept for the next request.
//!
//! A connection has no task of its own. Whoever asks drives it: the request goes out, and the answer comes
//! in, within the client's own task, so that a token passes from one socket to the other without waking
//! anybody, and dropping the answer closes the connection at once, which is how a replica learns that its
//! client has gone. HTTP/1.1 is spoken here by hand, since nothing of it is needed but a request whose bytes are
//! known and an answer's framing: `docs/decisions/0013-own-client.md`.

use std::collections::HashMap;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::response::Parts;
use tokio::io::{AsyncReadExt as _, AsyncWrite as _};
use tokio::net::TcpStream;

mod answer;

use answer::{Body, Head, Taken};

/// Idle connections kept to one replica, by each thread.
const IDLE_MAX: usize = 256;
/// An idle connection older than this is not used any more: the replica may be closing it just now.
const IDLE_AGE_MAX: Duration = Duration::from_secs(20);
/// Bytes that are read at a time, at first,
const READ_BYTES: usize = 4 * 1024;
/// and at most, where so much keeps coming.
const READ_BYTES_MAX: usize = 256 * 1024;
/// Room left below which a buffer is made anew.
const READ_BYTES_MIN: usize = 1024;
/// Bytes of a request's body that are sent together with its head.
const JOINED_BYTES_MAX: usize = 16 * 1024;

/// A connection to a replica.
pub(crate) struct Link {
    stream: TcpStream,
    /// What has come and is not taken.
    input: BytesMut,
    read_bytes: usize,
    /// The request, but for a body that is sent behind it.
    output: Vec<u8>,
    rest: Bytes,
    /// Of both, what is sent.
    sent: usize,
    /// What is still to come of the answer.
    body: Body,
    /// It can carry another request once the answer is over.
    keeps: bool,
    /// It has carried a request before, so that its failure may mean no more than that it was closed.
    pub(crate) reused: bool,
}

impl Link {
    /// Connects to `address`.
    ///
    /// # Errors
    /// Nobody listens there, or not within `timeout`.
    pub(crate) async fn connect(address: SocketAddr, timeout: Duration) -> io::Result<Self> {
        let stream = tokio::time::timeout(timeout, TcpStream::connect(address))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "nobody answered"))??;
        // A request is written at once and must not wait for an acknowledgement.
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            input: BytesMut::new(),
            read_bytes: READ_BYTES,
            output: Vec::new(),
            rest: Bytes::new(),
            sent: 0,
            body: Body::Ended,
            keeps: true,
            reused: false,
        })
    }

    /// Sends a request, whose head `write` appends, and waits for the head of its answer. `has_body`: it is not one
    /// that is answered by a head alone.
    ///
    /// # Errors
    /// The connection broke, or this was no answer.
    ///
    /// # Cancel safety
    /// None: a link whose `send` was dropped is of no more use.
    pub(crate) async fn send(
        &mut self,
        write: impl FnOnce(&mut Vec<u8>),
        body: &Bytes,
        has_body: bool,
    ) -> io::Result<Parts> {
        self.output.clear();
        self.sent = 0;
        self.keeps = false;
        write(&mut self.output);
        if body.len() <= JOINED_BYTES_MAX {
            self.output.extend_from_slice(body);
            self.rest = Bytes::new();
        } else {
            self.rest = body.clone();
        }
        let mut failure = None;
        let head = poll_fn(|context| {
            // An answer may come before all is sent, and even where the rest cannot be sent any more.
            if failure.is_none()
                && let Poll::Ready(Err(error)) = self.poll_write(context)
            {
                failure = Some(error);
            }
            self.poll_head(has_body, context)
        });
        match head.await {
            Ok(head) => {
                self.body = head.body;
                self.keeps = head.keeps;
                Ok(head.parts)
            }
            Err(error) => Err(failure.unwrap_or(error)),
        }
    }

    /// What is still to come of the answer's body, if that is known.
    pub(crate) fn body_bytes(&self) -> Option<u64> {
        match self.body {
            Body::Sized(bytes) => Some(bytes),
            Body::Ended => Some(0),
            Body::Chunked(_) | Body::UntilClose => None,
        }
    }

    /// The next part of the answer's body, never empty.
    ///
    /// # Errors
    /// It breaks off, or is not as it was said to be.
    pub(crate) fn poll_body(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        loop {
            match self.body.take(&mut self.input) {
                Ok(Taken::Data(bytes)) => return Poll::Ready(Some(Ok(bytes))),
                Ok(Taken::End) => return Poll::Ready(None),
                Ok(Taken::More) => {}
                Err(malformed) => return Poll::Ready(Some(Err(malformed.into()))),
            }
            // It may be the rest of the request that the replica waits for.
            if self.is_unsent()
                && let Poll::Ready(Err(error)) = self.poll_write(context)
            {
                return Poll::Ready(Some(Err(error)));
            }
            match ready!(self.poll_read(context)) {
                Ok(0) => {
                    if let Err(malformed) = self.body.close() {
                        return Poll::Ready(Some(Err(malformed.into())));
                    }
                }
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    /// As [`Self::poll_body`].
    pub(crate) async fn next(&mut self) -> Option<io::Result<Bytes>> {
        poll_fn(|context| self.poll_body(context)).await
    }

    fn is_unsent(&self) -> bool {
        self.sent < self.output.len() + self.rest.len()
    }

    /// Writes on until all is sent.
    fn poll_write(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.is_unsent() {
            let stream = Pin::new(&mut self.stream);
            let sent = match self.output.get(self.sent..) {
                Some(head) if self.rest.is_empty() => ready!(stream.poll_write(context, head))?,
                Some(head) if !head.is_empty() => {
                    let parts = [IoSlice::new(head), IoSlice::new(&self.rest)];
                    ready!(stream.poll_write_vectored(context, &parts))?
                }
                _ => ready!(stream.poll_write(context, &self.rest[self.sent - self.output.len()..]))?,
            };
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.sent += sent;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_head(&mut self, has_body: bool, context: &mut Context<'_>) -> Poll<io::Result<Head>> {
        loop {
            if !self.input.is_empty()
                && let Some(head) = Head::take(&mut self.input, has_body)?
            {
                return Poll::Ready(Ok(head));
            }
            if ready!(self.poll_read(context))? == 0 {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.input.capacity() - self.input.len() < READ_BYTES_MIN {
            self.input.reserve(self.read_bytes);
        }
        let room = self.input.capacity() - self.input.len();
        let count = ready!(pin!(self.stream.read_buf(&mut self.input)).poll(context))?;
        if count == room {
            self.read_bytes = (self.read_bytes * 2).min(READ_BYTES_MAX);
        }
        Poll::Ready(Ok(count))
    }

    /// Whether it can carry another request.
    fn is_idle(&self) -> bool {
        self.keeps && self.body == Body::Ended && self.input.is_empty() && !self.is_unsent()
    }

    /// Whether the replica has left it open, as far as is known, and silent.
    fn is_open(&mut self, context: &mut Context<'_>) -> bool {
        self.poll_read(context).is_pending()
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Link").field("body", &self.body).field("keeps", &self.keeps).finish()
    }
}

/// The idle connections of one thread.
#[derive(Default)]
pub(crate) struct Pool(Mutex<HashMap<SocketAddr, Vec<(Link, Instant)>>>);

impl Pool {
    /// A connection to `address` that nobody uses, the youngest first.
    pub(crate) async fn take(&self, address: SocketAddr) -> Option<Link> {
        loop {
            let (mut link, since) = self.lock().get_mut(&address)?.pop()?;
            if since.elapsed() > IDLE_AGE_MAX {
                // The others are older.
                self.lock().remove(&address);
                return None;
            }
            // The replica may have closed it meanwhile.
            if poll_fn(|context| Poll::Ready(link.is_open(context))).await {
                return Some(link);
            }
        }
    }

    /// Keeps `link`, whose answer was read to its end, if it can be used again.
    pub(crate) fn give(&self, address: SocketAddr, mut link: Link) {
        if !link.is_idle() {
            return;
        }
        link.reused = true;
        link.rest = Bytes::new();
        if link.read_bytes > READ_BYTES {
            // What a large answer took is not kept for the small ones that may follow.
            link.read_bytes = READ_BYTES;
            link.input = BytesMut::new();
        }
        let mut idle = self.lock();
        let idle = idle.entry(address).or_default();
        if idle.len() < IDLE_MAX {
            idle.push((link, Instant::now()));
        }
    }

    /// Drops what is too old to be used.
    pub(crate) fn sweep(&self) {
        self.lock().retain(|_, idle| {
            idle.retain(|(_, since)| since.elapsed() <= IDLE_AGE_MAX);
            !idle.is_empty()
        });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<SocketAddr, Vec<(Link, Instant)>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Pool").field("replicas", &self.lock().len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_to_a_replica_does_not_wait_for_acknowledgements() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let link = Link::connect(listener.local_addr().unwrap(), Duration::from_secs(30)).await.unwrap();
        assert!(link.stream.nodelay().unwrap());
    }
}
