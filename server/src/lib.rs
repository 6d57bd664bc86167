//! The server, which serves OpenAI's API over HTTP and reports the replica's load over gRPC.
//!
//! Of the server's crates, only this one serves HTTP. It turns requests into tokens for the engine, and tokens into
//! answers. The engine decides which tokens are computed in each step.
//!
//! ```text
//! routes ─► prepare ─► engine::Request ─► EngineHandle::submit
//!                                               │
//! HTTP ◄─ routes (encoders) ◄─ respond (deltas) ◄─ TokenStream
//! ```
//!
//! Nothing after `prepare` reads the wire request. If a client disconnects, its answer is dropped, unless it is
//! generated in the background. Dropping the answer drops the token stream, which frees the sequences. Dropping the
//! stream is the only way to cancel a single request in the engine.

mod allocator;
mod api_rules;
mod app;
mod args;
mod authentication;
mod backend;
mod blocking;
mod compat;
mod dispatches;
mod drain;
mod encoding;
mod error;
mod fetch;
mod image_reader;
mod lifecycle;
mod limits;
mod listen;
mod load;
mod media;
mod metrics;
mod model;
mod numa;
mod prepare;
mod request_record;
mod respond;
mod responses;
mod routes;
mod run;
mod sleep;
mod sse;
mod store;
mod tenant;

pub use api_rules::ApiRules;
pub use app::{App, ServedModel};
pub use args::{
    Args, Backend, ByteSize, Command, LimitArgs, LogFormat, NamedAdapter, ParserChoice, SimArgs, SleepArgs,
    SpillArgs, StoreArgs,
};
pub use authentication::{RequireToken, authenticated};
pub use backend::{built_in_model_with_images, built_in_text, built_in_text_with, script};
pub use compat::ovms_api;
pub use drain::DrainArgs;
pub use fetch::{FetchArgs, Format};
pub use lifecycle::{Lifecycle, Phase};
pub use limits::{HttpLimits, RETRY_AFTER_MAX};
pub use load::{ReplicaService, publish};
pub use media::{MediaDomain, MediaPolicy};
pub use metrics::Metrics;
pub use model::Model;
pub use routes::{SleepApi, router, router_with};
pub use run::exit_code;
pub use sleep::sleep_when_idle;
pub use store::StoreConfig;
