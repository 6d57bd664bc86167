//! The runner: it turns a batch into the inputs of the paged model, and the output of the model into logits.

use std::sync::Arc;

use server_engine::{CacheLayout, Logits, ModelRunner, RunError};
use server_scheduler::{Batch, BlockId};

use crate::Error;
use crate::background::BackgroundThread;
use crate::kv_cache::KvCache;
use crate::runtime::{CompiledModel, Core, Element, InferRequest, NodeTime, Tensor};

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

/// A model that is compiled for a device, with its KV cache and the inputs of its steps.
pub struct OpenVinoRunner {
    // The fields are dropped in this order, so that no object outlives the object from which it was created.
    inputs: StepInputs,
    output: Option<Tensor>,
    kv_cache: KvCache,
    graph: CompiledGraph,
    _cache_writer: Option<BackgroundThread>,
    layout: CacheLayout,
    adapters: u32,
    /// The attention of the last batch to each of its blocks.
    block_scores: Vec<f32>,
}

pub(crate) struct RunnerParts {
    pub(crate) graph: CompiledGraph,
    /// The thread that writes the model to the cache directory.
    pub(crate) cache_writer: Option<BackgroundThread>,
    pub(crate) kv_cache: KvCache,
    pub(crate) layout: CacheLayout,
    /// Number of adapters in the graph.
    pub(crate) adapters: u32,
    /// The largest number of KV heads of a layer.
    pub(crate) kv_heads: usize,
}

impl OpenVinoRunner {
    pub(crate) fn new(parts: RunnerParts) -> Result<Self, Error> {
        let RunnerParts { mut graph, cache_writer, kv_cache, layout, adapters, kv_heads } = parts;
        let names: Vec<String> = graph.compiled.inputs()?.into_iter().map(|port| port.name).collect();
        let inputs = StepInputs::new(&names, kv_heads)?;
        inputs.bind(&mut graph.request)?;
        kv_cache.bind(&mut graph.request)?;
        Ok(Self {
            inputs,
            output: None,
            kv_cache,
            graph,
            _cache_writer: cache_writer,
            layout,
            adapters,
            block_scores: Vec::new(),
        })
    }

    /// Returns the memory of the KV cache to the system. The content of the cache is lost.
    ///
    /// # Errors
    /// The system rejects the call.
    pub(crate) fn discard_cache(&mut self) -> Result<(), Error> {
        self.kv_cache.discard()
    }

    /// Like [`ModelRunner::run`], but computes the logits of the tokens at the indices `logits_indices` of
    /// [`Batch::tokens`], to score a given text.
    ///
    /// # Errors
    /// The step failed.
    pub fn score(&mut self, batch: &Batch, logits_indices: &[u32]) -> Result<Logits<'_>, Error> {
        let indices = logits_indices.iter().map(|token| i64::from(*token));
        self.step(batch, logits_indices.len(), indices)?;
        self.logits(logits_indices.len())
    }

    /// The mean execution time of each node of the graph, for profiles. Empty unless the model was compiled with
    /// `PERF_COUNT`.
    ///
    /// # Errors
    /// The runtime does not report the times.
    pub fn node_times(&self) -> Result<Vec<NodeTime>, Error> {
        self.graph.request.node_times()
    }

    /// Runs a step that computes the logits of the `count` tokens at `logits_indices`.
    fn step(
        &mut self,
        batch: &Batch,
        count: usize,
        logits_indices: impl Iterator<Item = i64>,
    ) -> Result<(), Error> {
        // The output is the memory of the request, which must not be referenced while the request runs.
        self.output = None;
        for copy in &batch.copies {
            self.kv_cache.copy(*copy)?;
        }
        self.inputs.fill(batch)?;
        // A model computes at least one row of logits. If none is needed, request that of the last token.
        match count {
            0 => self.inputs.logits_indices.write(1, std::iter::once(batch.tokens.len() as i64 - 1))?,
            _ => self.inputs.logits_indices.write(count, logits_indices)?,
        }
        self.graph.request.infer()?;
        self.output = Some(self.graph.request.output()?);
        self.inputs.sum_block_scores(&mut self.block_scores)
    }

    /// The `rows` rows of logits of the last step.
    fn logits(&self, rows: usize) -> Result<Logits<'_>, Error> {
        let vocabulary = self.layout.vocabulary;
        if rows == 0 {
            return Ok(Logits::new(&[], vocabulary));
        }
        let output = self.output.as_ref().expect("invariant: a step leaves its output");
        let values = output.values::<f32>()?;
        if values.len() == rows * vocabulary as usize {
            return Ok(Logits::new(values, vocabulary));
        }
        let message = format!("the model returned {} values for {rows} rows of {vocabulary}", values.len());
        Err(Error::runtime("read the logits", &message))
    }
}

impl ModelRunner for OpenVinoRunner {
    fn layout(&self) -> CacheLayout {
        self.layout
    }

    fn adapters(&self) -> u32 {
        self.adapters
    }

    fn read_block(&self, block: BlockId, bytes: &mut [u8]) -> Result<(), RunError> {
        self.kv_cache.read(block, bytes).map_err(|error| RunError { message: error.chain(), fatal: false })
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), RunError> {
        self.kv_cache.write(block, bytes).map_err(|error| RunError { message: error.chain(), fatal: false })
    }

    fn block_scores(&self) -> &[f32] {
        &self.block_scores
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        let failed = |error: Error| RunError { message: error.chain(), fatal: false };
        let rows = batch.logits_indices().count();
        self.step(batch, rows, batch.logits_indices().map(i64::from)).map_err(failed)?;
        self.logits(rows).map_err(failed)
    }
}

/// The inputs of a step. Their memory is reused in every step.
struct StepInputs {
    input_ids: Input<i64>,
    position_ids: Input<i64>,
    past_lens: Input<i32>,
    subsequence_begins: Input<i32>,
    block_indices: Input<i32>,
    block_indices_begins: Input<i32>,
    max_context_len: Tensor,
    logits_indices: Input<i64>,
    adapters: Input<i32>,
    block_scores: Input<u8>,
    /// The largest number of KV heads of a layer.
    kv_heads: usize,
}

impl StepInputs {
    fn new(names: &[String], kv_heads: usize) -> Result<Self, Error> {
        const KNOWN: [&str; 10] = [
            "input_ids",
            "position_ids",
            "past_lens",
            "subsequence_begins",
            "block_indices",
            "block_indices_begins",
            "max_context_len",
            "logits_indices",
            "adapters",
            "block_scores",
        ];
        if let Some(name) =
            names.iter().find(|name| !KNOWN.contains(&name.as_str()) && !name.contains("_cache."))
        {
            return Err(Error::Unsupported(format!("its input {name:?} is unknown")));
        }
        let has = |input: &str| names.iter().any(|name| name == input);
        Ok(Self {
            input_ids: Input::new("input_ids", Presence::InModel)?,
            position_ids: Input::new("position_ids", Presence::of(has("position_ids")))?,
            past_lens: Input::new("past_lens", Presence::InModel)?,
            subsequence_begins: Input::new("subsequence_begins", Presence::InModel)?,
            block_indices: Input::new("block_indices", Presence::InModel)?,
            block_indices_begins: Input::new("block_indices_begins", Presence::InModel)?,
            max_context_len: Tensor::new(i32::TYPE, &[])?,
            logits_indices: Input::new("logits_indices", Presence::InModel)?,
            adapters: Input::new("adapters", Presence::of(has("adapters")))?,
            block_scores: Input::new("block_scores", Presence::of(has("block_scores")))?,
            kv_heads,
        })
    }

    /// Binds the inputs to a request of this model.
    fn bind(&self, request: &mut InferRequest) -> Result<(), Error> {
        self.input_ids.bind(request)?;
        self.position_ids.bind(request)?;
        self.past_lens.bind(request)?;
        self.subsequence_begins.bind(request)?;
        self.block_indices.bind(request)?;
        self.block_indices_begins.bind(request)?;
        request.set("max_context_len", &self.max_context_len)?;
        self.logits_indices.bind(request)?;
        self.adapters.bind(request)?;
        self.block_scores.bind(request)
    }

    fn fill(&mut self, batch: &Batch) -> Result<(), Error> {
        let (tokens, sequences) = (batch.tokens.len(), &batch.sequences);
        self.input_ids.write(tokens, batch.tokens.iter().map(|token| i64::from(*token)))?;
        let positions = sequences.iter().flat_map(|sequence| {
            let past = i64::from(sequence.computed_tokens);
            (0..i64::from(sequence.tokens.end - sequence.tokens.start)).map(move |offset| past + offset)
        });
        self.position_ids.write(tokens, positions)?;
        let adapters = sequences.iter().flat_map(|sequence| {
            let count = sequence.tokens.end - sequence.tokens.start;
            std::iter::repeat_n(sequence.adapter.cast_signed(), count as usize)
        });
        self.adapters.write(tokens, adapters)?;
        let past = sequences.iter().map(|sequence| sequence.resident_tokens().cast_signed());
        self.past_lens.write(sequences.len(), past)?;
        let begins = sequences.iter().map(|sequence| sequence.tokens.end.cast_signed());
        self.subsequence_begins.write(sequences.len() + 1, std::iter::once(0).chain(begins))?;
        self.block_indices
            .write(batch.blocks.len(), batch.blocks.iter().map(|block| block.0.cast_signed()))?;
        let begins = sequences.iter().map(|sequence| sequence.blocks.end.cast_signed());
        self.block_indices_begins.write(sequences.len() + 1, std::iter::once(0).chain(begins))?;
        let context = sequences
            .iter()
            .map(|sequence| sequence.resident_tokens() + sequence.tokens.end - sequence.tokens.start)
            .max();
        self.max_context_len.values_mut::<i32>()?[0] = context.unwrap_or(0).cast_signed();
        let score_bytes = self.kv_heads * batch.blocks.len() * size_of::<f32>();
        self.block_scores.write(score_bytes, std::iter::repeat_n(0, score_bytes))
    }

    /// Sums the attention to each block of the step over all heads. The result is empty if the model has no block scores.
    fn sum_block_scores(&mut self, sums: &mut Vec<f32>) -> Result<(), Error> {
        sums.clear();
        if self.block_scores.presence == Presence::Absent {
            return Ok(());
        }
        let blocks = self.block_scores.length as usize / size_of::<f32>() / self.kv_heads;
        sums.resize(blocks, 0.0);
        let scores = self.block_scores.tensor.values::<u8>()?.as_chunks().0;
        for (index, score) in scores.iter().enumerate() {
            sums[index % blocks] += f32::from_ne_bytes(*score);
        }
        Ok(())
    }
}

/// Whether a model has an input.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    InModel,
    Absent,
}

impl Presence {
    fn of(is_in_model: bool) -> Self {
        if is_in_model { Self::InModel } else { Self::Absent }
    }
}

/// A one-dimensional input whose memory is reused. Writes to an absent input have no effect.
struct Input<T> {
    name: &'static str,
    tensor: Tensor,
    length: i64,
    presence: Presence,
    _element: std::marker::PhantomData<T>,
}

/// Number of elements for which an input initially has room. The input grows when a batch needs more.
const INPUT_ELEMENTS: i64 = 4096;

impl<T: Element> Input<T> {
    fn new(name: &'static str, presence: Presence) -> Result<Self, Error> {
        let tensor = Tensor::new(T::TYPE, &[INPUT_ELEMENTS])?;
        Ok(Self { name, tensor, length: INPUT_ELEMENTS, presence, _element: std::marker::PhantomData })
    }

    fn bind(&self, request: &mut InferRequest) -> Result<(), Error> {
        match self.presence {
            Presence::InModel => request.set(self.name, &self.tensor),
            Presence::Absent => Ok(()),
        }
    }

    fn write(&mut self, length: usize, values: impl Iterator<Item = T>) -> Result<(), Error> {
        if self.presence == Presence::Absent {
            return Ok(());
        }
        if self.length != length as i64 {
            self.length = length as i64;
            self.tensor.reshape(&[self.length])?;
        }
        for (to, value) in self.tensor.values_mut::<T>()?.iter_mut().zip(values) {
            *to = value;
        }
        Ok(())
    }
}
