//! The ledger: whatever happens in whatever order, it returns to zero and swallows no dispatch.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod model;
mod random;
mod rules;

/// What the ledger under the model check shares state by.
mod sync {
    pub(crate) use loom::sync::{Mutex, MutexGuard};
}
