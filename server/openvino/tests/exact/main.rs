//! Compares loaded models with a simple forward pass, for random weights of every common architecture and tensor type.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapter;
mod adapters;
mod architectures;
mod drafts;
mod memory;
mod parts;
mod quantized;
#[path = "../../../scheduler/tests/random/random.rs"]
#[expect(dead_code, reason = "weights need no numbers below a limit")]
mod random;
mod reference;
