//! The body of a request: no larger and no slower than the limits have it.

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use futures_util::StreamExt as _;

use crate::app::App;
use crate::error::Error;

/// Bytes that are read and dropped of a body that is too large: who is still sending does not look for an answer, and
/// closing the connection would take it away with what was not read.
const DROPPED_BYTES_MAX: usize = 64 << 20;

/// The whole body.
///
/// # Errors
/// It is too large, or did not arrive in time.
pub(super) async fn read(app: &App, request: Request) -> Result<Bytes, Error> {
    let limits = app.limits();
    let bytes_max = limits.body_bytes_max;
    if is_hopeless(request.headers(), bytes_max) {
        return Err(Error::BodyTooLarge(bytes_max));
    }
    let whole = tokio::time::timeout(limits.read_timeout, whole(request.into_body(), bytes_max)).await;
    whole.map_err(|_| Error::Body(format!("it took longer than {:?}", limits.read_timeout)))?
}

/// Whether a body that is announced need not be waited for: it is larger than can be dropped, or has not been sent yet.
fn is_hopeless(headers: &HeaderMap, bytes_max: usize) -> bool {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let waits = headers.contains_key(header::EXPECT);
    length
        .is_some_and(|length: usize| length > bytes_max && (waits || length - bytes_max > DROPPED_BYTES_MAX))
}

async fn whole(body: Body, bytes_max: usize) -> Result<Bytes, Error> {
    let mut pieces = body.into_data_stream();
    let Some(first) = next(&mut pieces).await? else { return Ok(Bytes::new()) };
    let mut second = next(&mut pieces).await?;
    if second.is_none() && first.len() <= bytes_max {
        return Ok(first);
    }
    let (mut size, mut gathered) = (first.len(), first.to_vec());
    while let Some(piece) = second {
        size += piece.len();
        if size <= bytes_max {
            gathered.extend_from_slice(&piece);
        } else if size - bytes_max > DROPPED_BYTES_MAX {
            break;
        }
        second = next(&mut pieces).await?;
    }
    if size > bytes_max { Err(Error::BodyTooLarge(bytes_max)) } else { Ok(gathered.into()) }
}

async fn next(pieces: &mut BodyDataStream) -> Result<Option<Bytes>, Error> {
    let piece = pieces.next().await.transpose();
    piece.map_err(|_| Error::Body("the connection broke".to_owned()))
}
