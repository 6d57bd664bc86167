//! Connections to replicas: how one is made, asked, read and kept for the next request.
//!
//! A connection has no task of its own. Whoever asks drives it: the request goes out, and the answer comes
//! in, within the client's own task, so that a token passes from one socket to the other without waking
//! anybody, and dropping the answer closes the connection at once, which is how a replica learns that its
//! client has gone.

use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body as _, Frame, Incoming};
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Idle connections kept to one replica, by each thread.
const IDLE_MAX: usize = 256;
/// An idle connection older than this is not used any more: the replica may be closing it just now.
const IDLE_AGE_MAX: Duration = Duration::from_secs(20);
/// Bytes of an answer's head.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// A connection to a replica.
pub(crate) struct Link {
    sender: SendRequest<Full<Bytes>>,
    driver: Connection<TokioIo<TcpStream>, Full<Bytes>>,
    ended: bool,
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
        let mut builder = http1::Builder::new();
        builder.max_header_size(HEAD_BYTES_MAX);
        let (sender, driver) = builder.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        Ok(Self { sender, driver, ended: false, reused: false })
    }

    fn drive(&mut self, context: &mut Context<'_>) {
        if !self.ended && Pin::new(&mut self.driver).poll(context).is_ready() {
            // Why it ended, the answer's future or body tells.
            self.ended = true;
        }
    }

    /// Sends `request` and waits for the head of its answer.
    ///
    /// # Errors
    /// The connection broke.
    ///
    /// # Cancel safety
    /// None: a link whose `send` was dropped is of no more use.
    pub(crate) async fn send(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
        let mut answer = pin!(self.sender.send_request(request));
        poll_fn(|context| {
            if !self.ended && Pin::new(&mut self.driver).poll(context).is_ready() {
                self.ended = true;
            }
            answer.as_mut().poll(context)
        })
        .await
    }

    /// The next part of the answer's body.
    pub(crate) fn poll_body(
        &mut self,
        body: &mut Incoming,
        context: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let frame = Pin::new(&mut *body).poll_frame(context);
        if frame.is_ready() || self.ended {
            return frame;
        }
        self.drive(context);
        Pin::new(body).poll_frame(context)
    }

    /// The answer's body, which drives the link itself.
    pub(crate) fn body(self, body: Incoming) -> LinkBody {
        LinkBody { link: self, body }
    }

    /// Whether it can carry another request, once an answer has been read to its end.
    fn poll_idle(&mut self, context: &mut Context<'_>) -> bool {
        self.drive(context);
        !self.ended && self.sender.is_ready()
    }
}

/// A body together with its link, for who does not need the link again.
pub(crate) struct LinkBody {
    link: Link,
    body: Incoming,
}

impl hyper::body::Body for LinkBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let Self { link, body } = self.get_mut();
        link.poll_body(body, context)
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
            if poll_fn(|context| Poll::Ready(link.poll_idle(context))).await {
                return Some(link);
            }
        }
    }

    /// Keeps `link`, whose answer was read to its end, if it can be used again.
    pub(crate) fn give(&self, address: SocketAddr, mut link: Link, context: &mut Context<'_>) {
        if !link.poll_idle(context) {
            return;
        }
        link.reused = true;
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
