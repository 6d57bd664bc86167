//! The engine: one dedicated thread that owns a [`Scheduler`](server_scheduler) and a [`ModelRunner`], and
//! the handle through which everything else talks to it.
//!
//! The engine knows tokens. It knows no text, no JSON, no HTTP and no Kubernetes.

mod request;
mod runner;

pub use request::{Event, Failure, Request, Sampling, TokenLogprob, TokenLogprobs};
pub use runner::{CacheLayout, Logits, ModelRunner, RunError};
pub use server_scheduler::{FinishReason, Load, Rejected, SchedulerConfig, StopRule, TokenId};
