//! The state that all requests share.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::Context as _;
use server_engine::{EngineHandle, mix};

use crate::dispatches::Dispatches;
use crate::error::{Error, Resource};
use crate::lifecycle::{Lifecycle, Phase};
use crate::limits::{
    Admission, ByteBudget, HttpLimits, PreparationSlots, STORED_OBJECT_REQUESTS_MAX, UNREAD_ANSWER_BYTES_MAX,
};
use crate::media::{FETCHES_MAX, MediaFetcher, MediaPolicy};
use crate::metrics::{Metrics, ProcessState};
use crate::model::Model;
use crate::responses::BackgroundResponses;
use crate::store::{Store, StoreConfig};

/// The state of the server. Clones share the same state.
#[derive(Clone, Debug)]
pub struct App(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    epoch: u64,
    requests: AtomicU64,
    limits: HttpLimits,
    admission: Admission,
    /// The budget for all request bodies, their parsed values and their images in memory.
    body_bytes: Arc<ByteBudget>,
    preparation_slots: PreparationSlots,
    stored_objects: Admission,
    unread_answer_bytes: Arc<ByteBudget>,
    lifecycle: Lifecycle,
    metrics: Metrics,
    dispatches: Dispatches,
    store: Store,
    media: MediaFetcher,
    background: BackgroundResponses,
    served: OnceLock<ServedModel>,
}

/// A loaded model and the engine that runs it.
#[derive(Debug)]
pub struct ServedModel {
    /// The model's names, tokenizer, chat template and formats.
    pub model: Model,
    /// The handle of the engine that runs the model.
    pub engine: EngineHandle,
    /// The maximum number of sequences that run at the same time, for the load report.
    pub max_num_seqs: u32,
    /// Number of tokens in a block of the KV cache, for the load report.
    pub block_tokens: u32,
}

impl App {
    /// Creates the state of a server that has not loaded its model yet and stores responses in memory.
    ///
    /// # Panics
    /// This function never panics: only opening a directory can fail, and the default configuration has none.
    pub fn new(limits: HttpLimits, metrics: Metrics) -> Self {
        let config = StoreConfig::default();
        Self::with_store(limits, metrics, &config)
            .expect("invariant: the default configuration has no directory, and only a directory can fail")
    }

    /// Creates the state of a server that has not loaded its model yet and fetches no images.
    ///
    /// # Errors
    /// The directory for stored responses cannot be used.
    pub fn with_store(limits: HttpLimits, metrics: Metrics, config: &StoreConfig) -> anyhow::Result<Self> {
        Self::with_media(limits, metrics, config, MediaPolicy::default())
    }

    /// Creates the state of a server that has not loaded its model yet.
    ///
    /// # Errors
    /// The directory for stored responses cannot be used, or the fetcher of images cannot be created.
    pub fn with_media(
        limits: HttpLimits,
        metrics: Metrics,
        config: &StoreConfig,
        media: MediaPolicy,
    ) -> anyhow::Result<Self> {
        let store = Store::open(config).context("failed to open the directory for stored responses")?;
        let media = MediaFetcher::new(media)?;
        Ok(Self(Arc::new(Inner {
            // The standard library seeds the hash with random numbers from the operating system.
            epoch: RandomState::new().hash_one("epoch").max(1),
            requests: AtomicU64::new(0),
            admission: Admission::new(limits.max_concurrent_requests),
            body_bytes: limits.body_budget(),
            preparation_slots: PreparationSlots::for_this_machine(),
            stored_objects: Admission::new(STORED_OBJECT_REQUESTS_MAX),
            unread_answer_bytes: ByteBudget::new(UNREAD_ANSWER_BYTES_MAX, UNREAD_ANSWER_BYTES_MAX),
            limits,
            lifecycle: Lifecycle::default(),
            metrics,
            dispatches: Dispatches::default(),
            store,
            media,
            background: BackgroundResponses::default(),
            served: OnceLock::new(),
        })))
    }

    /// Starts to serve a model. The served model never changes: a second call has no effect.
    pub fn serve(&self, served: ServedModel) {
        if self.0.served.set(served).is_ok() {
            self.0.lifecycle.advance(Phase::Serving);
        }
    }

    /// Returns the lifecycle of the process.
    pub fn lifecycle(&self) -> &Lifecycle {
        &self.0.lifecycle
    }

    /// Returns the number of requests in progress.
    pub fn requests(&self) -> usize {
        self.0.admission.requests()
    }

    /// Whether the server should receive requests: the engine is running and the server is not draining.
    pub fn is_ready(&self) -> bool {
        self.0.lifecycle.phase() == Phase::Serving
            && self.0.served.get().is_some_and(|served| served.engine.is_alive())
    }

    /// Returns all metrics as OpenMetrics text.
    pub fn scrape(&self) -> String {
        let engine = self.0.served.get().map(|served| &served.engine);
        let state = ProcessState { is_ready: self.is_ready(), requests: self.requests(), engine };
        self.0.metrics.encode(&state)
    }

    /// Returns a random nonzero number that was generated when the process started.
    pub(crate) fn epoch(&self) -> u64 {
        self.0.epoch
    }

    /// Returns the number of requests that were submitted to the engine.
    pub(crate) fn submissions(&self) -> u64 {
        self.0.served.get().map_or(0, |served| served.engine.submissions())
    }

    pub(crate) fn limits(&self) -> HttpLimits {
        self.0.limits
    }

    pub(crate) fn admission(&self) -> &Admission {
        &self.0.admission
    }

    pub(crate) fn body_bytes(&self) -> &Arc<ByteBudget> {
        &self.0.body_bytes
    }

    pub(crate) fn preparation_slots(&self) -> &PreparationSlots {
        &self.0.preparation_slots
    }

    /// Returns the error for a request that is rejected because a shared resource is exhausted.
    pub(crate) fn overloaded(&self, resource: Resource) -> Error {
        let limit = match resource {
            Resource::BodyBytes => format!("{} bytes", self.0.body_bytes.bytes_max()),
            Resource::Preparation => self.0.preparation_slots.to_string(),
            Resource::ImageFetches => FETCHES_MAX.to_string(),
            Resource::UnreadAnswers => format!("{UNREAD_ANSWER_BYTES_MAX} bytes"),
        };
        let retry_after = self.0.admission.retry_after(Instant::now());
        Error::Overloaded { resource, limit, retry_after }
    }

    /// Returns the fetcher of the media that requests refer to.
    pub(crate) fn media(&self) -> &MediaFetcher {
        &self.0.media
    }

    /// Returns the budget for answers that clients have not read yet, from the tokenize, detokenize and stored-object
    /// endpoints.
    pub(crate) fn unread_answer_bytes(&self) -> &Arc<ByteBudget> {
        &self.0.unread_answer_bytes
    }

    /// Returns the admission control for requests to the stored-object endpoints.
    pub(crate) fn stored_objects(&self) -> &Admission {
        &self.0.stored_objects
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Returns the record of the requests that routers have sent.
    pub(crate) fn dispatches(&self) -> &Dispatches {
        &self.0.dispatches
    }

    /// Returns the store of responses and conversations.
    pub(crate) fn store(&self) -> &Store {
        &self.0.store
    }

    /// Returns the responses that are generated in the background.
    pub(crate) fn background(&self) -> &BackgroundResponses {
        &self.0.background
    }

    /// Returns the loaded model, regardless of the phase.
    pub(crate) fn loaded(&self) -> Option<&ServedModel> {
        self.0.served.get()
    }

    /// Returns the served model, or an error if the server does not accept requests.
    pub(crate) fn served(&self) -> Result<&ServedModel, Error> {
        match self.0.lifecycle.phase() {
            Phase::Starting => Err(Error::Starting),
            Phase::Serving | Phase::Draining => self.0.served.get().ok_or(Error::Starting),
            Phase::Stopping => Err(Error::Stopping),
            Phase::Stopped => Err(Error::Failed(server_engine::Failure::Stopped)),
        }
    }

    /// Returns an ID that is unique among the requests of all processes, unless two processes have the same epoch (with
    /// a probability of about 2^-64 for each pair of processes).
    pub(crate) fn next_id(&self) -> RequestId {
        RequestId { epoch: self.0.epoch, number: self.0.requests.fetch_add(1, Ordering::Relaxed) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestId {
    epoch: u64,
    number: u64,
}

impl RequestId {
    /// Returns a pseudorandom seed, for a request without a seed.
    pub(crate) fn seed(self) -> u64 {
        mix(self.epoch ^ mix(self.number))
    }
}

impl std::fmt::Display for RequestId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:016x}{:08x}", self.epoch, self.number)
    }
}
