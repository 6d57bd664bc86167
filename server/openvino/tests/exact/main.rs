//! What is served is the model that the file contains: random weights of every common architecture and tensor
//! type against a plain forward pass.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapter;
mod adapters;
mod architectures;
mod drafts;
mod quantised;
mod reference;
