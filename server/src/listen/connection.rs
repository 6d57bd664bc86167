//! A client's connection, which fails if the client does not read within the write timeout, and which adds a body to
//! the error responses that `hyper` generates.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::time::{Instant, Sleep};

use super::peer::Peer;
use super::protocol_error;

/// A client counts as stalled if data waits to be sent and the client reads fewer bytes than this within the write
/// timeout.
const READ_BYTES_MIN: usize = 16 << 10;

/// A connection with a write timeout.
#[derive(Debug)]
pub(super) struct Connection {
    peer: Peer,
    write: OwnedWriteHalf,
    stall: StallTimer,
    /// The answer that replaces an answer of `hyper`, until the replacement is written completely.
    replacement: Option<Replacement>,
}

#[derive(Debug)]
struct Replacement {
    bytes: Vec<u8>,
    written: usize,
    /// The length of the replaced answer in bytes. `hyper` expects the write to return this number.
    replaced: usize,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, write_timeout: Duration) -> Self {
        let (read, write) = stream.into_split();
        let stall = StallTimer { timeout: write_timeout, deadline: None, written: 0 };
        Self { peer: Peer::new(read), write, stall, replacement: None }
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer.clone()
    }

    /// Forwards the result of writing `offered` bytes, or returns an error if the client has not read enough within the
    /// write timeout.
    fn watch(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<usize>>,
        offered: usize,
    ) -> Poll<io::Result<usize>> {
        let watched = self.stall.watch(context, result, offered);
        self.peer.set_stalled(self.stall.deadline.is_some());
        watched
    }

    fn poll_replacement(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let Some(replacement) = &mut self.replacement else { return Poll::Ready(Ok(0)) };
        while replacement.written < replacement.bytes.len() {
            let rest = &replacement.bytes[replacement.written..];
            let written = Pin::new(&mut self.write).poll_write(context, rest);
            let written = ready!(self.stall.watch(context, written, rest.len()))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            replacement.written += written;
        }
        let replaced = replacement.replaced;
        self.replacement = None;
        Poll::Ready(Ok(replaced))
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = self.peer.stream();
        loop {
            ready!(stream.poll_read_ready(context))?;
            match stream.try_read(buffer.initialize_unfilled()) {
                Ok(read) => {
                    buffer.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.replacement.is_none()
            && let Some(replacement) = protocol_error::replacement(bytes)
        {
            let replaced = bytes.len();
            this.replacement = Some(Replacement { bytes: replacement, written: 0, replaced });
        }
        if this.replacement.is_some() {
            return this.poll_replacement(context);
        }
        let written = Pin::new(&mut this.write).poll_write(context, bytes);
        this.watch(context, written, bytes.len())
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [only] = slices {
            return self.poll_write(context, only);
        }
        let this = self.get_mut();
        let written = Pin::new(&mut this.write).poll_write_vectored(context, slices);
        let offered = slices.iter().map(|slice| slice.len()).sum();
        this.watch(context, written, offered)
    }

    fn is_write_vectored(&self) -> bool {
        self.write.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().write).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().write).poll_shutdown(context)
    }
}

/// Detects clients that do not read.
#[derive(Debug)]
struct StallTimer {
    timeout: Duration,
    /// The time by which the client must have read [`READ_BYTES_MIN`] bytes or all offered bytes. `None` while no write
    /// waits for the client.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Number of bytes written since `deadline` was last set to `None`.
    written: usize,
}

impl StallTimer {
    /// Forwards the result of writing `offered` bytes, or returns an error if the client has not read enough within the
    /// write timeout.
    fn watch(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<usize>>,
        offered: usize,
    ) -> Poll<io::Result<usize>> {
        match result {
            Poll::Ready(Ok(written)) => {
                self.written += written;
                if written == offered || self.written >= READ_BYTES_MIN {
                    (self.deadline, self.written) = (None, 0);
                }
                Poll::Ready(Ok(written))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                let timeout = self.timeout;
                let deadline = self
                    .deadline
                    .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + timeout)));
                ready!(deadline.as_mut().poll(context));
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
            }
        }
    }
}
