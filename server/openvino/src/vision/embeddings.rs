//! The embeddings of tokens, which a separate model computes.

use std::sync::Arc;

use super::files::VisionFiles;
use crate::compiled_graph::CompiledGraph;
use crate::runtime::{Core, Tensor};
use crate::{Error, shim};

/// The model that returns the embeddings of tokens.
pub(crate) struct TextEmbeddings {
    // The fields are dropped in this order, so that no object outlives the object from which it was created.
    output: Option<Tensor>,
    tokens: Tensor,
    num_tokens: usize,
    width: usize,
    graph: CompiledGraph,
}

impl TextEmbeddings {
    /// Compiles the model. It runs on the CPU, because it only looks up rows of a matrix.
    pub(crate) fn load(core: &Arc<Core>, files: &VisionFiles) -> Result<Self, Error> {
        let model = shim::read_ir(core, &files.text_embeddings())?;
        let properties = [("INFERENCE_PRECISION_HINT", "f32"), ("INFERENCE_NUM_THREADS", "1")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()));
        let compiled = Arc::new(core.compile(&model, "CPU", &properties)?);
        let inputs = compiled.inputs()?;
        let [input] = &inputs[..] else {
            let message = format!("its text embedding model has {} inputs instead of one", inputs.len());
            return Err(Error::Unsupported(message));
        };
        let mut graph = CompiledGraph::new(Arc::clone(core), compiled)?;
        let width = graph
            .row_values()?
            .ok_or_else(|| Error::Unsupported("the size of its embeddings is not static".to_owned()))?;
        let tokens = Tensor::new(openvino_sys::ov_element_type_e::I64, &[1, 1])?;
        graph.request.set(&input.name, &tokens)?;
        Ok(Self { output: None, tokens, num_tokens: 1, width, graph })
    }

    /// Number of values in an embedding.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Writes the embeddings of tokens to `rows`, one after the other.
    ///
    /// # Errors
    /// The model fails, or returns embeddings of another size.
    pub(crate) fn write(
        &mut self,
        tokens: impl ExactSizeIterator<Item = u32>,
        rows: &mut [f32],
    ) -> Result<(), Error> {
        self.output = None;
        if self.num_tokens != tokens.len() {
            self.tokens.reshape(&[1, tokens.len() as i64])?;
            self.num_tokens = tokens.len();
        }
        for (to, token) in self.tokens.values_mut::<i64>()?.iter_mut().zip(tokens) {
            *to = i64::from(token);
        }
        self.graph.request.infer()?;
        let output = self.output.insert(self.graph.request.output()?);
        let values = output.values::<f32>()?;
        if values.len() != rows.len() {
            let message = format!(
                "the model returned {} values instead of {} for {} embeddings",
                values.len(),
                rows.len(),
                self.num_tokens
            );
            return Err(Error::runtime("look up embeddings", &message));
        }
        rows.copy_from_slice(values);
        Ok(())
    }
}
