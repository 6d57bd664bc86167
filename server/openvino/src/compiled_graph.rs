//! A compiled model together with the request that runs it.

use std::sync::Arc;

use crate::Error;
use crate::runtime::{CompiledModel, Core, Element, InferRequest, Tensor};

/// A compiled model and the request that runs it.
pub(crate) struct CompiledGraph {
    // The fields are dropped in this order, so that no object outlives the object from which it was created.
    pub(crate) request: InferRequest,
    pub(crate) compiled: Arc<CompiledModel>,
    _core: Arc<Core>,
}

impl CompiledGraph {
    /// Creates a request for a model that `core` has compiled or read.
    pub(crate) fn new(core: Arc<Core>, compiled: Arc<CompiledModel>) -> Result<Self, Error> {
        Ok(Self { request: compiled.request()?, compiled, _core: core })
    }

    /// Binds a new tensor with these values to an input.
    ///
    /// # Errors
    /// The tensor cannot be allocated, the number of values does not match the shape, or the model has no input with
    /// this name, shape and type.
    pub(crate) fn set_values<T: Element>(
        &mut self,
        input: &str,
        shape: &[usize],
        values: &[T],
    ) -> Result<(), Error> {
        let shape: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
        let mut tensor = Tensor::new(T::TYPE, &shape)?;
        let to = tensor.values_mut::<T>()?;
        if to.len() != values.len() {
            let message = format!("{input} has {} values instead of {}", values.len(), to.len());
            return Err(Error::runtime("set an input", &message));
        }
        to.copy_from_slice(values);
        self.request.set(input, &tensor)
    }

    /// Returns the number of values in a row of the first output (the size of its last dimension), or `None` if this
    /// size is dynamic or 0.
    pub(crate) fn row_values(&self) -> Result<Option<usize>, Error> {
        let width = self.compiled.first_output()?.shape.last().copied().flatten();
        Ok(width.and_then(|width| usize::try_from(width).ok()).filter(|width| *width > 0))
    }
}
