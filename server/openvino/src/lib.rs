//! The OpenVINO runner, which loads models from GGUF files and OpenVINO IR directories, and runs them with a paged KV
//! cache.
//!
//! This crate decides how a model file becomes a compiled graph, and how a batch becomes the inputs of that graph. It
//! does not process text or requests. It is the only crate with `unsafe` code: calls to OpenVINO's C API (`runtime.rs`,
//! `runtime/`), to the C++ shim in `shim/` that covers what the C API lacks (mainly `shim.rs`), and to functions of the
//! C library that the standard library does not wrap (`numa.rs`, `memory.rs`, `runtime/tensor.rs`).
//!
//! ```text
//! GGUF ─► front end ─► rewrite rotary embeddings ─► rewrite weights ─┐
//!                                                                    ├► adapters ─► merge projections ─► paged attention
//! IR ───► read ──────────────────────────────────────────────────────┘                                         │
//!                                                       compile ◄─ native kernels ◄─ kernel plan (`kernels.rs`) ◄┘
//! ```
//!
//! The language model of a vision-language model takes the same path. The other models of a vision-language model are
//! not paged: `vision.rs` compiles them, after replacing some operations of the image encoder with native kernels.
#![allow(unsafe_code, reason = "the boundary to OpenVINO; every block says why it is sound")]

mod adapters;
mod background;
mod compiled_graph;
mod config;
mod cpu;
mod device;
mod error;
mod gguf;
mod kernels;
mod kv_cache;
mod library;
mod load;
mod memory;
mod model_cache;
mod model_source;
#[cfg(test)]
#[path = "../../fuzz/mutations.rs"]
mod mutations;
#[cfg(test)]
mod native_tests;
mod numa;
mod runner;
mod runtime;
mod shim;
mod sleep;
mod thread_groups;
mod tiles;
mod vision;
mod weights;

pub use adapters::{ADAPTER_RANK_MAX, ADAPTER_RANKS_MAX, AdapterSource};
pub use config::{ActivationPrecision, Config};
pub use error::Error;
pub use load::{CacheIdentity, LoadReport, LoadStage, load, load_pair};
pub use memory::{available_bytes, trim, use_one_arena};
pub use numa::{NodeError, NumaBinding, nodes_in_use, run_on_node};
pub use runner::OpenVinoRunner;
pub use runtime::NodeTime;
pub use sleep::SleepableRunner;
pub use thread_groups::{ThreadGroups, divide_threads};
pub use vision::{EncoderImage, EncoderReport, OpenVinoImageEncoder, load_image_encoder};
