//! A second compiled graph of the model, with f32 weights, for large steps.
//!
//! On a processor that does not multiply 8-bit integers, converting weights costs a large step more than reading larger ones.
//! Both graphs compute the same over one KV cache. The second one is compiled in the background: until it is ready, and if it
//! fails, the first graph runs all steps.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use crate::config::UnpackWeights;
use crate::cpu::CpuFeatures;
use crate::runtime::{CompiledModel, Core, InferRequest, Model};
use crate::{Error, memory, shim};

/// Tokens of a step from which f32 weights were measured to be faster (AVX2: equal at 64 tokens, 16 % faster at 128).
pub const LARGE_STEP_TOKENS: u32 = 96;

/// Peak memory of the compilation as a multiple of the f32 weights: the values, the plugin's own layout of them, and room for
/// the rest.
const COMPILATION_FACTOR: u64 = 3;

/// A compiled model and the request that runs it.
pub(crate) struct CompiledGraph {
    // The fields are dropped in this order.
    pub(crate) request: InferRequest,
    pub(crate) compiled: Arc<CompiledModel>,
    _core: Arc<Core>,
}

impl CompiledGraph {
    /// Creates a request of a model that `core` has compiled or read.
    pub(crate) fn new(core: Arc<Core>, compiled: Arc<CompiledModel>) -> Result<Self, Error> {
        Ok(Self { request: compiled.request()?, compiled, _core: core })
    }
}

/// Returns the paged graph: one that is in memory, or one that is read again.
pub(crate) type PagedModel = Box<dyn FnOnce(&Core) -> Result<Model, Error> + Send>;

/// The device for which a model is compiled, and the properties for its plugin.
#[derive(Clone, Debug)]
pub(crate) struct CompileTarget {
    pub(crate) device: String,
    pub(crate) properties: Vec<(String, String)>,
}

/// The decision to compile a graph for large steps.
pub(crate) struct LargeStepPlan {
    from_tokens: u32,
    /// Peak memory of the compilation in bytes.
    pub(crate) bytes: u64,
}

impl LargeStepPlan {
    /// The plan for a model whose integer weights have `unpacked_bytes` bytes in f32. `None` if it has no such weights, or
    /// large steps run on the first graph.
    pub(crate) fn new(unpacked_bytes: u64, unpack_weights: UnpackWeights, device: &str) -> Option<Self> {
        let from_tokens = match unpack_weights {
            UnpackWeights::Never => return None,
            UnpackWeights::Auto => LARGE_STEP_TOKENS,
            UnpackWeights::FromTokens(tokens) => tokens,
        };
        let bytes = unpacked_bytes * COMPILATION_FACTOR;
        let fits = memory::available_bytes().is_some_and(|free| bytes < free / 4);
        let is_worthwhile = unpack_weights != UnpackWeights::Auto || (device == "CPU" && is_faster() && fits);
        (bytes > 0 && is_worthwhile).then_some(Self { from_tokens, bytes })
    }
}

/// Whether [`LARGE_STEP_TOKENS`] applies to this processor.
fn is_faster() -> bool {
    cfg!(target_arch = "x86_64") && !CpuFeatures::detect().multiplies_int8()
}

/// The graph for large steps, if there is one.
pub(crate) struct LargeSteps {
    from_tokens: u32,
    state: State,
}

enum State {
    None,
    Compiling(JoinHandle<Result<CompiledGraph, Error>>),
    Ready(CompiledGraph),
}

impl LargeSteps {
    /// No graph: the first graph runs large steps.
    pub(crate) fn none() -> Self {
        Self { from_tokens: u32::MAX, state: State::None }
    }

    /// Starts to compile the paged graph that `model` returns.
    pub(crate) fn start(
        plan: &LargeStepPlan,
        core: Arc<Core>,
        model: PagedModel,
        target: CompileTarget,
    ) -> Self {
        let compile = move || {
            let started = Instant::now();
            let mut model = model(&core)?;
            shim::unpack_weights(&mut model)?;
            let compiled = Arc::new(core.compile(&model, &target.device, &target.properties)?);
            let graph = CompiledGraph::new(core, compiled)?;
            tracing::info!(ms = started.elapsed().as_millis() as u64, "large steps now use f32 weights");
            Ok(graph)
        };
        let state = match std::thread::Builder::new().name("unpack".to_owned()).spawn(compile) {
            Ok(thread) => State::Compiling(thread),
            Err(error) => {
                tracing::warn!(%error, "failed to start a thread to compile the graph for large steps");
                State::None
            }
        };
        Self { from_tokens: plan.from_tokens, state }
    }

    /// The request for a step of `tokens` tokens, if the step is large and the graph is ready. `bind` binds the inputs of a
    /// new request. Does not block.
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

    /// Waits until the compilation has ended, and returns whether there is a graph.
    pub(crate) fn wait(&mut self, bind: impl FnOnce(&mut InferRequest) -> Result<(), Error>) -> bool {
        self.state = match std::mem::replace(&mut self.state, State::None) {
            State::Compiling(thread) => {
                let outcome = thread
                    .join()
                    .unwrap_or_else(|_| Err(Error::runtime("compile the model", "the thread panicked")));
                match outcome.and_then(|mut graph| bind(&mut graph.request).map(|()| graph)) {
                    Ok(graph) => State::Ready(graph),
                    Err(error) => {
                        tracing::warn!(
                            error = error.chain(),
                            "failed to compile the graph for large steps, which now use the first graph"
                        );
                        State::None
                    }
                }
            }
            state => state,
        };
        matches!(self.state, State::Ready(_))
    }
}

impl Drop for LargeSteps {
    fn drop(&mut self) {
        // The runtime's libraries must not be unloaded during a compilation.
        if let State::Compiling(thread) = std::mem::replace(&mut self.state, State::None) {
            let _ = thread.join();
        }
    }
}
