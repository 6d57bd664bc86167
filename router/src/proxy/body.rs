//! The body of an answer: bytes in memory, bytes that a replica sends, or a page of the router.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

use super::relay::Relay;

/// Maximum number of bytes of an in-memory answer that the connection receives at once. The connection buffers a piece
/// of any size, and polls for the next piece only when the client has read enough of it, so each poll proves that the
/// client reads.
const PIECE_BYTES_MAX: usize = 64 * 1024;

/// The body of an answer.
pub(crate) struct Body(Kind);

enum Kind {
    /// The bytes that the connection has not received yet.
    Whole(Bytes),
    Relay(Box<Relay>),
    Page(axum::body::Body),
}

impl Body {
    /// A body of bytes in memory.
    pub(crate) fn whole(bytes: Bytes) -> Self {
        Self(Kind::Whole(bytes))
    }

    /// A body that a replica sends.
    pub(super) fn relay(relay: Relay) -> Self {
        Self(Kind::Relay(Box::new(relay)))
    }

    /// The body of a page of the router.
    pub(crate) fn page(body: axum::body::Body) -> Self {
        Self(Kind::Page(body))
    }
}

impl std::fmt::Debug for Body {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match &self.0 {
            Kind::Whole(rest) => return write!(formatter, "Body({} bytes)", rest.len()),
            Kind::Relay(_) => "relay",
            Kind::Page(_) => "page",
        };
        write!(formatter, "Body({kind})")
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match &mut self.get_mut().0 {
            Kind::Whole(rest) => {
                let piece = rest.split_to(rest.len().min(PIECE_BYTES_MAX));
                Poll::Ready((!piece.is_empty()).then(|| Ok(Frame::data(piece))))
            }
            Kind::Relay(relay) => {
                relay.poll_bytes(context).map(|bytes| bytes.map(|bytes| bytes.map(Frame::data)))
            }
            Kind::Page(page) => Pin::new(page).poll_frame(context).map_err(io::Error::other),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Whole(rest) => rest.is_empty(),
            Kind::Relay(_) => false,
            Kind::Page(page) => page.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Whole(rest) => SizeHint::with_exact(rest.len() as u64),
            Kind::Relay(_) => SizeHint::default(),
            Kind::Page(page) => page.size_hint(),
        }
    }
}
