//! Compares served models with a plain forward pass: random weights of every common architecture and tensor type.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapter;
mod adapters;
mod architectures;
mod drafts;
mod quantized;
mod reference;
