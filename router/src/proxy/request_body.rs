//! The body of a request to a replica: the client's body, or the client's body with a few bytes replaced. The client's
//! bytes are shared and not copied, so that they count once toward the memory budget for bodies.

use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

/// The body of a request to a replica. Clones share the bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestBody {
    /// The parts that are still to be sent. Empty parts are skipped.
    parts: [Bytes; 3],
}

impl RequestBody {
    /// The unchanged body of the client.
    pub(super) fn whole(body: Bytes) -> Self {
        Self { parts: [body, Bytes::new(), Bytes::new()] }
    }

    /// The body of the client, in which `new` replaces the bytes in `range`.
    pub(super) fn replaced(body: &Bytes, range: Range<usize>, new: Bytes) -> Self {
        Self { parts: [body.slice(..range.start), new, body.slice(range.end..)] }
    }

    fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }

    /// The whole body in one buffer.
    #[cfg(test)]
    pub(super) fn concat(&self) -> Vec<u8> {
        self.parts.concat()
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let part = self.get_mut().parts.iter_mut().find(|part| !part.is_empty()).map(std::mem::take);
        Poll::Ready(part.map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.parts.iter().all(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes())
    }
}
