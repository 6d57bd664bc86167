//! What all requests share.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::Context as _;
use server_engine::EngineHandle;

use crate::dispatches::Dispatches;
use crate::error::{Error, Resource};
use crate::lifecycle::{Lifecycle, Phase};
use crate::limits::{Admission, ByteBudget, Limits, Preparations, STORED_OBJECT_REQUESTS_MAX};
use crate::metrics::Metrics;
use crate::mix::mix;
use crate::model::Model;
use crate::responses::Background;
use crate::store::{Store, StoreConfig};

/// The state of the server. Clones are of the same.
#[derive(Clone, Debug)]
pub struct App(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    epoch: u64,
    requests: AtomicU64,
    limits: Limits,
    admission: Admission,
    /// The bytes of all bodies that are in memory.
    body_bytes: Arc<ByteBudget>,
    preparations: Preparations,
    stored_objects: Admission,
    lifecycle: Lifecycle,
    metrics: Metrics,
    dispatches: Dispatches,
    store: Store,
    background: Background,
    serving: OnceLock<Serving>,
}

/// A loaded model and the engine that computes it.
#[derive(Debug)]
pub struct Serving {
    /// The model.
    pub model: Model,
    /// The engine.
    pub engine: EngineHandle,
    /// Most sequences that run at once, for the load report.
    pub sequences_max: u32,
    /// Tokens that a block of the cache holds, for the load report.
    pub block_tokens: u32,
}

impl App {
    /// A server without a model as yet, which keeps responses in memory.
    ///
    /// # Panics
    /// Never: memory is there.
    pub fn new(limits: Limits, metrics: Metrics) -> Self {
        let config = StoreConfig::default();
        Self::with_store(limits, metrics, &config).expect("invariant: only a directory can fail")
    }

    /// A server without a model as yet.
    ///
    /// # Errors
    /// The directory of responses cannot be used.
    pub fn with_store(limits: Limits, metrics: Metrics, config: &StoreConfig) -> anyhow::Result<Self> {
        let store = Store::open(config).context("failed to open the directory of responses")?;
        Ok(Self(Arc::new(Inner {
            // The standard library seeds it from the operating system's random numbers.
            epoch: RandomState::new().hash_one("epoch").max(1),
            requests: AtomicU64::new(0),
            admission: Admission::new(limits.requests_max),
            body_bytes: ByteBudget::new(limits.buffered_body_bytes_max, limits.body_bytes_max),
            preparations: Preparations::of_this_machine(),
            stored_objects: Admission::new(STORED_OBJECT_REQUESTS_MAX),
            limits,
            lifecycle: Lifecycle::default(),
            metrics,
            dispatches: Dispatches::default(),
            store,
            background: Background::default(),
            serving: OnceLock::new(),
        })))
    }

    /// Begins to serve. What is served is never exchanged: a second call does nothing.
    pub fn serve(&self, serving: Serving) {
        if self.0.serving.set(serving).is_ok() {
            self.0.lifecycle.advance(Phase::Serving);
        }
    }

    /// Where the process is between start and end.
    pub fn lifecycle(&self) -> &Lifecycle {
        &self.0.lifecycle
    }

    /// Requests in work.
    pub fn requests(&self) -> usize {
        self.0.admission.requests()
    }

    /// Whether requests should be sent here: the engine answers and nobody has asked to drain.
    pub fn is_ready(&self) -> bool {
        self.0.lifecycle.phase() == Phase::Serving
            && self.0.serving.get().is_some_and(|serving| serving.engine.is_alive())
    }

    /// Chosen at random when the process started, never 0.
    pub(crate) fn epoch(&self) -> u64 {
        self.0.epoch
    }

    /// Requests that the engine was handed.
    pub(crate) fn submissions(&self) -> u64 {
        self.0.serving.get().map_or(0, |serving| serving.engine.submissions())
    }

    pub(crate) fn limits(&self) -> Limits {
        self.0.limits
    }

    pub(crate) fn admission(&self) -> &Admission {
        &self.0.admission
    }

    pub(crate) fn body_bytes(&self) -> &Arc<ByteBudget> {
        &self.0.body_bytes
    }

    pub(crate) fn preparations(&self) -> &Preparations {
        &self.0.preparations
    }

    /// The refusal of a request for lack of something that all requests share.
    pub(crate) fn overloaded(&self, resource: Resource) -> Error {
        let limit = match resource {
            Resource::BodyBytes => format!("{} bytes", self.0.body_bytes.bytes_max()),
            Resource::Preparation => self.0.preparations.to_string(),
        };
        let retry_after = self.0.admission.retry_after(Instant::now());
        Error::Overloaded { resource, limit, retry_after }
    }

    /// Admits requests about stored objects.
    pub(crate) fn stored_objects(&self) -> &Admission {
        &self.0.stored_objects
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// What routers have sent.
    pub(crate) fn dispatches(&self) -> &Dispatches {
        &self.0.dispatches
    }

    /// What is kept of responses.
    pub(crate) fn store(&self) -> &Store {
        &self.0.store
    }

    /// The responses that are made in the background.
    pub(crate) fn background(&self) -> &Background {
        &self.0.background
    }

    /// What is served, whatever the phase.
    pub(crate) fn loaded(&self) -> Option<&Serving> {
        self.0.serving.get()
    }

    /// What is served, if requests are taken.
    pub(crate) fn serving(&self) -> Result<&Serving, Error> {
        match self.0.lifecycle.phase() {
            Phase::Starting => Err(Error::Starting),
            Phase::Serving | Phase::Draining => self.0.serving.get().ok_or(Error::Starting),
            Phase::Stopping => Err(Error::Stopping),
            Phase::Stopped => Err(Error::Failed(server_engine::Failure::Stopped)),
        }
    }

    /// A number that no other request of any process has (but for a chance of 2^-64).
    pub(crate) fn next_id(&self) -> RequestId {
        RequestId { epoch: self.0.epoch, number: self.0.requests.fetch_add(1, Ordering::Relaxed) }
    }
}

/// Names a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestId {
    epoch: u64,
    number: u64,
}

impl RequestId {
    /// For a request that names no seed: as good as random.
    pub(crate) fn seed(self) -> u64 {
        mix(self.epoch ^ mix(self.number))
    }
}

impl std::fmt::Display for RequestId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:016x}{:08x}", self.epoch, self.number)
    }
}
