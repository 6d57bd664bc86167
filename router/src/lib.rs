//! The router: each request goes to the replica judged to answer soonest.
//!
//! ```text
//! report ─► ledger ─► view ─┐
//! prompt ─► prefix ─────────┼─► Candidate ─► policy::pick ─► Booking (RAII) ─► the request is sent
//! outcomes ─► health ───────┘
//! ```
//!
//! `policy`, `ledger`, `prefix`, `queue`, `health`, `limits` and `estimate` are pure: they read no clock and
//! draw no random number of their own, both are parameters.

//! The rest is the process: `discovery` and `load` find and hear replicas, `dispatch` books places, `proxy`
//! passes requests and answers on, `admin` shows all of it.

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
pub mod fleet;
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
mod sync;
mod telemetry;
pub mod tenant;
pub mod trace;
mod waiting;
mod watch_replicas;

pub use app::App;
pub use args::Args;
pub use config::CommandLine;
pub use listen::ConnectionServer;
pub use metrics::Metrics;
