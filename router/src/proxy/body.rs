//! The body of an answer: bytes in memory, bytes that a replica sends, or a page of the router.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

use super::relay::Relay;

/// The body of an answer.
pub(crate) struct Body(Kind);

enum Kind {
    Whole(Option<Bytes>),
    Relay(Box<Relay>),
    Page(axum::body::Body),
}

impl Body {
    /// A body of bytes in memory.
    pub(crate) fn whole(bytes: Bytes) -> Self {
        Self(Kind::Whole((!bytes.is_empty()).then_some(bytes)))
    }

    /// A body that a replica sends.
    pub(super) fn relay(relay: Relay) -> Self {
        Self(Kind::Relay(Box::new(relay)))
    }

    /// A page of the router.
    pub(crate) fn page(body: axum::body::Body) -> Self {
        Self(Kind::Page(body))
    }
}

impl std::fmt::Debug for Body {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match &self.0 {
            Kind::Whole(bytes) => {
                return write!(formatter, "Body({} bytes)", bytes.as_ref().map_or(0, Bytes::len));
            }
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
            Kind::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Kind::Relay(relay) => {
                relay.poll_bytes(context).map(|bytes| bytes.map(|bytes| bytes.map(Frame::data)))
            }
            Kind::Page(page) => Pin::new(page).poll_frame(context).map_err(io::Error::other),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Whole(bytes) => bytes.is_none(),
            Kind::Relay(_) => false,
            Kind::Page(page) => page.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Kind::Relay(_) => SizeHint::default(),
            Kind::Page(page) => page.size_hint(),
        }
    }
}
