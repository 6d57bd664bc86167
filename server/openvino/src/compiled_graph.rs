//! A compiled model with a request.

use std::sync::Arc;

use crate::Error;
use crate::runtime::{CompiledModel, Core, InferRequest};

/// A compiled model and the request that runs it.
pub(crate) struct CompiledGraph {
    // The fields are dropped in this order.
    pub(crate) request: InferRequest,
    pub(crate) compiled: Arc<CompiledModel>,
    _core: Arc<Core>,
}

impl CompiledGraph {
    /// Creates a request of a model that `core` has compiled or read.
    pub(crate) fn new(core: Arc<Core>, compiled: Arc<CompiledModel>) -> Result<Self, Error> {
        Ok(Self { request: compiled.request()?, compiled, _core: core })
    }
}
