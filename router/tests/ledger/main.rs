//! Tests of the ledger: it returns to zero and loses no dispatch, regardless of the order of events.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod model;
mod random;
mod rules;

/// The lock of the ledger in the model check.
mod sync {
    pub(crate) use loom::sync::{Mutex, MutexGuard};
}
