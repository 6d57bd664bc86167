//! The state of a thread that serves requests.

use tokio::sync::Notify;

use super::headers::Via;
use super::request_id::RequestIds;
use super::upstream::Pool;
use crate::admin::Admin;
use crate::app::App;

/// The state of a thread that serves requests.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) app: App,
    pub(crate) pool: Pool,
    /// Wakes the requests that wait for an answer, so that they check their deadlines.
    pub(crate) tick: Notify,
    pub(super) admin: Admin,
    pub(super) via: Via,
    pub(super) request_ids: RequestIds,
}

impl Worker {
    /// Creates the state of a thread that has no connections to replicas yet.
    pub(crate) fn new(app: App) -> Self {
        Self {
            admin: Admin::new(app.clone()),
            pool: Pool::default(),
            tick: Notify::new(),
            via: Via::new(app.dispatcher().replicas.router()),
            request_ids: RequestIds::new(),
            app,
        }
    }
}
