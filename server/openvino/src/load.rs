//! Loading a model: what is read, in which form its weights are held, how large its KV cache is.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use server_engine::CacheLayout;

use crate::adapters::{self, AdapterSource, Origin};
use crate::asked::Asked;
use crate::attention::{Attention, OwnAttention};
use crate::cache::CachePorts;
use crate::kept::{self, Facts, Kept, KeptCompiled, ToKeep};
use crate::runner::{OpenVinoRunner, Parts};
use crate::runtime::{CompiledModel, Core, Model};
use crate::source::Source;
use crate::unpacked::{Graph, PagedModel, Plan, Unpack, Unpacked};
use crate::weights::Form;
use crate::{Error, gguf, memory, processor, projections, shim};

/// What to load, and how.
#[derive(Clone, Debug)]
pub struct Config {
    /// A GGUF file, or the directory of an OpenVINO IR (with `openvino_model.xml` in it).
    pub model: PathBuf,
    /// The OpenVINO device, such as `CPU`, `GPU.1` or `HETERO:GPU,CPU`. Only `CPU` is tested.
    pub device: String,
    /// Properties for the device's plugin, passed through as they are.
    pub properties: Vec<(String, String)>,
    /// How the quantised weights of a GGUF file are held.
    pub weights: Weights,
    /// Whether large steps get a graph of their own, with f32 weights.
    pub unpack: Unpack,
    /// Bytes of the KV cache; `None` derives them from the memory there is.
    pub cache_bytes: Option<u64>,
    /// Where rewritten graphs of GGUF files are kept, and what was compiled, so that the next start need not do it again.
    pub graph_folder: Option<PathBuf>,
    /// The longest sequence there will be, if that is less than the model was made for: a model of long contexts
    /// may have other rotary embeddings for short ones.
    pub context_tokens_max: Option<u32>,
    /// Most tokens a cache of derived size is made for.
    pub cache_tokens_max: u64,
    /// The adapters, which requests name by their numbers from 1.
    pub adapters: Vec<AdapterSource>,
    /// What only our own attention does.
    pub attention: Attention,
}

impl Config {
    pub(crate) fn asked<'a>(&'a self, core: &'a Core) -> Asked<'a> {
        Asked { core, device: &self.device, properties: &self.properties }
    }
}

/// How the quantised weights of a GGUF file are held in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// [`Form::Compact`], or [`Form::Fine`] where the plugin multiplies 8-bit integers and memory allows: exact either way.
    Auto,
    /// This form.
    As(Form),
}

/// A step of loading that is done, for progress.
#[derive(Clone, Debug)]
pub struct Stage {
    /// What was done.
    pub name: &'static str,
    /// How long it took.
    pub took: Duration,
}

/// What was loaded.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The form of the weights; `None` for an IR, which is served as it is.
    pub form: Option<Form>,
    /// Whether the graph, or the compiled model, was taken from [`Config::graph_folder`].
    pub warm: bool,
    /// Whether a graph for large steps is being compiled.
    pub unpacks: bool,
    /// The KV cache.
    pub layout: CacheLayout,
    /// Whether all that is much to compute is so by our own kernels: what a token gives is the same to the bit then, whatever
    /// is in the step beside it.
    pub own_kernels: bool,
    /// The precision that is computed in where products are not of 8-bit integers: the asked one, or the device's own.
    pub inference_precision: String,
    /// The precision of the KV cache, as the device says itself.
    pub cache_precision: String,
    /// A number for each adapter that changes with its content.
    pub adapters: Vec<u64>,
    /// What the bytes of a block of the KV cache depend on, besides the tokens and their adapter.
    pub cache_identity: CacheIdentity,
}

/// What the bytes of a block of the KV cache depend on.
#[derive(Clone, Debug)]
pub struct CacheIdentity {
    /// How they are computed and laid out.
    pub description: String,
    /// The files of the model and of the runtime, by their content.
    pub files: Vec<PathBuf>,
}

/// Loads a model and allocates its KV cache. `progress` is called after each stage.
///
/// # Errors
/// The model is missing, unsound or not supported, the device refuses it, or the cache does not fit.
pub fn load(config: &Config, progress: &mut dyn FnMut(Stage)) -> Result<(OpenVinoRunner, Loaded), Error> {
    let mut stages = Stages { progress, started: Instant::now() };
    Source::find(&config.model)?;
    let core = Arc::new(Core::new()?);
    stages.done("start the runtime");
    let model = Compiled::compile(config, core, &mut stages)?;
    let blocks = blocks(config, &[&model])?;
    model.allocate(blocks, &mut stages)
}

/// Loads a model and one that guesses what it will say. Their KV caches have the same number of blocks, and together the
/// size that `config` says or that is derived; of `draft` it does not matter.
///
/// # Errors
/// As [`load`], of either, or their blocks hold different numbers of tokens.
pub fn load_pair(
    config: &Config,
    draft: &Config,
    progress: &mut dyn FnMut(Stage),
) -> Result<[(OpenVinoRunner, Loaded); 2], Error> {
    let mut stages = Stages { progress, started: Instant::now() };
    for config in [config, draft] {
        Source::find(&config.model)?;
    }
    let core = Arc::new(Core::new()?);
    stages.done("start the runtime");
    let first = Compiled::compile(config, Arc::clone(&core), &mut stages)?;
    let second = Compiled::compile(draft, core, &mut stages)?;
    let [of_first, of_second] = [&first, &second].map(|model| model.ports.block_tokens);
    if of_first != of_second {
        return Err(Error::Unsupported(format!(
            "blocks of its KV cache hold {of_first} tokens, those of its draft model {of_second}"
        )));
    }
    let blocks = blocks(config, &[&first, &second])?;
    Ok([first.allocate(blocks, &mut stages)?, second.allocate(blocks, &mut stages)?])
}

/// Tells of stages, and how long each took.
struct Stages<'a> {
    progress: &'a mut dyn FnMut(Stage),
    started: Instant,
}

impl Stages<'_> {
    fn done(&mut self, name: &'static str) {
        let now = Instant::now();
        (self.progress)(Stage { name, took: now - self.started });
        self.started = now;
    }
}

/// A model that is compiled and has no KV cache yet.
struct Compiled<'a> {
    config: &'a Config,
    core: Arc<Core>,
    model: PagedModel,
    graph: Graph,
    plan: Option<Plan>,
    facts: Facts,
    form: Option<Form>,
    warm: bool,
    to_keep: ToKeep,
    /// A number for each adapter.
    adapters: Vec<u64>,
    ports: CachePorts,
    vocabulary: u32,
}

impl<'a> Compiled<'a> {
    fn compile(config: &'a Config, core: Arc<Core>, stages: &mut Stages<'_>) -> Result<Self, Error> {
        let source = Source::find(&config.model)?;
        let form = source.form(config, &core);
        let kept = kept_compiled(config, &source, form);
        let found = kept.as_ref().and_then(|kept| Made::read(config, form, kept));
        let is_new = found.is_none();
        let Made { compiled, compiled_by, facts, model, warm, to_keep, adapters } = match found {
            Some(made) => {
                stages.done("read the compiled model");
                made
            }
            None => Made::compile(config, (&source, form), &core, stages)?,
        };
        let graph = Graph::new(compiled_by, compiled)?;
        let plan = Plan::of(facts.unpacked_bytes, config.unpack, &config.device);
        let ports = CachePorts::find(&graph.compiled.inputs()?)?;
        let vocabulary = vocabulary(&graph.compiled)?;
        let compiled = kept.filter(|_| is_new).map(|kept| (kept, Arc::clone(&graph.compiled), facts));
        let to_keep = ToKeep { graph: to_keep, compiled };
        Ok(Self { config, core, model, graph, plan, facts, form, warm, to_keep, adapters, ports, vocabulary })
    }

    fn allocate(self, blocks: u32, stages: &mut Stages<'_>) -> Result<(OpenVinoRunner, Loaded), Error> {
        let Self {
            config,
            core,
            model,
            graph,
            plan,
            facts,
            form,
            warm,
            to_keep,
            adapters,
            ports,
            vocabulary,
        } = self;
        let cache = ports.allocate(blocks)?;
        let layout = ports.layout(blocks, vocabulary);
        stages.done("allocate the KV cache");
        let property = |name| graph.compiled.property(name).unwrap_or_default();
        let loaded = Loaded {
            form,
            warm,
            unpacks: plan.is_some(),
            own_kernels: facts.is_around_f32,
            layout,
            inference_precision: config.asked(&core).precision("INFERENCE_PRECISION_HINT"),
            cache_precision: property("KV_CACHE_PRECISION"),
            adapters,
            cache_identity: cache_identity(config, (&ports, form))?,
        };
        let adapters = config.adapters.len() as u32;
        let keeping = to_keep.keep(Arc::clone(&core));
        let unpacked = plan.map_or_else(Unpacked::none, |plan| {
            Unpacked::start(&plan, core, model, (config.device.clone(), config.properties.clone()))
        });
        Ok((
            OpenVinoRunner::new(Parts {
                graph,
                unpacked,
                keeping,
                cache,
                layout,
                adapters,
                kv_heads: ports.kv_heads,
            })?,
            loaded,
        ))
    }
}

/// Whatever changes the values or their order is in it. That the graph for large steps has other weights is not: which
/// tokens it computes is chance.
fn cache_identity(
    config: &Config,
    (ports, form): (&CachePorts, Option<Form>),
) -> Result<CacheIdentity, Error> {
    let Config { device, properties, context_tokens_max, attention, .. } = config;
    let description = format!(
        "{} {device} {} {properties:?} {context_tokens_max:?} {attention:?} {form:?} {}",
        kept::VERSION,
        processor::identity(),
        ports.describe()
    );
    let mut files = match Source::find(&config.model)? {
        Source::Gguf(path) => vec![path],
        Source::Ir(path) => vec![path.with_extension("bin"), path],
    };
    files.extend(shim::libraries());
    Ok(CacheIdentity { description, files })
}

/// Where the model is kept as it was compiled, or is to be. With adapters it is not: they are read in any case.
fn kept_compiled(config: &Config, source: &Source, form: Option<Form>) -> Option<KeptCompiled> {
    if !config.adapters.is_empty() {
        return None;
    }
    let graph = source.kept(config, form)?;
    KeptCompiled::of(&graph, &config.device, &config.properties, config.attention)
}

/// A compiled model, and what it was compiled from.
struct Made {
    compiled: CompiledModel,
    /// The core that compiled or read it.
    compiled_by: Arc<Core>,
    facts: Facts,
    model: PagedModel,
    /// Whether anything of it was taken from [`Config::graph_folder`].
    warm: bool,
    /// What is to be kept of its graph, and where.
    to_keep: Option<(Kept, Model)>,
    adapters: Vec<u64>,
}

impl Made {
    /// Takes it as it was compiled before.
    fn read(config: &Config, form: Option<Form>, kept: &KeptCompiled) -> Option<Self> {
        let (compiled, facts, compiled_by) = kept.read()?;
        let config = config.clone();
        let model = move |core: &Core| {
            let source = Source::find(&config.model)?;
            let mut stages = Stages { progress: &mut |_| {}, started: Instant::now() };
            read(&config, (&source, form), core, &mut stages).map(|read| read.model)
        };
        let adapters = Vec::new();
        let model = Box::new(model);
        Some(Self { compiled, compiled_by, facts, model, warm: true, to_keep: None, adapters })
    }

    fn compile(
        config: &Config,
        (source, form): (&Source, Option<Form>),
        core: &Arc<Core>,
        stages: &mut Stages<'_>,
    ) -> Result<Self, Error> {
        let Read { mut model, is_around_f32, warm, to_keep, adapters } =
            read(config, (source, form), core, stages)?;
        let facts = Facts { unpacked_bytes: shim::unpacked_bytes(&mut model)?, is_around_f32 };
        let compiled = core.compile(&model, &config.device, &facts.properties(&config.properties))?;
        stages.done("compile");
        let (model, compiled_by) = (Box::new(move |_: &Core| Ok(model)), Arc::clone(core));
        Ok(Self { compiled, compiled_by, facts, model, warm, to_keep, adapters })
    }
}

/// A model's graph.
struct Read {
    model: Model,
    /// Whether the plugin is to compute in f32: see [`Facts`].
    is_around_f32: bool,
    /// Whether it is one that was kept.
    warm: bool,
    /// What is to be kept of it, and where.
    to_keep: Option<(Kept, Model)>,
    /// A number for each adapter.
    adapters: Vec<u64>,
}

/// Why what is asked of the attention is not done.
const NOT_OWN: &str = "sparse attention and weights of blocks are our own attention's, and this model's is the plugin's, by the \
     device, the precision of its KV cache or what the model asks of it";

const NOT_IN_F16: &str = "with INFERENCE_PRECISION_HINT=f16, adapters need the native attention, which this model or the precision \
     of its KV cache does not allow; use bf16 or f32";

/// Reads a model, with its adapters, and makes it paged.
fn read(
    config: &Config,
    (source, form): (&Source, Option<Form>),
    core: &Core,
    stages: &mut Stages<'_>,
) -> Result<Read, Error> {
    let mut read = read_graph(config, (source, form), core)?;
    stages.done("read the model");
    let asked = config.asked(core);
    let are_own = projections::are_own(asked, config.unpack);
    let all_are_own = are_own && shim::can_own_projections(&mut read.model)?;
    if !config.adapters.is_empty() {
        read.adapters = adapt(&mut read.model, config, source, all_are_own)?;
        stages.done("add the adapters");
    }
    // Where the plugin computes in f16, so would the inputs of our operations be, which read f32 and bf16. A model that is wholly
    // ours is compiled in f32; any other is left to the plugin.
    let in_f16 = asked.in_f16();
    let attention =
        OwnAttention::wanted(asked, all_are_own, config.attention).filter(|_| !in_f16 || all_are_own);
    let is_own = shim::make_paged(&mut read.model, attention)?;
    if config.attention.is_own() && !is_own {
        return Err(Error::Unsupported(NOT_OWN.to_owned()));
    }
    read.is_around_f32 = all_are_own && is_own;
    let are_own = are_own && (!in_f16 || read.is_around_f32);
    if all_are_own && !are_own && !config.adapters.is_empty() {
        return Err(Error::Unsupported(NOT_IN_F16.to_owned()));
    }
    tracing::debug!(is_own, "the attention is paged");
    stages.done("make the attention paged");
    if are_own {
        let replaced = shim::own_projections(&mut read.model, asked.in_bf16() && !read.is_around_f32)?;
        tracing::debug!(replaced, "projections are our own");
        stages.done("pack the projections");
    }
    Ok(read)
}

/// Reads a model as it is. Its projections are merged, unless there are adapters to add before.
fn read_graph(config: &Config, (source, form): (&Source, Option<Form>), core: &Core) -> Result<Read, Error> {
    let is_merged = config.adapters.is_empty();
    let found =
        |model, warm, to_keep| Read { model, is_around_f32: false, warm, to_keep, adapters: Vec::new() };
    let (path, form) = match (source, form) {
        (Source::Gguf(path), Some(form)) => (path, form),
        (Source::Ir(path) | Source::Gguf(path), _) => {
            let mut model = core.read_model(path)?;
            if is_merged {
                shim::merge_projections(&mut model)?;
            }
            return Ok(found(model, false, None));
        }
    };
    let kept = source.kept(config, Some(form));
    if let Some(model) = kept.as_ref().and_then(|kept| kept.read(core)) {
        return Ok(found(model, true, None));
    }
    let mut model = gguf::read(path, form, config.context_tokens_max)?;
    if is_merged {
        shim::merge_projections(&mut model)?;
    }
    let to_keep = match kept {
        Some(kept) => Some((kept, shim::clone_model(&mut model)?)),
        None => None,
    };
    Ok(found(model, false, to_keep))
}

/// Adds the adapters to a model whose projections are not merged, and merges these.
fn adapt(model: &mut Model, config: &Config, source: &Source, own: bool) -> Result<Vec<u64>, Error> {
    let architecture = match source {
        Source::Gguf(path) => Some(gguf::architecture(path)?),
        Source::Ir(_) => None,
    };
    let origin = architecture.as_deref().map_or(Origin::Ir, Origin::Gguf);
    let digests = adapters::adapt(model, &config.adapters, origin, own)?;
    shim::merge_projections(model)?;
    Ok(digests)
}

/// How many blocks the caches of these models have each. All have the size that is given or derived, together.
fn blocks(config: &Config, models: &[&Compiled<'_>]) -> Result<u32, Error> {
    let block_bytes = models.iter().map(|model| model.ports.block_bytes).sum();
    let reserved = models.iter().filter_map(|model| model.plan.as_ref()).map(|plan| plan.bytes).sum();
    let block_tokens = models.first().map_or(1, |model| model.ports.block_tokens);
    let bytes =
        config.cache_bytes.unwrap_or_else(|| derived_bytes(config, (block_bytes, block_tokens), reserved));
    let wrong = |why: String| Error::CacheSize { bytes, why };
    let blocks = u32::try_from(bytes / block_bytes)
        .ok()
        .filter(|blocks| *blocks <= i32::MAX as u32)
        .ok_or_else(|| wrong("has more blocks than can be numbered".to_owned()))?;
    if blocks < 2 {
        return Err(wrong(format!("holds no two blocks of {block_bytes} bytes")));
    }
    if config.cache_bytes.is_some() && memory::available_bytes().is_some_and(|free| bytes > free) {
        return Err(wrong(format!(
            "does not fit: {} bytes are free",
            memory::available_bytes().unwrap_or(0)
        )));
    }
    Ok(blocks)
}

/// How many logits it gives.
pub(crate) fn vocabulary(compiled: &CompiledModel) -> Result<u32, Error> {
    let output = compiled.output()?;
    output
        .shape
        .last()
        .copied()
        .flatten()
        .and_then(|size| u32::try_from(size).ok())
        .ok_or_else(|| Error::Unsupported("the size of its vocabulary is not fixed".to_owned()))
}

/// Half of what is free and not reserved, but no more than the tokens that can ever be in use need.
fn derived_bytes(config: &Config, (block_bytes, block_tokens): (u64, u32), reserved: u64) -> u64 {
    const UNKNOWN: u64 = 1 << 30;
    let free = memory::available_bytes().map_or(UNKNOWN, |free| free.saturating_sub(reserved) / 2);
    let wanted = config.cache_tokens_max.div_ceil(u64::from(block_tokens)) * block_bytes;
    free.min(wanted)
}
