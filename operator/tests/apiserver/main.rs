//! Tests the operator with a real API server, for example the validation rules and the objects that the operator
//! creates for resources. The cluster has no node: a simulated kubelet reports the status of pods.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::needless_pass_by_value, reason = "values are written where they are passed")]

mod control;
mod kubelet;
mod leaders;
mod outage;
mod readiness;
mod replica_token;
mod rules;
mod spans;
mod support;
mod undecodable;
mod upgrades;
