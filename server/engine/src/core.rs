//! The loop of the engine's thread: process commands, schedule, run, sample, commit and publish.

use std::sync::mpsc;
use std::time::Duration;

use server_scheduler::{
    Batch, BlockKeyScheme, Event, FinishReason, SampledToken, Scheduler, SchedulerConfig, SequenceId,
};

use crate::clock::Clock;
use crate::command::{Command, SleepCommand, Submission};
use crate::encoder::{Encoder, FailedImage, fill_step};
use crate::guides::GuideDispatcher;
use crate::handle::SharedState;
use crate::images::StepImages;
use crate::report::{EngineLoad, EngineState, Observer, Rate, StepReport};
use crate::request::Failure;
use crate::requests::Requests;
use crate::runner::{ModelRunner, RunError, Runners};
use crate::sleep::{SleepError, SleepLevel};
use crate::speculator::{RequestDrafter, Speculator};
use crate::spill::Spill;
use crate::waker::Waker;
use crate::workers::Workers;
use jobs::GeneratedToken;
use outputs::{LockWait, StepOutput, StepOutputs};

mod jobs;
mod outputs;

/// The length of the pause after a decode-only step while images are being encoded, as a multiple of the step's
/// duration. The pause leaves the processors to the encoder. A step takes almost as long for one sequence as for
/// several, so encoding images sooner lets later steps decode more sequences.
const ENCODER_PAUSE_STEPS: u32 = 3;

/// The pause for the image encoder after a step.
#[derive(Clone, Copy, Debug)]
struct EncoderPause {
    began: Duration,
    end: Duration,
}

/// The state of the engine's thread.
pub(crate) struct Core {
    /// Declared before the runner, so that streams end even if dropping the runner is slow.
    requests: Requests,
    commands: mpsc::Receiver<Command>,
    waker: Waker,
    scheduler: Scheduler,
    runner: Box<dyn ModelRunner>,
    /// `None` if evicted blocks are not stored.
    spill: Option<Spill>,
    /// `None` if the model accepts no images.
    encoder: Option<Encoder>,
    workers: Workers,
    guides: GuideDispatcher,
    speculator: Speculator,
    observer: Observer,
    state: EngineState,
    /// The sleep level of the engine, if it is asleep.
    sleep_level: Option<SleepLevel>,
    prefill_rate: Rate,
    image_rate: Rate,
    decode_rate: Rate,
    preemptions_total: u64,
    /// The pause for the image encoder before the next step, if there is one.
    pause: Option<EncoderPause>,
    /// Whether the engine cannot compute a step until blocks are restored, images are encoded or guides are ready.
    is_stalled: bool,
    // These buffers are reused in every step.
    batch: Batch,
    step_images: StepImages,
    outputs: StepOutputs,
    sampled: Vec<SampledToken>,
    events: Vec<Event>,
    /// The sequences that end in this step for a reason that the scheduler does not know.
    ended: Vec<SequenceId>,
    report: StepReport,
}

/// The connections of the engine's thread to other threads.
pub(crate) struct Links {
    pub(crate) commands: mpsc::Receiver<Command>,
    pub(crate) waker: Waker,
    pub(crate) clock: Clock,
    pub(crate) spill: Option<(Spill, BlockKeyScheme)>,
    pub(crate) encoder: Option<Encoder>,
    pub(crate) workers: Workers,
}

impl Core {
    pub(crate) fn new(config: SchedulerConfig, runners: Runners, observer: Observer, links: Links) -> Self {
        let Runners { target: runner, draft } = runners;
        let Links { commands, waker, clock, spill, encoder, workers } = links;
        let layout = runner.layout();
        let vocabulary = layout.vocabulary;
        let guides = GuideDispatcher::new(vocabulary, clock, waker.clone());
        let speculator = Speculator::new(draft, vocabulary, config.max_chunk_tokens);
        let mut scheduler = Scheduler::new(config, layout.size());
        let spill = spill.map(|(spill, key_scheme)| {
            scheduler.enable_spill(key_scheme);
            spill
        });
        if let Some(encoder) = &encoder {
            scheduler.set_image_limits(encoder.limits());
        }
        Self {
            requests: Requests::default(),
            commands,
            waker,
            scheduler,
            runner,
            spill,
            encoder,
            workers,
            guides,
            speculator,
            observer,
            state: EngineState::Starting,
            sleep_level: None,
            prefill_rate: Rate::default(),
            image_rate: Rate::default(),
            decode_rate: Rate::default(),
            preemptions_total: 0,
            pause: None,
            is_stalled: false,
            batch: Batch::default(),
            step_images: StepImages::default(),
            outputs: StepOutputs::default(),
            sampled: Vec::new(),
            events: Vec::new(),
            ended: Vec::new(),
            report: StepReport::default(),
        }
    }

    /// Serves requests until the engine is stopped or has drained.
    ///
    /// # Errors
    /// The error of the runner, if the runner can no longer be used.
    pub(crate) fn run(&mut self, shared: &SharedState) -> Result<(), RunError> {
        self.state = EngineState::Serving;
        while self.process_commands(shared)? {
            self.requests.remove_aborted(&mut self.scheduler);
            self.poll_spill(shared);
            if !self.scheduler.is_idle() && self.ensure_awake(shared)? {
                self.step(shared)?;
            }
        }
        Ok(())
    }

    /// Processes all commands in the channel, and waits for one if there is nothing to compute. Returns false when the
    /// engine ends.
    fn process_commands(&mut self, shared: &SharedState) -> Result<bool, RunError> {
        loop {
            let command = if self.is_stalled {
                match self.wait_for_results(shared) {
                    Some(command) => command,
                    None => return Ok(true),
                }
            } else if !self.scheduler.is_idle() {
                match self.next_command(shared) {
                    Some(command) => command,
                    None => return Ok(true),
                }
            } else if self.state == EngineState::Draining {
                match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(_) => {
                        // If spilling is enabled, this stores the cached blocks for the next process.
                        self.clear_cache();
                        return Ok(false);
                    }
                }
            } else {
                self.poll_spill(shared);
                // The encoder may still be encoding an image of a request that has ended.
                self.collect_images();
                self.publish(shared);
                match self.commands.recv() {
                    Ok(command) => command,
                    Err(_) => return Ok(false),
                }
            };
            match command {
                Command::Submit(submission) => self.submit(*submission),
                Command::Drain => self.state = EngineState::Draining,
                Command::Sleep(command) => self.change_sleep_level(command, shared)?,
                Command::Stop => return Ok(false),
                Command::Wake => self.waker.acknowledge(),
            }
        }
    }

    /// Returns the next command, if any. During a pause, waits for a command until the pause ends. [`Command::Wake`]
    /// ends the pause only if there are results for a step, or if the scheduler has become idle.
    fn next_command(&mut self, shared: &SharedState) -> Option<Command> {
        let Some(EncoderPause { began, end }) = self.pause else { return self.commands.try_recv().ok() };
        let restores = self.num_restores();
        let command = loop {
            match self.commands.recv_timeout(end.saturating_sub(shared.clock.now())) {
                Ok(Command::Wake) => {
                    self.waker.acknowledge();
                    self.requests.remove_aborted(&mut self.scheduler);
                    if self.has_results(shared, restores) || self.scheduler.is_idle() {
                        break None;
                    }
                }
                result => break result.ok(),
            }
        };
        // End the pause, but store when it began: the next step records how long the pause was.
        self.pause = (!self.scheduler.is_idle()).then_some(EncoderPause { began, end: began });
        command
    }

    /// The pause after a step, if images are being encoded and the step only decoded. The engine does not pause if
    /// a sequence has ended, because a waiting sequence may be able to start.
    fn pause_after_step(&self, now: Duration) -> Option<EncoderPause> {
        let is_encoding = self.encoder.as_ref().is_some_and(Encoder::is_busy);
        let has_ended = |event: &Event| matches!(event, Event::Finished { .. });
        if !is_encoding
            || self.report.prefill_tokens > 0
            || self.scheduler.is_idle()
            || !self.ended.is_empty()
            || self.events.iter().any(has_ended)
            || !self.scheduler.allows_pauses()
        {
            return None;
        }
        let length = self.report.step_time.saturating_mul(ENCODER_PAUSE_STEPS);
        Some(EncoderPause { began: now, end: now + length })
    }

    fn num_restores(&self) -> usize {
        self.spill.as_ref().map_or(0, Spill::num_restores)
    }

    /// Applies the results of other threads. Returns whether there are restored blocks, images or ready guides that a
    /// step may need; `restores_before` is the number of restores when the engine began to wait.
    fn has_results(&mut self, shared: &SharedState, restores_before: usize) -> bool {
        self.poll_spill(shared);
        self.collect_images()
            || self.guides.collect(&mut self.requests)
            || self.num_restores() != restores_before
    }

    fn submit(&mut self, mut submission: Submission) {
        let (lookup, draft) = (submission.lookup.take(), submission.draft.take());
        let drafter = RequestDrafter::new(lookup, draft, &submission.prompt);
        let number = self.requests.submit(submission, &mut self.scheduler);
        if let Some((number, drafter)) = number.zip(drafter) {
            self.speculator.add_request(number, drafter);
        }
    }

    fn step(&mut self, shared: &SharedState) -> Result<(), RunError> {
        let began = shared.clock.now();
        let paused = self.pause.take().map_or(Duration::ZERO, |pause| began.saturating_sub(pause.began));
        self.report.clear();
        self.collect_images();
        self.resume_suspended();
        self.speculator.propose(&self.requests, &mut self.scheduler);
        self.scheduler.schedule(&mut self.batch);
        self.save_evicted(began);
        if let Some(encoder) = &mut self.encoder {
            encoder.start_requested(&mut self.scheduler, &self.requests);
        }
        self.publish(shared);
        if self.batch.sequences.is_empty() {
            self.stall();
            return Ok(());
        }
        self.report.draft_time = self.speculator.write_drafts(&mut self.batch, &self.requests, &shared.clock);
        self.count_batch();

        self.report.guided_sequences = self.guides.dispatch(&self.batch, &mut self.requests);
        fill_step(&mut self.step_images, &self.batch, &self.requests, self.encoder.as_ref());
        let run_began = shared.clock.now();
        let result = self.runner.run_with_images(&self.batch, &self.step_images);
        let run_ended = shared.clock.now();
        self.guides.collect_awaited(&mut self.requests);
        self.report.run_time = run_ended - run_began;
        self.report.structured_output_wait = shared.clock.now() - run_ended;
        let is_computed = result.is_ok();
        match result {
            Ok(logits) => {
                logits.check_rows(self.batch.logits_indices().count())?;
                let Self { batch, requests, workers, speculator, outputs, .. } = self;
                outputs.clear();
                outputs.sample_batch(batch, logits, requests, workers, speculator);
                self.commit(began);
            }
            Err(error) if error.fatal => return Err(error),
            Err(error) => self.fail_step(&error),
        }
        self.report.step_time = shared.clock.now() - began;
        // A failed step may end early, so its duration does not show how long its tokens take to compute.
        if is_computed {
            self.record_step(paused);
            self.pause = self.pause_after_step(shared.clock.now());
        }
        (self.observer)(&self.report);
        Ok(())
    }

    /// Handles an empty batch: the scheduler is idle, or it waits for restored blocks, images or guides.
    fn stall(&mut self) {
        let waits = self.scheduler.is_restoring()
            || self.scheduler.has_suspended()
            || self.scheduler.is_waiting_for_images();
        assert!(
            waits || self.scheduler.is_idle(),
            "invariant: a busy scheduler that waits for nothing schedules a batch"
        );
        self.is_stalled = waits;
        if self.report.generated_tokens + self.report.requests_failed > 0 {
            (self.observer)(&self.report);
        }
    }

    /// Applies the results of the image encoder. Returns whether there were any.
    fn collect_images(&mut self) -> bool {
        let Some(encoder) = &mut self.encoder else { return false };
        let collected = encoder.collect(&mut self.scheduler);
        let mut requests_failed = 0;
        for FailedImage { sequence, message } in collected.failed {
            tracing::warn!("failed to encode an image: {message}");
            let failure = Failure::Image(message);
            let is_failed = self.requests.fail(sequence.request, failure, &mut self.scheduler);
            requests_failed += u32::from(is_failed);
        }
        self.image_rate.add(collected.tokens, collected.time);
        if collected.has_results {
            (self.observer)(&StepReport {
                encoder_runs: collected.runs,
                encoded_images: collected.encoded,
                encode_time: collected.time,
                requests_failed,
                ..StepReport::default()
            });
        }
        collected.has_results
    }

    /// Samples suspended sequences whose guides are ready.
    fn resume_suspended(&mut self) {
        self.guides.collect(&mut self.requests);
        if self.requests.suspended.is_empty() {
            return;
        }
        // While a thread computes allowed tokens, sampling does not wait for locks: the thread wakes the engine when it
        // has finished, and the engine then tries again. Without such a thread, nothing would wake the engine, so
        // sampling waits for the locks of the guides' shared state.
        let wait = if self.guides.has_pending() { LockWait::Never } else { LockWait::Allowed };
        let Self { requests, workers, speculator, outputs, .. } = self;
        outputs.clear();
        outputs.sample_suspended(requests, wait, workers, speculator);
        self.fail_unsampled();
        let Self { scheduler, outputs, sampled, events, .. } = self;
        sampled.clear();
        sampled.extend(outputs.outputs.iter().map(StepOutput::sampled_token));
        events.clear();
        scheduler.resume(sampled, events);
        self.deliver();
    }

    /// Commits the outputs of the step to the scheduler, and sends them to the clients.
    fn commit(&mut self, began: Duration) {
        self.fail_unsampled();
        let Self { requests, scheduler, outputs, sampled, events, report, batch, .. } = self;
        let scores = self.runner.block_scores();
        if !scores.is_empty() {
            scheduler.record_block_scores(batch, scores);
        }
        sampled.clear();
        sampled.extend(outputs.outputs.iter().map(StepOutput::sampled_token));
        events.clear();
        scheduler.commit(batch, sampled, events);
        for event in &*events {
            if let &Event::Started { sequence, cached_tokens } = event {
                requests.start(sequence, cached_tokens);
                if let Some(active) = requests.active.get(&sequence.request) {
                    report.prompt_tokens += active.prompt_tokens;
                    report.cached_tokens += cached_tokens;
                    report.queue_times.push(began.saturating_sub(active.submitted));
                }
            }
        }
        // Send the scores before the first token, which is sampled in the step that completes the prompt. A prompt of
        // one token has no scored tokens, so its empty list of scores is sent after the step that begins at position 0.
        for scheduled in &batch.sequences {
            if scheduled.computed_tokens == 0 || !scheduled.scored_tokens.is_empty() {
                requests.send_scores(scheduled.id);
            }
        }
        self.deliver();
    }

    /// Fails the requests for which no token could be sampled.
    fn fail_unsampled(&mut self) {
        for (number, failure) in self.outputs.failures.drain(..) {
            let is_fault = failure.is_fault();
            let is_failed = self.requests.fail(number, failure, &mut self.scheduler);
            self.report.requests_failed += u32::from(is_failed && is_fault);
        }
    }

    /// Sends the outputs to the clients, and removes the sequences that have ended.
    fn deliver(&mut self) {
        let Self { requests, scheduler, speculator, outputs, events, ended, report, .. } = self;
        ended.clear();
        for output in outputs.outputs.drain(..) {
            let (sequence, accepted_drafts, token) = match output {
                StepOutput::Tokens { sequence, accepted_drafts, token, is_last } => {
                    if is_last {
                        ended.push(sequence);
                    }
                    (sequence, accepted_drafts, Some(token))
                }
                StepOutput::End { sequence, accepted_drafts } => {
                    ended.push(sequence);
                    (sequence, accepted_drafts, None)
                }
                StepOutput::Suspended { .. } => {
                    report.sequence_suspensions += 1;
                    continue;
                }
                StepOutput::Beam { .. } => {
                    report.generated_tokens += 1;
                    continue;
                }
            };
            let drafts = speculator.counts(sequence);
            // Returns 0 if the request has failed, because its tokens are not sent.
            let mut send = |GeneratedToken { token, logprobs }: GeneratedToken| {
                u32::from(requests.send_token(sequence, token, logprobs, drafts))
            };
            let accepted: u32 = accepted_drafts.into_iter().map(&mut send).sum();
            report.accepted_tokens += accepted;
            report.generated_tokens += accepted + token.map_or(0, send);
        }
        for event in &*events {
            if let &Event::Finished { sequence, reason } = event
                && !ended.contains(&sequence)
            {
                requests.finish(sequence, reason, speculator.counts(sequence));
            }
        }
        // These sequences finish with `Stop`, even if they have also reached the maximum number of tokens.
        for &sequence in &*ended {
            scheduler.abort(sequence);
            requests.finish(sequence, FinishReason::Stop, speculator.counts(sequence));
        }
        outputs.finished_searches.drain(..).for_each(|number| requests.finish_search(number));
    }

    /// Fails the requests of a batch that could not be computed.
    fn fail_step(&mut self, error: &RunError) {
        tracing::warn!(sequences = self.batch.sequences.len(), "{error}");
        for sequence in self.scheduler.fail(&self.batch) {
            let failure = Failure::Step(error.message.clone());
            let is_failed = self.requests.fail(sequence.request, failure, &mut self.scheduler);
            self.report.requests_failed += u32::from(is_failed);
        }
    }

    fn count_batch(&mut self) {
        self.report.num_sequences = self.batch.sequences.len() as u32;
        self.report.batch_tokens = self.batch.tokens.len() as u32;
        for scheduled in &self.batch.sequences {
            let active = self.requests.active.get(&scheduled.id.request);
            let num_tokens = scheduled.tokens.len() as u32;
            let is_decode = num_tokens == 1 + scheduled.num_draft_tokens
                && active.is_some_and(|active| active.prompt_tokens <= scheduled.computed_tokens);
            self.report.drafted_tokens += scheduled.num_draft_tokens;
            if !is_decode {
                self.report.prefill_tokens += num_tokens;
            }
        }
        let preemptions_total = self.scheduler.load().preemptions_total;
        self.report.preemptions = (preemptions_total - self.preemptions_total) as u32;
        self.preemptions_total = preemptions_total;
    }

    /// Adds the time of the step to the models that predict the times of later steps, and to the reported rates. The
    /// decode rate also includes the pause before the step, because the pause delayed the tokens.
    fn record_step(&mut self, paused: Duration) {
        let step_time = self.report.step_time;
        self.speculator.record_step(&self.report);
        self.scheduler.record_step(&self.batch, step_time);
        self.prefill_rate.add(self.report.prefill_tokens, step_time);
        self.decode_rate.add(self.report.generated_tokens, step_time + paused);
    }

    fn publish(&self, shared: &SharedState) {
        let load = self.scheduler.load();
        let output_bytes = |encoder: &Encoder| encoder.output_bytes(load.encoded_image_tokens);
        let new = EngineLoad {
            state: self.state,
            sleep_level: self.sleep_level,
            load,
            image_cache_bytes: self.encoder.as_ref().map_or(0, output_bytes),
            prefill_tokens_per_second: self.prefill_rate.per_second(),
            decode_tokens_per_second: self.decode_rate.per_second(),
            image_tokens_per_second: self.image_rate.per_second(),
            submissions: self.requests.submissions,
        };
        shared.load.send_if_modified(|published| {
            let has_changed = (published.state, published.sleep_level) != (new.state, new.sleep_level)
                || published.load != new.load;
            *published = new;
            has_changed
        });
    }

    /// Applies the results of the threads that store and read blocks, and ends restores that take too long.
    fn poll_spill(&mut self, shared: &SharedState) {
        let Self { spill: Some(spill), scheduler, runner, .. } = self else { return };
        let now = shared.clock.now();
        spill.poll(scheduler, &mut **runner, now);
        spill.end_overdue(scheduler, now);
    }

    /// Copies the evicted blocks before the step overwrites them, and starts the restores that requests wait for.
    fn save_evicted(&mut self, now: Duration) {
        let Self { spill: Some(spill), scheduler, runner, prefill_rate, .. } = self else { return };
        spill.save_evicted(scheduler, &**runner);
        spill.start_restores(scheduler, now, prefill_rate.per_second());
    }

    /// Waits for the restored blocks, images or ready guides that the next step needs. Returns `None` when there are
    /// results, when another thread wakes the engine (for example, because a client has disconnected), or when an
    /// overdue restore has ended. If a command arrives before that, returns the command.
    fn wait_for_results(&mut self, shared: &SharedState) -> Option<Command> {
        let restores_before = self.num_restores();
        loop {
            if self.has_results(shared, restores_before) {
                break;
            }
            let deadline = self.spill.as_ref().and_then(|spill| spill.next_deadline());
            let command = match deadline {
                Some(deadline) => {
                    self.commands.recv_timeout(deadline.saturating_sub(shared.clock.now())).ok()
                }
                None if self.guides.has_pending() || self.scheduler.is_waiting_for_images() => {
                    self.commands.recv().ok()
                }
                None => break,
            };
            match (command, deadline) {
                (Some(Command::Wake), _) => {
                    self.waker.acknowledge();
                    break;
                }
                (Some(command), _) => {
                    self.is_stalled = false;
                    return Some(command);
                }
                (None, Some(deadline)) => {
                    // Pass the deadline as the current time, because a simulated clock does not advance while this
                    // thread waits.
                    let Self { spill: Some(spill), scheduler, runner, .. } = self else { break };
                    spill.poll(scheduler, &mut **runner, deadline);
                    spill.end_overdue(scheduler, deadline);
                }
                (None, None) => break,
            }
        }
        self.is_stalled = false;
        None
    }

    /// Evicts all cached blocks and encoder outputs that no sequence holds. Stores the blocks if spilling is enabled.
    fn clear_cache(&mut self) {
        let Self { spill, encoder, requests, scheduler, runner, .. } = self;
        match spill {
            Some(spill) => spill.flush(scheduler, &**runner),
            None => scheduler.clear_cache(),
        }
        if let Some(encoder) = encoder {
            encoder.start_requested(scheduler, requests);
        }
    }

    /// Puts the engine to sleep or wakes it, and replies to the caller.
    ///
    /// # Errors
    /// The error of the runner, if the runner can no longer be used.
    fn change_sleep_level(&mut self, command: SleepCommand, shared: &SharedState) -> Result<(), RunError> {
        let SleepCommand { level, reply, _permit } = command;
        // The requests of disconnected clients must not prevent sleep.
        self.requests.remove_aborted(&mut self.scheduler);
        let result = match level {
            None => self.wake(shared)?.map_err(SleepError::Wake),
            Some(_) if !self.scheduler.is_idle() => Err(SleepError::Busy),
            // The engine has already released at least as much memory as `level` requires.
            Some(level) if self.sleep_level >= Some(level) => Ok(()),
            Some(level) => {
                self.clear_cache();
                self.runner.sleep(level);
                self.speculator.sleep(level);
                self.sleep_level = Some(level);
                tracing::info!(?level, "the engine is asleep; the next request wakes it");
                Ok(())
            }
        };
        // Publish the load before the reply, so that the caller sees the new level.
        self.publish(shared);
        match (&self.encoder, self.sleep_level) {
            // The encoder's thread replies when it has released its memory, too. It may be encoding an image that no
            // request needs anymore.
            (Some(encoder), Some(level)) if result.is_ok() => encoder.sleep(level, reply),
            _ => {
                // The caller may have stopped waiting for the reply.
                let _ = reply.send(result);
            }
        }
        Ok(())
    }

    /// Wakes the runner if it is asleep. If that fails, returns false and fails all requests. The engine tries again
    /// for the next request.
    ///
    /// # Errors
    /// The same as those of [`Self::change_sleep_level`].
    fn ensure_awake(&mut self, shared: &SharedState) -> Result<bool, RunError> {
        if self.sleep_level.is_none() {
            return Ok(true);
        }
        // Publish the load now, so that it includes the requests that wait until the engine is awake.
        self.publish(shared);
        match self.wake(shared)? {
            Ok(()) => Ok(true),
            Err(message) => {
                tracing::warn!("failed to wake the engine: {message}");
                let all: Vec<u64> = self.requests.active.keys().copied().collect();
                for &number in &all {
                    self.requests.fail(number, Failure::Wake(message.clone()), &mut self.scheduler);
                }
                let requests_failed = all.len() as u32;
                (self.observer)(&StepReport { requests_failed, ..StepReport::default() });
                Ok(false)
            }
        }
    }

    fn wake(&mut self, shared: &SharedState) -> Result<Result<(), String>, RunError> {
        if self.sleep_level.is_none() {
            return Ok(Ok(()));
        }
        let began = shared.clock.now();
        match self.runner.wake() {
            Ok(()) => {}
            Err(error) if error.fatal => return Err(error),
            Err(error) => return Ok(Err(error.message)),
        }
        self.speculator.wake();
        if self.sleep_level == Some(SleepLevel::Model) {
            self.disable_spill_of_changed_model();
        }
        self.sleep_level = None;
        let wake_time = shared.clock.now() - began;
        tracing::info!(ms = wake_time.as_millis() as u64, "the engine is awake");
        let wake_time = Some(wake_time);
        (self.observer)(&StepReport { wake_time, ..StepReport::default() });
        Ok(Ok(()))
    }

    fn disable_spill_of_changed_model(&mut self) {
        if self.spill.as_ref().is_some_and(|spill| spill.has_model_changed()) {
            tracing::warn!("evicted blocks are no longer stored: the files of the model have changed");
            self.scheduler.disable_spill();
            self.spill = None;
        }
    }
}
