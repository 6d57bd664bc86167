//! The operator, which manages LLMDeployments.
//!
//! ```text
//! watches ─► controller::reconcile
//!              observe ─► validate ─► desired ─► apply ─► status
//!               memory      pure        pure      I/O      pure
//! ```
//!
//! If a resource is valid, no step after `validate` reads its `spec`, and the status is computed from the result of the
//! apply. A mistake in a resource is reported as a condition; only transient failures are errors, and the operator
//! retries them. `local` runs one resource on this machine, with processes instead of pods.

pub mod admin;
pub mod apply;
mod args;
mod client;
pub mod controller;
pub mod desired;
pub mod events;
pub mod gate;
pub mod leader;
mod local;
pub mod manifest;
pub mod metrics;
pub mod names;
pub mod observe;
pub mod pod;
pub mod pod_reports;
pub mod ports;
pub mod quantity;
pub mod run;
pub mod source;
pub mod status;
pub mod trace;
pub mod upgrades;
pub mod valid_deployment;
pub mod validate;
pub mod watch;

pub use args::{Args, Command, DieWithParentArgs, LocalArgs, LogFormat, RunArgs};
