//! The runner: a batch becomes the inputs of the paged model, and its output the logits.

use server_engine::{CacheLayout, Logits, ModelRunner, RunError};
use server_scheduler::Batch;

use crate::Error;
use crate::cache::Cache;
use crate::runtime::{CompiledModel, Core, Element, InferRequest, Tensor};

/// A model compiled for a device, its KV cache and the inputs of its steps.
pub struct OpenVinoRunner {
    // Dropped in this order: what was made from something before it.
    inputs: Inputs,
    output: Option<Tensor>,
    cache: Cache,
    request: InferRequest,
    _compiled: CompiledModel,
    _core: Core,
    layout: CacheLayout,
}

/// What a runner is made of.
pub(crate) struct Parts {
    pub(crate) core: Core,
    pub(crate) compiled: CompiledModel,
    pub(crate) request: InferRequest,
    pub(crate) cache: Cache,
    pub(crate) layout: CacheLayout,
}

impl OpenVinoRunner {
    pub(crate) fn new(parts: Parts) -> Result<Self, Error> {
        let Parts { core, compiled, mut request, cache, layout } = parts;
        let names: Vec<String> = compiled.inputs()?.into_iter().map(|port| port.name).collect();
        let inputs = Inputs::new(&mut request, &names)?;
        Ok(Self { inputs, output: None, cache, request, _compiled: compiled, _core: core, layout })
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
        self.request.infer()?;
        self.output = Some(self.request.output()?);
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

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        let failed = |error: Error| RunError { message: error.chain(), fatal: false };
        let rows = batch.sampling_rows().count();
        let wanted = batch.sampling_rows().map(|row| i64::from(row.tokens.end) - 1);
        self.step(batch, rows, wanted).map_err(failed)?;
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
}

impl Inputs {
    fn new(request: &mut InferRequest, names: &[String]) -> Result<Self, Error> {
        const KNOWN: [&str; 8] = [
            "input_ids",
            "position_ids",
            "past_lens",
            "subsequence_begins",
            "block_indices",
            "block_indices_begins",
            "max_context_len",
            "wanted_rows",
        ];
        if let Some(name) =
            names.iter().find(|name| !KNOWN.contains(&name.as_str()) && !name.contains("_cache."))
        {
            return Err(Error::Unsupported(format!("it has an input that is not known: {name}")));
        }
        let has_positions = names.iter().any(|name| name == "position_ids");
        let max_context_len = Tensor::new(i32::TYPE, &[])?;
        request.set("max_context_len", &max_context_len)?;
        let mut input_i32 = |name| Input::new(request, name, true);
        let past_lens = input_i32("past_lens")?;
        let subsequence_begins = input_i32("subsequence_begins")?;
        let block_indices = input_i32("block_indices")?;
        let block_indices_begins = input_i32("block_indices_begins")?;
        Ok(Self {
            input_ids: Input::new(request, "input_ids", true)?,
            position_ids: Input::new(request, "position_ids", has_positions)?,
            past_lens,
            subsequence_begins,
            block_indices,
            block_indices_begins,
            max_context_len,
            wanted_rows: Input::new(request, "wanted_rows", true)?,
        })
    }

    fn fill(&mut self, batch: &Batch) -> Result<(), Error> {
        let rows = batch.rows.len();
        self.input_ids.write(batch.tokens.len(), batch.tokens.iter().map(|token| i64::from(*token)))?;
        let positions = batch.rows.iter().flat_map(|row| {
            let past = i64::from(row.past);
            (0..i64::from(row.tokens.end - row.tokens.start)).map(move |offset| past + offset)
        });
        self.position_ids.write(batch.tokens.len(), positions)?;
        self.past_lens.write(rows, batch.rows.iter().map(|row| row.past.cast_signed()))?;
        let begins = batch.rows.iter().map(|row| row.tokens.end.cast_signed());
        self.subsequence_begins.write(rows + 1, std::iter::once(0).chain(begins))?;
        self.block_indices
            .write(batch.blocks.len(), batch.blocks.iter().map(|block| block.0.cast_signed()))?;
        let begins = batch.rows.iter().map(|row| row.blocks.end.cast_signed());
        self.block_indices_begins.write(rows + 1, std::iter::once(0).chain(begins))?;
        let context = batch.rows.iter().map(|row| row.past + row.tokens.end - row.tokens.start).max();
        self.max_context_len.values_mut::<i32>()?[0] = context.unwrap_or(0).cast_signed();
        Ok(())
    }
}

/// A one-dimensional input whose memory is kept.
struct Input<T> {
    tensor: Tensor,
    length: i64,
    used: bool,
    _element: std::marker::PhantomData<T>,
}

/// Elements an input has room for at first; it grows when a batch needs more.
const INPUT_ELEMENTS: i64 = 4096;

impl<T: Element> Input<T> {
    /// An input of the model, or one that it lacks and that is not `used`.
    fn new(request: &mut InferRequest, name: &str, used: bool) -> Result<Self, Error> {
        let tensor = Tensor::new(T::TYPE, &[INPUT_ELEMENTS])?;
        if used {
            request.set(name, &tensor)?;
        }
        Ok(Self { tensor, length: INPUT_ELEMENTS, used, _element: std::marker::PhantomData })
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
