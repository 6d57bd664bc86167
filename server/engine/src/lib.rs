//! The engine: one dedicated thread that owns a [`Scheduler`](server_scheduler::Scheduler) and a
//! [`ModelRunner`], and the handle through which everything else talks to it.
//!
//! ```text
//! EngineHandle::submit ─► bounded channel ─► ┌ commands ─► schedule ─► run ─► sample ─► commit ┐
//! TokenStream::next    ◄─ room for all of it ◄─ events ◄───────────────────────────────────────┘
//! ```
//!
//! The engine knows tokens. It knows no text, no JSON, no HTTP and no Kubernetes.

mod clock;
mod engine;
mod guide;
mod handle;
mod lookup;
mod report;
mod request;
mod runner;
mod sampler;
mod search;
pub mod sim;
mod sleep;
mod spill;
mod stream;
mod waker;

pub use clock::Clock;
pub use engine::{Engine, EngineConfig, Extras, MAX_QUEUE_LIMIT, StartError};
pub use guide::{
    Guide, GuideError, GuideState, Hold, Progress, ThreadGuard, ThreadLock, TokenSet, guide_threads,
};
pub use handle::{EngineDied, EngineHandle, Limits, SubmitError};
pub use lookup::PromptLookup;
pub use report::{EngineLoad, EngineState, Observer, RATE_WINDOW, StepReport};
pub use request::{
    DraftCounts, DraftRule, Event, Failure, Request, Sampling, ScoredToken, TokenLogprob, TokenLogprobs,
};
pub use runner::{ADAPTERS_MAX, CacheLayout, DraftRunner, Logits, ModelRunner, RunError};
pub use sampler::{Choice, History, Sampler, Unsampled};
pub use search::{Beams, SearchEnd, TextStop};
pub use server_scheduler::{
    FinishReason, Load, Rejection, SchedulerConfig, SequenceId, StopCriteria, TokenId,
};
pub use sleep::{SleepError, SleepLevel};
pub use spill::{SpillConfig, SpillIdentity, SpillStats};
pub use stream::TokenStream;
