//! For who looks after the operator: probes and metrics.

use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use kube::runtime::reflector::Store;
use operator_api::LlmDeployment;

use crate::controller::{count, count_releases};
use crate::metrics::Metrics;

/// What the pages tell. Clones are of the same.
#[derive(Clone, Debug, Default)]
pub struct Admin(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    metrics: Metrics,
    /// Why the operator is of no use yet.
    waits_for: Mutex<Option<&'static str>>,
    stores: Mutex<Vec<Store<LlmDeployment>>>,
}

impl Admin {
    /// Pages that tell `metrics`.
    #[must_use]
    pub fn new(metrics: Metrics) -> Self {
        Self(Arc::new(Inner { metrics, ..Inner::default() }))
    }

    /// The operator waits for something, or does not any more.
    pub fn waits_for(&self, what: Option<&'static str>) {
        *self.0.waits_for.lock().unwrap_or_else(PoisonError::into_inner) = what;
    }

    /// Resources that are counted.
    pub fn knows(&self, store: Store<LlmDeployment>) {
        self.0.stores.lock().unwrap_or_else(PoisonError::into_inner).push(store);
    }

    /// The pages.
    pub fn router(self) -> Router {
        Router::new()
            .route("/healthz", get(|| async { "ok" }))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self)
    }
}

/// Standing by for a leader is readiness, too: it is for the cluster that a second operator is there.
async fn ready(State(admin): State<Admin>) -> Response {
    match *admin.0.waits_for.lock().unwrap_or_else(PoisonError::into_inner) {
        None => "ok".into_response(),
        Some(what) => (StatusCode::SERVICE_UNAVAILABLE, format!("waits for {what}")).into_response(),
    }
}

async fn metrics(State(admin): State<Admin>) -> Response {
    const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let stores = admin.0.stores.lock().unwrap_or_else(PoisonError::into_inner).clone();
    admin.0.metrics.phases(|phase| count(&stores, phase));
    admin.0.metrics.releases(|state| count_releases(&stores, state));
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], admin.0.metrics.scrape()).into_response()
}
