//! Tests the behavior of the router that clients and replicas see. The tests run the real process between raw
//! connections, so that they control every byte, and the time at which each connection is closed.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod access;
mod config;
mod draining;
mod faults;
mod fuzz;
mod harness;
mod hostile;
mod lifecycle;
mod passing;
mod proxying;
mod quotas;
mod repeats;
mod reports;
mod routing;
mod stored_objects;
mod token;
mod traces;
