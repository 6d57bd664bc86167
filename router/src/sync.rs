//! What threads share state by. The ledger takes it from here, so that its model check can put loom's types in
//! this place.

pub(crate) use std::sync::{Mutex, MutexGuard};
