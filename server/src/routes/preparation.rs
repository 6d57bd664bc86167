//! Prepares small requests on the threads that serve connections, and other requests on separate threads.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::media;
use crate::app::App;
use crate::error::{Error, Resource};
use crate::limits::NoSlot;
use crate::prepare::{self, Media};
use crate::tenant::Tenant;

/// Maximum size of a body that is prepared inline. Larger bodies, and smaller ones whose preparation may take a long
/// time, are prepared on separate threads, so that they do not delay the tokens of other requests.
const INLINE_BYTES_MAX: usize = 16 * 1024;

/// Whether a body can be prepared so quickly that it needs no separate thread.
pub(super) fn is_light(body: &[u8]) -> bool {
    body.len() <= INLINE_BYTES_MAX
        && !prepare::may_compile(body)
        && !prepare::may_decode_images(body)
        && !prepare::may_pad(body)
}

/// Prepares a request, and prepares it again whenever media that it needs have been fetched. If `is_light` is set, the
/// request is prepared on the current thread.
///
/// # Cancel safety
/// Dropping the future cancels the token that is passed to `work`, so that work on a separate thread can stop.
pub(super) async fn with_media<T: Send + 'static>(
    app: &App,
    tenant: Tenant,
    is_light: bool,
    work: impl Fn(&App, &Media, &CancellationToken) -> Result<T, Error> + Send + Sync + 'static,
) -> Result<T, Error> {
    let work = Arc::new(work);
    let canceled = CancellationToken::new();
    let _guard = canceled.clone().drop_guard();
    let run = async |media: Arc<Media>| {
        if is_light {
            return work(app, &media, &canceled);
        }
        let (work, canceled) = (Arc::clone(&work), canceled.clone());
        on_thread(app, tenant, move |app| work(app, &media, &canceled)).await
    };
    let mut media = Arc::new(Media::new(Arc::clone(app.body_bytes())));
    // Each iteration fetches at least one image. If a conversation is truncated, each attempt to shorten it can need
    // further images, but all attempts together need at most `IMAGES_MAX`.
    for _ in 0..prepare::IMAGES_MAX {
        match run(Arc::clone(&media)).await {
            Err(Error::MediaNeeded(references)) => {
                media::fetch(app, references, tenant, Arc::make_mut(&mut media)).await?;
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::limits::HttpLimits;
    use crate::metrics::Metrics;

    #[tokio::test]
    async fn work_is_canceled_when_the_client_disconnects() {
        let app = App::new(HttpLimits::default(), Metrics::new("m", "test"));
        let (sender, receiver) = mpsc::channel();
        let prepared = with_media(&app, Tenant::default(), false, move |_, _, canceled| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(canceled.cancelled());
            sender.send(()).unwrap();
            Ok(())
        });
        // `now_or_never` polls the future, which starts the work, and drops it.
        assert!(prepared.now_or_never().is_none());
        receiver.recv_timeout(Duration::from_secs(60)).expect("the work ends");
    }
}
