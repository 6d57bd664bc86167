//! What threads share state by. The ledger takes it from here, so that its model check can put other types
//! (loom's) in this place.

pub(crate) use std::sync::{Arc, Mutex, MutexGuard};
