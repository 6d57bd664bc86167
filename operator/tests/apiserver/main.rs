//! The operator against a real API server: its rules, and what it makes of resources. There is no node: a kubelet of
//! these tests says of pods what a real one would.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::needless_pass_by_value, reason = "values are written where they are passed")]

mod control;
mod kubelet;
mod leaders;
mod replica_token;
mod rules;
mod spans;
mod support;
mod upgrades;
