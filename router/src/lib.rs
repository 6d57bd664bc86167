//! The router, which sends each request to the replica that is expected to answer it first.
//!
//! ```text
//! load reports ─► ledger ─► LoadSnapshot ─┐
//! prompts ──────► prefix ─────────────────┼─► Candidate ─► policy::pick ─► booking (RAII) ─► the request is sent
//! outcomes ─────► health ─────────────────┘
//! ```
//!
//! `policy`, `ledger`, `prefix`, `queue`, `health`, `limits` and `estimate` do no I/O, and receive the time and random
//! numbers as parameters.
//!
//! Of the other modules, `discovery` finds replicas, `load` receives their reports, `dispatch` books replicas for
//! requests, `proxy` forwards requests and answers, and `admin` serves the pages for administrators.

pub mod access;
mod admin;
pub mod app;
pub mod args;
pub mod body_budget;
pub mod config;
mod deferred;
pub mod discovery;
pub mod dispatch;
mod endpoint;
mod error;
pub mod estimate;
pub mod health;
pub mod ledger;
pub mod limits;
mod listen;
pub mod load;
pub mod metrics;
pub mod policy;
pub mod prefix;
pub mod proxy;
pub mod queue;
pub mod replica;
pub mod replicas;
mod run;
pub mod served_model;
mod sync;
pub mod tenant;
pub mod trace;
mod waiting;
mod watch_replicas;

pub use app::App;
pub use args::Args;
pub use config::CommandLine;
pub use listen::ConnectionServer;
pub use metrics::Metrics;
