//! The OpenVINO runner: models from GGUF files and OpenVINO IR directories, with a paged KV cache.
//!
//! This crate decides how a model file becomes a compiled graph, and how a batch becomes its inputs. It knows
//! no text and no request. It is the only crate with `unsafe`: calls of OpenVINO's C API (`runtime.rs`), of the C++
//! shim that does what that API lacks (`shim.rs`, `shim/`), and of the system where the standard library has none (`numa.rs`).
//!
//! ```text
//! GGUF ─► front end ─► rotary rewrite ─► weights anew ─┐
//!                                                      ├► adapters ─► merge projections ─► paged attention ─► compile
//! IR ───► read ────────────────────────────────────────┘                                    wanted rows
//! ```
#![allow(unsafe_code, reason = "the boundary to OpenVINO; every block says why it is sound")]

mod adapters;
mod asked;
mod attention;
mod cache;
mod error;
mod gguf;
mod kept;
#[cfg(test)]
mod kernel_tests;
mod load;
mod memory;
mod numa;
mod processor;
mod projections;
mod runner;
mod runtime;
mod shim;
mod sleep;
mod source;
#[cfg(test)]
mod symbol_tests;
mod unpacked;
mod weights;

pub use adapters::{ADAPTER_RANK_MAX, ADAPTER_RANKS_MAX, AdapterSource};
pub use attention::Attention;
pub use error::Error;
pub use load::{CacheIdentity, Config, Loaded, Stage, Weights, load, load_pair};
pub use memory::{available_bytes, trim, use_one_arena};
pub use numa::{NodeError, OnNode, nodes_in_use, run_on_node};
pub use runner::OpenVinoRunner;
pub use runtime::NodeTime;
pub use sleep::Sleeper;
pub use unpacked::{LARGE_STEP_TOKENS, Unpack};
pub use weights::Form;
