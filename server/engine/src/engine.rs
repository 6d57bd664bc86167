//! Starts and stops the engine's thread. The module `core` contains the loop of the thread.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;

use server_scheduler::{KV_EVICTION_BLOCKS_MIN, SchedulerConfig};
use tokio::sync::{Semaphore, watch};

use crate::clock::Clock;
use crate::command::{CONTROL_COMMANDS_MAX, Command};
use crate::core::{Core, Links};
use crate::encoder::{Encoder, EncoderConfig};
use crate::handle::{EngineError, EngineHandle, EngineLimits, SharedState};
use crate::report::{EngineLoad, EngineState, Observer};
use crate::runner::{CacheLayout, DraftRunner, ModelRunner, Runners};
use crate::spill::{self, Spill, SpillConfig, SpillStats};
use crate::waker::Waker;
use crate::workers::Workers;

/// The settings of an engine. The runner determines the sizes of the cache and of the vocabulary.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The settings of the scheduler. If `max_model_len` exceeds the number of tokens that fit in the cache, the engine
    /// reduces it to that number.
    pub scheduler: SchedulerConfig,
    /// The clock that measures queue times and step times.
    pub clock: Clock,
}

/// The largest value of [`SchedulerConfig::max_queue`] that an engine accepts. The queue is allocated at the start.
pub const MAX_QUEUE_LIMIT: u32 = 1 << 20;

/// The reason why an engine could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A setting of the scheduler or a size in the cache layout is below its minimum.
    #[error("{name} must be at least {min}, but it is {value}")]
    TooSmall {
        /// The name of the field of [`SchedulerConfig`] or [`CacheLayout`].
        name: &'static str,
        /// The value of the field.
        value: u32,
        /// The smallest valid value.
        min: u32,
    },
    /// The queue would be too large.
    #[error("max_queue must be at most {MAX_QUEUE_LIMIT}, but it is {max_queue}")]
    TooManyWaiting {
        /// The configured maximum number of waiting sequences.
        max_queue: u32,
    },
    /// The draft model cannot use the block tables of the target model.
    #[error(
        "the cache of the draft model must have at least {} blocks of exactly {} tokens, but it has {} blocks of {} \
         tokens",
        target.blocks_total, target.block_tokens, draft.blocks_total, draft.block_tokens
    )]
    DraftCache {
        /// The cache layout of the target model.
        target: CacheLayout,
        /// The cache layout of the draft model.
        draft: CacheLayout,
    },
    /// The operating system failed to start a thread.
    #[error("failed to start a thread of the engine")]
    Thread(#[source] std::io::Error),
    /// The number of adapters in the identity of stored blocks is not that of the runner, so a block that was computed
    /// with one adapter could be used with another.
    #[error(
        "the identity of stored blocks includes the digests of {known} adapters, but the model has {adapters} adapters"
    )]
    UnknownAdapters {
        /// Number of adapters in [`SpillIdentity`](crate::SpillIdentity).
        known: usize,
        /// Number of adapters of the runner.
        adapters: u32,
    },
    /// Evicted blocks cannot be stored, because without prefix caching no blocks are evicted.
    #[error("storing evicted blocks requires prefix caching")]
    NothingToSpill,
}

/// The optional parts of an engine.
#[derive(Default)]
pub struct EngineOptions {
    /// The draft model for requests with [`Request::draft`](crate::Request::draft).
    pub draft: Option<DraftRunner>,
    /// The settings for storing evicted blocks in a directory. `None` if evicted blocks are not stored.
    pub spill: Option<SpillConfig>,
    /// The image encoder, if the model accepts images.
    pub encoder: Option<EncoderConfig>,
    /// The maximum number of threads that sample tokens between two steps, including the engine's thread. `None` stands
    /// for one thread per processor, up to 16 threads. Answers do not depend on this number.
    pub sampling_threads: Option<usize>,
}

impl EngineOptions {
    fn check(&self, config: &EngineConfig, runner: &dyn ModelRunner) -> Result<(), StartError> {
        if let Some(draft) = &self.draft {
            let (target, other) = (runner.layout(), draft.runner.layout());
            if other.block_tokens != target.block_tokens || other.blocks_total < target.blocks_total {
                return Err(StartError::DraftCache { target, draft: other });
            }
        }
        if let Some(spill) = &self.spill {
            let (known, adapters) = (spill.identity.adapters.len(), runner.adapters());
            if !config.scheduler.prefix_caching {
                return Err(StartError::NothingToSpill);
            }
            if known != adapters as usize {
                return Err(StartError::UnknownAdapters { known, adapters });
            }
        }
        Ok(())
    }
}

/// Owns the engine's thread. Dropping it ends the engine after the current step, fails unfinished requests with
/// [`Failure::Stopped`](crate::Failure::Stopped), and waits for the thread.
#[derive(Debug)]
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts a thread that owns `runner` and serves requests with it.
    ///
    /// # Errors
    /// [`StartError`] if the configuration is invalid or a thread could not be started.
    pub fn start(
        config: EngineConfig,
        runner: Box<dyn ModelRunner>,
        observer: Observer,
    ) -> Result<Self, StartError> {
        Self::start_with_options(config, runner, EngineOptions::default(), observer)
    }

    /// Starts an engine with optional parts.
    ///
    /// # Errors
    /// [`StartError`] if the configuration or an option is invalid, or a thread could not be started. Errors that
    /// concern the directory in [`EngineOptions::spill`] are only logged.
    pub fn start_with_options(
        config: EngineConfig,
        runner: Box<dyn ModelRunner>,
        options: EngineOptions,
        observer: Observer,
    ) -> Result<Self, StartError> {
        options.check(&config, &*runner)?;
        let EngineOptions { draft, spill, encoder, sampling_threads } = options;
        let runners = Runners { target: runner, draft };
        let layout = runners.target.layout();
        let EngineConfig { scheduler: config, clock } = config;
        let config = fit(config, layout)?;
        let requests = config.request_limits(layout.size());
        let limits = EngineLimits {
            requests,
            vocabulary: layout.vocabulary,
            adapters: runners.target.adapters(),
            reads_images: encoder.is_some(),
        };
        let (commands, receiver) = mpsc::sync_channel(config.max_queue as usize + CONTROL_COMMANDS_MAX);
        let waker = Waker::new(commands.clone());
        let stats = spill.as_ref().map(|_| Arc::new(SpillStats::default()));
        let start = |(spill, stats): (&SpillConfig, &Arc<SpillStats>)| {
            let started = Spill::start(spill, &*runners.target, waker.clone(), Arc::clone(stats));
            Ok((started.map_err(StartError::Thread)?, spill::key_scheme(&spill.identity)))
        };
        let started = spill.as_ref().zip(stats.as_ref()).map(start).transpose()?;
        let start = |config| Encoder::start(config, clock.clone(), waker.clone());
        let encoder = encoder.map(start).transpose().map_err(StartError::Thread)?;
        let shared = Arc::new(SharedState {
            commands,
            waker: waker.clone(),
            load: watch::Sender::new(EngineLoad::default()),
            limits,
            clock,
            has_draft_model: runners.draft.is_some(),
            spill_stats: stats,
            waiting: Arc::new(AtomicU32::new(0)),
            submissions: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            sleep_permit: Arc::new(Semaphore::new(1)),
            failure: OnceLock::new(),
        });
        let handle = EngineHandle { shared: Arc::clone(&shared) };
        let links = Links {
            commands: receiver,
            waker,
            clock: shared.clock.clone(),
            spill: started,
            encoder,
            workers: Workers::new(sampling_threads),
        };
        // The handle enforces `max_queue`. The scheduler does not, because preempted sequences return to its queue and
        // must not cause rejections.
        let core = Core::new(SchedulerConfig { max_queue: u32::MAX, ..config }, runners, observer, links);
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || run(core, &shared))
            .map_err(StartError::Thread)?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// Returns a handle to submit requests.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Finishes the accepted requests, rejects new ones, and blocks until the thread has ended.
    ///
    /// # Errors
    /// [`EngineError`] if the engine has failed.
    pub fn shutdown(mut self) -> Result<(), EngineError> {
        self.handle.begin_drain();
        self.join();
        self.handle.result()
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // An uncaught panic can come only from dropping the `Core`, after the state was published.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.thread.is_some() {
            // The channel has room for the command. Sending fails only if the thread has ended.
            let _ = self.handle.shared.commands.try_send(Command::Stop);
            self.join();
        }
    }
}

/// Validates the settings, and limits `max_model_len` to the number of tokens that fit in the cache.
fn fit(mut config: SchedulerConfig, layout: CacheLayout) -> Result<SchedulerConfig, StartError> {
    let CacheLayout { block_tokens, blocks_total, vocabulary, .. } = layout;
    config.max_model_len = config.max_model_len.min(block_tokens.saturating_mul(blocks_total));
    let eviction_tokens_min = KV_EVICTION_BLOCKS_MIN * block_tokens;
    let sizes = [
        ("block_tokens", block_tokens, 1),
        ("blocks_total", blocks_total, 1),
        ("vocabulary", vocabulary, 1),
        ("max_num_batched_tokens", config.max_num_batched_tokens, 1),
        ("max_chunk_tokens", config.max_chunk_tokens, 1),
        ("max_num_seqs", config.max_num_seqs, 1),
        ("max_queue", config.max_queue, 1),
        ("max_model_len", config.max_model_len, 2),
        ("kv_eviction_tokens", config.kv_eviction_tokens.unwrap_or(u32::MAX), eviction_tokens_min),
    ];
    if let Some((name, value, min)) = sizes.into_iter().find(|(_, value, min)| value < min) {
        return Err(StartError::TooSmall { name, value, min });
    }
    let max_queue = config.max_queue;
    if max_queue > MAX_QUEUE_LIMIT {
        return Err(StartError::TooManyWaiting { max_queue });
    }
    Ok(config)
}

/// The engine's thread.
fn run(mut core: Core, shared: &SharedState) {
    // Unwind safety: after a panic, the state is only dropped.
    let result = catch_unwind(AssertUnwindSafe(|| core.run(shared)));
    let failure = match result {
        Ok(Ok(())) => None,
        Ok(Err(fatal)) => Some(fatal.to_string()),
        Err(panic) => Some(panic_message(panic.as_ref())),
    };
    let state = if failure.is_some() { EngineState::Dead } else { EngineState::Stopped };
    if let Some(reason) = failure {
        shared.failure.get_or_init(|| reason);
    }
    // Publish the state before the streams end, so that their clients can read the reason.
    shared.load.send_replace(EngineLoad { state, ..EngineLoad::default() });
    drop(core);
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<&str>().copied();
    message.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("the engine panicked").to_owned()
}
