//! The engine as its owner sees it: started, and joined. The loop is in `core`.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use server_scheduler::{KV_EVICTION_BLOCKS_MIN, SchedulerConfig};
use tokio::sync::{Semaphore, watch};

use crate::clock::Clock;
use crate::handle::{CONTROL_COMMANDS_MAX, Command, EngineDied, EngineHandle, Limits, Shared};
use crate::report::{EngineLoad, EngineState, Observer};
use crate::runner::{CacheLayout, DraftRunner, ModelRunner, Runners};
use crate::spill::{self, Spill, SpillConfig, SpillStats};
use crate::waker::Waker;

mod core;

pub(crate) use core::Drafters;

/// The sizes and limits of an engine. Those of the cache and the vocabulary are the runner's.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Most tokens computed in one step, over all sequences.
    pub max_num_batched_tokens: u32,
    /// Most tokens computed in a step in which sequences decode while there are prompts to compute: how long a
    /// prompt may hold these up.
    pub max_chunk_tokens: u32,
    /// How long a step should take at most in which sequences decode; then prompts have as many tokens in it as fit by what
    /// steps were seen to take, and `max_chunk_tokens` holds only until enough is known.
    pub max_itl: Option<Duration>,
    /// Most sequences that run at once.
    pub max_num_seqs: u32,
    /// Most sequences that wait to be started. A burst waits as a whole until the next step, so this is not
    /// to be less than what is to be taken at once.
    pub max_queue: u32,
    /// Longest sequence, prompt and generated tokens together; what the cache holds if that is less.
    pub max_model_len: u32,
    /// Whether blocks of equal content are computed once and kept after their sequence ends.
    pub prefix_caching: bool,
    /// Tokens of a sequence that stay in the cache at most while it generates, in whole blocks, of which there are four at least:
    /// others are left by what weight they have had ([`ModelRunner::block_weights`]). `None`: all stay.
    pub kv_eviction_tokens: Option<u32>,
    /// What queue times and step times are measured by.
    pub clock: Clock,
}

/// Upper limit of [`EngineConfig::max_queue`].
pub const MAX_QUEUE_LIMIT: u32 = 1 << 20;

/// Why an engine could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A size is zero, or too small to compute anything with.
    #[error("{name} is too small: it is to be {min} at least")]
    TooSmall {
        /// The field of [`EngineConfig`] or [`CacheLayout`].
        name: &'static str,
        /// What would do.
        min: u32,
    },
    /// More may never wait: the queue is allocated at once.
    #[error("max_queue is greater than {MAX_QUEUE_LIMIT}")]
    TooManyWaiting,
    /// The draft model cannot share the target's block tables.
    #[error(
        "the draft model's cache has {} blocks of {} tokens, the model's {} of {}",
        draft.blocks_total, draft.block_tokens, target.blocks_total, target.block_tokens
    )]
    DraftCache {
        /// The cache of the model.
        target: CacheLayout,
        /// The cache of the draft model.
        draft: CacheLayout,
    },
    /// The operating system has no thread for it.
    #[error("failed to start the engine's thread")]
    Thread(#[source] std::io::Error),
    /// It is not told what each adapter is by its content, so that what is kept of one cannot be told from another's.
    #[error("of the content of {known} of {adapters} adapters is known what evicted blocks are kept by")]
    UnknownAdapters {
        /// Those of [`SpillIdentity`](crate::SpillIdentity).
        known: usize,
        /// Those of the runner.
        adapters: u32,
    },
    /// Evicted blocks are to be kept of a cache that evicts none.
    #[error("without a prefix cache nothing is evicted that could be kept")]
    NothingToSpill,
}

/// What an engine can do without.
#[derive(Default)]
pub struct Extras {
    /// A model that guesses what the other will say, for requests with [`Request::draft`](crate::Request::draft).
    pub draft: Option<DraftRunner>,
    /// Where evicted blocks are kept.
    pub spill: Option<SpillConfig>,
}

impl Extras {
    fn check(&self, config: &EngineConfig, runner: &dyn ModelRunner) -> Result<(), StartError> {
        if let Some(draft) = &self.draft {
            let (target, other) = (runner.layout(), draft.runner.layout());
            if other.block_tokens != target.block_tokens || other.blocks_total < target.blocks_total {
                return Err(StartError::DraftCache { target, draft: other });
            }
        }
        if let Some(spill) = &self.spill {
            let (known, adapters) = (spill.identity.adapters.len(), runner.adapters());
            if !config.prefix_caching {
                return Err(StartError::NothingToSpill);
            }
            if known != adapters as usize {
                return Err(StartError::UnknownAdapters { known, adapters });
            }
        }
        Ok(())
    }
}

/// Owns the engine's thread. Dropping it ends the engine after the step in progress, fails what is
/// unfinished with [`Failure::Stopped`](crate::Failure::Stopped), and waits for the thread.
#[derive(Debug)]
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts a thread that owns `runner` and serves requests with it.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(
        config: EngineConfig,
        runner: Box<dyn ModelRunner>,
        observer: Observer,
    ) -> Result<Self, StartError> {
        Self::start_with(config, runner, Extras::default(), observer)
    }

    /// As [`Self::start`], with what an engine can do without.
    ///
    /// # Errors
    /// [`StartError`]. Whatever is wrong with the directory of [`Extras::spill`] is logged, and costs only what would
    /// be kept there.
    pub fn start_with(
        config: EngineConfig,
        runner: Box<dyn ModelRunner>,
        extras: Extras,
        observer: Observer,
    ) -> Result<Self, StartError> {
        extras.check(&config, &*runner)?;
        let Extras { draft, spill } = extras;
        let runners = Runners { target: runner, draft };
        let layout = runners.target.layout();
        let scheduler = scheduler_config(&config, layout)?;
        let limits = Limits {
            vocabulary: layout.vocabulary,
            max_model_len: scheduler.max_model_len,
            block_tokens: scheduler.block_tokens,
            blocks_total: scheduler.blocks_total,
            request_sequences_max: scheduler.max_num_seqs.min(config.max_queue),
            max_queue: config.max_queue,
            adapters: runners.target.adapters(),
        };
        let (commands, receiver) = mpsc::sync_channel(config.max_queue as usize + CONTROL_COMMANDS_MAX);
        let waker = Waker::new(commands.clone());
        let stats = spill.as_ref().map(|_| Arc::new(SpillStats::default()));
        let start = |(spill, stats): (&SpillConfig, &Arc<SpillStats>)| {
            let started = Spill::start(spill, &*runners.target, waker.clone(), Arc::clone(stats));
            Ok((started.map_err(StartError::Thread)?, spill::keying(&spill.identity)))
        };
        let started = spill.as_ref().zip(stats.as_ref()).map(start).transpose()?;
        let shared = Arc::new(Shared {
            commands,
            load: watch::Sender::new(EngineLoad::default()),
            limits,
            clock: config.clock,
            has_draft_model: runners.draft.is_some(),
            spill: stats,
            waiting: Arc::new(AtomicU32::new(0)),
            submissions: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            sleep_turn: Arc::new(Semaphore::new(1)),
            death: OnceLock::new(),
        });
        let handle = EngineHandle { shared: Arc::clone(&shared) };
        let links = core::Links {
            commands: receiver,
            waker: waker.clone(),
            clock: shared.clock.clone(),
            spill: started,
        };
        let core = core::Core::new(scheduler, runners, observer, links);
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || run(core, &shared))
            .map_err(StartError::Thread)?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// A handle to submit requests by.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Finishes what there is, refuses more, and waits for the thread to end. It blocks.
    ///
    /// # Errors
    /// The engine died.
    pub fn shutdown(mut self) -> Result<(), EngineDied> {
        self.handle.begin_drain();
        self.join();
        self.handle.ended()
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic that was not caught happened while the runner was dropped: the state is set already.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.thread.is_some() {
            // There is room for it; without a receiver the thread has ended.
            let _ = self.handle.shared.commands.try_send(Command::Stop);
            self.join();
        }
    }
}

fn scheduler_config(config: &EngineConfig, layout: CacheLayout) -> Result<SchedulerConfig, StartError> {
    let CacheLayout { block_tokens, blocks_total, vocabulary, .. } = layout;
    let cache_tokens = block_tokens.saturating_mul(blocks_total);
    let sizes = [
        ("block_tokens", block_tokens, 1),
        ("blocks_total", blocks_total, 1),
        ("vocabulary", vocabulary, 1),
        ("max_num_batched_tokens", config.max_num_batched_tokens, 1),
        ("max_chunk_tokens", config.max_chunk_tokens, 1),
        ("max_num_seqs", config.max_num_seqs, 1),
        ("max_queue", config.max_queue, 1),
        ("max_model_len", config.max_model_len.min(cache_tokens), 2),
        (
            "kv_eviction_tokens",
            config.kv_eviction_tokens.unwrap_or(u32::MAX),
            KV_EVICTION_BLOCKS_MIN * block_tokens,
        ),
    ];
    if let Some((name, _, min)) = sizes.into_iter().find(|(_, size, min)| size < min) {
        return Err(StartError::TooSmall { name, min });
    }
    if config.max_queue > MAX_QUEUE_LIMIT {
        return Err(StartError::TooManyWaiting);
    }
    Ok(SchedulerConfig {
        block_tokens,
        blocks_total,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_chunk_tokens: config.max_chunk_tokens,
        max_itl: config.max_itl,
        max_num_seqs: config.max_num_seqs.min(config.max_num_batched_tokens),
        // The handle keeps the limit. Preempted sequences wait as well and are refused nothing for it.
        max_queue: config.max_queue.saturating_add(config.max_num_seqs),
        max_model_len: config.max_model_len.min(cache_tokens),
        prefix_caching: config.prefix_caching,
        kv_eviction_tokens: config.kv_eviction_tokens,
    })
}

/// The engine's thread.
fn run(mut core: core::Core, shared: &Shared) {
    // Whatever the panic left behind is only dropped.
    let outcome = catch_unwind(AssertUnwindSafe(|| core.run(shared)));
    let death = match outcome {
        Ok(Ok(())) => None,
        Ok(Err(fatal)) => Some(fatal.to_string()),
        Err(panic) => Some(panic_message(panic.as_ref())),
    };
    let state = if death.is_some() { EngineState::Dead } else { EngineState::Stopped };
    if let Some(reason) = death {
        shared.death.get_or_init(|| reason);
    }
    // Before the streams end: whoever sees that they did, finds the reason here.
    shared.load.send_replace(EngineLoad { state, ..EngineLoad::default() });
    drop(core);
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<&str>().copied();
    message.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it panicked").to_owned()
}
