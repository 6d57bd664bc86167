//! Fetches the media that a request refers to. The bytes of the media count toward `--max-buffered-body-bytes` until
//! the media are dropped.

use axum::body::Bytes;
use futures_util::{StreamExt as _, stream};

use crate::app::App;
use crate::error::{Error, MediaReference, Resource};
use crate::limits::BudgetExhausted;
use crate::media::MediaError;
use crate::prepare::Media;
use crate::tenant::Tenant;

/// Number of images that are fetched at the same time for one request.
///
/// If exceeded: further images of the request are fetched afterward.
const REQUEST_FETCHES_MAX: usize = 4;

/// Fetches media for a request, and adds them to `media`.
///
/// # Errors
/// An image is not allowed, cannot be fetched, or does not fit into `--max-buffered-body-bytes`.
pub(super) async fn fetch(
    app: &App,
    references: Vec<MediaReference>,
    tenant: Tenant,
    media: &mut Media,
) -> Result<(), Error> {
    let fetches = references.into_iter().map(|reference| fetch_one(app, reference, tenant));
    let mut fetched = stream::iter(fetches).buffer_unordered(REQUEST_FETCHES_MAX);
    while let Some(medium) = fetched.next().await {
        let (MediaReference { url, param }, bytes) = medium?;
        let bytes_max = app.body_bytes().large_bytes_max();
        if media.bytes() + bytes.len() > bytes_max {
            let problem = format!(
                "the fetched images of the request exceed the limit of {bytes_max} bytes, the part of \
                 --max-buffered-body-bytes that is not reserved for small bodies"
            );
            return Err(Error::coded("array_above_max_length", param, problem));
        }
        let mut reservation = app.body_bytes().empty_reservation();
        reservation.grow_to(bytes.len()).map_err(|BudgetExhausted| app.overloaded(Resource::BodyBytes))?;
        media.insert(url, reservation.hold(bytes));
    }
    Ok(())
}

/// Fetches an image, and returns it with its reference.
async fn fetch_one(
    app: &App,
    reference: MediaReference,
    tenant: Tenant,
) -> Result<(MediaReference, Bytes), Error> {
    match app.media().fetch(&reference.url, tenant).await {
        Ok(bytes) => Ok((reference, bytes)),
        Err(error) => {
            tracing::debug!(error = &error as &dyn std::error::Error, "failed to fetch an image");
            Err(match error {
                MediaError::Busy => app.overloaded(Resource::ImageFetches),
                error => Error::coded("invalid_image_url", reference.param, error),
            })
        }
    }
}
