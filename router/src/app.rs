//! The state of the router that all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use arc_swap::ArcSwap;

use crate::access::Access;
use crate::args::{Args, Settings};
use crate::body_budget::BodyBudget;
use crate::dispatch::Dispatcher;
use crate::error::Error;
use crate::health::HealthState;
use crate::metrics::{GaugeSources, Metrics};
use process::trace::Tracer;

/// The state of the router. Clones share the same state.
#[derive(Clone, Debug)]
pub struct App(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    settings: Settings,
    dispatcher: Arc<Dispatcher>,
    access: Access,
    bodies: Arc<BodyBudget>,
    metrics: Metrics,
    tracer: Option<Tracer>,
    requests_in_flight: AtomicUsize,
    is_stopping: AtomicBool,
}

impl App {
    /// Creates a router that does not know any replicas yet.
    pub fn new(args: Args, tracer: Option<Tracer>) -> Self {
        let settings: Settings = Arc::new(ArcSwap::from_pointee(args));
        let metrics = Metrics::default();
        Self(Arc::new(Inner {
            dispatcher: Dispatcher::new(Arc::clone(&settings), metrics.clone()),
            settings,
            access: Access::default(),
            bodies: Arc::default(),
            metrics,
            tracer,
            requests_in_flight: AtomicUsize::new(0),
            is_stopping: AtomicBool::new(false),
        }))
    }

    /// The settings that are in effect now.
    pub fn settings(&self) -> arc_swap::Guard<Arc<Args>> {
        self.0.settings.load()
    }

    /// Replaces the settings and applies the changes.
    pub fn set_settings(&self, args: Args) {
        self.0.settings.store(Arc::new(args));
        self.0.dispatcher.reconfigure();
    }

    /// The dispatcher, which assigns replicas to requests.
    pub fn dispatcher(&self) -> &Arc<Dispatcher> {
        &self.0.dispatcher
    }

    /// The API keys and their usage.
    pub fn access(&self) -> &Access {
        &self.0.access
    }

    /// The memory budget of request bodies.
    pub fn bodies(&self) -> &Arc<BodyBudget> {
        &self.0.bodies
    }

    /// The metrics of the process.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    pub(crate) fn tracer(&self) -> Option<&Tracer> {
        self.0.tracer.as_ref()
    }

    /// The number of requests in flight, including those that wait for a replica.
    pub fn requests_in_flight(&self) -> usize {
        self.0.requests_in_flight.load(Ordering::Relaxed)
    }

    /// Admits a request.
    ///
    /// # Errors
    /// The limit of concurrent requests is reached.
    pub(crate) fn admit(&self) -> Result<RequestPermit, Error> {
        let limit = self.settings().max_concurrent_requests;
        let permit = RequestPermit(self.clone());
        let before = self.0.requests_in_flight.fetch_add(1, Ordering::Relaxed);
        if before >= limit as usize { Err(Error::TooManyRequests(limit)) } else { Ok(permit) }
    }

    /// All metrics, as OpenMetrics text.
    pub fn scrape(&self) -> String {
        let dispatcher = self.dispatcher();
        let replicas = dispatcher.replicas.all();
        let now = Instant::now();
        let health = dispatcher.health();
        let health_states: Vec<HealthState> =
            replicas.iter().map(|replica| health.state(replica.identity, now)).collect();
        drop(health);
        self.metrics().scrape(&GaugeSources {
            is_ready: self.is_ready(),
            requests_in_flight: self.requests_in_flight(),
            requests_queued: dispatcher.queued(),
            requests_without_replica: dispatcher.requests_without_replica(),
            replicas: &replicas,
            health_states: &health_states,
            report_ttl: self.settings().report_ttl,
        })
    }

    /// Marks the router as not ready, because it is about to stop.
    pub fn stop(&self) {
        self.0.is_stopping.store(true, Ordering::Relaxed);
    }

    /// Whether clients should send requests: a replica accepts requests, and the router is not stopping.
    pub fn is_ready(&self) -> bool {
        !self.0.is_stopping.load(Ordering::Relaxed)
            && self
                .0
                .dispatcher
                .replicas
                .served_models()
                .values()
                .any(|served_model| self.0.dispatcher.is_available(served_model))
    }
}

/// The permit of a request in flight. Dropping it makes room for another request.
#[derive(Debug)]
pub(crate) struct RequestPermit(App);

impl Drop for RequestPermit {
    fn drop(&mut self) {
        self.0.0.requests_in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
