//! The lock that the ledger uses. The model check of the ledger replaces this module with the types of loom.

pub(crate) use std::sync::{Mutex, MutexGuard};
