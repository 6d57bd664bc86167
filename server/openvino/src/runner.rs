//! The runner: a batch becomes the inputs of the paged model, and its output the logits.

use server_engine::{CacheLayout, Logits, ModelRunner, RunError};
use server_scheduler::{Batch, BlockId};

use crate::Error;
use crate::cache::Cache;
use crate::kept::Keeping;
use crate::runtime::{Element, InferRequest, NodeTime, Tensor};
use crate::unpacked::{Graph, Unpacked};

/// A model compiled for a device, its KV cache and the inputs of its steps.
pub struct OpenVinoRunner {
    // Dropped in this order: what was made from something before it.
    inputs: Inputs,
    output: Option<Tensor>,
    cache: Cache,
    graph: Graph,
    unpacked: Unpacked,
    _keeping: Option<Keeping>,
    layout: CacheLayout,
    adapters: u32,
    /// Of the blocks of the last batch.
    block_scores: Vec<f32>,
}

/// What a runner is made of.
pub(crate) struct Parts {
    pub(crate) graph: Graph,
    pub(crate) unpacked: Unpacked,
    pub(crate) keeping: Option<Keeping>,
    pub(crate) cache: Cache,
    pub(crate) layout: CacheLayout,
    /// How many adapters are in the graph.
    pub(crate) adapters: u32,
    /// Most heads of a layer's cache.
    pub(crate) kv_heads: usize,
}

impl OpenVinoRunner {
    pub(crate) fn new(parts: Parts) -> Result<Self, Error> {
        let Parts { mut graph, unpacked, keeping, cache, layout, adapters, kv_heads } = parts;
        let names: Vec<String> = graph.compiled.inputs()?.into_iter().map(|port| port.name).collect();
        let inputs = Inputs::new(&names, kv_heads)?;
        inputs.bind(&mut graph.request)?;
        cache.bind(&mut graph.request)?;
        let block_scores = Vec::new();
        Ok(Self {
            inputs,
            output: None,
            cache,
            graph,
            unpacked,
            _keeping: keeping,
            layout,
            adapters,
            block_scores,
        })
    }

    /// Waits for what [`load`](crate::load()) left to the background, which steps before it do without; for
    /// benchmarks and tests. Answers whether there is now a graph of its own for large steps.
    pub fn wait(&mut self) -> bool {
        let Self { inputs, cache, unpacked, .. } = self;
        unpacked.wait(|request| inputs.bind(request).and_then(|()| cache.bind(request)))
    }

    /// Gives the memory of the KV cache back to the system. The next step finds nothing in it.
    ///
    /// # Errors
    /// The system does not take it.
    pub(crate) fn discard_cache(&mut self) -> Result<(), Error> {
        self.cache.discard()
    }

    /// Like [`ModelRunner::run`], but gives the logits of the tokens at `wanted` in [`Batch::tokens`] instead
    /// of those of the rows that sample: to score what is given.
    ///
    /// # Errors
    /// The step failed.
    pub fn score(&mut self, batch: &Batch, wanted: &[u32]) -> Result<Logits<'_>, Error> {
        self.step(batch, wanted.len(), wanted.iter().map(|token| i64::from(*token)))?;
        self.logits(wanted.len())
    }

    /// What each node of the graph for small steps took, as the mean of its runs; for profiles. Empty unless it was
    /// compiled with `PERF_COUNT`.
    ///
    /// # Errors
    /// The runtime does not tell.
    pub fn node_times(&self) -> Result<Vec<NodeTime>, Error> {
        self.graph.request.node_times()
    }

    fn step(&mut self, batch: &Batch, count: usize, wanted: impl Iterator<Item = i64>) -> Result<(), Error> {
        // The output is the request's own memory: not to be held while it runs.
        self.output = None;
        for copy in &batch.copies {
            self.cache.copy(*copy)?;
        }
        self.inputs.fill(batch)?;
        // A model computes at least one row of logits: without a wanted one, that of the last token.
        match count {
            0 => self.inputs.wanted_rows.write(1, std::iter::once(batch.tokens.len() as i64 - 1))?,
            _ => self.inputs.wanted_rows.write(count, wanted)?,
        }
        let Self { inputs, cache, graph, unpacked, .. } = self;
        let bind = |request: &mut InferRequest| inputs.bind(request).and_then(|()| cache.bind(request));
        let request = unpacked.for_step(batch.tokens.len(), bind).unwrap_or(&mut graph.request);
        request.infer()?;
        self.output = Some(request.output()?);
        self.inputs.weights_of_blocks(&mut self.block_scores)?;
        Ok(())
    }

    /// The last step's logits, of which `rows` were wanted.
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
        Err(Error::runtime("read the logits", &format!("there are {} of them for {rows} rows", values.len())))
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
        self.cache.read(block, bytes).map_err(|error| RunError { message: error.chain(), fatal: false })
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), RunError> {
        self.cache.write(block, bytes).map_err(|error| RunError { message: error.chain(), fatal: false })
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

/// The inputs of a step, written in place from step to step.
struct Inputs {
    input_ids: Input<i64>,
    position_ids: Input<i64>,
    past_lens: Input<i32>,
    subsequence_begins: Input<i32>,
    block_indices: Input<i32>,
    block_indices_begins: Input<i32>,
    max_context_len: Tensor,
    wanted_rows: Input<i64>,
    adapters: Input<i32>,
    block_scores: Input<u8>,
    /// Most heads of a layer's cache.
    kv_heads: usize,
}

impl Inputs {
    fn new(names: &[String], kv_heads: usize) -> Result<Self, Error> {
        const KNOWN: [&str; 10] = [
            "input_ids",
            "position_ids",
            "past_lens",
            "subsequence_begins",
            "block_indices",
            "block_indices_begins",
            "max_context_len",
            "wanted_rows",
            "adapters",
            "block_weights",
        ];
        if let Some(name) =
            names.iter().find(|name| !KNOWN.contains(&name.as_str()) && !name.contains("_cache."))
        {
            return Err(Error::Unsupported(format!("it has an input that is not known: {name}")));
        }
        let has = |wanted: &str| names.iter().any(|name| name == wanted);
        Ok(Self {
            input_ids: Input::new("input_ids", true)?,
            position_ids: Input::new("position_ids", has("position_ids"))?,
            past_lens: Input::new("past_lens", true)?,
            subsequence_begins: Input::new("subsequence_begins", true)?,
            block_indices: Input::new("block_indices", true)?,
            block_indices_begins: Input::new("block_indices_begins", true)?,
            max_context_len: Tensor::new(i32::TYPE, &[])?,
            wanted_rows: Input::new("wanted_rows", true)?,
            adapters: Input::new("adapters", has("adapters"))?,
            block_scores: Input::new("block_weights", has("block_weights"))?,
            kv_heads,
        })
    }

    /// Gives the inputs to a request of this model.
    fn bind(&self, request: &mut InferRequest) -> Result<(), Error> {
        self.input_ids.bind(request)?;
        self.position_ids.bind(request)?;
        self.past_lens.bind(request)?;
        self.subsequence_begins.bind(request)?;
        self.block_indices.bind(request)?;
        self.block_indices_begins.bind(request)?;
        request.set("max_context_len", &self.max_context_len)?;
        self.wanted_rows.bind(request)?;
        self.adapters.bind(request)?;
        self.block_scores.bind(request)
    }

    fn fill(&mut self, batch: &Batch) -> Result<(), Error> {
        let rows = batch.sequences.len();
        self.input_ids.write(batch.tokens.len(), batch.tokens.iter().map(|token| i64::from(*token)))?;
        let positions = batch.sequences.iter().flat_map(|row| {
            let past = i64::from(row.computed_tokens);
            (0..i64::from(row.tokens.end - row.tokens.start)).map(move |offset| past + offset)
        });
        self.position_ids.write(batch.tokens.len(), positions)?;
        let adapters = batch.sequences.iter().flat_map(|row| {
            std::iter::repeat_n(row.adapter.cast_signed(), (row.tokens.end - row.tokens.start) as usize)
        });
        self.adapters.write(batch.tokens.len(), adapters)?;
        self.past_lens.write(rows, batch.sequences.iter().map(|row| row.resident_tokens().cast_signed()))?;
        let begins = batch.sequences.iter().map(|row| row.tokens.end.cast_signed());
        self.subsequence_begins.write(rows + 1, std::iter::once(0).chain(begins))?;
        self.block_indices
            .write(batch.blocks.len(), batch.blocks.iter().map(|block| block.0.cast_signed()))?;
        let begins = batch.sequences.iter().map(|row| row.blocks.end.cast_signed());
        self.block_indices_begins.write(rows + 1, std::iter::once(0).chain(begins))?;
        let context =
            batch.sequences.iter().map(|row| row.resident_tokens() + row.tokens.end - row.tokens.start).max();
        self.max_context_len.values_mut::<i32>()?[0] = context.unwrap_or(0).cast_signed();
        let weights = self.kv_heads * batch.blocks.len() * size_of::<f32>();
        self.block_scores.write(weights, std::iter::repeat_n(0, weights))
    }

    /// What weight the step gave to each of its blocks, over all heads and layers; nothing if the model does not tell.
    fn weights_of_blocks(&mut self, sums: &mut Vec<f32>) -> Result<(), Error> {
        sums.clear();
        if !self.block_scores.used {
            return Ok(());
        }
        let blocks = self.block_scores.length as usize / size_of::<f32>() / self.kv_heads;
        sums.resize(blocks, 0.0);
        let weights = self.block_scores.tensor.values::<u8>()?.as_chunks().0;
        for (index, weight) in weights.iter().enumerate() {
            sums[index % blocks] += f32::from_ne_bytes(*weight);
        }
        Ok(())
    }
}

/// A one-dimensional input whose memory is kept.
struct Input<T> {
    name: &'static str,
    tensor: Tensor,
    length: i64,
    used: bool,
    _element: std::marker::PhantomData<T>,
}

/// Elements an input has room for at first; it grows when a batch needs more.
const INPUT_ELEMENTS: i64 = 4096;

impl<T: Element> Input<T> {
    /// An input of the model, or one that it lacks and that is not `used`.
    fn new(name: &'static str, used: bool) -> Result<Self, Error> {
        let tensor = Tensor::new(T::TYPE, &[INPUT_ELEMENTS])?;
        Ok(Self { name, tensor, length: INPUT_ELEMENTS, used, _element: std::marker::PhantomData })
    }

    fn bind(&self, request: &mut InferRequest) -> Result<(), Error> {
        if self.used { request.set(self.name, &self.tensor) } else { Ok(()) }
    }

    fn write(&mut self, length: usize, values: impl Iterator<Item = T>) -> Result<(), Error> {
        if !self.used {
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
