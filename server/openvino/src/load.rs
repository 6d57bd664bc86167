//! Loads a model: reads it, rewrites its graph, compiles it, and allocates its KV cache.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use server_engine::CacheLayout;

use crate::adapters::{self, GraphOrigin};
use crate::compiled_graph::CompiledGraph;
use crate::config::Config;
use crate::cpu::{self, CpuFeatures};
use crate::device::DeviceOptions;
use crate::kernels::{
    GraphProperties, KernelOptions, KernelPlan, ProjectionKernels, plan_kernels, projection_kernels,
};
use crate::kv_cache::CachePorts;
use crate::model_cache::{self, CacheUpdate, CacheableModel, CompiledCacheEntry};
use crate::model_source::ModelSource;
use crate::runner::{OpenVinoRunner, RunnerParts, VisionParts};
use crate::runtime::{CompiledModel, Core, Model};
use crate::shim::{self, AdapterMethod, ProjectionSupport};
use crate::tiles::{TileSupport, tile_support};
use crate::vision::{TextEmbeddings, VisionFiles};
use crate::{Error, gguf, library, memory};

/// A finished stage of loading, for progress reports.
#[derive(Clone, Debug)]
pub struct LoadStage {
    /// The name of the stage, such as `read the model`.
    pub name: &'static str,
    /// The time that the stage has taken.
    pub duration: Duration,
}

/// The properties of a loaded model.
#[derive(Clone, Debug)]
pub struct LoadReport {
    /// Whether the graph or the compiled model was read from [`Config::cache_dir`].
    pub from_cache: bool,
    /// The layout of the KV cache.
    pub layout: CacheLayout,
    /// The kernels that compute the model, as text.
    pub kernels: String,
    /// Whether the native kernels compute all projections and the attention. In this case, the logits of a token are
    /// bitwise identical, regardless of the other tokens in the step.
    pub native_kernels: bool,
    /// The configured inference precision. If none is configured, f32 if the configuration prefers accuracy, and the
    /// device's default otherwise. The native kernels may compute in another precision, which [`Self::kernels`] states.
    pub inference_precision: String,
    /// The precision of the KV cache, as the device reports it.
    pub kv_cache_precision: String,
    /// A digest of the content of each adapter.
    pub adapter_digests: Vec<u64>,
    /// The inputs on which the bytes of a block of the KV cache depend, besides its tokens and their adapter.
    pub cache_identity: CacheIdentity,
}

/// The inputs on which the bytes of a block of the KV cache depend, besides its tokens and their adapter.
#[derive(Clone, Debug)]
pub struct CacheIdentity {
    /// A description of how the bytes are computed and laid out.
    pub description: String,
    /// The files of the model and of the runtime, on whose content the bytes depend.
    pub files: Vec<PathBuf>,
}

/// Loads a model and allocates its KV cache. Calls `progress` after each stage.
///
/// # Errors
/// The model or an adapter is missing, invalid or not supported, the device rejects the model, or the KV cache is too
/// small or does not fit into memory.
pub fn load(
    config: &Config,
    progress: &mut dyn FnMut(LoadStage),
) -> Result<(OpenVinoRunner, LoadReport), Error> {
    let mut stages = Stages { progress, started: Instant::now() };
    let source = ModelSource::find(&config.model)?;
    let core = Arc::new(Core::new()?);
    stages.done("start the runtime");
    let model = ModelLoader::new(config, source, core).compile(&mut stages)?;
    let blocks = num_blocks(config, &[&model])?;
    model.allocate(blocks, &mut stages)
}

/// Loads a model and its draft model. Their KV caches have the same number of blocks. Together, the caches have the
/// size that `config` sets or that is derived; the size in `draft` is ignored.
///
/// # Errors
/// The same as for [`load`], for either model, or the blocks of the two models have different numbers of tokens.
pub fn load_pair(
    config: &Config,
    draft: &Config,
    progress: &mut dyn FnMut(LoadStage),
) -> Result<[(OpenVinoRunner, LoadReport); 2], Error> {
    let mut stages = Stages { progress, started: Instant::now() };
    let source = ModelSource::find(&config.model)?;
    let draft_source = ModelSource::find(&draft.model)?;
    let core = Arc::new(Core::new()?);
    stages.done("start the runtime");
    let target = ModelLoader::new(config, source, Arc::clone(&core)).compile(&mut stages)?;
    let draft = ModelLoader::new(draft, draft_source, core).compile(&mut stages)?;
    let [of_target, of_draft] = [&target, &draft].map(|model| model.ports.block_tokens);
    if of_target != of_draft {
        return Err(Error::Unsupported(format!(
            "the blocks of its KV cache have {of_target} tokens, but those of its draft model's KV cache have {of_draft} \
             tokens"
        )));
    }
    let blocks = num_blocks(config, &[&target, &draft])?;
    Ok([target.allocate(blocks, &mut stages)?, draft.allocate(blocks, &mut stages)?])
}

/// Reports stages and their durations.
struct Stages<'a> {
    progress: &'a mut dyn FnMut(LoadStage),
    started: Instant,
}

impl Stages<'_> {
    fn done(&mut self, name: &'static str) {
        let now = Instant::now();
        (self.progress)(LoadStage { name, duration: now - self.started });
        self.started = now;
    }
}

/// Loads one model. The fields are determined before its graph is read.
struct ModelLoader {
    config: Config,
    source: ModelSource,
    core: Arc<Core>,
    kernel_options: KernelOptions,
    device_options: DeviceOptions,
    cpu: CpuFeatures,
    projections: ProjectionKernels,
}

/// A graph that was read from the files of the model or from the cache.
struct SourceGraph {
    model: Model,
    from_cache: bool,
}

/// A paged graph with the kernels of its plan.
struct PreparedGraph {
    model: Model,
    plan: KernelPlan,
    properties: GraphProperties,
    from_cache: bool,
    adapter_digests: Vec<u64>,
}

/// A compiled model, and how it was compiled or read.
struct CompiledSource {
    compiled: Arc<CompiledModel>,
    /// The core that has compiled or read the model.
    compiled_by: Arc<Core>,
    plan: KernelPlan,
    from_cache: bool,
    cache_update: CacheUpdate,
    adapter_digests: Vec<u64>,
}

impl ModelLoader {
    fn new(config: &Config, source: ModelSource, core: Arc<Core>) -> Self {
        let kernel_options = KernelOptions::from(config);
        let device_options = DeviceOptions::read(&core, &config.device, &config.plugin_config);
        let cpu = CpuFeatures::detect();
        if let Some(reason) = denied_tiles(tile_support(), &source, &device_options) {
            tracing::warn!(reason, "AMX is not available, so the native kernels use at most AVX-512");
        }
        let projections = projection_kernels(&device_options, cpu);
        Self { config: config.clone(), source, core, kernel_options, device_options, cpu, projections }
    }

    fn compile(self, stages: &mut Stages<'_>) -> Result<LoadedModel, Error> {
        let entry = self.compiled_entry();
        let cached = entry.as_ref().and_then(|entry| self.read_compiled(entry));
        let compiled = match cached {
            Some(cached) => {
                stages.done("read the compiled model");
                cached
            }
            None => self.compile_source(entry, stages)?,
        };
        let graph = CompiledGraph::new(Arc::clone(&compiled.compiled_by), Arc::clone(&compiled.compiled))?;
        let ports = CachePorts::find(&graph.compiled.inputs()?)?;
        let vocabulary = graph.compiled.vocabulary()?;
        Ok(LoadedModel { loader: self, source: compiled, graph, ports, vocabulary })
    }

    /// The entry of the compiled model in the cache directory. Models with adapters are not cached, because their
    /// adapters must be read at every start. The language models of vision-language models are not cached either,
    /// because the probe of the cache has no embeddings for them.
    fn compiled_entry(&self) -> Option<CompiledCacheEntry> {
        if !self.config.adapters.is_empty() || self.vision().is_some() {
            return None;
        }
        let graph = self.source.cache_entry(&self.config)?;
        CompiledCacheEntry::new(&graph, &self.config, self.projections)
    }

    /// Returns the files of the vision-language model, or `None` for other models.
    fn vision(&self) -> Option<&VisionFiles> {
        match &self.source {
            ModelSource::Vision(files) => Some(files),
            ModelSource::Gguf(_) | ModelSource::Ir(_) => None,
        }
    }

    fn plan(&self, graph: GraphProperties) -> Result<KernelPlan, Error> {
        plan_kernels(&self.kernel_options, &self.device_options, self.cpu, graph)
    }

    fn read_compiled(&self, entry: &CompiledCacheEntry) -> Option<CompiledSource> {
        let properties =
            |graph: GraphProperties| Ok(self.plan(graph)?.plugin_properties(&self.config.plugin_config));
        let (compiled, graph, compiled_by) = entry.read(properties)?;
        let plan = self.plan(graph).ok()?;
        Some(CompiledSource {
            compiled: Arc::new(compiled),
            compiled_by,
            plan,
            from_cache: true,
            cache_update: CacheUpdate::default(),
            adapter_digests: Vec::new(),
        })
    }

    fn compile_source(
        &self,
        entry: Option<CompiledCacheEntry>,
        stages: &mut Stages<'_>,
    ) -> Result<CompiledSource, Error> {
        // The graph is cached only if the compiled model is not: one copy of the weights in the cache is enough.
        let caches_graph = entry.is_none();
        let PreparedGraph { model, plan, properties: graph, from_cache, adapter_digests } =
            self.prepare(caches_graph, stages)?;
        let properties = plan.plugin_properties(&self.config.plugin_config);
        let compiled = Arc::new(self.core.compile(&model, &self.config.device, &properties)?);
        stages.done("compile");
        let cacheable = CacheableModel { compiled: Arc::clone(&compiled), graph, properties };
        Ok(CompiledSource {
            compiled,
            compiled_by: Arc::clone(&self.core),
            plan,
            from_cache,
            cache_update: CacheUpdate { compiled: entry.map(|entry| (entry, cacheable)) },
            adapter_digests,
        })
    }

    /// Reads a model with its adapters, makes its attention paged, and replaces operations with native kernels.
    fn prepare(&self, caches_graph: bool, stages: &mut Stages<'_>) -> Result<PreparedGraph, Error> {
        let SourceGraph { mut model, from_cache } = self.read(caches_graph)?;
        stages.done("read the model");
        let ProjectionSupport { supports_all: native_projections, experts } =
            shim::projection_support(&mut model)?;
        let mut adapter_digests = Vec::new();
        if !self.config.adapters.is_empty() {
            let is_native = native_projections && matches!(self.projections, ProjectionKernels::Native(_));
            let method = if is_native { AdapterMethod::NativeProjections } else { AdapterMethod::Graph };
            adapter_digests = self.add_adapters(&mut model, method)?;
            stages.done("add the adapters");
        }
        let native_attention = shim::make_paged(&mut model)?;
        self.resolve_length_conditions(&mut model)?;
        stages.done("convert the model to paged attention");
        let properties = GraphProperties { native_projections, native_attention, experts };
        let plan = self.plan(properties)?;
        let replaced = shim::apply_kernel_plan(&mut model, &plan)?;
        tracing::debug!(projections = replaced, %plan, "replaced operations with native kernels");
        stages.done("prepare the native kernels");
        Ok(PreparedGraph { model, plan, properties, from_cache, adapter_digests })
    }

    /// Lets all sequences use the rotary embeddings for a sequence of `max_model_len` tokens, because a step contains
    /// several sequences and parts of prompts, and cached keys cannot change.
    fn resolve_length_conditions(&self, model: &mut Model) -> Result<(), Error> {
        let max_model_len = self.config.max_model_len;
        let conditions = shim::resolve_length_conditions(model, max_model_len)?;
        if conditions > 0 {
            tracing::info!(
                conditions,
                max_model_len,
                "all sequences use the rotary embeddings for sequences of max_model_len tokens"
            );
        }
        Ok(())
    }

    /// Reads a model, and merges its projections unless adapters must be added first. With `caches_graph`, the graph of
    /// a GGUF file is read from the cache or written to it.
    fn read(&self, caches_graph: bool) -> Result<SourceGraph, Error> {
        let is_merged = self.config.adapters.is_empty();
        let file = match &self.source {
            ModelSource::Gguf(file) => file,
            ModelSource::Ir(path) => return self.read_ir(path),
            ModelSource::Vision(files) => return self.read_ir(&files.language_model()),
        };
        let entry = if caches_graph { self.source.cache_entry(&self.config) } else { None };
        if let Some(model) = entry.as_ref().and_then(|entry| entry.read(&self.core)) {
            return Ok(SourceGraph { model, from_cache: true });
        }
        let mut model = gguf::read(file, self.config.max_model_len)?;
        if is_merged {
            shim::merge_projections(&mut model)?;
        }
        // Use the graph that is read back, because its weights are mapped from its file and need no additional
        // memory.
        let cached = entry.and_then(|entry| entry.write(&self.core, &mut model));
        Ok(SourceGraph { model: cached.unwrap_or(model), from_cache: false })
    }

    /// Reads an IR, and merges its projections unless adapters must be added first.
    fn read_ir(&self, path: &Path) -> Result<SourceGraph, Error> {
        let mut model = shim::read_ir(&self.core, path)?;
        if self.config.adapters.is_empty() {
            shim::merge_projections(&mut model)?;
        }
        Ok(SourceGraph { model, from_cache: false })
    }

    /// Adds the adapters to a model whose projections are not merged, and merges the projections. Returns a digest of
    /// each adapter.
    fn add_adapters(&self, model: &mut Model, method: AdapterMethod) -> Result<Vec<u64>, Error> {
        let origin = match &self.source {
            ModelSource::Gguf(file) => GraphOrigin::Gguf(file.architecture().unwrap_or_default()),
            ModelSource::Ir(_) => GraphOrigin::Ir,
            ModelSource::Vision(_) => {
                return Err(Error::Unsupported(
                    "adapters of vision-language models are not supported".to_owned(),
                ));
            }
        };
        let digests = adapters::add(model, &self.config.adapters, origin, method)?;
        shim::merge_projections(model)?;
        Ok(digests)
    }

    /// Returns the identity of the cache, which includes everything that changes the values of a block or their order.
    fn cache_identity(&self, ports: &CachePorts) -> CacheIdentity {
        let Config {
            device,
            plugin_config,
            max_model_len,
            activation_precision,
            sparse_attention,
            block_scores,
            ..
        } = &self.config;
        let description = format!(
            "{} {device} {} {plugin_config:?} {max_model_len:?} {activation_precision:?} {sparse_attention:?} \
             {block_scores} {}",
            model_cache::VERSION,
            cpu::identity(),
            ports.describe()
        );
        let mut files = self.source.files();
        files.extend(library::files());
        CacheIdentity { description, files }
    }
}

/// A compiled model that has no KV cache yet.
struct LoadedModel {
    loader: ModelLoader,
    source: CompiledSource,
    graph: CompiledGraph,
    ports: CachePorts,
    vocabulary: u32,
}

impl LoadedModel {
    fn allocate(self, blocks: u32, stages: &mut Stages<'_>) -> Result<(OpenVinoRunner, LoadReport), Error> {
        let Self { loader, source, graph, ports, vocabulary } = self;
        let kv_cache = ports.allocate(blocks)?;
        let layout = ports.layout(blocks, vocabulary);
        stages.done("allocate the KV cache");
        let report = LoadReport {
            from_cache: source.from_cache,
            layout,
            kernels: source.plan.to_string(),
            native_kernels: source.plan.is_native,
            inference_precision: loader.device_options.inference_precision.clone(),
            kv_cache_precision: graph.compiled.property("KV_CACHE_PRECISION").unwrap_or_default(),
            adapter_digests: source.adapter_digests,
            cache_identity: loader.cache_identity(&ports),
        };
        let vision = match loader.vision() {
            Some(files) => Some(VisionParts {
                embeddings: TextEmbeddings::load(&loader.core, files)?,
                first_position: files.first_position(),
                deepstack_layers: files.deepstack_layers,
            }),
            None => None,
        };
        let ModelLoader { config, .. } = loader;
        let cache_writer = source.cache_update.write();
        let runner = OpenVinoRunner::new(RunnerParts {
            graph,
            cache_writer,
            kv_cache,
            layout,
            adapters: config.adapters.len() as u32,
            kv_heads: ports.kv_heads,
            vision,
        })?;
        Ok((runner, report))
    }
}

/// Returns the reason why the native kernels may not use AMX, if the operating system denies it. `None` if no part of
/// the model runs on the CPU. The image encoder of a vision-language model runs on the CPU, regardless of the device of
/// its language model.
fn denied_tiles(
    support: TileSupport,
    source: &ModelSource,
    device_options: &DeviceOptions,
) -> Option<&'static str> {
    let uses_cpu = device_options.is_cpu || matches!(source, ModelSource::Vision(_));
    match support {
        TileSupport::Denied(reason) if uses_cpu => Some(reason),
        TileSupport::Denied(_) | TileSupport::Absent | TileSupport::Granted => None,
    }
}

/// Returns the number of blocks of each cache. Together, the caches of the models have the configured or derived size.
fn num_blocks(config: &Config, models: &[&LoadedModel]) -> Result<u32, Error> {
    let block_bytes: u64 = models.iter().map(|model| model.ports.block_bytes).sum();
    let block_tokens = models.first().map_or(1, |model| model.ports.block_tokens);
    let derived = || {
        // Half of the available memory, or 1 GiB if the available memory is unknown, but not more than
        // `kv_cache_tokens_max` tokens need.
        const UNKNOWN: u64 = 1 << 30;
        let free = memory::available_bytes().map_or(UNKNOWN, |free| free / 2);
        free.min(config.kv_cache_tokens_max.div_ceil(u64::from(block_tokens)) * block_bytes)
    };
    let bytes = config.kv_cache_bytes.unwrap_or_else(derived);
    let unusable = |why: String| Error::CacheSize { bytes, why };
    let blocks = u32::try_from(bytes / block_bytes)
        .ok()
        .filter(|blocks| *blocks <= i32::MAX as u32)
        .ok_or_else(|| unusable(format!("has too many blocks (limit: {})", i32::MAX)))?;
    if blocks < 2 {
        return Err(unusable(format!("is too small for two blocks of {block_bytes} bytes")));
    }
    if let Some(free) =
        memory::available_bytes().filter(|free| config.kv_cache_bytes.is_some() && bytes > *free)
    {
        return Err(unusable(format!("does not fit into memory: {free} bytes are available")));
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denied_amx_is_reported_only_if_the_model_runs_on_the_cpu() {
        let source = ModelSource::Ir(PathBuf::from("openvino_model.xml"));
        let reported = |support, is_cpu| {
            denied_tiles(support, &source, &DeviceOptions { is_cpu, ..DeviceOptions::default() })
        };
        assert_eq!(reported(TileSupport::Denied("a reason"), true), Some("a reason"));
        assert_eq!(reported(TileSupport::Denied("a reason"), false), None);
        assert_eq!(reported(TileSupport::Granted, true), None);
    }
}
