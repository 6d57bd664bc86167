//! Receives the body of a client's request, and enforces the limits on its size, on the time until it has arrived, and
//! on the memory for all bodies.

use bytes::Bytes;
use http::{HeaderMap, header};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Incoming};
use tokio::time::{Instant, timeout_at};

use crate::app::App;
use crate::body_budget::{BudgetExceeded, BudgetLimits};
use crate::error::Error;

/// Size of the part of a rejected request body that the router reads and discards. A client that is still sending may
/// not read the answer yet, and if the router closed the connection early, the answer could be lost together with the
/// unread data.
///
/// If exceeded: the router responds without reading the rest, and closes the connection.
const DISCARDED_BYTES_MAX: usize = 64 << 20;

/// The body of a request, of which nothing has been read.
pub(super) struct UnreadBody {
    body: Incoming,
    /// Whether the client sends the body only after the router has begun to read it.
    expects_continue: bool,
}

impl UnreadBody {
    pub(super) fn new(headers: &HeaderMap, body: Incoming) -> Self {
        Self { body, expects_continue: headers.contains_key(header::EXPECT) }
    }

    /// Receives the whole body.
    ///
    /// # Errors
    /// The body exceeds a limit or does not arrive in time, or the connection broke.
    pub(super) async fn receive(mut self, app: &App) -> Result<Bytes, Error> {
        if self.body.is_end_stream() {
            return Ok(Bytes::new());
        }
        let settings = app.settings();
        let (max_body_bytes, read_timeout) = (settings.max_body_bytes.0, settings.read_timeout);
        drop(settings);
        if self.body.size_hint().lower() > max_body_bytes {
            self.discard(app).await;
            return Err(Error::BodyTooLarge(max_body_bytes));
        }
        let announced = usize::try_from(self.body.size_hint().lower()).unwrap_or(usize::MAX);
        let deadline = Instant::now() + read_timeout;
        let received =
            timeout_at(deadline, receive_parts(app, &mut self.body, announced, max_body_bytes)).await;
        let received = received.unwrap_or_else(|_| {
            Err(Error::Body(format!("it did not arrive completely within {read_timeout:?} (--read-timeout)")))
        });
        if received.is_err() {
            // The request is rejected whether or not the rest arrives.
            let _ = timeout_at(deadline, discard(&mut self.body)).await;
        }
        received
    }

    /// Discards the body of a request that was rejected before its body was read, so that the client reads the answer.
    /// A body is left unread if the client has not begun to send it, or if its declared size exceeds
    /// [`DISCARDED_BYTES_MAX`].
    pub(super) async fn discard(mut self, app: &App) {
        let is_small = self.body.size_hint().lower() <= DISCARDED_BYTES_MAX as u64;
        if is_small && !self.expects_continue {
            let deadline = Instant::now() + app.settings().read_timeout;
            // The request is rejected whether or not the body arrives.
            let _ = timeout_at(deadline, discard(&mut self.body)).await;
        }
    }
}

async fn receive_parts(
    app: &App,
    body: &mut Incoming,
    announced: usize,
    max_body_bytes: u64,
) -> Result<Bytes, Error> {
    let max_buffered_body_bytes = app.settings().max_buffered_body_bytes.0;
    let limits = BudgetLimits::new(max_buffered_body_bytes, max_body_bytes);
    let mut received = app.bodies().body(announced);
    while let Some(part) = next_part(body).await? {
        if received.len() + part.len() as u64 > max_body_bytes {
            return Err(Error::BodyTooLarge(max_body_bytes));
        }
        received
            .push(part, limits)
            .map_err(|BudgetExceeded| Error::BodyBufferFull(max_buffered_body_bytes))?;
    }
    Ok(received.into_bytes())
}

/// Reads and discards the rest of a body, up to [`DISCARDED_BYTES_MAX`].
async fn discard(body: &mut Incoming) -> Result<(), Error> {
    let mut discarded = 0;
    while let Some(part) = next_part(body).await? {
        discarded += part.len();
        if discarded > DISCARDED_BYTES_MAX {
            break;
        }
    }
    Ok(())
}

/// The next part of a body. Trailers are ignored.
async fn next_part(body: &mut Incoming) -> Result<Option<Bytes>, Error> {
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|_| Error::Body("the connection broke, or the framing is invalid".to_owned()))?;
        if let Ok(part) = frame.into_data() {
            return Ok(Some(part));
        }
    }
    Ok(None)
}
