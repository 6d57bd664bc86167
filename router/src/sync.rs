//! The lock that the ledger uses. The loom tests of the ledger replace this module with loom's types.

pub(crate) use std::sync::{Mutex, MutexGuard};
