//! The operator against a real API server: its rules, and what it makes of resources. There is no node: a kubelet of
//! these tests says of pods what a real one would.
#![expect(
    clippy::unwrap_used,
    clippy::needless_pass_by_value,
    reason = "tests: they fail by panicking, and read better"
)]

mod control;
mod kubelet;
mod leaders;
mod many;
mod rules;
mod support;
