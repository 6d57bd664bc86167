//! Loads the model and starts its engine: connects a runner, an engine and the model's tokenizer. Loading blocks the
//! calling thread.

mod built_in_text;
mod config;
mod draft;
#[cfg(feature = "openvino")]
mod openvino;
mod runners;
mod sim;

use std::time::Instant;

use anyhow::{Context as _, anyhow};
use server_engine::{
    CacheLayout, Clock, DraftRunner, EncoderConfig, Engine, EngineConfig, EngineOptions, SchedulerConfig,
    SpillConfig,
};
use server_text::{ModelText, TextSource};

use crate::app::ServedModel;
use crate::args::Backend;
use crate::image_reader::ImageReader;
use crate::metrics::Metrics;
use crate::model::Model;
use runners::{ImageBackend, Runners};

pub use built_in_text::{built_in_text, built_in_text_with};
pub(crate) use config::{BackendConfig, KvSpill, OpenVinoConfig};
pub use sim::{built_in_model_with_images, script};

/// Loads the model and starts its engine.
///
/// # Errors
/// The model cannot be loaded, or the engine cannot be started.
pub(crate) fn start(config: &BackendConfig, metrics: &Metrics) -> anyhow::Result<(ServedModel, Engine)> {
    let started = Instant::now();
    let source = config.model.as_ref().map(TextSource::open).transpose().context(NO_TOKENIZER)?;
    let trained = source.as_ref().map(TextSource::context_tokens_max).transpose().context(NO_TOKENIZER)?;
    let context = config.max_model_len.or(trained.flatten());
    let LoadedModel { texts: Texts { text, draft_model_len }, runners } =
        load(config, source.as_ref(), context)?;
    let Runners { model: runner, draft, description, identity, images } = runners;
    let (reader, encoder) = match images {
        None => (None, None),
        Some(ImageBackend { processor, encoder, content }) => {
            let reader = ImageReader::new(processor, &text, content, config.max_image_memory)?;
            (Some(reader), Some(EncoderConfig { encoder, cache_bytes: config.image_cache_size }))
        }
    };
    let layout = runner.layout();
    let engine_config = EngineConfig {
        scheduler: SchedulerConfig {
            max_num_batched_tokens: config.max_num_batched_tokens,
            max_chunk_tokens: config.max_chunk_tokens,
            max_itl: config.max_itl,
            max_num_seqs: config.max_num_seqs,
            max_queue: config.max_queue,
            max_model_len: match config.backend {
                Backend::Sim => context.unwrap_or(config.sim.sim_model_len),
                Backend::OpenVino => context.unwrap_or(u32::MAX),
            },
            prefix_caching: config.prefix_caching,
            kv_eviction_tokens: config.kv_eviction_tokens,
        },
        clock: Clock::real(),
    };
    let spill = config.kv_spill.clone().map(|KvSpill { dir, bytes }| SpillConfig {
        directory: dir,
        bytes_max: bytes,
        identity,
    });
    let draft = draft.map(|runner| DraftRunner { runner, max_model_len: draft_model_len });
    let options = EngineOptions { draft, spill, encoder, sampling_threads: None };
    let engine = Engine::start_with_options(engine_config, runner, options, metrics.observer())
        .context("failed to start the engine")?;
    let mut model = Model::new(config.names(), text, &description)
        .with_formats(config.tool_parser, config.reasoning_parser)?
        .with_adapters(config.adapters.clone())
        .with_tokenizer_memory(config.max_tokenizer_memory)
        .with_api_rules(config.api_rules)
        .with_images(reader);
    model.prompt_lookup = config.prompt_lookup;
    model.grammar_trials = true;
    let CacheLayout { block_tokens, blocks_total, block_bytes, vocabulary } = layout;
    tracing::info!(
        model = model.name(),
        adapters = config.adapters.len(),
        kv_cache_mib = (u64::from(blocks_total) * block_bytes) >> 20,
        blocks_total,
        block_tokens,
        vocabulary,
        max_model_len = engine.handle().limits().requests.max_model_len,
        tool_parser = model.formats().tool.name(),
        reasoning_parser = model.formats().reasoning.name(),
        ms = started.elapsed().as_millis() as u64,
        "loaded the model"
    );
    let max_num_seqs = config.max_num_seqs;
    Ok((ServedModel { model, engine: engine.handle(), max_num_seqs, block_tokens }, engine))
}

/// The message for an error in the tokenizer or the chat template.
const NO_TOKENIZER: &str = "failed to load the model's tokenizer";

struct LoadedModel {
    texts: Texts,
    runners: Runners,
}

/// The tokenizer and chat template of the model, and the context length of its draft model.
struct Texts {
    text: ModelText,
    draft_model_len: u32,
}

/// Loads the tokenizers and the runners. With OpenVINO, they are loaded concurrently. This is possible because the
/// runners need only the context length from the tokenizer's files, and the caller has already read this length.
fn load(
    config: &BackendConfig,
    source: Option<&TextSource>,
    context: Option<u32>,
) -> anyhow::Result<LoadedModel> {
    if config.backend == Backend::Sim {
        let texts = load_texts(config, source)?;
        let runners = sim::load(config, &texts.text)?;
        return Ok(LoadedModel { texts, runners });
    }
    std::thread::scope(|scope| {
        let texts = std::thread::Builder::new()
            .name("text".to_owned())
            .spawn_scoped(scope, || load_texts(config, source))
            .context("failed to start the thread that loads the tokenizer")?;
        let runners = load_openvino(config, context);
        let texts = texts.join().map_err(|_| anyhow!("loading the tokenizer panicked"))??;
        Ok(LoadedModel { texts, runners: runners? })
    })
}

#[cfg(feature = "openvino")]
fn load_openvino(config: &BackendConfig, context: Option<u32>) -> anyhow::Result<Runners> {
    openvino::load(config, context)
}

#[cfg(not(feature = "openvino"))]
fn load_openvino(_: &BackendConfig, _: Option<u32>) -> anyhow::Result<Runners> {
    anyhow::bail!("this server was built without OpenVINO; only --backend sim is available")
}

fn load_texts(config: &BackendConfig, source: Option<&TextSource>) -> anyhow::Result<Texts> {
    let started = Instant::now();
    let mut text = match source {
        Some(source) => source.load().context(NO_TOKENIZER)?,
        None if config.sim.sim_images => sim::text_with_images()?,
        None => built_in_text()?,
    };
    tracing::info!(ms = started.elapsed().as_millis() as u64, "loaded the tokenizer");
    let draft = config.draft_model.as_deref().map(|path| draft::load_text(path, &mut text)).transpose()?;
    let draft_model_len = draft.and_then(|draft| draft.context_tokens_max).unwrap_or(u32::MAX);
    Ok(Texts { text, draft_model_len })
}
