//! A second compiled graph of the model, whose projections have their weights in f32, for large steps: on a
//! processor that cannot multiply 8-bit integers, unpacking weights costs a large step more than reading
//! larger ones. Both graphs compute the same, over one KV cache. It is made in the background: steps before
//! it is ready, and all steps if it fails, are run by the first graph.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use crate::runtime::{CompiledModel, Core, InferRequest, Model};
use crate::{Error, memory, processor, shim};

/// Whether large steps get a graph of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unpack {
    /// From [`LARGE_STEP_TOKENS`] on, where it is faster and memory allows.
    Auto,
    /// No.
    Never,
    /// Steps of at least this many tokens do.
    FromTokens(u32),
}

/// Tokens of a step from which f32 weights were seen to be faster (AVX2; equal at 64, 16 % at 128).
pub const LARGE_STEP_TOKENS: u32 = 96;

/// Times the f32 weights that compiling takes at its height: the values, and the plugin's own layout of them
/// before the former are freed, with room for the rest.
const COMPILING_FACTOR: u64 = 3;

/// A compiled model and the request that runs it.
pub(crate) struct Graph {
    // Dropped in this order.
    pub(crate) request: InferRequest,
    pub(crate) compiled: Arc<CompiledModel>,
    _core: Arc<Core>,
}

impl Graph {
    pub(crate) fn new(core: Arc<Core>, compiled: CompiledModel) -> Result<Self, Error> {
        Self::over(core, Arc::new(compiled))
    }

    /// Another request of what is compiled.
    pub(crate) fn over(core: Arc<Core>, compiled: Arc<CompiledModel>) -> Result<Self, Error> {
        Ok(Self { request: compiled.request()?, compiled, _core: core })
    }
}

/// Gives a graph that is paged: one that is there, or read anew.
pub(crate) type PagedModel = Box<dyn FnOnce(&Core) -> Result<Model, Error> + Send>;

/// What is to be compiled for large steps.
pub(crate) struct Plan {
    from_tokens: u32,
    /// Bytes it takes at its height.
    pub(crate) bytes: u64,
}

impl Plan {
    /// For a model whose integer weights take so many bytes in f32. `None` if it has none, or large steps are not to have
    /// a graph of their own.
    pub(crate) fn of(unpacked_bytes: u64, unpack: Unpack, device: &str) -> Option<Self> {
        let from_tokens = match unpack {
            Unpack::Never => return None,
            Unpack::Auto => LARGE_STEP_TOKENS,
            Unpack::FromTokens(tokens) => tokens,
        };
        let bytes = unpacked_bytes * COMPILING_FACTOR;
        let fits = memory::available_bytes().is_some_and(|free| bytes < free / 4);
        let wanted = unpack != Unpack::Auto || (device == "CPU" && is_faster() && fits);
        (bytes > 0 && wanted).then_some(Self { from_tokens, bytes })
    }
}

/// Whether this is a processor for which [`LARGE_STEP_TOKENS`] holds.
fn is_faster() -> bool {
    cfg!(target_arch = "x86_64") && !processor::multiplies_bytes()
}

/// The graph for large steps, if there is to be one.
pub(crate) struct Unpacked {
    from_tokens: u32,
    state: State,
}

enum State {
    None,
    Compiling(JoinHandle<Result<Graph, Error>>),
    Ready(Graph),
}

impl Unpacked {
    /// Large steps are run as others are.
    pub(crate) fn none() -> Self {
        Self { from_tokens: u32::MAX, state: State::None }
    }

    /// Starts compiling what `model` gives, which is paged, for large steps.
    pub(crate) fn start(
        plan: &Plan,
        core: Arc<Core>,
        model: PagedModel,
        target: (String, Vec<(String, String)>),
    ) -> Self {
        let compile = move || {
            let started = Instant::now();
            let mut model = model(&core)?;
            shim::unpack_weights(&mut model)?;
            let (device, properties) = target;
            let compiled = core.compile(&model, &device, &properties)?;
            let graph = Graph::new(core, compiled)?;
            tracing::info!(ms = started.elapsed().as_millis() as u64, "large steps have f32 weights now");
            Ok(graph)
        };
        let state = match std::thread::Builder::new().name("unpack".to_owned()).spawn(compile) {
            Ok(thread) => State::Compiling(thread),
            Err(error) => {
                tracing::warn!(%error, "no thread to compile the graph for large steps");
                State::None
            }
        };
        Self { from_tokens: plan.from_tokens, state }
    }

    /// The request for a step of so many tokens, if it is a large one and the graph is ready. `bind` gives a
    /// new request its inputs. Does not block.
    pub(crate) fn for_step(
        &mut self,
        tokens: usize,
        bind: impl FnOnce(&mut InferRequest) -> Result<(), Error>,
    ) -> Option<&mut InferRequest> {
        if tokens < self.from_tokens as usize {
            return None;
        }
        if let State::Compiling(thread) = &self.state
            && thread.is_finished()
        {
            self.wait(bind);
        }
        match &mut self.state {
            State::Ready(graph) => Some(&mut graph.request),
            State::None | State::Compiling(_) => None,
        }
    }

    /// Waits for the graph; answers whether there is one.
    pub(crate) fn wait(&mut self, bind: impl FnOnce(&mut InferRequest) -> Result<(), Error>) -> bool {
        self.state = match std::mem::replace(&mut self.state, State::None) {
            State::Compiling(thread) => {
                let outcome = thread.join().unwrap_or_else(|_| Err(Error::runtime("compile", "it panicked")));
                match outcome.and_then(|mut graph| bind(&mut graph.request).map(|()| graph)) {
                    Ok(graph) => State::Ready(graph),
                    Err(error) => {
                        tracing::warn!(error = error.chain(), "large steps have no graph of their own");
                        State::None
                    }
                }
            }
            state => state,
        };
        matches!(self.state, State::Ready(_))
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        // The runtime's libraries must not be unloaded under a compilation.
        if let State::Compiling(thread) = std::mem::replace(&mut self.state, State::None) {
            let _ = thread.join();
        }
    }
}
