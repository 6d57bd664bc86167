//! The engine: one thread that owns a [`Scheduler`](server_scheduler::Scheduler) and a [`ModelRunner`], and the handle
//! through which other threads use it.
//!
//! ```text
//! EngineHandle::submit ─► bounded channel ─► ┌ commands ─► schedule ─► run ─► sample ─► commit ┐
//! TokenStream::next    ◄─ bounded channel ◄─ events ◄──────────────────────────────────────────┘
//! ```
//!
//! The engine processes tokens. It does not process text, JSON, HTTP requests or Kubernetes objects.

mod aborts;
mod clock;
mod command;
mod core;
mod encoder;
mod engine;
mod guide;
mod guides;
mod handle;
mod hash;
mod images;
mod logprobs;
mod lookup;
mod report;
mod request;
mod requests;
mod runner;
mod sampler;
mod search;
pub mod sim;
mod sleep;
mod speculator;
mod spill;
mod stream;
mod waker;
mod workers;

pub use clock::Clock;
pub use encoder::{EncoderConfig, ImageEncoder};
pub use engine::{Engine, EngineConfig, EngineOptions, MAX_QUEUE_LIMIT, StartError};
pub use guide::{CommitLock, Guide, GuideError, GuideState, Progress, TokenSet, guide_threads};
pub use handle::{EngineError, EngineHandle, EngineLimits, SubmitError};
pub use hash::mix;
pub use images::{
    ImageFeatures, ImageInput, ImageRows, PromptPositions, RequestImages, SequencePositions, StepImages,
};
pub use logprobs::{ScoredToken, TokenLogprob, TokenLogprobs};
pub use lookup::PromptLookup;
pub use report::{EngineLoad, EngineState, Observer, RATE_WINDOW, StepReport};
pub use request::{DraftCounts, DraftModelParams, Event, Failure, Request, Sampling};
pub use runner::{ADAPTERS_MAX, CacheLayout, DraftRunner, Logits, ModelRunner, RunError};
pub use sampler::{History, SampleError, Sampler, SamplingContext};
pub use search::{BeamSearch, EarlyStopping, TextStop};
pub use server_scheduler::{
    FinishReason, ImageDigest, ImageSpan, Load, PromptImages, Rejection, RequestLimits, SchedulerConfig,
    SpanAttention, StopCriteria, TokenId,
};
pub use sleep::{SleepError, SleepLevel};
pub use spill::{SpillConfig, SpillIdentity, SpillStats};
pub use stream::TokenStream;
