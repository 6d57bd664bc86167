//! What the router does to requests and answers, as clients and replicas see it: the real process between raw
//! connections, so that every byte and every end of a connection is the test's to choose.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod access;
mod config;
mod faults;
mod fuzz;
mod harness;
mod kept;
mod lifecycle;
mod passing;
mod reports;
mod routing;
mod traces;
