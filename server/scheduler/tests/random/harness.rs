//! Performs random operations on a scheduler and checks the results.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cache::Cache;
use crate::random::Random;
use images::Encoder;
use server_scheduler::{
    Batch, BlockHash, CacheSize, Event, FinishReason, NewRequest, PromptImages, Rejection, SampledToken,
    ScheduledSequence, Scheduler, SchedulerConfig, SequenceId, SpanAttention, StopCriteria, TokenId,
};
use storage::Storage;

mod images;
mod storage;
mod tokens;

pub(crate) struct Setup {
    pub(crate) config: SchedulerConfig,
    pub(crate) cache: CacheSize,
    pub(crate) hash: fn(BlockHash, &[TokenId]) -> BlockHash,
    /// The number of different tokens. If this number is small, prompts share prefixes by chance.
    pub(crate) vocabulary: u32,
    /// Whether evicted blocks are stored and restored.
    pub(crate) spills: bool,
    /// Whether some prompts have images.
    pub(crate) images: bool,
}

/// Counts of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) submitted: u32,
    pub(crate) rejected: u32,
    pub(crate) finished: u32,
    pub(crate) aborted: u32,
    pub(crate) aborted_in_flight: u32,
    pub(crate) failed: u32,
    pub(crate) copies: u32,
    pub(crate) forked: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) computed_tokens: u32,
    pub(crate) scored: u32,
    /// The number of times that a sequence in lockstep continued from another sequence.
    pub(crate) reassigned: u32,
    pub(crate) drafted: u32,
    pub(crate) accepted: u32,
    pub(crate) preempted: u64,
    pub(crate) restored: u32,
    /// Restores that the harness ended early.
    pub(crate) ended_restores: u32,
    /// Restores that ended because a block was no longer stored.
    pub(crate) missing: u32,
    /// The number of times that the cache was cleared.
    pub(crate) cleared: u32,
    pub(crate) suspended: u32,
    pub(crate) evicted_tokens: u32,
    pub(crate) encoded_images: u32,
    pub(crate) failed_images: u32,
    /// A digest of the sequences and blocks of all steps.
    pub(crate) digest: u64,
}

/// The expected state of a sequence, which the harness retains after the sequence has ended.
struct SequenceRecord {
    request: u32,
    tokens: Vec<TokenId>,
    prompt_tokens: usize,
    adapter: u32,
    images: PromptImages,
    alive: bool,
}

struct Request {
    stop: StopCriteria,
    /// Number of prompt tokens, excluding the last one, whose logits are needed.
    to_score: u32,
    /// Number of these prompt tokens whose logits have been computed.
    scored: u32,
    started: bool,
    lockstep: bool,
    alive: u32,
    /// Number of steps, not counting empty ones, since the request became the oldest.
    steps_as_oldest: u32,
}

pub(crate) struct Harness {
    seed: u64,
    operation: u32,
    random: Random,
    config: SchedulerConfig,
    cache_size: CacheSize,
    vocabulary: u32,
    scheduler: Scheduler,
    cache: Cache,
    spills: bool,
    storage: Storage,
    has_images: bool,
    encoder: Encoder,
    batch: Batch,
    sequences: BTreeMap<SequenceId, SequenceRecord>,
    /// Suspended sequences, and some that were suspended and have ended.
    suspended: Vec<SequenceId>,
    requests: BTreeMap<u32, Request>,
    /// The IDs of all sequences ever submitted or rejected.
    ids: Vec<SequenceId>,
    totals: Totals,
}

/// Prints the seed and the operation when a test fails.
impl Drop for Harness {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}, operation {}: {:?}", self.seed, self.operation, self.totals);
        }
    }
}

impl Harness {
    pub(crate) fn new(seed: u64, setup: Setup) -> Self {
        let Setup { config, cache: cache_size, hash, vocabulary, spills, images: has_images } = setup;
        let mut scheduler = Scheduler::with_block_hash(config.clone(), cache_size, hash);
        scheduler.set_image_limits(images::LIMITS);
        if spills {
            scheduler.enable_spill(storage::key_scheme(2));
        }
        Self {
            seed,
            operation: 0,
            random: Random(seed),
            vocabulary,
            scheduler,
            spills,
            storage: Storage::default(),
            has_images,
            encoder: Encoder::default(),
            cache: Cache::new(cache_size.blocks_total, cache_size.block_tokens),
            cache_size,
            config,
            batch: Batch::default(),
            sequences: BTreeMap::new(),
            suspended: Vec::new(),
            requests: BTreeMap::new(),
            ids: Vec::new(),
            totals: Totals::default(),
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        Totals { preempted: self.scheduler.load().preemptions_total, ..self.totals }
    }

    pub(crate) fn operate(&mut self) {
        self.operation += 1;
        match self.random.below(16) {
            0..4 => self.submit(),
            4 => self.abort(),
            _ => self.step(),
        }
        self.check();
    }

    /// Runs steps until the scheduler is idle, and checks that no sequence or active block remains.
    pub(crate) fn drain(&mut self) {
        while !self.scheduler.is_idle() {
            self.operation += 1;
            self.step();
            self.check();
        }
        let load = self.scheduler.load();
        assert_eq!((load.blocks_active, load.running, load.waiting, load.uncomputed_tokens), (0, 0, 0, 0));
        assert_eq!(load.unencoded_image_tokens > 0, self.encoder.is_busy(), "no request expects an image");
        assert!(self.requests.is_empty(), "every request has ended");
    }

    fn check(&self) {
        self.scheduler.check_invariants();
        let load = self.scheduler.load();
        assert_eq!(load.blocks_free + load.blocks_evictable + load.blocks_active, load.blocks_total);
        let alive: u32 = self.requests.values().map(|request| request.alive).sum();
        assert_eq!(load.running + load.waiting, alive, "every sequence that has not ended is counted");
        assert_eq!(self.scheduler.is_idle(), alive == 0);
        self.check_image_load(&load);
    }

    fn submit(&mut self) {
        let random = &mut self.random;
        let count = if random.once_in(4) { random.below(self.config.max_num_seqs) + 2 } else { 1 };
        let prompt_tokens = random.below(self.config.max_model_len + 2);
        // About half of the prompts begin with a run of the same token.
        let repeated = if random.once_in(2) { random.below(prompt_tokens + 1) } else { 0 };
        let prompt: Vec<_> = (0..prompt_tokens)
            .map(|position| if position < repeated { 0 } else { random.below(self.vocabulary) })
            .collect();
        let stop = StopCriteria {
            stop_token_ids: if random.once_in(2) { vec![0] } else { vec![] },
            max_tokens: random.below(20),
            min_tokens: random.below(4),
        };
        let id = self.ids.len() as u64;
        let sequences: Vec<_> = (0..count).map(|index| SequenceId::new(id, index)).collect();
        self.ids.extend(&sequences);
        let waiting = self.scheduler.load().waiting;
        let mut request = NewRequest::new(id, count, prompt.clone(), stop.clone());
        request.lockstep = random.once_in(3);
        let lockstep = request.lockstep;
        request.scores_prompt = random.once_in(6);
        request.prefix_seed = if random.once_in(3) { BlockHash(7) } else { BlockHash::NONE };
        request.adapter = if random.once_in(12) { random.below(3) } else { 0 };
        request.tenant = u128::from(random.below(3));
        if self.has_images && random.once_in(2) {
            request.images = images::draw(random, prompt_tokens);
            request.scores_prompt &= request.images.attention == SpanAttention::Causal;
        }
        let (adapter, images) = (request.adapter, request.images.clone());
        let to_score = if request.scores_prompt { prompt_tokens.saturating_sub(1) } else { 0 };
        let result = self.scheduler.submit(request);
        let config = &self.config;
        let max_num_seqs = config.max_num_seqs.min(config.max_num_batched_tokens);
        let lockstep_len = self.cache_size.blocks_total / count * self.cache_size.block_tokens;
        let max_model_len =
            if lockstep { config.max_model_len.min(lockstep_len) } else { config.max_model_len };
        let expected = match () {
            () if prompt.is_empty() => Err(Rejection::EmptyPrompt),
            () if prompt_tokens + stop.max_tokens.max(1) > max_model_len => {
                Err(Rejection::TooLong { prompt_tokens, max_model_len })
            }
            () if count > max_num_seqs => {
                Err(Rejection::TooManySequences { num_sequences: count, max_num_seqs })
            }
            () if waiting + count > config.max_queue => {
                Err(Rejection::QueueFull { max_queue: config.max_queue })
            }
            () => Ok(()),
        };
        assert_eq!(result, expected);
        if result.is_err() {
            self.totals.rejected += 1;
            return;
        }
        let number = self.totals.submitted;
        self.totals.submitted += 1;
        for id in sequences {
            let tokens = prompt.clone();
            let prompt_tokens = tokens.len();
            let images = images.clone();
            let record =
                SequenceRecord { request: number, prompt_tokens, tokens, adapter, images, alive: true };
            self.sequences.insert(id, record);
        }
        let request =
            Request { stop, to_score, scored: 0, started: false, lockstep, alive: count, steps_as_oldest: 0 };
        self.requests.insert(number, request);
    }

    fn abort(&mut self) {
        let id = self.recent_id();
        self.scheduler.abort(id);
        if self.sequences.get(&id).is_some_and(|record| record.alive) {
            self.totals.aborted += 1;
            self.end(id);
        }
    }

    /// The ID of a recent sequence, which may have ended or may never have existed.
    fn recent_id(&mut self) -> SequenceId {
        let at = self.ids.len().saturating_sub(self.random.below(30) as usize);
        self.ids.get(at).copied().unwrap_or(SequenceId::new(self.ids.len() as u64, 0))
    }

    fn end(&mut self, id: SequenceId) {
        let record = self.sequences.get_mut(&id).expect("the sequence was submitted");
        assert!(std::mem::replace(&mut record.alive, false), "{id:?} ends once");
        let request = self.requests.get_mut(&record.request).expect("the request was submitted");
        request.alive -= 1;
        if request.alive == 0 {
            self.requests.remove(&record.request);
        }
    }

    fn step(&mut self) {
        let mut batch = std::mem::take(&mut self.batch);
        self.set_drafts();
        self.resume();
        self.check();
        self.restore_blocks();
        self.encode_images();
        self.scheduler.schedule(&mut batch);
        self.store_evicted();
        self.request_images();
        self.storage.request(self.scheduler.drain_restores());
        for sequence in &batch.sequences {
            let drafts = batch.drafts_of(sequence);
            batch.tokens[drafts].fill_with(|| self.random.below(self.vocabulary));
        }
        let waits = self.scheduler.is_idle()
            || self.scheduler.is_restoring()
            || self.scheduler.has_suspended()
            || self.scheduler.is_waiting_for_images();
        assert!(!batch.sequences.is_empty() || waits, "a scheduler with work schedules a batch");
        assert!(batch.sequences.is_empty() || !self.scheduler.is_idle());
        self.check();
        if batch.sequences.is_empty() {
            self.batch = batch;
            self.clear_cache();
            return;
        }
        self.check_batch(&batch);
        self.totals.copies += batch.copies.len() as u32;
        self.totals.computed_tokens += batch.tokens.len() as u32;
        let seen = batch
            .sequences
            .iter()
            .map(|sequence| sequence.id.request ^ u64::from(sequence.id.index) << 32)
            .chain(batch.blocks.iter().map(|block| block.0.into()));
        for number in seen {
            self.totals.digest = Random(self.totals.digest ^ number).next();
        }
        let aborted_before = self.totals.aborted;
        while self.random.once_in(8) {
            self.abort();
            self.check();
        }
        self.totals.aborted_in_flight += self.totals.aborted - aborted_before;
        self.cache.copy_blocks(&batch);
        if self.random.once_in(40) {
            self.fail(&batch);
        } else {
            self.run(&batch);
            self.commit(&batch);
        }
        let time = Duration::from_micros(self.random.below(10_000).into());
        self.scheduler.record_step(&batch, time);
        self.check_progress();
        self.batch = batch;
    }

    /// Checks a batch before it is run.
    fn check_batch(&self, batch: &Batch) {
        assert!(
            batch.tokens.len() <= self.config.max_num_batched_tokens as usize + self.excess_max(batch),
            "the budget is not exceeded"
        );
        assert!(batch.sequences.len() <= self.config.max_num_seqs as usize);
        let mut ends = (0, 0, 0);
        let mut written = BTreeMap::new();
        for sequence in &batch.sequences {
            assert_eq!(
                (sequence.tokens.start, sequence.blocks.start, sequence.samples.start),
                ends,
                "the ranges follow each other"
            );
            ends = (sequence.tokens.end, sequence.blocks.end, sequence.samples.end);
            let record = &self.sequences[&sequence.id];
            assert!(record.alive, "a scheduled sequence has not ended");
            let tokens = with_drafts(record, batch, sequence);
            let range =
                sequence.computed_tokens as usize..sequence.computed_tokens as usize + sequence.tokens.len();
            assert!(!range.is_empty());
            assert_eq!(batch.tokens_of(sequence), &tokens[range.clone()], "a sequence has its own tokens");
            assert_eq!(sequence.adapter, record.adapter, "a sequence has its own adapter");
            let generated = tokens.len() - record.prompt_tokens;
            let stop = &self.requests[&record.request].stop;
            assert!(
                sequence.num_draft_tokens == 0 || generated < stop.max_tokens as usize,
                "a token can follow the drafts"
            );
            let block_tokens = self.cache_size.block_tokens as usize;
            let num_blocks = (range.end - sequence.evicted_tokens as usize).div_ceil(block_tokens);
            assert_eq!(sequence.blocks.len(), num_blocks);
            assert!(
                sequence.evicted_tokens == 0 || range.end > record.prompt_tokens,
                "no block of a prompt is evicted while the prompt is computed"
            );
            assert_eq!(
                !sequence.samples.is_empty(),
                range.end == tokens.len(),
                "only a chunk at the end of a sequence samples a token"
            );
            self.check_scores(sequence);
            self.check_images(record, sequence);
            for &id in batch.samples_of(sequence) {
                assert!(self.sequences[&id].alive && self.sequences[&id].request == record.request);
            }
            let Request { lockstep, alive, .. } = self.requests[&record.request];
            if lockstep && !sequence.samples.is_empty() {
                let sampling =
                    batch.samples.iter().filter(|id| self.sequences[id].request == record.request).count();
                assert_eq!(sampling, alive as usize, "all sequences in lockstep sample, or none");
            }
            for block in &batch.block_table_of(sequence)[sequence.resident_tokens() as usize / block_tokens..]
            {
                assert_eq!(written.insert(*block, sequence.id), None, "only one sequence writes a block");
            }
        }
        assert_eq!(ends, (batch.tokens.len() as u32, batch.blocks.len() as u32, batch.samples.len() as u32));
        for sequence in &batch.sequences {
            for block in batch.block_table_of(sequence) {
                let writer = written.get(block).copied().unwrap_or(sequence.id);
                assert_eq!(writer, sequence.id, "a block that is written has no other readers");
            }
        }
    }

    /// Checks that the logits of every prompt token but the last, if they are needed, are computed once, in order, and
    /// before the first token is sampled.
    fn check_scores(&self, sequence: &ScheduledSequence) {
        let Request { to_score, scored, .. } = self.requests[&self.sequences[&sequence.id].request];
        let end = sequence.computed_tokens + sequence.tokens.len() as u32;
        let (first, count) = (
            sequence.scored_tokens.start + sequence.computed_tokens - sequence.tokens.start,
            sequence.scored_tokens.len() as u32,
        );
        assert_eq!(count, end.min(to_score).saturating_sub(scored), "all needed logits are computed");
        assert!(count == 0 || first == scored, "no logits are skipped or computed twice");
        assert!(sequence.samples.is_empty() || scored + count == to_score);
    }

    fn run(&mut self, batch: &Batch) {
        for sequence in &batch.sequences {
            self.cache.write(batch, sequence, &self.identities(batch, sequence));
        }
        for sequence in &batch.sequences {
            self.cache.read(batch, sequence, &self.identities(batch, sequence));
        }
    }

    /// The tokens of a sequence, including drafts, with unique numbers at image positions.
    fn identities(&self, batch: &Batch, sequence: &ScheduledSequence) -> Vec<TokenId> {
        let record = &self.sequences[&sequence.id];
        images::identities(record, &with_drafts(record, batch, sequence))
    }

    fn fail(&mut self, batch: &Batch) {
        for sequence in &batch.sequences {
            self.cache.spoil(batch, sequence);
        }
        let removed = self.scheduler.fail(batch);
        self.totals.failed += 1;
        let mut expected: Vec<_> =
            batch.sequences.iter().map(|sequence| self.sequences[&sequence.id].request).collect();
        expected.sort_unstable();
        for id in removed {
            assert!(expected.binary_search(&self.sequences[&id].request).is_ok(), "{id:?} was in the batch");
            self.end(id);
        }
        for sequence in &batch.sequences {
            assert!(!self.sequences[&sequence.id].alive, "all sequences of the batch are removed");
        }
    }

    fn commit(&mut self, batch: &Batch) {
        let sampled = self.sample(batch);
        if self.config.kv_eviction_tokens.is_some() {
            let scores: Vec<f32> = batch.blocks.iter().map(|_| self.random.below(100) as f32).collect();
            self.scheduler.record_block_scores(batch, &scores);
            self.totals.evicted_tokens +=
                batch.sequences.iter().map(|sequence| sequence.evicted_tokens).sum::<u32>();
        }
        let mut events = Vec::new();
        self.scheduler.commit(batch, &sampled, &mut events);
        let tokens_of = |id: SequenceId| self.sequences[&id].tokens.clone();
        let mut tokens: Vec<_> = sampled.iter().map(|sampled| tokens_of(sampled.parent)).collect();
        for sequence in &batch.sequences {
            let request = self.sequences[&sequence.id].request;
            // The request may have been aborted in the meantime.
            if let Some(request) = self.requests.get_mut(&request) {
                request.scored += sequence.scored_tokens.len() as u32;
            }
            self.totals.scored += sequence.scored_tokens.len() as u32;
            self.totals.forked += (sequence.samples.len() as u32).saturating_sub(1);
            self.totals.drafted += sequence.num_draft_tokens;
            let range = sequence.samples.start as usize..sequence.samples.end as usize;
            for (&SampledToken { sequence: id, accepted_drafts, .. }, tokens) in
                sampled[range.clone()].iter().zip(&mut tokens[range])
            {
                if self.sequences[&id].alive {
                    let accepted = batch.drafts_of(sequence).len().min(accepted_drafts as usize);
                    tokens.extend_from_slice(&batch.tokens[batch.drafts_of(sequence)][..accepted]);
                    self.totals.accepted += accepted as u32;
                }
            }
        }
        self.apply_sampled(&sampled, tokens, &events);
    }

    /// Appends the sampled tokens to `tokens`, which are those of each sequence's parent, and checks the events.
    fn apply_sampled(&mut self, sampled: &[SampledToken], tokens: Vec<Vec<TokenId>>, events: &[Event]) {
        let mut expected = Vec::new();
        for (&SampledToken { sequence: id, token, .. }, tokens) in sampled.iter().zip(tokens) {
            let record = self.sequences.get_mut(&id).expect("the sequence was submitted");
            if !record.alive {
                continue;
            }
            record.tokens = tokens;
            let Some(token) = token else {
                self.suspended.push(id);
                self.totals.suspended += 1;
                continue;
            };
            record.tokens.push(token);
            let generated = (record.tokens.len() - record.prompt_tokens) as u32;
            let stop = &self.requests[&record.request].stop;
            if stop.stop_token_ids.contains(&token) && generated > stop.min_tokens {
                expected.push((id, FinishReason::Stop));
            } else if generated >= stop.max_tokens {
                expected.push((id, FinishReason::Length));
            }
        }
        let mut finished = Vec::new();
        for event in events {
            match *event {
                Event::Started { sequence, cached_tokens } => {
                    let record = &self.sequences[&sequence];
                    assert!(record.alive && (cached_tokens as usize) < record.prompt_tokens);
                    let request = self.requests.get_mut(&record.request).expect("the request was submitted");
                    assert!(!std::mem::replace(&mut request.started, true), "a request starts once");
                    self.totals.cached_tokens += cached_tokens;
                }
                Event::Finished { sequence, reason } => {
                    let request = self.sequences[&sequence].request;
                    assert!(self.requests[&request].started, "a request starts before it ends");
                    self.totals.finished += 1;
                    self.end(sequence);
                    finished.push((sequence, reason));
                }
            }
        }
        assert_eq!(finished, expected);
    }

    /// Sets the number of draft tokens of random sequences, which can be in any state or not exist.
    fn set_drafts(&mut self) {
        for _ in 0..self.random.below(12) {
            let id = self.recent_id();
            self.scheduler.set_num_draft_tokens(id, self.random.below(9));
        }
    }

    /// Checks that the oldest request ends in time. The bound is twice the number of steps in which `max_num_seqs + 1`
    /// sequences of the maximum length are computed one after the other, one token per step: once for the sequences
    /// that the request may wait for, and once for the request itself.
    fn check_progress(&mut self) {
        let bound = 2 * (self.config.max_num_seqs + 1) * self.config.max_model_len;
        if let Some((number, oldest)) = self.requests.iter_mut().next() {
            oldest.steps_as_oldest += 1;
            assert!(oldest.steps_as_oldest <= bound, "request {number} starves");
        }
    }
}

/// The tokens of a sequence, followed by its drafts.
fn with_drafts(record: &SequenceRecord, batch: &Batch, sequence: &ScheduledSequence) -> Vec<TokenId> {
    [&record.tokens, &batch.tokens[batch.drafts_of(sequence)]].concat()
}
