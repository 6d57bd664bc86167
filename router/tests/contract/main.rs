//! The behavior of the router as clients and replicas see it: the real process between raw connections, so that the
//! tests control every byte and every end of a connection.

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
