//! The runners of a loaded model.

use server_engine::{ModelRunner, SpillIdentity};

/// The runners of a model and of its draft model.
pub(super) struct Runners {
    pub(super) model: Box<dyn ModelRunner>,
    pub(super) draft: Option<Box<dyn ModelRunner>>,
    /// The backend and the precisions, for the fingerprint of the model.
    pub(super) description: String,
    /// The identity of the blocks in the KV cache.
    pub(super) identity: SpillIdentity,
}
