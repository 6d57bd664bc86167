//! A simulated model: no weights, but a real paged cache, costs in real or simulated time, and faults.
//!
//! Each slot of its cache holds a hash of the token written there, of its position and of all slots before
//! it, *as read back through the block table*; its logits are a function of all slots of the sequence. So a
//! block that two sequences write, a copy that was not made or a prefix that is not what it claims to be
//! changes the output, and [`expected_tokens`], which has no cache, tells what the output should be.

mod script;

use std::time::Duration;

use server_scheduler::{Batch, BlockId, ScheduledSequence, TokenId};

use crate::clock::Clock;
use crate::runner::{CacheLayout, Logits, ModelRunner, RunError};
use crate::sampler::mix;
use crate::sleep::SleepLevel;

pub use script::SimScript;

/// What is simulated.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Tokens a block holds.
    pub block_tokens: u32,
    /// Blocks in the cache.
    pub blocks_total: u32,
    /// Tokens in the vocabulary.
    pub vocabulary: u32,
    /// What time steps take.
    pub costs: SimCosts,
    /// What goes wrong.
    pub faults: Vec<SimFault>,
}

/// What a step costs: the sum of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimCosts {
    /// A step, whatever it computes.
    pub step: Duration,
    /// A token in a row of several.
    pub prefill_token: Duration,
    /// A row of one token.
    pub decode_row: Duration,
}

/// Something that goes wrong in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimFault {
    /// The step, the first being 0.
    pub step: u64,
    /// What happens.
    pub kind: SimFaultKind,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimFaultKind {
    /// The step fails, and leaves rubbish in the blocks it was to write.
    Step,
    /// The step fails, and the runner is of no further use.
    Fatal,
    /// The runner panics.
    Panic,
    /// This row of the logits, counted among those returned, is NaN.
    NotANumber(u32),
}

/// A [`ModelRunner`] without a model.
#[derive(Debug)]
pub struct SimRunner {
    config: SimConfig,
    clock: Clock,
    /// A hash for each token slot of each block.
    slots: Vec<u64>,
    /// What it says instead of gibberish.
    script: Option<SimScript>,
    /// The token in each slot, for the script.
    tokens: Vec<TokenId>,
    adapters: u32,
    digests: Vec<u64>,
    /// Of the blocks of the last batch.
    block_weights: Vec<f32>,
    logits: Vec<f32>,
    steps: u64,
    is_asleep: bool,
}

/// The digest of no token.
const ROOT: u64 = 0x6f76_666c_6565_7421;

impl SimRunner {
    /// A runner whose steps spend their time on `clock`.
    ///
    /// # Panics
    /// If a size is zero.
    pub fn new(config: SimConfig, clock: Clock) -> Self {
        assert!(config.block_tokens > 0 && config.blocks_total > 0, "a cache has blocks, and a block tokens");
        assert!(config.vocabulary > 0, "a model knows a token");
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
            block_weights: Vec::new(),
            logits: Vec::new(),
            steps: 0,
            is_asleep: false,
        }
    }

    /// The same model with so many adapters, each of which makes another model of it. A script stays as it is.
    #[must_use]
    pub fn adapted(self, adapters: u32) -> Self {
        Self { adapters, ..self }
    }

    /// The same model with something to say.
    ///
    /// # Panics
    /// If the script has no opening or no answer.
    #[must_use]
    pub fn scripted(self, script: SimScript) -> Self {
        assert!(!script.opening.is_empty() && !script.answers.is_empty(), "a script has turns and answers");
        Self { script: Some(script), ..self }
    }

    fn slot(&self, blocks: &[BlockId], place: u32) -> usize {
        let block_tokens = self.config.block_tokens;
        let block = blocks[(place / block_tokens) as usize];
        assert!(block.0 < self.config.blocks_total, "{block:?} is not in the cache");
        block.0 as usize * block_tokens as usize + (place % block_tokens) as usize
    }

    fn copy_blocks(&mut self, batch: &Batch) {
        let block_tokens = self.config.block_tokens as usize;
        for copy in &batch.copies {
            let from = copy.from.0 as usize * block_tokens;
            self.slots.copy_within(from..from + block_tokens, copy.to.0 as usize * block_tokens);
            self.tokens.copy_within(from..from + block_tokens, copy.to.0 as usize * block_tokens);
        }
    }

    /// Reads what the rows' sequences have in the cache, all before anything is written: a row counts on
    /// what was there before the step.
    fn read(&mut self, batch: &Batch) {
        self.digests.clear();
        for row in &batch.sequences {
            let blocks = batch.block_table_of(row);
            let slots = (0..row.resident_tokens()).map(|place| self.slots[self.slot(blocks, place)]);
            assert!(row.adapter <= self.adapters, "there is no adapter {}", row.adapter);
            let digest = slots.fold(root(row.adapter), absorb);
            self.digests.push(digest);
        }
    }

    /// Writes the tokens of `row`, and adds the logits of those of which they are wanted. `digest` is of what the
    /// sequence has before.
    fn write(&mut self, batch: &Batch, row: &ScheduledSequence, mut digest: u64) {
        let blocks = batch.block_table_of(row);
        // Only a script looks at what was said.
        let past = if self.script.is_some() { row.resident_tokens() } else { 0 };
        let mut said: Vec<TokenId> = (0..past).map(|place| self.tokens[self.slot(blocks, place)]).collect();
        for ((position, place), &token) in
            (row.computed_tokens..).zip(row.tokens.clone()).zip(batch.tokens_of(row))
        {
            let slot = self.slot(blocks, position - row.evicted_tokens);
            self.slots[slot] = slot_value(digest, token, position);
            digest = absorb(digest, self.slots[slot]);
            self.tokens[slot] = token;
            said.push(token);
            if row.scored_tokens.contains(&place) || row.sampled_tokens().contains(&place) {
                let vocabulary = self.config.vocabulary;
                match self.script.as_ref().and_then(|script| script.next(&said)) {
                    Some(next) => self
                        .logits
                        .extend((0..vocabulary).map(|token| if token == next { CERTAIN } else { 0.0 })),
                    None => self.logits.extend(logits(digest, vocabulary)),
                }
            }
        }
    }

    fn spoil(&mut self, batch: &Batch) {
        for row in &batch.sequences {
            for place in row.resident_tokens()..row.resident_tokens() + row.tokens.len() as u32 {
                let slot = self.slot(batch.block_table_of(row), place);
                self.slots[slot] = mix(self.slots[slot]);
            }
        }
    }

    fn cost(&self, batch: &Batch) -> Duration {
        let SimCosts { step, prefill_token, decode_row } = self.config.costs;
        let rows = batch.sequences.iter().map(|row| match row.tokens.len() as u32 {
            1 => decode_row,
            tokens => prefill_token * tokens,
        });
        step + rows.sum::<Duration>()
    }

    /// The fault of this step, if it has one.
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

    fn block_weights(&self) -> &[f32] {
        &self.block_weights
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
        assert!(!self.is_asleep, "invariant: nothing runs while it sleeps");
        let fault = self.fault();
        self.steps += 1;
        self.clock.spend(self.cost(batch));
        self.copy_blocks(batch);
        match fault {
            Some(SimFaultKind::Step) => {
                self.spoil(batch);
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
        for (index, row) in batch.sequences.iter().enumerate() {
            self.write(batch, row, self.digests[index]);
        }
        // Any weights will do that are the same each time.
        let mut weights = std::mem::take(&mut self.block_weights);
        weights.clear();
        weights.extend(batch.blocks.iter().map(|block| (self.slots[self.slot(&[*block], 0)] % 1000) as f32));
        self.block_weights = weights;
        if let Some(SimFaultKind::NotANumber(row)) = fault {
            let vocabulary = self.config.vocabulary as usize;
            self.logits[row as usize * vocabulary..][..vocabulary].fill(f32::NAN);
        }
        Ok(Logits::new(&self.logits, self.config.vocabulary))
    }

    /// The cache is lost: what believes in its content finds something else there.
    fn sleep(&mut self, _: SleepLevel) {
        (self.slots, self.tokens) = (Vec::new(), Vec::new());
        self.is_asleep = true;
    }

    fn wake(&mut self) -> Result<(), RunError> {
        let slots = self.config.blocks_total as usize * self.config.block_tokens as usize;
        (self.slots, self.tokens) = (vec![0; slots], vec![0; slots]);
        self.is_asleep = false;
        Ok(())
    }
}

/// The `count` tokens that continue `prompt` when the most probable is taken each time, without a cache.
pub fn expected_tokens(prompt: &[TokenId], count: u32, vocabulary: u32) -> Vec<TokenId> {
    expected_tokens_with(0, prompt, count, vocabulary)
}

/// The same with an adapter.
pub fn expected_tokens_with(adapter: u32, prompt: &[TokenId], count: u32, vocabulary: u32) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    let mut digest = root(adapter);
    let mut positions = 0..;
    let mut read = |digest: u64, token| {
        let position = positions.next().expect("invariant: the range has no end");
        absorb(digest, slot_value(digest, token, position))
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

/// The digest of no token, by adapter.
fn root(adapter: u32) -> u64 {
    if adapter == 0 { ROOT } else { mix(ROOT ^ u64::from(adapter)) }
}

/// What the cache holds for `token` at `position`, after a history of this digest.
fn slot_value(digest: u64, token: TokenId, position: u32) -> u64 {
    mix(digest ^ mix(u64::from(token) << 32 | u64::from(position)))
}

fn absorb(digest: u64, slot: u64) -> u64 {
    mix(digest.rotate_left(17) ^ slot)
}

/// The logit of what a script says next; that of all else is 0.
const CERTAIN: f32 = 100.0;

/// Logits between 0 and 16, a function of the digest.
fn logits(digest: u64, vocabulary: u32) -> impl Iterator<Item = f32> {
    const LOGIT_MAX: f32 = 16.0;
    (0..u64::from(vocabulary)).map(move |token| {
        let hash = mix(digest.wrapping_add(token));
        (hash >> 40) as f32 / (1u64 << 24) as f32 * LOGIT_MAX
    })
}
