//! The runner: it turns a batch into the inputs of the paged model, and the output of the model into logits.

use server_engine::{CacheLayout, Logits, ModelRunner, RunError, StepImages};
use server_scheduler::{Batch, BlockId};

use crate::Error;
use crate::background::BackgroundThread;
use crate::compiled_graph::CompiledGraph;
use crate::kv_cache::KvCache;
use crate::runtime::{Element, Flag, InferRequest, NodeTime, Port, Tensor};
use crate::vision::TextEmbeddings;

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
    /// The additional parts of a vision-language model.
    pub(crate) vision: Option<VisionParts>,
}

/// The parts that only the runner of a vision-language model has.
pub(crate) struct VisionParts {
    pub(crate) embeddings: TextEmbeddings,
    /// The position of the first token of a sequence.
    pub(crate) first_position: i64,
    /// Number of layers, counted from the first, that read rows of images.
    pub(crate) deepstack_layers: usize,
}

impl OpenVinoRunner {
    pub(crate) fn new(parts: RunnerParts) -> Result<Self, Error> {
        let RunnerParts { mut graph, cache_writer, kv_cache, layout, adapters, kv_heads, vision } = parts;
        let inputs = StepInputs::new(&graph.compiled.inputs()?, kv_heads, vision)?;
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
        self.step(batch, &StepImages::default(), logits_indices.len(), indices)?;
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
        images: &StepImages,
        count: usize,
        logits_indices: impl Iterator<Item = i64>,
    ) -> Result<(), Error> {
        // The output is the memory of the request, which must not be referenced while the request runs.
        self.output = None;
        for copy in &batch.copies {
            self.kv_cache.copy(*copy)?;
        }
        self.inputs.fill(batch, images)?;
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
        self.run_with_images(batch, &StepImages::default())
    }

    fn run_with_images(&mut self, batch: &Batch, images: &StepImages) -> Result<Logits<'_>, RunError> {
        let failed = |error: Error| RunError { message: error.chain(), fatal: false };
        let rows = batch.logits_indices().count();
        self.step(batch, images, rows, batch.logits_indices().map(i64::from)).map_err(failed)?;
        self.logits(rows).map_err(failed)
    }
}

/// The inputs of a step. Their memory is reused in every step.
struct StepInputs {
    input_ids: Input<i64>,
    inputs_embeds: Input<f32>,
    position_ids: Input<i64>,
    /// 1 for tokens of images, 0 for all others.
    token_type_ids: Input<i64>,
    /// Whether a token belongs to an image.
    visual_pos_masks: Input<Flag>,
    /// The rows that the first layers read for the image tokens of the step.
    deepstack_visual_embeds: Input<f32>,
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
    vision: Option<VisionParts>,
}

impl StepInputs {
    fn new(ports: &[Port], kv_heads: usize, vision: Option<VisionParts>) -> Result<Self, Error> {
        const KNOWN: [&str; 14] = [
            "input_ids",
            "inputs_embeds",
            "position_ids",
            "token_type_ids",
            "visual_pos_masks",
            "deepstack_visual_embeds",
            "past_lens",
            "subsequence_begins",
            "block_indices",
            "block_indices_begins",
            "max_context_len",
            "logits_indices",
            "adapters",
            "block_scores",
        ];
        let is_known = |port: &&Port| KNOWN.contains(&port.name.as_str()) || port.name.contains("_cache.");
        if let Some(Port { name, .. }) = ports.iter().find(|port| !is_known(port)) {
            return Err(Error::Unsupported(format!("its input {name:?} is unknown")));
        }
        let port = |input: &str| ports.iter().find(|port| port.name == input);
        let has = |input: &str| port(input).is_some();
        let reads_embeddings = has("inputs_embeds");
        if reads_embeddings != vision.is_some() {
            return Err(Error::Unsupported(
                "it must have both inputs_embeds and vision models, or neither".to_owned(),
            ));
        }
        let columns = vision.as_ref().map_or(0, |vision| vision.embeddings.width());
        let layers = vision.as_ref().map_or(0, |vision| vision.deepstack_layers);
        if has("deepstack_visual_embeds") != (layers > 0) {
            return Err(Error::Unsupported(format!(
                "it must have both deepstack_visual_embeds and deepstack layers, or neither (layers: {layers})"
            )));
        }
        let positions = match port("position_ids") {
            None => InputShape::Tokens,
            Some(port) => InputShape::of_positions(port).ok_or_else(|| {
                Error::Unsupported(format!(
                    "its input position_ids has the shape {:?} (supported: [tokens], [3, tokens])",
                    port.shape
                ))
            })?,
        };
        Ok(Self {
            input_ids: Input::new("input_ids", InputPresence::of(!reads_embeddings))?,
            inputs_embeds: Input::with_shape(
                "inputs_embeds",
                InputPresence::of(reads_embeddings),
                InputShape::Rows(columns),
            )?,
            position_ids: Input::with_shape(
                "position_ids",
                InputPresence::of(has("position_ids")),
                positions,
            )?,
            token_type_ids: Input::with_shape(
                "token_type_ids",
                InputPresence::of(has("token_type_ids")),
                InputShape::Column,
            )?,
            visual_pos_masks: Input::with_shape(
                "visual_pos_masks",
                InputPresence::of(has("visual_pos_masks")),
                InputShape::Row,
            )?,
            deepstack_visual_embeds: Input::with_shape(
                "deepstack_visual_embeds",
                InputPresence::of(layers > 0),
                InputShape::Layers { layers, columns },
            )?,
            past_lens: Input::new("past_lens", InputPresence::InModel)?,
            subsequence_begins: Input::new("subsequence_begins", InputPresence::InModel)?,
            block_indices: Input::new("block_indices", InputPresence::InModel)?,
            block_indices_begins: Input::new("block_indices_begins", InputPresence::InModel)?,
            max_context_len: Tensor::new(i32::TYPE, &[])?,
            logits_indices: Input::new("logits_indices", InputPresence::InModel)?,
            adapters: Input::new("adapters", InputPresence::of(has("adapters")))?,
            block_scores: Input::new("block_scores", InputPresence::of(has("block_scores")))?,
            kv_heads,
            vision,
        })
    }

    /// Binds the inputs to a request of this model.
    fn bind(&self, request: &mut InferRequest) -> Result<(), Error> {
        self.input_ids.bind(request)?;
        self.inputs_embeds.bind(request)?;
        self.position_ids.bind(request)?;
        self.token_type_ids.bind(request)?;
        self.visual_pos_masks.bind(request)?;
        self.deepstack_visual_embeds.bind(request)?;
        self.past_lens.bind(request)?;
        self.subsequence_begins.bind(request)?;
        self.block_indices.bind(request)?;
        self.block_indices_begins.bind(request)?;
        request.set("max_context_len", &self.max_context_len)?;
        self.logits_indices.bind(request)?;
        self.adapters.bind(request)?;
        self.block_scores.bind(request)
    }

    fn fill(&mut self, batch: &Batch, images: &StepImages) -> Result<(), Error> {
        let (tokens, sequences) = (batch.tokens.len(), &batch.sequences);
        self.input_ids.write(tokens, batch.tokens.iter().map(|token| i64::from(*token)))?;
        self.write_embeddings(batch, images)?;
        self.write_positions(batch, images)?;
        let is_image = || {
            let mut rows = images.rows.iter().peekable();
            (0..tokens as u32).map(move |token| {
                while rows.next_if(|rows| rows.tokens.end <= token).is_some() {}
                rows.peek().is_some_and(|rows| rows.tokens.contains(&token))
            })
        };
        self.token_type_ids.write(tokens, is_image().map(i64::from))?;
        self.visual_pos_masks.write(tokens, is_image().map(Flag::from))?;
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

    /// Writes the embeddings of the tokens, and the features of the images over those of their placeholders.
    fn write_embeddings(&mut self, batch: &Batch, images: &StepImages) -> Result<(), Error> {
        let Some(VisionParts { embeddings, .. }) = &mut self.vision else { return Ok(()) };
        let width = self.inputs_embeds.shape.columns();
        let layers = self.deepstack_visual_embeds.shape.layers();
        let rows = self.inputs_embeds.values_mut(batch.tokens.len())?;
        // A placeholder may have no embedding, so its token is not looked up.
        let mut image_rows = images.rows.iter().peekable();
        let tokens = batch.tokens.iter().enumerate().map(|(index, token)| {
            let index = index as u32;
            while image_rows.next_if(|rows| rows.tokens.end <= index).is_some() {}
            let is_image = image_rows.peek().is_some_and(|rows| rows.tokens.contains(&index));
            if is_image { 0 } else { *token }
        });
        embeddings.write(tokens, rows)?;
        let image_tokens: usize = images.rows.iter().map(|image| image.tokens.len()).sum();
        let deepstack = match self.deepstack_visual_embeds.presence {
            // The graph reads at least one row, even if the step has no image tokens.
            InputPresence::InModel => self.deepstack_visual_embeds.values_mut(image_tokens.max(1))?,
            InputPresence::Absent => &mut [],
        };
        if image_tokens == 0 {
            deepstack.fill(0.0);
        }
        let mut image_token = 0;
        for image in &images.rows {
            let values = image.features.values(image.first_row..image.first_row + image.tokens.len() as u32);
            let to = &mut rows[image.tokens.start as usize * width..image.tokens.end as usize * width];
            if values.len() != to.len() * (1 + layers) {
                let message =
                    format!("they have {} values instead of {}", values.len(), to.len() * (1 + layers));
                return Err(Error::runtime("read the features of an image", &message));
            }
            for (row, values) in to.chunks_exact_mut(width).zip(values.chunks_exact(width * (1 + layers))) {
                let (feature, further) = values.split_at(width);
                row.copy_from_slice(feature);
                for (layer, values) in further.chunks_exact(width).enumerate() {
                    deepstack[(layer * image_tokens + image_token) * width..][..width]
                        .copy_from_slice(values);
                }
                image_token += 1;
            }
        }
        Ok(())
    }

    fn write_positions(&mut self, batch: &Batch, images: &StepImages) -> Result<(), Error> {
        let first = self.vision.as_ref().map_or(0, |vision| vision.first_position);
        let streams = self.position_ids.shape.streams();
        let positions = (0..streams).flat_map(|stream| {
            let mut of_images = images.positions.iter().peekable();
            batch.sequences.iter().enumerate().flat_map(move |(index, sequence)| {
                while of_images.next_if(|positions| positions.sequence < index).is_some() {}
                let own = of_images.peek().copied();
                let own = own.filter(|positions| streams > 1 && positions.sequence == index);
                let own = own.map(|positions| &*positions.positions);
                let tokens =
                    sequence.computed_tokens..sequence.computed_tokens + sequence.tokens.len() as u32;
                tokens.map(move |token| match own {
                    Some(positions) => i64::from(positions.at(token)[stream]),
                    None => first + i64::from(token),
                })
            })
        });
        self.position_ids.write(batch.tokens.len(), positions)
    }

    /// Sums the attention to each block of the step over all heads. The result is empty if the model has no block
    /// scores.
    fn sum_block_scores(&mut self, sums: &mut Vec<f32>) -> Result<(), Error> {
        sums.clear();
        if self.block_scores.presence == InputPresence::Absent {
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
enum InputPresence {
    InModel,
    Absent,
}

impl InputPresence {
    fn of(is_in_model: bool) -> Self {
        if is_in_model { Self::InModel } else { Self::Absent }
    }
}

/// The shape of an input with values for each token of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InputShape {
    /// `[tokens]`
    Tokens,
    /// `[3, tokens]`
    Streams,
    /// `[tokens, 1]`
    Column,
    /// `[1, tokens]`
    Row,
    /// `[layers, tokens, columns]`
    Layers { layers: usize, columns: usize },
    /// `[tokens, columns]`
    Rows(usize),
}

impl InputShape {
    fn of_positions(port: &Port) -> Option<Self> {
        match port.shape[..] {
            [_] => Some(Self::Tokens),
            [Some(3), _] => Some(Self::Streams),
            _ => None,
        }
    }

    /// Number of values for each token.
    fn columns(self) -> usize {
        match self {
            Self::Tokens | Self::Column | Self::Row => 1,
            Self::Streams => 3,
            Self::Rows(columns) => columns,
            Self::Layers { layers, columns } => layers * columns,
        }
    }

    /// Number of layers, each of which reads separate values; 0 if all layers read the same ones.
    fn layers(self) -> usize {
        if let Self::Layers { layers, .. } = self { layers } else { 0 }
    }

    /// Number of positions of each token.
    fn streams(self) -> usize {
        if self == Self::Streams { 3 } else { 1 }
    }

    fn dimensions(self, tokens: i64) -> Vec<i64> {
        match self {
            Self::Tokens => vec![tokens],
            Self::Streams => vec![3, tokens],
            Self::Column => vec![tokens, 1],
            Self::Row => vec![1, tokens],
            Self::Rows(columns) => vec![tokens, columns as i64],
            Self::Layers { layers, columns } => vec![layers as i64, tokens, columns as i64],
        }
    }
}

/// An input whose memory is reused. Writes to an absent input have no effect.
struct Input<T> {
    name: &'static str,
    tensor: Tensor,
    shape: InputShape,
    length: i64,
    presence: InputPresence,
    _element: std::marker::PhantomData<T>,
}

/// Number of tokens for which an input initially has room. The input grows when a batch needs more.
const INPUT_TOKENS: i64 = 4096;

impl<T: Element> Input<T> {
    fn new(name: &'static str, presence: InputPresence) -> Result<Self, Error> {
        Self::with_shape(name, presence, InputShape::Tokens)
    }

    fn with_shape(name: &'static str, presence: InputPresence, shape: InputShape) -> Result<Self, Error> {
        // An absent input needs no memory.
        let length = if presence == InputPresence::Absent { 1 } else { INPUT_TOKENS };
        let tensor = Tensor::new(T::TYPE, &shape.dimensions(length))?;
        Ok(Self { name, tensor, shape, length, presence, _element: std::marker::PhantomData })
    }

    fn bind(&self, request: &mut InferRequest) -> Result<(), Error> {
        match self.presence {
            InputPresence::InModel => request.set(self.name, &self.tensor),
            InputPresence::Absent => Ok(()),
        }
    }

    fn write(&mut self, length: usize, values: impl Iterator<Item = T>) -> Result<(), Error> {
        if self.presence == InputPresence::Absent {
            return Ok(());
        }
        for (to, value) in self.values_mut(length)?.iter_mut().zip(values) {
            *to = value;
        }
        Ok(())
    }

    /// The values of `length` tokens, to be written.
    fn values_mut(&mut self, length: usize) -> Result<&mut [T], Error> {
        let length = length as i64;
        if self.length != length {
            self.tensor.reshape(&self.shape.dimensions(length))?;
            self.length = length;
        }
        self.tensor.values_mut::<T>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Core;

    #[test]
    fn an_input_that_cannot_grow_fails_each_time() {
        let _core = Core::new().expect("OpenVINO starts");
        // The memory of the first input cannot be allocated, and the size of the second one in bytes exceeds 64 bits.
        for length in [usize::MAX / 16, usize::MAX / 2] {
            let mut input: Input<i64> =
                Input::new("input", InputPresence::InModel).expect("it fits into memory");
            for attempt in 1..=2 {
                assert!(input.values_mut(length).is_err(), "attempt {attempt} with {length} tokens");
            }
        }
    }
}
