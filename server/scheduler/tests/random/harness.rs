//! Drives a scheduler at random and knows what it ought to do.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cache::Cache;
use crate::random::Random;
use kept::Kept;
use server_scheduler::{
    Batch, BlockHash, Event, FinishReason, NewRequest, Rejected, Row, Sampled, Scheduler, SchedulerConfig,
    SequenceId, StopRule, TokenId,
};

mod kept;
mod tokens;

pub(crate) struct Setup {
    pub(crate) config: SchedulerConfig,
    pub(crate) hash: fn(BlockHash, &[TokenId]) -> BlockHash,
    /// Few tokens: prompts share prefixes by chance.
    pub(crate) vocabulary: u32,
    /// Whether evicted blocks are kept, and may come back.
    pub(crate) keeps: bool,
}

/// How often things happened.
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
    /// Sequences in step that took over the tokens of another.
    pub(crate) taken_over: u32,
    pub(crate) drafted: u32,
    pub(crate) accepted: u32,
    pub(crate) preempted: u64,
    pub(crate) read_back: u32,
    /// Readings that were given up, and those of which a block was gone.
    pub(crate) late: u32,
    pub(crate) unreadable: u32,
    /// Times the cache was given up, with nothing in work.
    pub(crate) slept: u32,
    /// Sequences that were suspended.
    pub(crate) suspended: u32,
    /// Tokens that rows had left.
    pub(crate) left: u32,
    /// Of which sequences were in which blocks, in all steps.
    pub(crate) digest: u64,
}

/// What the harness knows of a sequence, for ever.
struct Known {
    request: u32,
    tokens: Vec<TokenId>,
    prompt_tokens: usize,
    adapter: u32,
    alive: bool,
}

struct Request {
    stop: StopRule,
    /// Tokens of the prompt whose logits are wanted, and of those that were computed.
    to_score: u32,
    scored: u32,
    started: bool,
    in_step: bool,
    alive: u32,
    /// Steps since it is the oldest.
    steps_as_oldest: u32,
}

pub(crate) struct Harness {
    seed: u64,
    operation: u32,
    random: Random,
    config: SchedulerConfig,
    vocabulary: u32,
    scheduler: Scheduler,
    cache: Cache,
    keeps: bool,
    kept: Kept,
    batch: Batch,
    sequences: BTreeMap<SequenceId, Known>,
    /// Sequences that are suspended, and some that were and have ended.
    suspended: Vec<SequenceId>,
    requests: BTreeMap<u32, Request>,
    ids: u64,
    totals: Totals,
}

/// Tells where it was when a test fails.
impl Drop for Harness {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}, operation {}: {:?}", self.seed, self.operation, self.totals);
        }
    }
}

impl Harness {
    pub(crate) fn new(seed: u64, setup: Setup) -> Self {
        let Setup { config, hash, vocabulary, keeps } = setup;
        let mut scheduler = Scheduler::with_block_hash(config.clone(), hash);
        if keeps {
            scheduler.tell_evicted(kept::keying(2));
        }
        Self {
            seed,
            operation: 0,
            random: Random(seed),
            vocabulary,
            scheduler,
            keeps,
            kept: Kept::default(),
            cache: Cache::new(config.blocks_total, config.block_tokens),
            config,
            batch: Batch::default(),
            sequences: BTreeMap::new(),
            suspended: Vec::new(),
            requests: BTreeMap::new(),
            ids: 0,
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

    /// Steps until nothing is left, and checks that nothing is.
    pub(crate) fn drain(&mut self) {
        while !self.scheduler.is_idle() {
            self.operation += 1;
            self.step();
            self.check();
        }
        let load = self.scheduler.load();
        assert_eq!((load.blocks_active, load.running, load.waiting, load.uncomputed_tokens), (0, 0, 0, 0));
        assert!(self.requests.is_empty(), "every request has ended");
    }

    fn check(&self) {
        self.scheduler.check_invariants();
        let load = self.scheduler.load();
        assert_eq!(load.blocks_free + load.blocks_evictable + load.blocks_active, load.blocks_total);
        let alive: u32 = self.requests.values().map(|request| request.alive).sum();
        assert_eq!(load.running + load.waiting, alive, "every sequence that has not ended is counted");
        assert_eq!(self.scheduler.is_idle(), alive == 0);
    }

    fn submit(&mut self) {
        let random = &mut self.random;
        let count = if random.once_in(4) { random.below(self.config.sequences_max) + 2 } else { 1 };
        let prompt_tokens = random.below(self.config.sequence_tokens_max + 2);
        // Half of the prompts start with the same token over and over.
        let monotonous = if random.once_in(2) { random.below(prompt_tokens + 1) } else { 0 };
        let prompt: Vec<_> = (0..prompt_tokens)
            .map(|position| if position < monotonous { 0 } else { random.below(self.vocabulary) })
            .collect();
        let stop = StopRule {
            tokens: if random.once_in(2) { vec![0] } else { vec![] },
            tokens_max: random.below(20),
            tokens_min: random.below(4),
        };
        let sequences: Vec<_> = (self.ids..).map(SequenceId).take(count as usize).collect();
        self.ids += u64::from(count);
        let waiting = self.scheduler.load().waiting;
        let mut request = NewRequest::new(sequences.clone(), prompt.clone(), stop.clone());
        request.in_step = random.once_in(3);
        let in_step = request.in_step;
        request.scores_prompt = random.once_in(6);
        request.root = if random.once_in(3) { BlockHash(7) } else { BlockHash::ROOT };
        request.adapter = if random.once_in(12) { random.below(3) } else { 0 };
        request.tenant = u128::from(random.below(3));
        let adapter = request.adapter;
        let to_score = if request.scores_prompt { prompt_tokens.saturating_sub(1) } else { 0 };
        let result = self.scheduler.submit(request);
        let config = &self.config;
        let sequences_max = config.sequences_max.min(config.batch_tokens_max);
        let each = config.blocks_total / count * config.block_tokens;
        let sequence_tokens_max =
            if in_step { config.sequence_tokens_max.min(each) } else { config.sequence_tokens_max };
        let expected = match () {
            () if prompt.is_empty() => Err(Rejected::EmptyPrompt),
            () if prompt_tokens + stop.tokens_max.max(1) > sequence_tokens_max => {
                Err(Rejected::TooLong { prompt_tokens, sequence_tokens_max })
            }
            () if count > sequences_max => {
                Err(Rejected::TooManySequences { sequences: count, sequences_max })
            }
            () if waiting + count > config.waiting_max => Err(Rejected::QueueFull),
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
            let known = Known { request: number, prompt_tokens: tokens.len(), tokens, adapter, alive: true };
            self.sequences.insert(id, known);
        }
        let request =
            Request { stop, to_score, scored: 0, started: false, in_step, alive: count, steps_as_oldest: 0 };
        self.requests.insert(number, request);
    }

    fn abort(&mut self) {
        // Now and then one that has ended, or never was.
        let id = SequenceId(self.ids.saturating_sub(u64::from(self.random.below(30))));
        self.scheduler.abort(id);
        if self.sequences.get(&id).is_some_and(|known| known.alive) {
            self.totals.aborted += 1;
            self.end(id);
        }
    }

    fn end(&mut self, id: SequenceId) {
        let known = self.sequences.get_mut(&id).expect("a known one");
        assert!(std::mem::replace(&mut known.alive, false), "{id:?} ends once");
        let request = self.requests.get_mut(&known.request).expect("a known one");
        request.alive -= 1;
        if request.alive == 0 {
            self.requests.remove(&known.request);
        }
    }

    fn step(&mut self) {
        let mut batch = std::mem::take(&mut self.batch);
        self.propose();
        self.resume();
        self.check();
        self.read_back();
        self.scheduler.schedule(&mut batch);
        self.keep();
        self.kept.ask(self.scheduler.take_reads());
        for row in &batch.rows {
            let drafts = batch.row_drafts(row);
            batch.tokens[drafts].fill_with(|| self.random.below(self.vocabulary));
        }
        let waits = self.scheduler.is_idle() || self.scheduler.is_reading() || self.scheduler.has_suspended();
        assert!(!batch.rows.is_empty() || waits, "whoever has work gets some");
        assert!(batch.rows.is_empty() || !self.scheduler.is_idle());
        self.check();
        if batch.rows.is_empty() {
            self.batch = batch;
            self.sleep();
            return;
        }
        self.check_batch(&batch);
        self.totals.copies += batch.copies.len() as u32;
        self.totals.computed_tokens += batch.tokens.len() as u32;
        let seen = batch
            .rows
            .iter()
            .map(|row| row.sequence.0)
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
        if self.config.step_time_max.is_some() {
            let time = Duration::from_micros(self.random.below(10_000).into());
            self.scheduler.took(&batch, time);
        }
        self.check_progress();
        self.batch = batch;
    }

    /// What can be seen of a batch without running it.
    fn check_batch(&self, batch: &Batch) {
        assert!(batch.tokens.len() <= self.config.batch_tokens_max as usize, "the budget is kept");
        assert!(batch.rows.len() <= self.config.sequences_max as usize);
        let mut ends = (0, 0, 0);
        let mut written = BTreeMap::new();
        for row in &batch.rows {
            assert_eq!((row.tokens.start, row.blocks.start, row.samples.start), ends, "one after the other");
            ends = (row.tokens.end, row.blocks.end, row.samples.end);
            let known = &self.sequences[&row.sequence];
            assert!(known.alive, "nobody computes for the dead");
            let tokens = with_drafts(known, batch, row);
            let range = row.past as usize..row.past as usize + row.tokens.len();
            assert!(!range.is_empty());
            assert_eq!(batch.row_tokens(row), &tokens[range.clone()], "a row has its own tokens");
            assert_eq!(row.adapter, known.adapter, "a row has its own adapter");
            let generated = tokens.len() - known.prompt_tokens;
            let stop = &self.requests[&known.request].stop;
            assert!(row.drafts == 0 || generated < stop.tokens_max as usize, "a token can follow");
            let block_tokens = self.config.block_tokens as usize;
            let held = (range.end - row.left as usize).div_ceil(block_tokens);
            assert_eq!(row.blocks.len(), held);
            assert!(
                row.left == 0 || range.end > known.prompt_tokens,
                "nothing of a prompt is left while it is computed"
            );
            assert_eq!(!row.samples.is_empty(), range.end == tokens.len(), "sampled at the end only");
            self.check_scores(row);
            for &id in batch.row_samples(row) {
                assert!(self.sequences[&id].alive && self.sequences[&id].request == known.request);
            }
            let Request { in_step, alive, .. } = self.requests[&known.request];
            if in_step && !row.samples.is_empty() {
                let sampling =
                    batch.samples.iter().filter(|id| self.sequences[id].request == known.request).count();
                assert_eq!(sampling, alive as usize, "all of them or none");
            }
            for block in &batch.row_blocks(row)[row.cached() as usize / block_tokens..] {
                assert_eq!(written.insert(*block, row.sequence), None, "a block has one writer");
            }
        }
        assert_eq!(ends, (batch.tokens.len() as u32, batch.blocks.len() as u32, batch.samples.len() as u32));
        for row in &batch.rows {
            for block in batch.row_blocks(row) {
                let writer = written.get(block).copied().unwrap_or(row.sequence);
                assert_eq!(writer, row.sequence, "nobody reads what another writes");
            }
        }
    }

    /// The logits of every token of the prompt but the last are wanted once, in order, and all before the first
    /// token is sampled.
    fn check_scores(&self, row: &Row) {
        let Request { to_score, scored, .. } = self.requests[&self.sequences[&row.sequence].request];
        let end = row.past + row.tokens.len() as u32;
        let (first, count) = (row.scored.start + row.past - row.tokens.start, row.scored.len() as u32);
        assert_eq!(count, end.min(to_score).saturating_sub(scored), "what is wanted is in the row");
        assert!(count == 0 || first == scored, "nothing is left out and nothing comes twice");
        assert!(row.samples.is_empty() || scored + count == to_score);
    }

    fn run(&mut self, batch: &Batch) {
        for row in &batch.rows {
            self.cache.write(batch, row, &with_drafts(&self.sequences[&row.sequence], batch, row));
        }
        for row in &batch.rows {
            self.cache.read(batch, row, &with_drafts(&self.sequences[&row.sequence], batch, row));
        }
    }

    fn fail(&mut self, batch: &Batch) {
        for row in &batch.rows {
            self.cache.spoil(batch, row);
        }
        let dropped = self.scheduler.fail(batch);
        self.totals.failed += 1;
        let mut expected: Vec<_> =
            batch.rows.iter().map(|row| self.sequences[&row.sequence].request).collect();
        expected.sort_unstable();
        for id in dropped {
            assert!(expected.binary_search(&self.sequences[&id].request).is_ok(), "{id:?} was in the batch");
            self.end(id);
        }
        for row in &batch.rows {
            assert!(!self.sequences[&row.sequence].alive, "all of the batch are dropped");
        }
    }

    fn commit(&mut self, batch: &Batch) {
        let sampled = self.sample(batch);
        if self.config.sequence_blocks_max.is_some() {
            let weights: Vec<f32> = batch.blocks.iter().map(|_| self.random.below(100) as f32).collect();
            self.scheduler.attended(batch, &weights);
            self.totals.left += batch.rows.iter().map(|row| row.left).sum::<u32>();
        }
        let mut events = Vec::new();
        self.scheduler.commit(batch, &sampled, &mut events);
        let before = |from: SequenceId| self.sequences[&from].tokens.clone();
        let mut taken: Vec<_> = sampled.iter().map(|sampled| before(sampled.from)).collect();
        for row in &batch.rows {
            let request = self.sequences[&row.sequence].request;
            // Whoever was aborted meanwhile may have been the last of the request.
            if let Some(request) = self.requests.get_mut(&request) {
                request.scored += row.scored.len() as u32;
            }
            self.totals.scored += row.scored.len() as u32;
            self.totals.forked += (row.samples.len() as u32).saturating_sub(1);
            self.totals.drafted += row.drafts;
            let range = row.samples.start as usize..row.samples.end as usize;
            for (&Sampled { sequence, accepted, .. }, taken) in
                sampled[range.clone()].iter().zip(&mut taken[range])
            {
                if self.sequences[&sequence].alive {
                    let accepted = batch.row_drafts(row).len().min(accepted as usize);
                    taken.extend_from_slice(&batch.tokens[batch.row_drafts(row)][..accepted]);
                    self.totals.accepted += accepted as u32;
                }
            }
        }
        self.take_in(&sampled, taken, &events);
    }

    /// Takes in what was sampled after the tokens in `taken`, and checks what the scheduler says of it.
    fn take_in(&mut self, sampled: &[Sampled], taken: Vec<Vec<TokenId>>, events: &[Event]) {
        let mut expected = Vec::new();
        for (&Sampled { sequence: id, token, .. }, taken) in sampled.iter().zip(taken) {
            let known = self.sequences.get_mut(&id).expect("a known one");
            if !known.alive {
                continue;
            }
            known.tokens = taken;
            let Some(token) = token else {
                self.suspended.push(id);
                self.totals.suspended += 1;
                continue;
            };
            known.tokens.push(token);
            let generated = (known.tokens.len() - known.prompt_tokens) as u32;
            let stop = &self.requests[&known.request].stop;
            if stop.tokens.contains(&token) && generated > stop.tokens_min {
                expected.push((id, FinishReason::Stop));
            } else if generated >= stop.tokens_max {
                expected.push((id, FinishReason::Length));
            }
        }
        let mut finished = Vec::new();
        for event in events {
            match *event {
                Event::Started { sequence, cached_tokens } => {
                    let known = &self.sequences[&sequence];
                    assert!(known.alive && (cached_tokens as usize) < known.prompt_tokens);
                    let request = self.requests.get_mut(&known.request).expect("a known one");
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

    /// Any sequence may be to have drafts, whatever it is doing.
    fn propose(&mut self) {
        for _ in 0..self.random.below(12) {
            let id = SequenceId(self.ids.saturating_sub(u64::from(self.random.below(30))));
            self.scheduler.propose(id, self.random.below(9));
        }
    }

    /// The oldest request is done when every running sequence could have been computed twice, one after the
    /// other: once for what it may have to wait for, once for itself.
    fn check_progress(&mut self) {
        let bound = 2 * (self.config.sequences_max + 1) * self.config.sequence_tokens_max;
        if let Some((number, oldest)) = self.requests.iter_mut().next() {
            oldest.steps_as_oldest += 1;
            assert!(oldest.steps_as_oldest <= bound, "request {number} does not starve");
        }
    }
}

/// The tokens of a sequence, and the drafts of its row.
fn with_drafts(known: &Known, batch: &Batch, row: &Row) -> Vec<TokenId> {
    [&known.tokens, &batch.tokens[batch.row_drafts(row)]].concat()
}
