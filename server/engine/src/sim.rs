//! A simulated model. It has no weights, but it has a real paged cache, its steps take real or simulated time, and it
//! can simulate faults.
//!
//! Each slot of the cache contains a hash of its token, of its position and of all slots before it, *as read through
//! the block table*. Without a script, the logits are a function of all slots of the sequence. A defect such as a block
//! written by two sequences, a missing copy or a wrong prefix therefore changes the output. [`expected_tokens`], which
//! uses no cache, returns the correct output.

mod images;
mod script;

use std::time::Duration;

use server_scheduler::{Batch, BlockId, ScheduledSequence, TokenId};

use crate::clock::Clock;
use crate::hash::mix;
use crate::images::{RequestImages, StepImages};
use crate::runner::{CacheLayout, Logits, ModelRunner, RunError};
use crate::sleep::SleepLevel;

pub use images::SimEncoder;
pub use script::SimScript;

/// The configuration of a simulated model.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Number of tokens in a block.
    pub block_tokens: u32,
    /// Number of blocks in the cache.
    pub blocks_total: u32,
    /// Number of tokens in the vocabulary.
    pub vocabulary: u32,
    /// The time that steps take.
    pub costs: SimCosts,
    /// The faults that the model simulates.
    pub faults: Vec<SimFault>,
}

/// The time of a step, which is the sum of these parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimCosts {
    /// The time of a step, regardless of its work.
    pub step: Duration,
    /// The time of each token of a sequence with several tokens in the step.
    pub prefill_token: Duration,
    /// The time of a sequence with one token in the step.
    pub decode_token: Duration,
}

/// A fault in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimFault {
    /// The number of the step, from 0.
    pub step: u64,
    /// The kind of the fault.
    pub kind: SimFaultKind,
}

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimFaultKind {
    /// The step fails, and the content of the blocks that it writes is undefined.
    Step,
    /// The step fails, and the runner can no longer be used.
    Fatal,
    /// The runner panics in the step.
    Panic,
    /// All returned logits of the row with this index are NaN.
    NotANumber(u32),
}

/// A [`ModelRunner`] that simulates a model.
#[derive(Debug)]
pub struct SimRunner {
    config: SimConfig,
    clock: Clock,
    /// The hash in each slot of each block.
    slots: Vec<u64>,
    /// The answers that the model generates instead of pseudorandom tokens.
    script: Option<SimScript>,
    /// The token in each slot, for the script.
    tokens: Vec<TokenId>,
    adapters: u32,
    digests: Vec<u64>,
    /// The scores of the blocks of the last batch.
    block_scores: Vec<f32>,
    logits: Vec<f32>,
    steps: u64,
    is_sleeping: bool,
}

/// The digest of an empty sequence.
const EMPTY_DIGEST: u64 = 0x6f76_666c_6565_7421;

impl SimRunner {
    /// Creates a runner whose steps spend their time on `clock`.
    ///
    /// # Panics
    /// Panics if a size is zero.
    pub fn new(config: SimConfig, clock: Clock) -> Self {
        assert!(
            config.block_tokens > 0 && config.blocks_total > 0,
            "block_tokens and blocks_total must be greater than zero"
        );
        assert!(config.vocabulary > 0, "vocabulary must be greater than zero");
        let slots = vec![0; config.blocks_total as usize * config.block_tokens as usize];
        let tokens = vec![0; slots.len()];
        Self {
            config,
            clock,
            slots,
            script: None,
            tokens,
            adapters: 0,
            digests: Vec::new(),
            block_scores: Vec::new(),
            logits: Vec::new(),
            steps: 0,
            is_sleeping: false,
        }
    }

    /// Sets the number of adapters. Each adapter changes the output of the model, but not that of a script.
    #[must_use]
    pub fn with_adapters(self, adapters: u32) -> Self {
        Self { adapters, ..self }
    }

    /// Sets the answers of the model.
    ///
    /// # Panics
    /// Panics if the script has no opening or no answer.
    #[must_use]
    pub fn with_script(self, script: SimScript) -> Self {
        assert!(
            !script.opening.is_empty() && !script.answers.is_empty(),
            "the opening and the answers must not be empty"
        );
        Self { script: Some(script), ..self }
    }

    fn slot(&self, blocks: &[BlockId], offset: u32) -> usize {
        let block_tokens = self.config.block_tokens;
        let block = blocks[(offset / block_tokens) as usize];
        assert!(block.0 < self.config.blocks_total, "{block:?} is not in the cache");
        block.0 as usize * block_tokens as usize + (offset % block_tokens) as usize
    }

    fn copy_blocks(&mut self, batch: &Batch) {
        let block_tokens = self.config.block_tokens as usize;
        for copy in &batch.copies {
            let from = copy.from.0 as usize * block_tokens;
            self.slots.copy_within(from..from + block_tokens, copy.to.0 as usize * block_tokens);
            self.tokens.copy_within(from..from + block_tokens, copy.to.0 as usize * block_tokens);
        }
    }

    /// Reads the cached tokens of all sequences before any token of the step is written, because a sequence must not
    /// depend on tokens that another sequence writes in the same step.
    fn read(&mut self, batch: &Batch) {
        self.digests.clear();
        for sequence in &batch.sequences {
            let blocks = batch.block_table_of(sequence);
            let slots = (0..sequence.resident_tokens()).map(|offset| self.slots[self.slot(blocks, offset)]);
            assert!(sequence.adapter <= self.adapters, "adapter {} does not exist", sequence.adapter);
            let digest = slots.fold(empty_digest(sequence.adapter), absorb);
            self.digests.push(digest);
        }
    }

    /// Writes the tokens of a sequence, and appends the needed logits. `digest` is the digest of the tokens before
    /// them. `input` returns the input that the model reads for a token, given its index in the batch and its index in
    /// the sequence.
    fn write(
        &mut self,
        batch: &Batch,
        sequence: &ScheduledSequence,
        mut digest: u64,
        input: &dyn Fn(u32, u32, TokenId) -> TokenId,
    ) {
        let blocks = batch.block_table_of(sequence);
        // Only a script needs the earlier tokens.
        let previous = if self.script.is_some() { sequence.resident_tokens() } else { 0 };
        let mut text: Vec<TokenId> =
            (0..previous).map(|offset| self.tokens[self.slot(blocks, offset)]).collect();
        for ((position, offset), &token) in
            (sequence.computed_tokens..).zip(sequence.tokens.clone()).zip(batch.tokens_of(sequence))
        {
            let slot = self.slot(blocks, position - sequence.evicted_tokens);
            self.slots[slot] = slot_value(digest, input(offset, position, token), position);
            digest = absorb(digest, self.slots[slot]);
            self.tokens[slot] = token;
            text.push(token);
            if sequence.scored_tokens.contains(&offset) || sequence.sampled_tokens().contains(&offset) {
                let vocabulary = self.config.vocabulary;
                match self.script.as_ref().and_then(|script| script.next(&text)) {
                    Some(next) => self
                        .logits
                        .extend((0..vocabulary).map(|token| if token == next { CERTAIN } else { 0.0 })),
                    None => self.logits.extend(logits(digest, vocabulary)),
                }
            }
        }
    }

    fn corrupt(&mut self, batch: &Batch) {
        for sequence in &batch.sequences {
            for offset in
                sequence.resident_tokens()..sequence.resident_tokens() + sequence.tokens.len() as u32
            {
                let slot = self.slot(batch.block_table_of(sequence), offset);
                self.slots[slot] = mix(self.slots[slot]);
            }
        }
    }

    fn cost(&self, batch: &Batch) -> Duration {
        let SimCosts { step, prefill_token, decode_token } = self.config.costs;
        let sequences = batch.sequences.iter().map(|sequence| match sequence.tokens.len() as u32 {
            1 => decode_token,
            tokens => prefill_token * tokens,
        });
        step + sequences.sum::<Duration>()
    }

    /// The fault of the current step, if it has one.
    fn fault(&self) -> Option<SimFaultKind> {
        self.config.faults.iter().find(|fault| fault.step == self.steps).map(|fault| fault.kind)
    }
}

impl ModelRunner for SimRunner {
    fn layout(&self) -> CacheLayout {
        let SimConfig { block_tokens, blocks_total, vocabulary, .. } = self.config;
        let block_bytes = u64::from(block_tokens) * (size_of::<u64>() + size_of::<TokenId>()) as u64;
        CacheLayout { block_tokens, blocks_total, block_bytes, vocabulary }
    }

    fn adapters(&self) -> u32 {
        self.adapters
    }

    fn block_scores(&self) -> &[f32] {
        &self.block_scores
    }

    fn read_block(&self, block: BlockId, bytes: &mut [u8]) -> Result<(), RunError> {
        let at = self.slot(&[block], 0);
        let slots = &self.slots[at..at + self.config.block_tokens as usize];
        let tokens = &self.tokens[at..at + self.config.block_tokens as usize];
        let (first, second) = bytes.split_at_mut(size_of_val(slots));
        first.as_chunks_mut().0.iter_mut().zip(slots).for_each(|(to, slot)| *to = slot.to_le_bytes());
        second.as_chunks_mut().0.iter_mut().zip(tokens).for_each(|(to, token)| *to = token.to_le_bytes());
        Ok(())
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), RunError> {
        let at = self.slot(&[block], 0);
        let slots = &mut self.slots[at..at + self.config.block_tokens as usize];
        let tokens = &mut self.tokens[at..at + self.config.block_tokens as usize];
        let (first, second) = bytes.split_at(size_of_val(slots));
        first.as_chunks().0.iter().zip(slots).for_each(|(from, slot)| *slot = u64::from_le_bytes(*from));
        second.as_chunks().0.iter().zip(tokens).for_each(|(from, token)| *token = u32::from_le_bytes(*from));
        Ok(())
    }

    fn run(&mut self, batch: &Batch) -> Result<Logits<'_>, RunError> {
        self.run_with_images(batch, &StepImages::default())
    }

    fn run_with_images(&mut self, batch: &Batch, images: &StepImages) -> Result<Logits<'_>, RunError> {
        assert!(!self.is_sleeping, "invariant: a runner that is asleep is not used");
        let fault = self.fault();
        self.steps += 1;
        self.clock.spend(self.cost(batch));
        self.copy_blocks(batch);
        match fault {
            Some(SimFaultKind::Step) => {
                self.corrupt(batch);
                return Err(RunError { message: "a simulated fault".to_owned(), fatal: false });
            }
            Some(SimFaultKind::Fatal) => {
                return Err(RunError { message: "a simulated fatal fault".to_owned(), fatal: true });
            }
            Some(SimFaultKind::Panic) => panic!("a simulated panic"),
            Some(SimFaultKind::NotANumber(_)) | None => {}
        }

        self.read(batch);
        self.logits.clear();
        for (index, sequence) in batch.sequences.iter().enumerate() {
            let input = images::StepReader::new(images, index);
            self.write(batch, sequence, self.digests[index], &|offset, position, token| {
                input.read(offset, position, token)
            });
        }
        // The scores are arbitrary but reproducible.
        let mut scores = std::mem::take(&mut self.block_scores);
        scores.clear();
        scores.extend(batch.blocks.iter().map(|block| (self.slots[self.slot(&[*block], 0)] % 1000) as f32));
        self.block_scores = scores;
        if let Some(SimFaultKind::NotANumber(row)) = fault {
            let vocabulary = self.config.vocabulary as usize;
            self.logits[row as usize * vocabulary..][..vocabulary].fill(f32::NAN);
        }
        Ok(Logits::new(&self.logits, self.config.vocabulary))
    }

    /// Discards the cache, so that wrong assumptions about its content change the output.
    fn sleep(&mut self, _: SleepLevel) {
        (self.slots, self.tokens) = (Vec::new(), Vec::new());
        self.is_sleeping = true;
    }

    fn wake(&mut self) -> Result<(), RunError> {
        let slots = self.config.blocks_total as usize * self.config.block_tokens as usize;
        (self.slots, self.tokens) = (vec![0; slots], vec![0; slots]);
        self.is_sleeping = false;
        Ok(())
    }
}

/// Returns the `count` tokens that greedy sampling appends to `prompt`, computed without a cache.
pub fn expected_tokens(prompt: &[TokenId], count: u32, vocabulary: u32) -> Vec<TokenId> {
    expected_tokens_with(0, prompt, count, vocabulary)
}

/// Like [`expected_tokens`], but with an adapter.
pub fn expected_tokens_with(adapter: u32, prompt: &[TokenId], count: u32, vocabulary: u32) -> Vec<TokenId> {
    expected(adapter, prompt, count, vocabulary, &|_, token| token)
}

/// Like [`expected_tokens`], for a prompt with images.
pub fn expected_tokens_with_images(
    prompt: &[TokenId],
    images: &RequestImages,
    count: u32,
    vocabulary: u32,
) -> Vec<TokenId> {
    expected(0, prompt, count, vocabulary, &|index, token| images::prompt_input(images, index, token))
}

/// Like [`expected_tokens_with`], for a model that reads `input(index, token)` instead of `token`, where `index` is the
/// index of the token in the sequence.
fn expected(
    adapter: u32,
    prompt: &[TokenId],
    count: u32,
    vocabulary: u32,
    input: &dyn Fn(u32, TokenId) -> TokenId,
) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    let mut digest = empty_digest(adapter);
    let mut positions = 0..;
    let mut read = |digest: u64, token| {
        let position = positions.next().expect("invariant: the range is infinite");
        absorb(digest, slot_value(digest, input(position, token), position))
    };
    for &token in prompt {
        digest = read(digest, token);
    }
    for _ in 0..count {
        let mut best = (0, f32::NEG_INFINITY);
        for (token, logit) in (0..).zip(logits(digest, vocabulary)) {
            if logit > best.1 {
                best = (token, logit);
            }
        }
        tokens.push(best.0);
        digest = read(digest, best.0);
    }
    tokens
}

/// The digest of an empty sequence with an adapter.
fn empty_digest(adapter: u32) -> u64 {
    if adapter == 0 { EMPTY_DIGEST } else { mix(EMPTY_DIGEST ^ u64::from(adapter)) }
}

/// The value of the slot of `token` at `position`, after tokens with this digest.
fn slot_value(digest: u64, token: TokenId, position: u32) -> u64 {
    mix(digest ^ mix(u64::from(token) << 32 | u64::from(position)))
}

fn absorb(digest: u64, slot: u64) -> u64 {
    mix(digest.rotate_left(17) ^ slot)
}

/// The logit of the next token of a script. The logits of all other tokens are 0.
const CERTAIN: f32 = 100.0;

/// Logits between 0 and 16 that depend on the digest.
fn logits(digest: u64, vocabulary: u32) -> impl Iterator<Item = f32> {
    const LOGIT_MAX: f32 = 16.0;
    (0..u64::from(vocabulary)).map(move |token| {
        let hash = mix(digest.wrapping_add(token));
        (hash >> 40) as f32 / (1u64 << 24) as f32 * LOGIT_MAX
    })
}
