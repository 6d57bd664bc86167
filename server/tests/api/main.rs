//! Tests the HTTP and gRPC contract: the axum router runs in the test process, with a simulated model. Only `health`
//! starts a server process.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapters;
mod authentication;
mod beams;
mod bodies;
mod cancellation;
mod chat;
mod completions;
mod effects;
mod functions;
mod harness;
mod health;
mod images;
mod limits;
mod load;
mod lookup;
mod metrics;
mod mutated;
#[path = "../../fuzz/mutations.rs"]
#[expect(dead_code, reason = "the check is asynchronous")]
mod mutations;
mod openapi;
mod ovms;
mod parameters;
mod random;
mod reasoning;
mod refusals;
mod responses;
mod responses_refused;
mod responses_stored;
mod responses_tools;
mod routes;
mod rows;
mod sleep;
mod stored_limits;
mod structured;
mod template;
mod tenants;
mod tokenize;
mod tools;
