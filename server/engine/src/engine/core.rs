//! The loop on the engine's thread: commands, schedule, run, sample, commit, events.
//!
//! It keeps what the scheduler does not need to know of a request: how it samples and where its events go.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use server_scheduler::{
    Batch, BlockHash, Event as Change, FinishReason, NewRequest, Sampled, Scheduler, SchedulerConfig,
    SequenceId, StopRule, TokenId,
};
use tokio::sync::mpsc as events;

use crate::handle::{Command, Shared, Submission, WaitingPermit};
use crate::report::{EngineLoad, EngineState, Observer, Rate, StepReport};
use crate::request::{DraftCounts, Event, Failure, Sampling, ScoredToken, TokenLogprobs};
use crate::runner::{Logits, ModelRunner, RunError};
use crate::sampler::{History, Sampler};
use crate::search::Search;
use crate::stream::Aborts;
pub(crate) use drafts::Drafter;
use drafts::Drafting;
use guides::{Guides, Slot};
use samples::{Outcome, Samples};

mod drafts;
mod guides;
mod samples;

/// A sequence's id is the number of its request, then, in so many bits, its index in the request.
pub(super) const INDEX_BITS: u32 = 16;

/// All that the engine's thread owns.
pub(super) struct Core {
    /// Before the runner: streams end even if that takes long to be dropped.
    requests: Requests,
    commands: mpsc::Receiver<Command>,
    scheduler: Scheduler,
    runner: Box<dyn ModelRunner>,
    sampler: Sampler,
    guides: Guides,
    drafting: Drafting,
    observer: Observer,
    state: EngineState,
    prefill_rate: Rate,
    decode_rate: Rate,
    preemptions_total: u64,
    // Kept from step to step for their memory.
    batch: Batch,
    samples: Samples,
    changes: Vec<Change>,
    /// Sequences that ended by their guides.
    ended: Vec<SequenceId>,
    report: StepReport,
}

#[derive(Default)]
struct Requests {
    /// By their numbers, so that whatever goes through all of them does so in the order they came.
    live: BTreeMap<u64, Live>,
    count: u64,
    /// Whether there ever was one with a guide.
    have_guides: bool,
    /// Whether any had guesses.
    have_drafters: bool,
}

/// A request the scheduler has.
struct Live {
    sampling: Sampling,
    stop: StopRule,
    histories: Vec<History>,
    /// Of the prompt, if they are wanted and have not been told yet.
    scores: Option<Scores>,
    /// One for each sequence, or none at all.
    guides: Vec<Slot>,
    /// One for each sequence, or none at all.
    drafters: Vec<Drafter>,
    /// What the sequences do together, if they do not draw each by itself.
    search: Option<Box<Search>>,
    /// Whether each sequence has ended.
    ended: Vec<bool>,
    /// Sequences that have not ended.
    open: usize,
    events: events::Sender<Event>,
    aborts: Arc<Aborts>,
    /// Given back when the request starts.
    permit: Option<WaitingPermit>,
    submitted: Duration,
    prompt_tokens: u32,
}

/// The log probabilities of a prompt in the making.
struct Scores {
    prompt: Vec<TokenId>,
    /// From the second on, as far as they are computed.
    tokens: Vec<ScoredToken>,
}

impl Core {
    pub(super) fn new(
        config: SchedulerConfig,
        runner: Box<dyn ModelRunner>,
        observer: Observer,
        commands: mpsc::Receiver<Command>,
    ) -> Self {
        let guides = Guides::new(runner.layout().vocabulary);
        Self {
            requests: Requests::default(),
            commands,
            scheduler: Scheduler::new(config),
            runner,
            sampler: Sampler::new(),
            guides,
            drafting: Drafting::default(),
            observer,
            state: EngineState::Starting,
            prefill_rate: Rate::default(),
            decode_rate: Rate::default(),
            preemptions_total: 0,
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
        while self.take_commands(shared) {
            self.requests.drop_abandoned(&mut self.scheduler);
            if !self.scheduler.is_idle() {
                self.step(shared)?;
            }
        }
        Ok(())
    }

    /// Takes all commands there are, and waits for one if there is nothing to compute. False at the end.
    fn take_commands(&mut self, shared: &Shared) -> bool {
        loop {
            let command = if !self.scheduler.is_idle() {
                match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(_) => return true,
                }
            } else if self.state == EngineState::Draining {
                match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(_) => return false,
                }
            } else {
                self.publish(shared);
                match self.commands.recv() {
                    Ok(command) => command,
                    Err(_) => return false,
                }
            };
            match command {
                Command::Submit(submission) => self.requests.submit(*submission, &mut self.scheduler),
                Command::Drain => self.state = EngineState::Draining,
                Command::Stop => return false,
            }
        }
    }

    fn step(&mut self, shared: &Shared) -> Result<(), RunError> {
        let began = shared.clock.now();
        self.drafting.propose(&mut self.requests, &mut self.scheduler);
        self.scheduler.schedule(&mut self.batch);
        Drafting::fill(&mut self.batch, &self.requests);
        assert!(!self.batch.rows.is_empty(), "invariant: unless it is idle, the scheduler has a row");
        self.publish(shared);
        self.report.clear();
        self.changes.clear();
        self.count_batch();

        self.report.guided_sequences = self.guides.send(&self.batch, &mut self.requests);
        let run_began = shared.clock.now();
        let outcome = self.runner.run(&self.batch);
        let run_ended = shared.clock.now();
        self.samples.clear();
        self.guides.collect(&mut self.requests, &mut self.samples.failed);
        self.report.run_time = run_ended - run_began;
        self.report.guide_time = shared.clock.now() - run_ended;
        match outcome {
            Ok(logits) => {
                check(&logits, &self.batch)?;
                let Self { batch, requests, sampler, drafting, .. } = self;
                self.samples.take(batch, logits, requests, (sampler, drafting));
                self.finish_step(began);
            }
            Err(error) if error.fatal => return Err(error),
            Err(error) => self.fail_step(&error),
        }

        self.report.step_time = shared.clock.now() - began;
        let StepReport { prefill_tokens, generated_tokens, step_time, .. } = self.report;
        if prefill_tokens == 0 && self.requests.have_drafters {
            self.drafting.took(&self.batch, step_time);
        }
        self.prefill_rate.add(prefill_tokens, step_time);
        self.decode_rate.add(generated_tokens, step_time);
        (self.observer)(&self.report);
        Ok(())
    }

    /// Commits what was sampled and tells the clients.
    fn finish_step(&mut self, began: Duration) {
        let Self { requests, scheduler, samples, changes, ended, report, .. } = self;
        let batch = &self.batch;
        for (number, message) in samples.failed.drain(..) {
            report.requests_failed += u32::from(requests.fail(number, message, scheduler));
        }
        scheduler.commit(&self.batch, &samples.tokens, changes);
        for change in &*changes {
            if let &Change::Started { sequence, cached_tokens } = change {
                requests.started(sequence, cached_tokens);
                if let Some(live) = requests.live.get(&request_of(sequence)) {
                    report.prompt_tokens += live.prompt_tokens;
                    report.cached_tokens += cached_tokens;
                    report.queue_times.push(began.saturating_sub(live.submitted));
                }
            }
        }
        // Before the first token: that is sampled from the end of the prompt. A prompt of one token has no scored row,
        // and is computed in one.
        let scoring = batch.rows.iter().filter(|row| row.past == 0 || !row.scored.is_empty());
        scoring.for_each(|row| requests.scored(row.sequence));
        ended.clear();
        let mut earlier = samples.earlier.drain(..);
        for (&Sampled { sequence, accepted, token, .. }, outcome) in
            samples.tokens.iter().zip(samples.outcomes.drain(..))
        {
            for (token, logprobs) in earlier.by_ref().take(accepted as usize) {
                report.generated_tokens += u32::from(requests.token(sequence, token, logprobs));
            }
            report.accepted_tokens += accepted;
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
        tracing::warn!(rows = self.batch.rows.len(), "{error}");
        for sequence in self.scheduler.fail(&self.batch) {
            let number = request_of(sequence);
            let failed = self.requests.fail(number, error.message.clone(), &mut self.scheduler);
            self.report.requests_failed += u32::from(failed);
        }
    }

    fn count_batch(&mut self) {
        self.report.rows = self.batch.rows.len() as u32;
        self.report.batch_tokens = self.batch.tokens.len() as u32;
        for row in &self.batch.rows {
            let live = self.requests.live.get(&request_of(row.sequence));
            let decodes = row.tokens.len() as u32 == 1 + row.drafts
                && live.is_some_and(|live| live.prompt_tokens <= row.past);
            self.report.drafted_tokens += row.drafts;
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
            load: self.scheduler.load(),
            prefill_tokens_per_second: self.prefill_rate.per_second(),
            decode_tokens_per_second: self.decode_rate.per_second(),
            submissions: self.requests.count,
        };
        shared.load.send_if_modified(|published| {
            let notify = published.state != new.state || published.load != new.load;
            *published = new;
            notify
        });
    }
}

/// Logits of the wrong number or width are no logits: such a runner is not to be trusted with another step.
fn check(logits: &Logits<'_>, batch: &Batch) -> Result<(), RunError> {
    let (returned, wanted) = (logits.rows().len(), batch.wanted().count());
    if returned == wanted {
        return Ok(());
    }
    Err(RunError { message: format!("{returned} rows of logits came back for {wanted}"), fatal: true })
}

impl Requests {
    /// Hands a request to the scheduler, unless its client has gone.
    fn submit(&mut self, submission: Submission, scheduler: &mut Scheduler) {
        let Submission {
            prompt, sampling, beams, salt, histories, events, aborts, permit, submitted, ..
        } = submission;
        let (stop, guide, drafters) = (submission.stop, submission.guide, submission.drafters);
        // Counted whatever becomes of it, as the handle counts: the two are compared.
        let number = self.count;
        self.count += 1;
        if events.is_closed() {
            return;
        }
        let prompt_tokens = prompt.len() as u32;
        let sequences = sequences_of(number, histories.len()).collect();
        let scores = sampling.prompt_logprobs.map(|_| Scores { prompt: prompt.clone(), tokens: Vec::new() });
        // When its sequences end is the search's business.
        let tokens = if beams.is_some() { Vec::new() } else { stop.tokens.clone() };
        let request = NewRequest {
            sequences,
            prompt,
            stop: StopRule { tokens, ..stop },
            in_step: beams.is_some(),
            scores_prompt: scores.is_some(),
            root: BlockHash(salt),
        };
        if let Err(rejected) = scheduler.submit(request) {
            // Not reached: the handle keeps the same limits.
            send(&events, Event::Failed(Failure::Step(format!("the scheduler refused it: {rejected:?}"))));
            return;
        }
        let open = histories.len();
        self.have_guides |= guide.is_some();
        self.have_drafters |= !drafters.is_empty();
        let search = beams.map(|beams| Box::new(Search::new(beams, open as u32, stop.clone())));
        let begins = |index| search.as_ref().is_none_or(|search| search.has_beam(index));
        let slots = |guide| {
            (0..open as u32).map(|index| if begins(index) { Slot::new(&guide) } else { Slot::Gone }).collect()
        };
        let live = Live {
            sampling,
            stop,
            scores,
            guides: guide.map_or(Vec::new(), slots),
            drafters,
            search,
            histories,
            ended: vec![false; open],
            open,
            events,
            aborts,
            permit: Some(permit),
            submitted,
            prompt_tokens,
        };
        self.live.insert(number, live);
    }

    /// Aborts the requests whose clients have gone, and the sequences that nobody wants any more.
    fn drop_abandoned(&mut self, scheduler: &mut Scheduler) {
        self.live.retain(|&number, live| {
            let abandoned = live.events.is_closed();
            if abandoned {
                sequences_of(number, live.histories.len()).for_each(|sequence| scheduler.abort(sequence));
            } else if live.search.is_none() {
                let aborts = Arc::clone(&live.aborts);
                for index in aborts.take().into_iter().flatten().filter(|index| live.end(*index)) {
                    scheduler.abort(sequence_of(number, index));
                }
            }
            !abandoned && live.open > 0
        });
    }

    /// Ends a request with a failure. False if it has ended already.
    fn fail(&mut self, number: u64, message: String, scheduler: &mut Scheduler) -> bool {
        let Some(live) = self.live.remove(&number) else { return false };
        sequences_of(number, live.histories.len()).for_each(|sequence| scheduler.abort(sequence));
        send(&live.events, Event::Failed(Failure::Step(message)));
        true
    }

    fn started(&mut self, sequence: SequenceId, cached_tokens: u32) {
        if let Some(live) = self.live.get_mut(&request_of(sequence)) {
            live.permit = None;
            send(&live.events, Event::Started { cached_tokens });
        }
    }

    /// Tells the scores of a prompt once they are complete.
    fn scored(&mut self, sequence: SequenceId) {
        let Some(live) = self.live.get_mut(&request_of(sequence)) else { return };
        let complete = |scores: &mut Scores| scores.tokens.len() + 1 == scores.prompt.len();
        if let Some(Scores { tokens, .. }) = live.scores.take_if(complete) {
            send(&live.events, Event::Scored { tokens });
        }
    }

    /// False if the request has failed.
    fn token(&mut self, sequence: SequenceId, token: TokenId, logprobs: Option<Box<TokenLogprobs>>) -> bool {
        let Some(live) = self.live.get_mut(&request_of(sequence)) else { return false };
        let index = index_of(sequence);
        send(&live.events, Event::Token { index, token, logprobs });
        true
    }

    /// Tells what a search has found, and ends it. Nothing happens if its request has failed.
    fn conclude(&mut self, number: u64) {
        let Some(Live { search: Some(search), events, .. }) = self.live.remove(&number) else { return };
        let all = search.found();
        // Where there are fewer texts than were asked for, the last ones are empty.
        let drafts = DraftCounts::default();
        let (found, results) = (all.len() as u32, search.results());
        (found..results)
            .for_each(|index| send(&events, Event::Finished { index, reason: FinishReason::Stop, drafts }));
        for (index, found) in (0..).zip(all) {
            for (token, logprobs) in found.tokens {
                send(&events, Event::Token { index, token, logprobs });
            }
            send(&events, Event::Finished { index, reason: found.reason, drafts });
        }
    }

    /// Nothing happens if it was aborted, its request has failed, or it is a beam.
    fn finished(&mut self, sequence: SequenceId, reason: FinishReason) {
        let number = request_of(sequence);
        if let Some(live) = self.live.get_mut(&number).filter(|live| live.search.is_none()) {
            let index = index_of(sequence);
            let drafts =
                live.drafters.get(index as usize).map_or(DraftCounts::default(), |drafter| drafter.counts);
            send(&live.events, Event::Finished { index, reason, drafts });
            live.end(index);
            if live.open == 0 {
                self.live.remove(&number);
            }
        }
    }
}

impl Live {
    /// False if the sequence had ended already.
    fn end(&mut self, index: u32) -> bool {
        let ends = !std::mem::replace(&mut self.ended[index as usize], true);
        self.open -= usize::from(ends);
        ends
    }
}

/// There is room for every event; a client that has gone is noticed before the next step.
fn send(events: &events::Sender<Event>, event: Event) {
    if let Err(events::error::TrySendError::Full(event)) = events.try_send(event) {
        debug_assert!(false, "invariant: a stream has room for all its events, {event:?} too");
    }
}

fn sequences_of(number: u64, count: usize) -> impl Iterator<Item = SequenceId> {
    (0..count as u32).map(move |index| sequence_of(number, index))
}

fn sequence_of(number: u64, index: u32) -> SequenceId {
    SequenceId(number << INDEX_BITS | u64::from(index))
}

fn request_of(sequence: SequenceId) -> u64 {
    sequence.0 >> INDEX_BITS
}

fn index_of(sequence: SequenceId) -> u32 {
    (sequence.0 & ((1 << INDEX_BITS) - 1)) as u32
}
