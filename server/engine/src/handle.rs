//! How everything else talks to the engine. What a request is refused for is decided here, on the caller's
//! thread, so that the answer comes at once and the engine's thread has less to do.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use server_scheduler::{Rejection, StopCriteria, TokenId};
use tokio::sync::{Semaphore, mpsc, watch};

use crate::clock::Clock;
use crate::engine::Drafters;
use crate::guide::Guide;
use crate::report::{EngineLoad, EngineState};
use crate::request::{DraftRule, Event, Request, Sampling};
use crate::sampler::History;
use crate::search::Beams;
use crate::sleep::SleepCommand;
use crate::spill::SpillStats;
use crate::stream::{Aborts, TokenStream};

/// Commands that may be on their way beside the requests: to drain, to stop, to sleep or wake the model, and to look at
/// what other threads have done, each once.
pub(crate) const CONTROL_COMMANDS_MAX: usize = 4;

/// Talks to an engine. Clones talk to the same.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
}

/// What the engine's thread and the handles share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) commands: SyncSender<Command>,
    pub(crate) load: watch::Sender<EngineLoad>,
    pub(crate) limits: Limits,
    pub(crate) clock: Clock,
    pub(crate) has_draft_model: bool,
    /// If evicted blocks are kept.
    pub(crate) spill: Option<Arc<SpillStats>>,
    /// Sequences that are submitted and not started.
    pub(crate) waiting: Arc<AtomicU32>,
    /// Requests handed to the engine, or about to be.
    pub(crate) submissions: AtomicU64,
    pub(crate) draining: AtomicBool,
    /// For whoever asks for sleep or waking: there is room for one such command.
    pub(crate) sleep_turn: Arc<Semaphore>,
    /// Set before the state becomes [`EngineState::Dead`].
    pub(crate) death: OnceLock<String>,
}

/// What a request has to keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens in the vocabulary.
    pub vocabulary: u32,
    /// Longest sequence, prompt and generated tokens together.
    pub max_model_len: u32,
    /// Tokens a block of the cache holds.
    pub block_tokens: u32,
    /// Blocks in the cache.
    pub blocks_total: u32,
    /// Most sequences of a request.
    pub request_sequences_max: u32,
    /// Most sequences that wait to be started.
    pub max_queue: u32,
    /// Adapters that there are, numbered from 1.
    pub adapters: u32,
}

#[derive(Debug)]
pub(crate) enum Command {
    Submit(Box<Submission>),
    /// Finish what there is, then end.
    Drain,
    /// Sleep or wake, if nothing is in work.
    Sleep(SleepCommand),
    /// End after the step in progress.
    Stop,
    /// Look at what other threads have done: evicted blocks that were read back, guides that are ready.
    Wake,
}

#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) prompt: Vec<TokenId>,
    pub(crate) stop: StopCriteria,
    pub(crate) sampling: Sampling,
    pub(crate) beams: Option<Beams>,
    pub(crate) drafters: Option<Drafters>,
    pub(crate) guide: Option<Arc<dyn Guide>>,
    pub(crate) salt: u64,
    pub(crate) adapter: u32,
    pub(crate) tenant: u128,
    pub(crate) histories: Vec<History>,
    pub(crate) events: mpsc::Sender<Event>,
    pub(crate) aborts: Arc<Aborts>,
    pub(crate) permit: WaitingPermit,
    pub(crate) submitted: Duration,
}

/// Counts sequences as waiting for as long as it lives.
#[derive(Debug)]
pub(crate) struct WaitingPermit {
    waiting: Arc<AtomicU32>,
    sequences: u32,
}

impl WaitingPermit {
    fn take(waiting: &Arc<AtomicU32>, sequences: u32, max_queue: u32) -> Result<Self, Rejection> {
        let more = |count: u32| count.checked_add(sequences).filter(|&count| count <= max_queue);
        waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).map_err(|_| Rejection::QueueFull)?;
        Ok(Self { waiting: Arc::clone(waiting), sequences })
    }
}

impl Drop for WaitingPermit {
    fn drop(&mut self) {
        self.waiting.fetch_sub(self.sequences, Ordering::AcqRel);
    }
}

/// Why a request was not taken. Nothing of it is left in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The engine's limits do not admit it.
    #[error("{}", describe(.0))]
    Rejected(Rejection),
    /// A token that the model does not know, in the prompt, in the bias or among those allowed.
    #[error("token {token} is not in the vocabulary of {vocabulary} tokens")]
    UnknownToken {
        /// The token.
        token: TokenId,
        /// Tokens in the vocabulary.
        vocabulary: u32,
    },
    /// A parameter's value has no meaning.
    #[error("the value of {parameter} has no meaning")]
    Invalid {
        /// The name of the field of [`Request`] or [`Sampling`].
        parameter: &'static str,
    },
    /// The engine finishes what it has and takes nothing more.
    #[error("the engine is draining")]
    Draining,
    /// The engine has ended.
    #[error("the engine has stopped")]
    Stopped,
}

fn describe(rejected: &Rejection) -> String {
    match rejected {
        Rejection::EmptyPrompt => "the prompt is empty".to_owned(),
        Rejection::TooLong { prompt_tokens, max_model_len } => format!(
            "a prompt of {prompt_tokens} tokens and the tokens asked for are more than the \
             {max_model_len} a sequence may have"
        ),
        Rejection::TooManySequences { num_sequences, max_num_seqs } => {
            format!("{num_sequences} sequences are more than the {max_num_seqs} a request may have")
        }
        Rejection::QueueFull => "as many sequences wait as may".to_owned(),
    }
}

/// The engine ended by a failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the engine died: {reason}")]
pub struct EngineDied {
    /// What the runner said, or the message of the panic.
    pub reason: String,
}

impl EngineHandle {
    /// Hands a request to the engine, which has it in hand before its next step.
    ///
    /// # Errors
    /// [`SubmitError`], at once. [`Rejection::TooLong`] goes by the prompt and `stop.max_tokens` together,
    /// [`Rejection::QueueFull`] by [`Limits::max_queue`], each sequence counted.
    pub fn submit(&self, request: Request) -> Result<TokenStream, SubmitError> {
        let Shared { limits, waiting, .. } = &*self.shared;
        self.check_state()?;
        limits.check(&request)?;
        let results = request.results() as usize;
        let Request { prompt, sequences, beams, lookup, draft, sampling, stop, guide, salt, adapter, tenant } =
            request;
        let permit =
            WaitingPermit::take(waiting, sequences, limits.max_queue).map_err(SubmitError::Rejected)?;

        // Started, scored, the tokens and the end of each result, and a failure.
        let events_max = 3 + results * (stop.max_tokens.max(1) as usize + 1);
        let (events, receiver) = mpsc::channel(events_max);
        let histories = vec![History::new(&prompt, &sampling); sequences as usize];
        let lookup = lookup.filter(|_| beams.is_none());
        let draft = draft.filter(|_| beams.is_none() && self.shared.has_draft_model);
        let drafters = Drafters::new(lookup, draft, &prompt);
        let submitted = self.shared.clock.now();
        let aborts = Aborts::new(results as u32);
        let stream = TokenStream::new(receiver, Arc::clone(&aborts));
        let submission = Submission {
            prompt,
            stop,
            sampling,
            beams,
            drafters,
            guide,
            salt,
            adapter,
            tenant,
            histories,
            events,
            aborts,
            permit,
            submitted,
        };
        // Counted before it is sent: whoever is taken before another is counted before it too.
        self.shared.submissions.fetch_add(1, Ordering::AcqRel);
        let sent = self.shared.commands.try_send(Command::Submit(Box::new(submission)));
        if sent.is_err() {
            self.shared.submissions.fetch_sub(1, Ordering::AcqRel);
        }
        match sent {
            Ok(()) => Ok(stream),
            Err(TrySendError::Disconnected(_)) => Err(SubmitError::Stopped),
            // Not reached: a command in the channel holds a permit, and there is room for all permits.
            Err(TrySendError::Full(_)) => Err(SubmitError::Rejected(Rejection::QueueFull)),
        }
    }

    /// Requests handed over so far. Read right after a submission it is a number such that a load with as many
    /// [`EngineLoad::submissions`] takes that request into account.
    pub fn submissions(&self) -> u64 {
        self.shared.submissions.load(Ordering::Acquire)
    }

    /// What a request has to keep to.
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// The load, published before each step and whenever the engine runs out of work. A change of the rates
    /// alone wakes nobody.
    pub fn load(&self) -> watch::Receiver<EngineLoad> {
        self.shared.load.subscribe()
    }

    /// What became of evicted blocks, if they are kept.
    pub fn spill(&self) -> Option<&SpillStats> {
        self.shared.spill.as_deref()
    }

    /// Sequences that are submitted and not started.
    pub fn waiting(&self) -> u32 {
        self.shared.waiting.load(Ordering::Acquire)
    }

    /// Whether the engine computes, or will when it gets something to do.
    pub fn is_alive(&self) -> bool {
        !matches!(self.state(), EngineState::Stopped | EngineState::Dead)
    }

    /// Waits until the engine dies: forever if it ends in good order.
    ///
    /// # Cancel safety
    /// Waiting changes nothing.
    pub async fn dead(&self) -> EngineDied {
        self.wait_for(|state| state == EngineState::Dead).await;
        self.died()
    }

    /// Makes the engine refuse further requests, finish those it has, and end; waits until it has.
    ///
    /// # Errors
    /// The engine died before.
    ///
    /// # Cancel safety
    /// The engine drains on if the future is dropped, once it was polled.
    pub async fn drain(&self) -> Result<(), EngineDied> {
        self.begin_drain();
        self.wait_for(|state| matches!(state, EngineState::Stopped | EngineState::Dead)).await;
        self.ended()
    }

    /// As [`Self::drain`], without waiting.
    pub fn begin_drain(&self) {
        if !self.shared.draining.swap(true, Ordering::AcqRel) {
            // There is room for it; without a receiver there is nothing left to drain.
            let _ = self.shared.commands.try_send(Command::Drain);
        }
    }

    /// How the engine ended, if it has.
    pub(crate) fn ended(&self) -> Result<(), EngineDied> {
        if self.state() == EngineState::Dead { Err(self.died()) } else { Ok(()) }
    }

    fn died(&self) -> EngineDied {
        EngineDied { reason: self.shared.death.get().cloned().unwrap_or_default() }
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
        load.wait_for(|load| state(load.state)).await.expect("invariant: the sender is in `shared`");
    }
}

impl Limits {
    /// The longest sequence of a request, prompt and generated tokens together. All beams of a search of this `width`
    /// have to fit the cache at once.
    pub fn tokens_max(&self, width: Option<u32>) -> u32 {
        let each = self.blocks_total / width.unwrap_or(1).max(1) * self.block_tokens;
        each.min(self.max_model_len)
    }

    fn check(&self, request: &Request) -> Result<(), SubmitError> {
        let Request { prompt, sequences, beams, lookup, draft, sampling, stop, adapter, .. } = request;
        let sequences = *sequences;
        let invalid = (sequences == 0).then_some("sequences").or_else(|| sampling.invalid());
        let invalid = invalid.or_else(|| (*adapter > self.adapters).then_some("adapter"));
        let invalid = invalid.or_else(|| beams.as_ref().and_then(|beams| beams.invalid(sequences)));
        let probability = |rule: &DraftRule| (0.0..=1.0).contains(&rule.probability_min);
        let invalid = invalid.or((!draft.as_ref().is_none_or(probability)).then_some("draft"));
        if let Some(parameter) = invalid {
            return Err(SubmitError::Invalid { parameter });
        }
        let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        if prompt_tokens == 0 {
            return Err(SubmitError::Rejected(Rejection::EmptyPrompt));
        }
        let max_model_len = self.tokens_max(beams.as_ref().map(|_| sequences));
        if prompt_tokens.saturating_add(stop.max_tokens.max(1)) > max_model_len {
            return Err(SubmitError::Rejected(Rejection::TooLong { prompt_tokens, max_model_len }));
        }
        let max_num_seqs = self.request_sequences_max;
        if sequences > max_num_seqs {
            return Err(SubmitError::Rejected(Rejection::TooManySequences {
                num_sequences: sequences,
                max_num_seqs,
            }));
        }
        let vocabulary = self.vocabulary;
        let lists = sampling.allowed.iter().flat_map(|allowed| allowed.iter().copied());
        let predicted = lookup.iter().flat_map(|lookup| lookup.prediction.iter().copied());
        let lists = lists.chain(predicted);
        let mut tokens = prompt.iter().copied().chain(sampling.bias.iter().map(|bias| bias.0)).chain(lists);
        match tokens.find(|&token| token >= vocabulary) {
            Some(token) => Err(SubmitError::UnknownToken { token, vocabulary }),
            None => Ok(()),
        }
    }
}
