//! The inputs of a step: which inputs a model has, and their values for a batch.

use server_engine::StepImages;
use server_scheduler::Batch;

use super::input::{Input, InputPresence, InputShape};
use crate::Error;
use crate::runtime::{Element as _, Flag, InferRequest, Port, Tensor};
use crate::vision::TextEmbeddings;

/// The parts that only the runner of a vision-language model has.
pub(crate) struct VisionParts {
    pub(crate) embeddings: TextEmbeddings,
    /// The position of the first token of a sequence.
    pub(crate) first_position: i64,
    /// Number of layers, counted from the first, that read rows of images.
    pub(crate) deepstack_layers: usize,
}

/// The inputs of a step. Their memory is reused in every step.
pub(super) struct StepInputs {
    input_ids: Input<i64>,
    inputs_embeds: Input<f32>,
    position_ids: Input<i64>,
    /// 1 for tokens of images, 0 for all others.
    token_type_ids: Input<i64>,
    /// Whether each token belongs to an image.
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
    /// Creates the inputs of the model that has `ports`.
    ///
    /// # Errors
    /// The model has an unknown input, or inputs that do not fit together.
    pub(super) fn new(ports: &[Port], kv_heads: usize, vision: Option<VisionParts>) -> Result<Self, Error> {
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
                "it must have both an input deepstack_visual_embeds and deepstack layers, or neither (deepstack layers: \
                 {layers})"
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
    pub(super) fn bind(&self, request: &mut InferRequest) -> Result<(), Error> {
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

    /// Requests `count` rows of logits: those of the tokens at `indices`.
    pub(super) fn request_logits(
        &mut self,
        count: usize,
        indices: impl Iterator<Item = i64>,
    ) -> Result<(), Error> {
        self.logits_indices.write(count, indices)
    }

    /// Writes the inputs of a step, except for the indices of the tokens whose logits are requested.
    pub(super) fn fill(&mut self, batch: &Batch, images: &StepImages) -> Result<(), Error> {
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

    /// Writes the embeddings of the tokens, with the features of the images in place of the embeddings of their
    /// placeholders, and the rows that the first layers read for the image tokens.
    fn write_embeddings(&mut self, batch: &Batch, images: &StepImages) -> Result<(), Error> {
        let Some(VisionParts { embeddings, .. }) = &mut self.vision else { return Ok(()) };
        let width = self.inputs_embeds.shape.columns();
        let layers = self.deepstack_visual_embeds.shape.layers();
        let rows = self.inputs_embeds.values_mut(batch.tokens.len())?;
        // The token of a placeholder may have no embedding, so the embedding of token 0 is looked up instead and
        // overwritten below.
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
    pub(super) fn sum_block_scores(&mut self, sums: &mut Vec<f32>) -> Result<(), Error> {
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
