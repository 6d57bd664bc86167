//! What the router does to requests and answers, as clients and replicas see it: the real process between raw
//! connections, so that every byte and every end of a connection is the test's to choose.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod access;
mod config;
mod draining;
mod faults;
mod fuzz;
mod harness;
mod hostile;
mod kept;
mod lifecycle;
mod passing;
mod proxying;
mod quotas;
mod repeats;
mod reports;
mod routing;
mod token;
mod traces;
