//! Reads the body of a request, subject to its size limit, its time limit and the budget for the bodies of all
//! requests.

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use futures_util::StreamExt as _;

use crate::app::App;
use crate::error::{Error, Resource};
use crate::limits::{BudgetExhausted, ByteReservation, ValuesMemory};

/// Size of the part of a rejected request body, beyond `--max-body-bytes`, that the server reads and discards. Many
/// clients read the answer only after sending the whole body, and closing the connection before all data is read would
/// discard the answer.
///
/// If exceeded: the server responds without reading the rest, and closes the connection.
const DROPPED_BYTES_MAX: usize = 64 << 20;

/// Reads the whole body. Its bytes, and the memory of its values once they are parsed, count toward the budget until
/// the last clone of the body is dropped. Code that parses the body must therefore own it for as long as the values
/// exist.
///
/// # Errors
/// The body is too large, has too many values, or did not arrive completely and in time, or the budget is exhausted.
pub(super) async fn read(app: &App, request: Request) -> Result<Bytes, Error> {
    let limits = app.limits();
    let bytes_max = limits.max_body_bytes;
    let announced = announced(request.headers());
    if is_hopeless(request.headers(), announced, bytes_max) {
        return Err(Error::BodyTooLarge(bytes_max));
    }
    let values_bytes_max = limits.values_bytes_max();
    let buffer = Buffer {
        reservation: app.body_bytes().empty_reservation(),
        bytes: Vec::new(),
        bytes_max,
        announced,
        values: ValuesMemory::default(),
        values_bytes_max,
    };
    let read = tokio::time::timeout(limits.read_timeout, whole(request.into_body(), buffer)).await;
    let read = read.map_err(|_| {
        Error::BodyIncomplete(format!("the body did not arrive within {:?}", limits.read_timeout))
    })?;
    read.map_err(|refusal| match refusal {
        Refusal::TooLarge => Error::BodyTooLarge(bytes_max),
        Refusal::TooManyValues => Error::TooManyValues(values_bytes_max),
        Refusal::Exhausted => app.overloaded(Resource::BodyBytes),
        Refusal::Broken => Error::BodyIncomplete("the connection broke".to_owned()),
    })
}

/// Returns the length of the body according to the `Content-Length` header.
fn announced(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Whether the server should reject a body without reading it. This is the case if the body is larger than `bytes_max`,
/// and either the client waits for permission to send it (`Expect`), or it is too large to be read and discarded.
fn is_hopeless(headers: &HeaderMap, announced: Option<usize>, bytes_max: usize) -> bool {
    let waits = headers.contains_key(header::EXPECT);
    announced.is_some_and(|length| length > bytes_max && (waits || length - bytes_max > DROPPED_BYTES_MAX))
}

/// The reason why a body is rejected.
#[derive(Clone, Copy, Debug)]
enum Refusal {
    TooLarge,
    TooManyValues,
    Exhausted,
    Broken,
}

impl From<BudgetExhausted> for Refusal {
    fn from(_: BudgetExhausted) -> Self {
        Self::Exhausted
    }
}

/// A request body that is being received, with the memory that is reserved for it.
struct Buffer {
    reservation: ByteReservation,
    bytes: Vec<u8>,
    bytes_max: usize,
    announced: Option<usize>,
    values: ValuesMemory,
    values_bytes_max: usize,
}

impl Buffer {
    /// Reserves the memory for the values in the next piece, and `capacity` bytes for the text of the body.
    fn reserve(&mut self, piece: &[u8], capacity: usize) -> Result<(), Refusal> {
        self.values.add(piece);
        if self.values.bytes() > self.values_bytes_max {
            return Err(Refusal::TooManyValues);
        }
        Ok(self.reservation.grow_to(capacity + self.values.bytes())?)
    }

    /// Appends a piece after reserving the memory for it.
    fn push(&mut self, piece: &[u8]) -> Result<(), Refusal> {
        let length = self.bytes.len() + piece.len();
        if length > self.bytes_max {
            return Err(Refusal::TooLarge);
        }
        let mut capacity = self.bytes.capacity();
        if length > capacity {
            // The announced body may never arrive, so the buffer grows only with the received bytes.
            let expected = self.announced.unwrap_or(self.bytes_max).min(self.bytes_max);
            capacity = (capacity * 2).min(expected).max(length);
        }
        self.reserve(piece, capacity)?;
        self.bytes.reserve_exact(capacity - self.bytes.len());
        self.bytes.extend_from_slice(piece);
        Ok(())
    }

    fn finish(self) -> Bytes {
        self.reservation.hold(self.bytes)
    }
}

async fn whole(body: Body, mut buffer: Buffer) -> Result<Bytes, Refusal> {
    let mut pieces = body.into_data_stream();
    let Some(first) = next(&mut pieces).await? else { return Ok(Bytes::new()) };
    let mut second = next(&mut pieces).await?;
    if second.is_none() && first.len() <= buffer.bytes_max {
        buffer.reserve(&first, first.len())?;
        return Ok(buffer.reservation.hold(first));
    }
    let (mut size, mut pushed) = (first.len(), buffer.push(&first));
    drop(first);
    while let (Ok(()), Some(piece)) = (pushed, &second) {
        size += piece.len();
        pushed = buffer.push(piece);
        second = next(&mut pieces).await?;
    }
    let Err(refusal) = pushed else { return Ok(buffer.finish()) };
    let readable = buffer.bytes_max + DROPPED_BYTES_MAX;
    // Free the memory of the received bytes before reading the rest.
    drop(buffer);
    while let Some(piece) = second {
        size += piece.len();
        if size > readable {
            break;
        }
        second = next(&mut pieces).await?;
    }
    Err(refusal)
}

async fn next(pieces: &mut BodyDataStream) -> Result<Option<Bytes>, Refusal> {
    pieces.next().await.transpose().map_err(|_| Refusal::Broken)
}
