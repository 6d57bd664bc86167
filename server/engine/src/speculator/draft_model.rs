//! The draft model: a second runner that uses the block tables of the target model and proposes drafts before the step
//! of the target model.
//!
//! ```text
//! schedule ─► sequences with room for drafts ─► (unread text, one token after it) ─► draft ─┐
//!                                                 ▲                                         │ while there is room
//!                                                 └──────────────── the draft ◄─────────────┘
//! ```
//!
//! Drafts are sampled like the target's tokens: with the same parameters, seed and position. Unless a guide rejects
//! them, all drafts of a model that equals the target are therefore accepted, even where the most probable token is not
//! sampled. An error of the draft model only reduces the number of drafts.

use std::collections::BTreeMap;

use server_scheduler::{Batch, BlockId, ScheduledSequence, SequenceId, TokenId};

use super::costs::CostModel;
use super::drafter::{ModelProposer, RequestDrafter};
use super::text::{CacheDigests, NO_DIGEST, Text, digest};
use crate::clock::Clock;
use crate::requests::{ActiveRequest, Requests};
use crate::runner::{CacheLayout, DraftRunner, ModelRunner, RunError};
use crate::sampler::{History, Sampler, SamplingContext};
use crate::sleep::SleepLevel;

pub(super) struct DraftModel {
    runner: Box<dyn ModelRunner>,
    layout: CacheLayout,
    /// Number of tokens of the longest text that the model can read.
    max_model_len: usize,
    /// Number of tokens in the target's vocabulary.
    vocabulary: usize,
    cache: CacheDigests,
    /// Maximum number of tokens in a run that reads texts. A sequence with one or two unread tokens may exceed the
    /// limit.
    max_read_tokens: usize,
    /// The limit in the current step: `max_read_tokens`, or less while the cost of reading is unknown.
    step_read_tokens: usize,
    sampler: Sampler,
    is_broken: bool,
    // These buffers are reused in every step.
    drafting: Vec<DraftingSequence>,
    batch: Batch,
    /// The digest of the text up to each token of the batch.
    digests: Vec<u64>,
    /// The blocks into which the batch writes texts.
    written_blocks: Vec<BlockId>,
    padded_logits: Vec<f32>,
}

/// A sequence for which the model proposes drafts in this step.
struct DraftingSequence {
    sequence: SequenceId,
    /// The range of the sequence's block table in the target's batch.
    blocks: std::ops::Range<u32>,
    /// Number of further drafts for which there is room.
    remaining: usize,
    /// Length of the prefix of the text and the following drafts that is in the model's cache, in tokens.
    cached_tokens: usize,
    /// Number of tokens of the text that were not in the cache at the start of the step.
    unread_tokens: usize,
    /// The history of the sequence as if the drafts had been sampled.
    history: History,
    /// The last draft, and the digest of the text that ends with this draft. `None` while the text is being read.
    last_draft: Option<(TokenId, u64)>,
}

/// Maximum number of tokens in a run that reads texts before the cost of reading is known.
const INITIAL_READ_TOKENS: usize = 16;

impl DraftModel {
    /// Creates a draft model for a target model with a vocabulary of `vocabulary` tokens. In a step, the draft model
    /// reads at most `max_read_tokens` tokens of texts.
    pub(super) fn new(draft: DraftRunner, vocabulary: u32, max_read_tokens: u32) -> Self {
        let DraftRunner { runner, max_model_len } = draft;
        let layout = runner.layout();
        Self {
            cache: CacheDigests::new(layout.blocks_total, layout.block_tokens),
            runner,
            layout,
            max_model_len: max_model_len as usize,
            vocabulary: vocabulary as usize,
            max_read_tokens: max_read_tokens as usize,
            step_read_tokens: 0,
            sampler: Sampler::new(),
            is_broken: false,
            drafting: Vec::new(),
            batch: Batch::default(),
            digests: Vec::new(),
            written_blocks: Vec::new(),
            padded_logits: Vec::new(),
        }
    }

    /// Puts the runner to sleep. The model must not be used until it is awake.
    pub(super) fn sleep(&mut self, level: SleepLevel) {
        self.runner.sleep(level);
        self.cache.clear();
    }

    /// Wakes the runner. If that fails, the draft model is disabled.
    pub(super) fn wake(&mut self) {
        if let Err(error) = self.runner.wake() {
            tracing::warn!("failed to wake the draft model, continuing without it: {}", error.message);
            self.is_broken = true;
        }
    }

    /// Number of tokens in a block of the model's cache.
    pub(super) fn block_tokens(&self) -> u32 {
        self.layout.block_tokens
    }

    /// Whether the model can propose up to `max_drafts` tokens after a text. The text must not be too long, and all its
    /// tokens must be in the model's vocabulary.
    pub(super) fn can_read(&self, text: &Text, max_drafts: usize) -> bool {
        let fits = text.len() + max_drafts <= self.max_model_len;
        !self.is_broken && fits && text.is_in_vocabulary(self.layout.vocabulary)
    }

    /// Proposes drafts for the sequences of `target` that have room for drafts of this model. The number of drafts may
    /// be less than the room allows.
    pub(super) fn propose(
        &mut self,
        target: &Batch,
        requests: &Requests,
        drafters: &mut BTreeMap<u64, RequestDrafter>,
        clock: &Clock,
        costs: &mut CostModel,
    ) {
        self.collect_sequences(target, requests, drafters);
        self.step_read_tokens = if costs.has_reading_cost() {
            self.max_read_tokens
        } else {
            self.max_read_tokens.min(INITIAL_READ_TOKENS)
        };
        let mut are_blocks_copied = false;
        while !self.drafting.is_empty() {
            self.fill_batch(target, drafters);
            if self.batch.sequences.is_empty() {
                break;
            }
            if !are_blocks_copied {
                self.batch.copies.clone_from(&target.copies);
                are_blocks_copied = true;
            }
            let began = clock.now();
            if let Err(error) = self.run(requests, drafters) {
                let scope = if error.fatal { "" } else { "this step " };
                tracing::warn!(
                    "failed to run the draft model, continuing {scope}without it: {}",
                    error.message
                );
                self.is_broken = error.fatal;
                break;
            }
            let seconds = (clock.now() - began).as_secs_f64();
            costs.record_run(self.batch.sequences.len() as u32, self.batch.tokens.len() as u32, seconds);
        }
        self.drafting.clear();
        if !are_blocks_copied {
            target.copies.iter().for_each(|copy| self.cache.invalidate(copy.to));
        }
    }

    /// Collects the sequences that need drafts. The sequences with the most tokens to read come last, so that they do
    /// not use up the limit on read tokens before the other sequences.
    fn collect_sequences(
        &mut self,
        target: &Batch,
        requests: &Requests,
        drafters: &mut BTreeMap<u64, RequestDrafter>,
    ) {
        let Self { drafting, cache, .. } = self;
        target.copies.iter().for_each(|copy| cache.copy(*copy));
        for scheduled in target.sequences.iter().filter(|scheduled| scheduled.num_draft_tokens > 0) {
            let Some(active) = requests.active.get(&scheduled.id.request) else { continue };
            let Some(proposer) = proposer(drafters, scheduled.id) else { continue };
            debug_assert_eq!(
                proposer.text.len() as u32,
                scheduled.computed_tokens + 1,
                "invariant: a sequence with drafts decodes"
            );
            let cached_tokens = cache.cached_tokens(target.block_table_of(scheduled), &proposer.text);
            proposer.cached_tokens = cached_tokens;
            drafting.push(DraftingSequence {
                sequence: scheduled.id,
                blocks: scheduled.blocks.clone(),
                remaining: scheduled.num_draft_tokens as usize,
                cached_tokens,
                unread_tokens: proposer.unread_tokens(),
                history: active.histories[scheduled.id.index as usize].clone(),
                last_draft: None,
            });
        }
        drafting.sort_by_key(|drafting| drafting.unread_tokens);
    }

    /// Fills the batch of the next run: the unread text or the last draft of each sequence. A sequence gets no drafts
    /// in this step if no part of its text fits into the batch, or if a sequence before it writes the same blocks.
    fn fill_batch(&mut self, target: &Batch, drafters: &mut BTreeMap<u64, RequestDrafter>) {
        let Self { drafting, batch, digests, written_blocks, layout, step_read_tokens, .. } = self;
        batch.clear();
        digests.clear();
        written_blocks.clear();
        let block_tokens = layout.block_tokens as usize;
        drafting.retain_mut(|drafting| {
            let start = batch.tokens.len();
            let table = &target.blocks[drafting.blocks.start as usize..drafting.blocks.end as usize];
            let mut samples_draft = true;
            if let Some((token, digest)) = drafting.last_draft {
                batch.tokens.push(token);
                digests.push(digest);
            } else {
                let Some(ModelProposer { text, .. }) = proposer(drafters, drafting.sequence) else {
                    return false;
                };
                let unread = text.len() - drafting.cached_tokens;
                // Reading the last token and a draft before it does not count toward `step_read_tokens`.
                let count =
                    if unread <= 2 { unread } else { unread.min(step_read_tokens.saturating_sub(start)) };
                let range = drafting.cached_tokens..drafting.cached_tokens + count;
                let blocks = &table[range.start / block_tokens..range.end.div_ceil(block_tokens)];
                if count == 0 || blocks.iter().any(|block| written_blocks.contains(block)) {
                    return false;
                }
                // Blocks into which drafts are written need not be recorded, because no other sequence uses them.
                written_blocks.extend_from_slice(blocks);
                batch.tokens.extend(text.tokens(range.clone()));
                digests.extend(text.digests(range));
                samples_draft = count == unread;
            }
            let end = batch.tokens.len();
            let blocks = batch.blocks.len() as u32;
            let num_blocks = (drafting.cached_tokens + end - start).div_ceil(block_tokens);
            batch.blocks.extend_from_slice(&table[..num_blocks]);
            let samples = batch.samples.len() as u32;
            if samples_draft {
                batch.samples.push(drafting.sequence);
            }
            batch.sequences.push(ScheduledSequence {
                id: drafting.sequence,
                computed_tokens: drafting.cached_tokens as u32,
                evicted_tokens: 0,
                tokens: start as u32..end as u32,
                blocks: blocks..batch.blocks.len() as u32,
                samples: samples..batch.samples.len() as u32,
                scored_tokens: 0..0,
                num_draft_tokens: 0,
                // The draft model has no adapters.
                adapter: 0,
            });
            true
        });
    }

    /// Runs the batch, and samples a draft for each sequence whose text has been read completely. Sequences that need
    /// another run remain in `drafting`.
    fn run(
        &mut self,
        requests: &Requests,
        drafters: &mut BTreeMap<u64, RequestDrafter>,
    ) -> Result<(), RunError> {
        let Self { runner, drafting, cache, batch, digests, sampler, padded_logits, vocabulary, .. } = self;
        let result =
            runner.run(batch).and_then(|logits| logits.check_rows(batch.samples.len()).map(|()| logits));
        for scheduled in &batch.sequences {
            let range = scheduled.tokens.start as usize..scheduled.tokens.end as usize;
            let digest = |digest: &u64| if result.is_ok() { *digest } else { NO_DIGEST };
            let computed = digests[range].iter().map(digest);
            cache.write(batch.block_table_of(scheduled), scheduled.computed_tokens as usize, computed);
        }
        let logits = match result {
            Ok(logits) => logits,
            Err(error) => {
                // The copies may not have been performed, so the content of the cache is unknown.
                if !batch.copies.is_empty() {
                    cache.clear();
                }
                return Err(error);
            }
        };
        let (mut scheduled, mut logits) = (batch.sequences.iter(), logits.rows());
        drafting.retain_mut(|drafting| {
            let scheduled = scheduled.next().expect("invariant: each sequence is in the batch");
            drafting.cached_tokens += scheduled.tokens.len();
            let logits = (!scheduled.samples.is_empty())
                .then(|| logits.next().expect("invariant: each sampled token has logits"));
            let Some(proposer) = proposer(drafters, drafting.sequence) else { return false };
            // Any further tokens in the cache are drafts.
            proposer.cached_tokens = drafting.cached_tokens.min(proposer.text.len());
            let Some(logits) = logits else { return false };
            let Some(active) = requests.active.get(&drafting.sequence.request) else { return false };
            let before = digests[scheduled.tokens.end as usize - 1];
            let logits = resize_logits(logits, *vocabulary, padded_logits);
            let Some(token) = sample_draft(drafting, active, proposer, logits, sampler) else { return false };
            drafting.last_draft = Some((token, digest(before, token)));
            drafting.remaining > 0
        });
        Ok(())
    }
}

/// The proposer of a sequence, if the draft model proposes for it in this step.
fn proposer(
    drafters: &mut BTreeMap<u64, RequestDrafter>,
    sequence: SequenceId,
) -> Option<&mut ModelProposer> {
    drafters.get_mut(&sequence.request)?.sequences.get_mut(sequence.index as usize)?.active_model()
}

/// Samples a draft in the same way as the target's token at that position, but without the guide of the request, and
/// adds the draft to those of its sequence. `None` if the sampled token is not proposed, which ends the drafts of this
/// step.
fn sample_draft(
    drafting: &mut DraftingSequence,
    active: &ActiveRequest,
    proposer: &mut ModelProposer,
    logits: &[f32],
    sampler: &mut Sampler,
) -> Option<TokenId> {
    let ActiveRequest { sampling, stop, .. } = active;
    let index = drafting.sequence.index;
    let context = SamplingContext { sampling, stop, history: &drafting.history, index, allowed: None };
    let token = sampler.sample(logits, &context).ok()?;
    // A stop token is never a draft.
    if stop.stop_token_ids.contains(&token) {
        return None;
    }
    let threshold = proposer.params.confidence_threshold;
    if threshold > 0.0 && sampler.logprobs(logits, token, 0).chosen.logprob.exp() < threshold {
        return None;
    }
    proposer.drafts.push(token);
    drafting.history.push(token);
    drafting.remaining -= 1;
    Some(token)
}

/// Resizes logits to the size of the target's vocabulary, because models with the same vocabulary can have different
/// numbers of unused logits.
fn resize_logits<'a>(logits: &'a [f32], vocabulary: usize, padded: &'a mut Vec<f32>) -> &'a [f32] {
    if logits.len() >= vocabulary {
        return &logits[..vocabulary];
    }
    padded.clear();
    padded.extend_from_slice(logits);
    padded.resize(vocabulary, f32::NEG_INFINITY);
    padded
}
