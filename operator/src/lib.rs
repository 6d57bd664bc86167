//! The operator: looks after LLMDeployments.
//!
//! ```text
//! watches ─► controller::reconcile
//!              observe ─► validate ─► desired ─► apply ─► status
//!               I/O        pure        pure       I/O      pure
//! ```
//!
//! Only `observe` and `apply` touch the cluster. After `validate` nobody reads the `spec`, and what is told in the status
//! comes from what was applied. A mistake of whoever wrote the resource becomes a condition; an error is what passes,
//! and is tried again. `local` does the same for one resource on this machine, with processes for pods.

pub mod admin;
pub mod apply;
mod args;
pub mod controller;
pub mod desired;
pub mod events;
pub mod fleet;
pub mod gate;
pub mod leader;
mod local;
pub mod manifest;
pub mod metrics;
pub mod observe;
pub mod pod;
pub mod run;
pub mod status;
mod telemetry;
pub mod trace;
pub mod upgrades;
pub mod validate;
pub mod watch;

pub use args::{Args, Command, LocalArgs, LogFormat, RunArgs, TetherArgs};
