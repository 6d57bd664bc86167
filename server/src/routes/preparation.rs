//! Prepares small requests on the threads that serve connections, and other requests on separate threads.

use std::sync::Arc;

use crate::app::App;
use crate::error::{Error, Resource};
use crate::limits::NoSlot;
use crate::prepare::{self, Media};
use crate::tenant::Tenant;

/// Size up to which a body is prepared inline. Larger bodies, and those whose preparation may take long nevertheless, are
/// prepared on separate threads, so that they do not delay the tokens of other requests.
const INLINE_BYTES_MAX: usize = 16 * 1024;

/// Whether a body can be prepared so quickly that it needs no separate thread.
pub(super) fn is_light(body: &[u8]) -> bool {
    body.len() <= INLINE_BYTES_MAX
        && !prepare::may_compile(body)
        && !prepare::may_decode_images(body)
        && !prepare::may_pad(body)
}

/// Prepares a request, and again whenever media that it needs have been fetched. `is_light` is the result of
/// [`is_light`].
pub(super) async fn with_media<T: Send + 'static>(
    app: &App,
    tenant: Tenant,
    is_light: bool,
    work: impl Fn(&App, &Media) -> Result<T, Error> + Send + Sync + 'static,
) -> Result<T, Error> {
    let work = Arc::new(work);
    let run = async |media: Arc<Media>| {
        if is_light {
            return work(app, &media);
        }
        let work = Arc::clone(&work);
        on_thread(app, tenant, move |app| work(app, &media)).await
    };
    let mut media = Arc::new(Media::default());
    // Each time, at least one image is fetched. If a conversation is truncated, each attempt to shorten it can need further
    // images, but all attempts together need no more than a request may have.
    for _ in 0..prepare::IMAGES_MAX {
        match run(Arc::clone(&media)).await {
            Err(Error::MediaNeeded(references)) => {
                app.fetch_media(references, Arc::make_mut(&mut media)).await?;
            }
            result => return result,
        }
    }
    run(media).await
}

/// Prepares a request on a separate thread once a slot is free.
pub(super) async fn on_thread<T: Send + 'static>(
    app: &App,
    tenant: Tenant,
    work: impl FnOnce(&App) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let slot =
        app.preparation_slots().slot(tenant).await.map_err(|NoSlot| app.overloaded(Resource::Preparation))?;
    let app = app.clone();
    let result = slot.run(move || work(&app)).await;
    result.unwrap_or_else(|| Err(Error::Internal("failed to prepare the request".to_owned())))
}
