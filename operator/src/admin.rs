//! The HTTP server for probes and metrics.

use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use kube::runtime::reflector::Store;
use operator_api::{Phase, ReleaseStatus};

use crate::metrics::Metrics;
use crate::watch::StoredDeployment;

/// The state of the HTTP server for probes and metrics. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Admin(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    metrics: Metrics,
    /// The condition that the operator waits for before it is ready.
    waits_for: Mutex<Option<&'static str>>,
    stores: Mutex<Vec<Store<StoredDeployment>>>,
}

impl Admin {
    /// Creates the state of a server that serves `metrics`.
    #[must_use]
    pub fn new(metrics: Metrics) -> Self {
        Self(Arc::new(Inner { metrics, ..Inner::default() }))
    }

    /// Sets the condition that the operator waits for before it is ready; `None` if it is ready.
    pub fn set_waits_for(&self, subject: Option<&'static str>) {
        *self.0.waits_for.lock().unwrap_or_else(PoisonError::into_inner) = subject;
    }

    /// Adds a store whose resources the metrics count.
    pub fn add_store(&self, store: Store<StoredDeployment>) {
        self.0.stores.lock().unwrap_or_else(PoisonError::into_inner).push(store);
    }

    /// Returns the routes of the server.
    pub fn router(self) -> Router {
        Router::new()
            .route("/healthz", get(|| async { "ok" }))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self)
    }

    fn count(&self, matches: impl Fn(&StoredDeployment) -> bool) -> usize {
        let stores = self.0.stores.lock().unwrap_or_else(PoisonError::into_inner);
        stores.iter().flat_map(Store::state).filter(|object| matches(object)).count()
    }
}

/// The phase of a resource, which is `Refused` if the resource cannot be decoded.
fn phase(object: &StoredDeployment) -> Phase {
    match &object.0 {
        Ok(object) => object.status.as_ref().map(|status| status.phase).unwrap_or_default(),
        Err(_) => Phase::Refused,
    }
}

fn release(object: &StoredDeployment) -> Option<&ReleaseStatus> {
    object.0.as_ref().ok()?.status.as_ref()?.release.as_ref()
}

/// A standby operator is ready too: the probe reports that it can take over.
async fn ready(State(admin): State<Admin>) -> Response {
    match *admin.0.waits_for.lock().unwrap_or_else(PoisonError::into_inner) {
        None => "ok".into_response(),
        Some(subject) => (StatusCode::SERVICE_UNAVAILABLE, format!("waiting for {subject}")).into_response(),
    }
}

async fn metrics(State(admin): State<Admin>) -> Response {
    const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let metrics = &admin.0.metrics;
    metrics.set_deployments(|counted| admin.count(|object| phase(object) == counted));
    metrics.set_releases(|state| {
        admin.count(|object| release(object).is_some_and(|release| release.state == state))
    });
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], metrics.scrape()).into_response()
}
