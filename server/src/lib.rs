//! The server: OpenAI's API over HTTP in front of the engine, and the replica's load over gRPC.
//!
//! This is the only crate that knows HTTP. It turns requests into tokens for the engine, and tokens into
//! answers; what is computed when is not for it to say.
//!
//! ```text
//! routes ─► prepare ─► engine::Request ─► EngineHandle::submit
//!                                               │
//! HTTP ◄─ routes (shape) ◄─ respond (deltas) ◄─ TokenStream
//! ```
//!
//! After `prepare` nobody looks at the request as it was on the wire. A client that goes away drops its
//! answer's body, which drops the token stream, which frees the sequence: there is no other cancellation.

mod allocator;
mod app;
mod args;
mod authentication;
mod backend;
mod compat;
mod dispatches;
mod drain;
mod error;
mod fetch;
mod lifecycle;
mod limits;
mod listen;
mod load;
mod metrics;
mod mix;
mod model;
mod numa;
mod prepare;
mod respond;
mod responses;
mod routes;
mod run;
mod sleep;
mod sse;
mod store;
mod telemetry;
mod tenant;

pub use app::{App, Serving};
pub use args::{
    Args, Backend, ByteSize, Command, LimitArgs, LogFormat, NamedAdapter, ParserChoice, SimArgs, SleepArgs,
    SpillArgs, StoreArgs, WeightsForm,
};
pub use authentication::{RequireToken, authenticated};
pub use backend::{built_in_text, built_in_text_with, script};
pub use compat::{ApiRules, ovms_api};
pub use drain::DrainArgs;
pub use fetch::{FetchArgs, Format};
pub use lifecycle::{Lifecycle, Phase};
pub use limits::{Limits, RETRY_AFTER_MAX};
pub use load::{ReplicaService, publish};
pub use metrics::Metrics;
pub use model::Model;
pub use routes::{Sleep, router, router_with};
pub use run::exit_code;
pub use sleep::sleep_when_idle;
pub use store::StoreConfig;
