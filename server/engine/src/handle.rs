//! The handle through which other threads use the engine. It checks requests on the caller's thread, so that rejections
//! are immediate and cost the engine's thread no time.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, OnceLock};

use server_scheduler::{Rejection, RequestLimits, TokenId};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::aborts::Aborts;
use crate::clock::Clock;
use crate::command::{Command, SleepCommand, Submission, WaitingPermit};
use crate::images::RequestImages;
use crate::report::{EngineLoad, EngineState};
use crate::request::{DraftModelParams, Request};
use crate::sampler::History;
use crate::sleep::{SleepError, SleepLevel};
use crate::spill::SpillStats;
use crate::stream::TokenStream;
use crate::waker::Waker;

/// Submits requests to an engine. Clones use the same engine.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    pub(crate) shared: Arc<SharedState>,
}

/// The state that the engine's thread and the handles share.
#[derive(Debug)]
pub(crate) struct SharedState {
    pub(crate) commands: SyncSender<Command>,
    pub(crate) waker: Waker,
    pub(crate) load: watch::Sender<EngineLoad>,
    pub(crate) limits: EngineLimits,
    pub(crate) clock: Clock,
    pub(crate) has_draft_model: bool,
    /// `None` if evicted blocks are not stored.
    pub(crate) spill_stats: Option<Arc<SpillStats>>,
    /// Number of sequences of submitted requests that have not started.
    pub(crate) waiting: Arc<AtomicU32>,
    /// Number of requests that were sent to the engine or are being sent.
    pub(crate) submissions: AtomicU64,
    pub(crate) draining: AtomicBool,
    /// Allows one sleep command in the channel.
    pub(crate) sleep_permit: Arc<Semaphore>,
    /// The reason why the engine failed. It is set before the state becomes [`EngineState::Dead`].
    pub(crate) failure: OnceLock<String>,
}

/// The limits for requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// The limits on the length of a sequence, on the number of sequences per request and on the queue.
    pub requests: RequestLimits,
    /// Number of tokens in the vocabulary.
    pub vocabulary: u32,
    /// Number of adapters. Adapters are numbered from 1.
    pub adapters: u32,
    /// Whether the engine has an image encoder.
    pub reads_images: bool,
}

/// The reason why a request was rejected. The engine stores no state for a rejected request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The request exceeds a limit of the engine, or its prompt is empty.
    #[error("{}", describe(.0))]
    Rejected(Rejection),
    /// A token in the prompt, the logit bias, the allowed tokens or the prediction is not in the vocabulary.
    #[error("token {token} is not in the vocabulary of {vocabulary} tokens")]
    UnknownToken {
        /// The unknown token id.
        token: TokenId,
        /// Number of tokens in the vocabulary.
        vocabulary: u32,
    },
    /// The value of a parameter is invalid.
    #[error("the value of {parameter} is invalid")]
    Invalid {
        /// The name of the field of [`Request`], [`Sampling`](crate::Sampling) or [`BeamSearch`](crate::BeamSearch).
        parameter: &'static str,
    },
    /// The engine finishes its requests and accepts no new ones.
    #[error("the engine is draining")]
    Draining,
    /// The engine has ended.
    #[error("the engine has stopped")]
    Stopped,
}

fn describe(rejection: &Rejection) -> String {
    match rejection {
        Rejection::EmptyPrompt => "the prompt is empty".to_owned(),
        Rejection::TooLong { prompt_tokens, max_model_len } => format!(
            "the {prompt_tokens} prompt tokens and the requested output tokens together exceed the maximum length of \
             {max_model_len} tokens"
        ),
        Rejection::TooManySequences { num_sequences, max_num_seqs } => {
            format!("{num_sequences} sequences exceed the limit of {max_num_seqs} sequences per request")
        }
        Rejection::QueueFull { max_queue } => format!("the queue is full (limit: {max_queue} sequences)"),
    }
}

/// The error of an engine that has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the engine died: {reason}")]
pub struct EngineError {
    /// The error message of the runner, or the message of the panic.
    pub reason: String,
}

impl EngineHandle {
    /// Sends a request to the engine, which receives it before its next step.
    ///
    /// # Errors
    /// [`SubmitError`] if the request is invalid or exceeds a limit, or if the engine is draining or has ended. The
    /// method never waits. [`Rejection::TooLong`] applies to the number of prompt tokens plus `stop.max_tokens`, and
    /// [`Rejection::QueueFull`] to the number of waiting sequences.
    pub fn submit(&self, request: Request) -> Result<TokenStream, SubmitError> {
        let SharedState { limits, waiting, .. } = &*self.shared;
        self.check_state()?;
        limits.check(&request)?;
        let num_results = request.num_results();
        let Request { prompt, num_sequences, beam_search, sampling, stop, .. } = request;
        let max_queue = limits.requests.max_queue;
        let permit =
            WaitingPermit::acquire(waiting, num_sequences, max_queue).map_err(SubmitError::Rejected)?;

        // A request has at most one event each for its start, its scores and its failure. Each result adds one event
        // per token and one for its end.
        let events_max = 3 + num_results as usize * (stop.max_tokens.max(1) as usize + 1);
        let (events, receiver) = mpsc::channel(events_max);
        let aborts = Aborts::new(num_results);
        let stream = TokenStream::new(receiver, Arc::clone(&aborts), self.shared.waker.clone());
        let has_draft_model = self.shared.has_draft_model;
        let submission = Submission {
            histories: vec![History::new(&prompt, &sampling); num_sequences as usize],
            prompt,
            images: request.images.clone(),
            stop,
            sampling,
            lookup: request.lookup.filter(|_| beam_search.is_none()),
            draft: request
                .draft
                .filter(|_| beam_search.is_none() && has_draft_model && request.images.is_none()),
            beam_search,
            guide: request.guide,
            cache_salt: request.cache_salt,
            adapter: request.adapter,
            tenant: request.tenant,
            events,
            aborts,
            permit,
            submitted: self.shared.clock.now(),
        };
        // Count the request before sending it, so that this count is never less than the number of requests that the
        // engine has received.
        self.shared.submissions.fetch_add(1, Ordering::AcqRel);
        let sent = self.shared.commands.try_send(Command::Submit(Box::new(submission)));
        if sent.is_err() {
            self.shared.submissions.fetch_sub(1, Ordering::AcqRel);
        }
        match sent {
            Ok(()) => Ok(stream),
            Err(TrySendError::Disconnected(_)) => Err(SubmitError::Stopped),
            // Unreachable: a submission in the channel has a permit, and the channel has room for all permits.
            Err(TrySendError::Full(_)) => Err(SubmitError::Rejected(Rejection::QueueFull { max_queue })),
        }
    }

    /// Number of requests sent so far. If a caller reads this number right after it has submitted a request, every load
    /// whose [`EngineLoad::submissions`] is at least this number includes that request.
    pub fn submissions(&self) -> u64 {
        self.shared.submissions.load(Ordering::Acquire)
    }

    /// The limits that [`Self::submit`] checks.
    pub fn limits(&self) -> EngineLimits {
        self.shared.limits
    }

    /// The load, published before each step and whenever the engine becomes idle. Receivers are notified only if the
    /// state, the sleep level or [`EngineLoad::load`] has changed.
    pub fn load(&self) -> watch::Receiver<EngineLoad> {
        self.shared.load.subscribe()
    }

    /// The statistics of stored blocks, if evicted blocks are stored.
    pub fn spill_stats(&self) -> Option<&SpillStats> {
        self.shared.spill_stats.as_deref()
    }

    /// Number of sequences of submitted requests that have not started.
    pub fn waiting_sequences(&self) -> u32 {
        self.shared.waiting.load(Ordering::Acquire)
    }

    /// Whether the engine has neither stopped nor failed.
    pub fn is_alive(&self) -> bool {
        !matches!(self.state(), EngineState::Stopped | EngineState::Dead)
    }

    /// Waits until the engine fails. If the engine ends normally, waits forever.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn wait_for_failure(&self) -> EngineError {
        self.wait_for(|state| state == EngineState::Dead).await;
        self.error()
    }

    /// Puts the engine to sleep, and waits until it and its image encoder have released the memory that `level`
    /// specifies. If the engine is already asleep, it releases only the memory that it has not released yet.
    ///
    /// # Errors
    /// [`SleepError`] if the engine is not idle, is draining or has ended.
    ///
    /// # Cancel safety
    /// Once the future has been polled, the sleep level may change even if the future is dropped.
    pub async fn sleep(&self, level: SleepLevel) -> Result<(), SleepError> {
        self.change_sleep_level(Some(level)).await
    }

    /// Wakes the engine, and waits until it can compute. Requests wake it as well.
    ///
    /// # Errors
    /// [`SleepError`] if the engine cannot be woken, or is draining or has ended.
    ///
    /// # Cancel safety
    /// The same as for [`Self::sleep`].
    pub async fn wake(&self) -> Result<(), SleepError> {
        self.change_sleep_level(None).await
    }

    /// The sleep level of the engine, if it is asleep.
    pub fn sleep_level(&self) -> Option<SleepLevel> {
        self.shared.load.borrow().sleep_level
    }

    /// Stops accepting requests, and waits until the engine has finished the accepted ones and has ended.
    ///
    /// # Errors
    /// [`EngineError`] if the engine fails before it has finished.
    ///
    /// # Cancel safety
    /// If the future is dropped after it has been polled, the engine continues to drain.
    pub async fn drain(&self) -> Result<(), EngineError> {
        self.begin_drain();
        self.wait_for(|state| matches!(state, EngineState::Stopped | EngineState::Dead)).await;
        self.result()
    }

    /// Stops accepting requests, like [`Self::drain`], but does not wait for the engine to end.
    pub fn begin_drain(&self) {
        if !self.shared.draining.swap(true, Ordering::AcqRel) {
            // The channel has room for this command, so sending fails only if the engine has ended.
            let _ = self.shared.commands.try_send(Command::Drain);
        }
    }

    /// The error of the engine, if it has failed.
    pub(crate) fn result(&self) -> Result<(), EngineError> {
        if self.state() == EngineState::Dead { Err(self.error()) } else { Ok(()) }
    }

    fn error(&self) -> EngineError {
        EngineError { reason: self.shared.failure.get().cloned().unwrap_or_default() }
    }

    fn state(&self) -> EngineState {
        self.shared.load.borrow().state
    }

    fn check_state(&self) -> Result<(), SubmitError> {
        if !self.is_alive() {
            return Err(SubmitError::Stopped);
        }
        if self.shared.draining.load(Ordering::Acquire) {
            return Err(SubmitError::Draining);
        }
        Ok(())
    }

    async fn wait_for(&self, state: impl Fn(EngineState) -> bool) {
        let mut load = self.shared.load.subscribe();
        load.wait_for(|load| state(load.state)).await.expect("invariant: `shared` has the sender");
    }

    async fn change_sleep_level(&self, level: Option<SleepLevel>) -> Result<(), SleepError> {
        let permit = Arc::clone(&self.shared.sleep_permit).acquire_owned().await;
        let permit = permit.expect("invariant: the semaphore is never closed");
        if self.state() == EngineState::Draining {
            return Err(SleepError::Stopped);
        }
        let (reply, receiver) = oneshot::channel();
        let command = Command::Sleep(SleepCommand { level, reply, _permit: permit });
        match self.shared.commands.try_send(command) {
            Ok(()) => receiver.await.unwrap_or(Err(SleepError::Stopped)),
            // The channel has room for one sleep command, and only the holder of the permit sends one, so sending fails
            // only if the engine has ended.
            Err(TrySendError::Disconnected(_) | TrySendError::Full(_)) => Err(SleepError::Stopped),
        }
    }
}

impl EngineLimits {
    fn check(&self, request: &Request) -> Result<(), SubmitError> {
        let Request {
            prompt,
            images,
            num_sequences,
            beam_search,
            lookup,
            draft,
            sampling,
            stop,
            adapter,
            ..
        } = request;
        let is_valid = |draft: &DraftModelParams| (0.0..=1.0).contains(&draft.confidence_threshold);
        let invalid = (*num_sequences == 0).then_some("num_sequences");
        let invalid = invalid.or_else(|| sampling.invalid_parameter());
        let invalid = invalid.or_else(|| (*adapter > self.adapters).then_some("adapter"));
        let invalid = invalid
            .or_else(|| beam_search.as_ref().and_then(|search| search.invalid_parameter(*num_sequences)));
        let invalid = invalid.or((!draft.as_ref().is_none_or(is_valid)).then_some("draft"));
        let are_valid = |images: &Arc<RequestImages>| {
            self.reads_images && images.are_valid(prompt.len()) && sampling.prompt_logprobs.is_none()
        };
        let invalid = invalid.or((!images.as_ref().is_none_or(are_valid)).then_some("images"));
        if let Some(parameter) = invalid {
            return Err(SubmitError::Invalid { parameter });
        }
        self.requests
            .check(prompt.len(), stop.max_tokens, *num_sequences, beam_search.is_some())
            .map_err(SubmitError::Rejected)?;
        let vocabulary = self.vocabulary;
        let allowed = sampling.allowed_token_ids.iter().flat_map(|allowed| allowed.iter().copied());
        let predicted = lookup.iter().flat_map(|lookup| lookup.prediction.iter().copied());
        let biased = sampling.logit_bias.iter().map(|bias| bias.0);
        let mut tokens = prompt.iter().copied().chain(biased).chain(allowed).chain(predicted);
        match tokens.find(|&token| token >= vocabulary) {
            Some(token) => Err(SubmitError::UnknownToken { token, vocabulary }),
            None => Ok(()),
        }
    }
}
