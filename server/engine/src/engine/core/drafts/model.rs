//! The draft model: a runner of its own over the block tables of the target, which guesses before the target's step.
//!
//! ```text
//! schedule ─► rows with room for drafts ─► (what is new to it, one token after it) ─► guess ─┐
//!                                            ▲                                               │ as deep as there is room
//!                                            └───────────────── the guess ◄──────────────────┘
//! ```
//!
//! Guesses are drawn as the target's tokens are: by the same parameters, seed and place. So a draft model that says what
//! the target says is always right, not only where the most probable token is taken. Whatever goes wrong here costs
//! guesses, and nothing else.

use server_scheduler::{Batch, BlockId, ScheduledSequence, SequenceId, TokenId};

use super::Drafter;
use super::costs::Costs;
use super::text::{NOTHING, Text, Written, digest};
use crate::clock::Clock;
use crate::engine::core::{Live, Requests};
use crate::runner::{CacheLayout, DraftRunner, Logits, ModelRunner, RunError};
use crate::sampler::{Choice, History, Sampler};
use crate::sleep::SleepLevel;

/// See the module.
pub(super) struct DraftModel {
    runner: Box<dyn ModelRunner>,
    layout: CacheLayout,
    /// Tokens of the longest text that it reads.
    tokens_max: usize,
    /// Tokens in the target's vocabulary.
    vocabulary: usize,
    written: Written,
    /// Most tokens of a run in which there are others than known ones and guesses, and in the step that is planned.
    read_max: usize,
    read_now: usize,
    sampler: Sampler,
    is_broken: bool,
    // Kept from step to step for their memory.
    work: Vec<Work>,
    batch: Batch,
    /// Of each token of the batch.
    digests: Vec<u64>,
    blocks_taken: Vec<BlockId>,
    padded: Vec<f32>,
}

/// A sequence that is guessed.
struct Work {
    sequence: SequenceId,
    /// Where its block table is in the target's batch.
    blocks: std::ops::Range<u32>,
    /// Guesses there is room for.
    wanted: usize,
    /// Leading tokens that the model has; of text and guesses together once it has the text.
    known: usize,
    /// As sampling would see it had the guesses been sampled.
    history: History,
    /// The last guess, with the digest of the text up to it; none as long as it reads.
    last: Option<(TokenId, u64)>,
}

/// Most tokens that it reads before it is known what that costs.
const READ_FIRST: usize = 16;

impl DraftModel {
    /// `read_max` is how many tokens it reads in a step at most.
    pub(super) fn new(draft: DraftRunner, vocabulary: u32, read_max: u32) -> Self {
        let DraftRunner { runner, tokens_max } = draft;
        let layout = runner.layout();
        Self {
            written: Written::new(layout.blocks_total, layout.block_tokens),
            runner,
            layout,
            tokens_max: tokens_max as usize,
            vocabulary: vocabulary as usize,
            read_max: read_max as usize,
            read_now: 0,
            sampler: Sampler::new(),
            is_broken: false,
            work: Vec::new(),
            batch: Batch::default(),
            digests: Vec::new(),
            blocks_taken: Vec::new(),
            padded: Vec::new(),
        }
    }

    /// Gives back its memory. Nothing is asked until it is awake.
    pub(super) fn sleep(&mut self, level: SleepLevel) {
        self.runner.sleep(level);
        self.written.clear();
    }

    /// Has it again, or does without.
    pub(super) fn wake(&mut self) {
        if let Err(error) = self.runner.wake() {
            tracing::warn!("the draft model does not wake, and is done without: {error}");
            self.is_broken = true;
        }
    }

    /// Tokens that a block of its cache holds.
    pub(super) fn block_tokens(&self) -> u32 {
        self.layout.block_tokens
    }

    /// Whether it can guess up to `most` tokens after a text: one that it knows all tokens of, and that is not too long.
    pub(super) fn can_read(&self, text: &Text, most: usize) -> bool {
        let fits = text.len() + most <= self.tokens_max;
        !self.is_broken && fits && text.is_known_to(self.layout.vocabulary)
    }

    /// Guesses for the rows of `target` that have room for guesses of this model. There may be fewer than there is room for.
    pub(super) fn guess(
        &mut self,
        target: &Batch,
        requests: &mut Requests,
        (clock, costs): (&Clock, &mut Costs),
    ) {
        self.find_work(target, requests);
        self.read_now = if costs.knows_reading() { self.read_max } else { self.read_max.min(READ_FIRST) };
        let mut copies_made = false;
        while !self.work.is_empty() {
            self.fill(target, requests);
            if self.batch.sequences.is_empty() {
                break;
            }
            if !copies_made {
                self.batch.copies.clone_from(&target.copies);
                copies_made = true;
            }
            let began = clock.now();
            if let Err(error) = self.run(requests) {
                tracing::warn!("the draft model guesses nothing in this step: {error}");
                self.is_broken = error.fatal;
                break;
            }
            let seconds = (clock.now() - began).as_secs_f64();
            costs.ran(self.batch.sequences.len() as u32, self.batch.tokens.len() as u32, seconds);
        }
        self.work.clear();
        if !copies_made {
            target.copies.iter().for_each(|copy| self.written.forget(copy.to));
        }
    }

    /// Whose guesses are wanted. Those who have most to read come last: others do not wait for them.
    fn find_work(&mut self, target: &Batch, requests: &mut Requests) {
        let Self { work, written, .. } = self;
        target.copies.iter().for_each(|copy| written.copy(*copy));
        for row in target.sequences.iter().filter(|row| row.num_draft_tokens > 0) {
            let Some((live, index)) = find(requests, row.id) else { continue };
            let history = live.histories[index].clone();
            let drafter = live.drafter(index as u32);
            let Some(asking) = drafter.and_then(Drafter::asking_now) else { continue };
            debug_assert_eq!(
                asking.text.len() as u32,
                row.computed_tokens + 1,
                "invariant: what has drafts takes one token"
            );
            let known = written.known(target.block_table_of(row), &asking.text);
            asking.known = known;
            work.push(Work {
                sequence: row.id,
                blocks: row.blocks.clone(),
                wanted: row.num_draft_tokens as usize,
                known,
                history,
                last: None,
            });
        }
        let lag = |work: &Work| {
            let (live, index) = find_ref(requests, work.sequence);
            live.drafter_of(index as u32).text().map_or(0, Text::len).saturating_sub(work.known)
        };
        work.sort_by_key(lag);
    }

    /// The next run: for each sequence what is new of its text, or its last guess. Whose text does not fit, or is just being
    /// read for another, is left for another step.
    fn fill(&mut self, target: &Batch, requests: &Requests) {
        let Self { work, batch, digests, blocks_taken, layout, read_now, .. } = self;
        batch.clear();
        digests.clear();
        blocks_taken.clear();
        let block_tokens = layout.block_tokens as usize;
        work.retain_mut(|work| {
            let start = batch.tokens.len();
            let table = &target.blocks[work.blocks.start as usize..work.blocks.end as usize];
            let mut is_whole = true;
            if let Some((token, digest)) = work.last {
                batch.tokens.push(token);
                digests.push(digest);
            } else {
                let (live, index) = find_ref(requests, work.sequence);
                let Some(text) = live.drafter_of(index as u32).text() else { return false };
                let lag = text.len() - work.known;
                // A token that is known and a guess before it are no reading.
                let count = if lag <= 2 { lag } else { lag.min(read_now.saturating_sub(start)) };
                let range = work.known..work.known + count;
                let taken = &table[range.start / block_tokens..range.end.div_ceil(block_tokens)];
                if count == 0 || taken.iter().any(|block| blocks_taken.contains(block)) {
                    return false;
                }
                // Only blocks that others have too can be met again.
                blocks_taken.extend_from_slice(taken);
                batch.tokens.extend(text.tokens(range.clone()));
                digests.extend(text.digests(range));
                is_whole = count == lag;
            }
            let end = batch.tokens.len();
            let blocks = batch.blocks.len() as u32;
            batch.blocks.extend_from_slice(&table[..(work.known + end - start).div_ceil(block_tokens)]);
            let samples = batch.samples.len() as u32;
            if is_whole {
                batch.samples.push(work.sequence);
            }
            batch.sequences.push(ScheduledSequence {
                id: work.sequence,
                computed_tokens: work.known as u32,
                tokens: start as u32..end as u32,
                blocks: blocks..batch.blocks.len() as u32,
                samples: samples..batch.samples.len() as u32,
                scored_tokens: 0..0,
                num_draft_tokens: 0,
                evicted_tokens: 0,
                // Adapters are the model's: it guesses for all alike.
                adapter: 0,
            });
            true
        });
    }

    /// Runs the batch, and takes a guess for each row that is whole. What is left to do stays in `work`.
    fn run(&mut self, requests: &mut Requests) -> Result<(), RunError> {
        let Self { runner, work, written, batch, digests, sampler, padded, vocabulary, .. } = self;
        let outcome = runner.run(batch).and_then(|logits| check(&logits, batch).map(|()| logits));
        for row in &batch.sequences {
            let range = row.tokens.start as usize..row.tokens.end as usize;
            let computed =
                digests[range].iter().map(|digest| if outcome.is_ok() { *digest } else { NOTHING });
            written.write(batch.block_table_of(row), row.computed_tokens as usize, computed);
        }
        let logits = match outcome {
            Ok(logits) => logits,
            Err(error) => {
                // Copies may not have been made.
                if !batch.copies.is_empty() {
                    written.clear();
                }
                return Err(error);
            }
        };
        let (mut rows, mut logits) = (batch.sequences.iter(), logits.rows());
        work.retain_mut(|work| {
            let row = rows.next().expect("invariant: what is in work has a row");
            work.known += row.tokens.len();
            if row.samples.is_empty() {
                return false;
            }
            let logits =
                logits.next().expect("invariant: there is a row of logits for each row that samples");
            let Some((live, index)) = find(requests, work.sequence) else { return false };
            let before = digests[row.tokens.end as usize - 1];
            take_guess(work, (live, index), fit(logits, *vocabulary, padded), sampler)
                .map(|token| work.last = Some((token, digest(before, token))))
                .is_some_and(|()| work.wanted > 0)
        });
        Ok(())
    }
}

/// Draws a guess as its token would be drawn, and adds it to those of its sequence. None if there is no more to guess.
fn take_guess(
    work: &mut Work,
    (live, index): (&mut Live, usize),
    logits: &[f32],
    sampler: &mut Sampler,
) -> Option<TokenId> {
    let Live { sampling, stop, drafters, .. } = live;
    let choice = Choice { sampling, stop, history: &work.history, index: index as u32, allowed: None };
    let token = sampler.sample(logits, &choice).ok()?;
    let asking = drafters.as_mut()?.each.get_mut(index)?.asking_now()?;
    // What ends a sequence is sampled by itself.
    if stop.stop_token_ids.contains(&token) {
        return None;
    }
    let least = asking.rule.probability_min;
    if least > 0.0 && sampler.logprobs(logits, token, 0).chosen.logprob.exp() < least {
        return None;
    }
    asking.guess.push(token);
    work.history.push(token);
    work.wanted -= 1;
    Some(token)
}

/// Logits of the target's vocabulary: models of one vocabulary may have other numbers of logits that stand for no token.
fn fit<'a>(logits: &'a [f32], vocabulary: usize, padded: &'a mut Vec<f32>) -> &'a [f32] {
    if logits.len() >= vocabulary {
        return &logits[..vocabulary];
    }
    padded.clear();
    padded.extend_from_slice(logits);
    padded.resize(vocabulary, f32::NEG_INFINITY);
    padded
}

fn check(logits: &Logits<'_>, batch: &Batch) -> Result<(), RunError> {
    let (returned, wanted) = (logits.rows().len(), batch.samples.len());
    if returned == wanted {
        return Ok(());
    }
    Err(RunError { message: format!("{returned} rows of logits came back for {wanted}"), fatal: true })
}

fn find(requests: &mut Requests, sequence: SequenceId) -> Option<(&mut Live, usize)> {
    let index = sequence.index as usize;
    let live = requests.live.get_mut(&sequence.request)?;
    let has_drafter = live.drafter(index as u32).is_some();
    has_drafter.then_some((live, index))
}

/// As [`find`], of what was found already.
fn find_ref(requests: &Requests, sequence: SequenceId) -> (&Live, usize) {
    (&requests.live[&sequence.request], sequence.index as usize)
}
