//! The loop on the engine's thread: commands, schedule, run, sample, commit, events.

use std::sync::mpsc;
use std::time::Duration;

use server_scheduler::{
    Batch, BlockKeyScheme, Event as Change, FinishReason, SampledToken, Scheduler, SchedulerConfig,
    SequenceId,
};

use crate::clock::Clock;
use crate::handle::{Command, Shared};
use crate::report::{EngineLoad, EngineState, Observer, Rate, StepReport};
use crate::request::Failure;
use crate::runner::{Logits, ModelRunner, RunError, Runners};
use crate::sampler::Sampler;
use crate::sleep::SleepLevel;
use crate::spill::Spill;
use crate::waker::Waker;
pub(crate) use drafts::Drafters;
use drafts::Drafting;
use guides::Guides;
use requests::{Live, Requests};
use samples::{Outcome, Samples};

mod drafts;
mod guides;
mod requests;
mod samples;
mod sleep;
mod spilling;

/// All that the engine's thread owns.
pub(super) struct Core {
    /// Before the runner: streams end even if that takes long to be dropped.
    requests: Requests,
    commands: mpsc::Receiver<Command>,
    waker: Waker,
    scheduler: Scheduler,
    runner: Box<dyn ModelRunner>,
    /// If evicted blocks are kept.
    spill: Option<Spill>,
    sampler: Sampler,
    guides: Guides,
    drafting: Drafting,
    observer: Observer,
    state: EngineState,
    /// What was given back, if it sleeps.
    asleep: Option<SleepLevel>,
    prefill_rate: Rate,
    decode_rate: Rate,
    preemptions_total: u64,
    /// Whether nothing can be computed before blocks have been read, or guides are ready.
    is_stalled: bool,
    // Kept from step to step for their memory.
    batch: Batch,
    samples: Samples,
    changes: Vec<Change>,
    /// Sequences that ended by their guides.
    ended: Vec<SequenceId>,
    report: StepReport,
}

/// What connects the engine's thread with others.
pub(super) struct Links {
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) waker: Waker,
    pub(super) clock: Clock,
    pub(super) spill: Option<(Spill, BlockKeyScheme)>,
}

impl Core {
    pub(super) fn new(
        config: SchedulerConfig,
        Runners { target: runner, draft }: Runners,
        observer: Observer,
        Links { commands, waker, clock, spill }: Links,
    ) -> Self {
        let vocabulary = runner.layout().vocabulary;
        let guides = Guides::new(vocabulary, clock, waker.clone());
        let drafting = Drafting::new(draft, vocabulary, config.max_chunk_tokens);
        let mut scheduler = Scheduler::new(config);
        let spill = spill.map(|(spill, keying)| {
            scheduler.enable_spill(keying);
            spill
        });
        Self {
            requests: Requests::default(),
            commands,
            waker,
            scheduler,
            runner,
            spill,
            sampler: Sampler::new(),
            guides,
            drafting,
            observer,
            state: EngineState::Starting,
            asleep: None,
            prefill_rate: Rate::default(),
            decode_rate: Rate::default(),
            preemptions_total: 0,
            is_stalled: false,
            batch: Batch::default(),
            samples: Samples::default(),
            changes: Vec::new(),
            ended: Vec::new(),
            report: StepReport::default(),
        }
    }

    /// Serves until it is stopped or has drained.
    ///
    /// # Errors
    /// The runner is of no further use.
    pub(super) fn run(&mut self, shared: &Shared) -> Result<(), RunError> {
        self.state = EngineState::Serving;
        while self.take_commands(shared)? {
            self.requests.drop_abandoned(&mut self.scheduler);
            self.look_at_spill(shared);
            if !self.scheduler.is_idle() && self.is_awake(shared)? {
                self.step(shared)?;
            }
        }
        Ok(())
    }

    /// Takes all commands there are, and waits for one if there is nothing to compute. False at the end.
    fn take_commands(&mut self, shared: &Shared) -> Result<bool, RunError> {
        loop {
            let command = if self.is_stalled {
                match self.await_news(shared) {
                    Some(command) => command,
                    None => return Ok(true),
                }
            } else if !self.scheduler.is_idle() {
                match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(_) => return Ok(true),
                }
            } else if self.state == EngineState::Draining {
                match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(_) => {
                        // Nothing is left to do: what is cached is of use to whoever serves after this.
                        self.give_up_cached();
                        return Ok(false);
                    }
                }
            } else {
                self.look_at_spill(shared);
                self.publish(shared);
                match self.commands.recv() {
                    Ok(command) => command,
                    Err(_) => return Ok(false),
                }
            };
            match command {
                Command::Submit(submission) => self.requests.submit(*submission, &mut self.scheduler),
                Command::Drain => self.state = EngineState::Draining,
                Command::Sleep(command) => self.change_sleep(command, shared)?,
                Command::Stop => return Ok(false),
                Command::Wake => self.waker.woke(),
            }
        }
    }

    fn step(&mut self, shared: &Shared) -> Result<(), RunError> {
        let began = shared.clock.now();
        self.report.clear();
        self.resume();
        self.drafting.propose(&mut self.requests, &mut self.scheduler);
        self.scheduler.schedule(&mut self.batch);
        self.spill_scheduled(began);
        self.publish(shared);
        if self.batch.sequences.is_empty() {
            let waits = self.scheduler.is_restoring() || self.scheduler.has_suspended();
            assert!(
                waits || self.scheduler.is_idle(),
                "invariant: if it has work and waits for nothing, it has a row"
            );
            self.is_stalled = waits;
            if self.report.generated_tokens + self.report.requests_failed > 0 {
                (self.observer)(&self.report);
            }
            return Ok(());
        }
        let tools = (&shared.clock, &mut self.report);
        self.drafting.fill(&mut self.batch, &mut self.requests, tools);
        self.count_batch();

        self.report.guided_sequences = self.guides.send(&self.batch, &mut self.requests);
        let run_began = shared.clock.now();
        let outcome = self.runner.run(&self.batch);
        let run_ended = shared.clock.now();
        self.guides.collect_soon(&mut self.requests);
        self.report.run_time = run_ended - run_began;
        self.report.guide_time = shared.clock.now() - run_ended;
        match outcome {
            Ok(logits) => {
                check(&logits, &self.batch)?;
                let Self { batch, requests, sampler, drafting, .. } = self;
                self.samples.clear();
                self.samples.take(batch, logits, requests, (sampler, drafting));
                self.finish_step(began);
            }
            Err(error) if error.fatal => return Err(error),
            Err(error) => self.fail_step(&error),
        }

        self.report.step_time = shared.clock.now() - began;
        let StepReport { prefill_tokens, generated_tokens, step_time, .. } = self.report;
        if self.requests.have_drafters {
            self.drafting.took(&self.report);
        }
        self.scheduler.record_step(&self.batch, step_time);
        self.prefill_rate.add(prefill_tokens, step_time);
        self.decode_rate.add(generated_tokens, step_time);
        (self.observer)(&self.report);
        Ok(())
    }

    /// Samples sequences that were suspended and whose guides are ready by now.
    fn resume(&mut self) {
        self.guides.collect(&mut self.requests);
        if self.requests.suspended.is_empty() {
            return;
        }
        let Self { requests, scheduler, samples, sampler, guides, changes, .. } = self;
        samples.clear();
        // While any is away the engine is woken when it is done, and tries again.
        samples.take_suspended(requests, !guides.are_away(), sampler);
        let failed = fail(samples, requests, scheduler);
        self.report.requests_failed += failed;
        changes.clear();
        scheduler.resume(&samples.tokens, changes);
        self.deliver();
    }

    /// Commits what was sampled and tells the clients.
    fn finish_step(&mut self, began: Duration) {
        let Self { requests, scheduler, samples, changes, report, batch, .. } = self;
        report.requests_failed += fail(samples, requests, scheduler);
        let weights = self.runner.block_weights();
        if !weights.is_empty() {
            scheduler.record_block_scores(batch, weights);
        }
        changes.clear();
        scheduler.commit(batch, &samples.tokens, changes);
        for change in &*changes {
            if let &Change::Started { sequence, cached_tokens } = change {
                requests.started(sequence, cached_tokens);
                if let Some(live) = requests.live.get(&sequence.request) {
                    report.prompt_tokens += live.prompt_tokens;
                    report.cached_tokens += cached_tokens;
                    report.queue_times.push(began.saturating_sub(live.submitted));
                }
            }
        }
        // Before the first token: that is sampled from the end of the prompt. A prompt of one token has no scored row,
        // and is computed in one.
        let scoring =
            batch.sequences.iter().filter(|row| row.computed_tokens == 0 || !row.scored_tokens.is_empty());
        scoring.for_each(|row| requests.scored(row.id));
        self.deliver();
    }

    /// Tells the clients what was sampled, and lets go of the sequences that have ended by it.
    fn deliver(&mut self) {
        let Self { requests, scheduler, samples, changes, ended, report, .. } = self;
        ended.clear();
        let mut earlier = samples.earlier.drain(..);
        for (&SampledToken { sequence, accepted_drafts, token, .. }, outcome) in
            samples.tokens.iter().zip(samples.outcomes.drain(..))
        {
            for (token, logprobs) in earlier.by_ref().take(accepted_drafts as usize) {
                report.generated_tokens += u32::from(requests.token(sequence, token, logprobs));
            }
            report.accepted_tokens += accepted_drafts;
            let Some(token) = token else {
                report.suspended_sequences += 1;
                continue;
            };
            let logprobs = match outcome {
                Outcome::Token(logprobs) => logprobs,
                Outcome::Last(logprobs) => {
                    ended.push(sequence);
                    logprobs
                }
                Outcome::Nothing => {
                    ended.push(sequence);
                    continue;
                }
                Outcome::Beam => {
                    report.generated_tokens += 1;
                    continue;
                }
            };
            report.generated_tokens += u32::from(requests.token(sequence, token, logprobs));
        }
        for change in &*changes {
            if let &Change::Finished { sequence, reason } = change
                && !ended.contains(&sequence)
            {
                requests.finished(sequence, reason);
            }
        }
        // Complete, even if it has as many tokens as it may.
        for &sequence in &*ended {
            scheduler.abort(sequence);
            requests.finished(sequence, FinishReason::Stop);
        }
        drop(earlier);
        samples.found.drain(..).for_each(|number| requests.conclude(number));
    }

    /// Fails what was in a batch that could not be computed.
    fn fail_step(&mut self, error: &RunError) {
        tracing::warn!(rows = self.batch.sequences.len(), "{error}");
        for sequence in self.scheduler.fail(&self.batch) {
            let number = sequence.request;
            let failed =
                self.requests.fail(number, Failure::Step(error.message.clone()), &mut self.scheduler);
            self.report.requests_failed += u32::from(failed);
        }
    }

    fn count_batch(&mut self) {
        self.report.rows = self.batch.sequences.len() as u32;
        self.report.batch_tokens = self.batch.tokens.len() as u32;
        for row in &self.batch.sequences {
            let live = self.requests.live.get(&row.id.request);
            let decodes = row.tokens.len() as u32 == 1 + row.num_draft_tokens
                && live.is_some_and(|live| live.prompt_tokens <= row.computed_tokens);
            self.report.drafted_tokens += row.num_draft_tokens;
            if !decodes {
                self.report.prefill_tokens += row.tokens.len() as u32;
            }
        }
        let preemptions_total = self.scheduler.load().preemptions_total;
        self.report.preemptions = (preemptions_total - self.preemptions_total) as u32;
        self.preemptions_total = preemptions_total;
    }

    fn publish(&self, shared: &Shared) {
        let new = EngineLoad {
            state: self.state,
            asleep: self.asleep,
            load: self.scheduler.load(),
            prefill_tokens_per_second: self.prefill_rate.per_second(),
            decode_tokens_per_second: self.decode_rate.per_second(),
            submissions: self.requests.count,
        };
        shared.load.send_if_modified(|published| {
            let notify =
                (published.state, published.asleep) != (new.state, new.asleep) || published.load != new.load;
            *published = new;
            notify
        });
    }
}

/// Fails the requests that could not be sampled. Answers how many these are.
fn fail(samples: &mut Samples, requests: &mut Requests, scheduler: &mut Scheduler) -> u32 {
    let failed = samples.failed.drain(..);
    failed.map(|(number, failure)| u32::from(requests.fail(number, failure, scheduler))).sum()
}

/// Logits of the wrong number or width are no logits: such a runner is not to be trusted with another step.
fn check(logits: &Logits<'_>, batch: &Batch) -> Result<(), RunError> {
    let (returned, wanted) = (logits.rows().len(), batch.logits_indices().count());
    if returned == wanted {
        return Ok(());
    }
    Err(RunError { message: format!("{returned} rows of logits came back for {wanted}"), fatal: true })
}
