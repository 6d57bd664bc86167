//! What computes: wires a runner, an engine and the model's text together. It blocks, for as long as loading
//! a model takes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use serde_json::{Map, Value, json};
use server_engine::sim::{SimConfig, SimCosts, SimFault, SimFaultKind, SimRunner, SimScript};
use server_engine::{
    ADAPTERS_MAX, CacheLayout, Clock, DraftRunner, Engine, EngineConfig, EngineOptions, ModelRunner,
    SpillConfig, SpillIdentity,
};
use server_parsers::{ReasoningFormat, ToolFormat};
use server_text::{LoadOptions, ModelText, RenderInput, TextSource};

use crate::app::Serving;
use crate::args::{Backend, NamedAdapter, Properties, SimArgs, Unpack, WeightsForm};
use crate::compat::ApiRules;
use crate::metrics::Metrics;
use crate::model::{Model, name_of};

mod draft;

/// What is to be computed, by what, and how.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) backend: Backend,
    pub(crate) model: Option<PathBuf>,
    pub(crate) names: Vec<String>,
    pub(crate) adapters: Vec<NamedAdapter>,
    /// How it writes calls and reasoning, where its chat template does not tell, or not rightly.
    pub(crate) tool_format: Option<ToolFormat>,
    pub(crate) reasoning_format: Option<ReasoningFormat>,
    #[cfg_attr(not(feature = "openvino"), expect(dead_code, reason = "there is no runtime to tell"))]
    pub(crate) openvino: OpenVino,
    pub(crate) sim: SimArgs,
    pub(crate) sequences_max: u32,
    pub(crate) batch_tokens_max: u32,
    pub(crate) chunk_tokens_max: u32,
    pub(crate) step_time_max: Option<Duration>,
    pub(crate) waiting_max: u32,
    pub(crate) sequence_tokens_max: Option<u32>,
    pub(crate) prefix_caching: bool,
    pub(crate) cached_tokens_max: Option<u32>,
    pub(crate) prompt_lookup: bool,
    pub(crate) api_rules: ApiRules,
    pub(crate) draft_model: Option<PathBuf>,
    /// Where evicted blocks are kept, and the most bytes of them.
    pub(crate) spill: Option<(PathBuf, u64)>,
    /// Bytes of memory for texts that are being tokenized.
    pub(crate) tokenizer_memory: usize,
}

/// What only the OpenVINO runtime wants to know.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "openvino"), expect(dead_code, reason = "there is no runtime to tell"))]
pub(crate) struct OpenVino {
    pub(crate) device: String,
    pub(crate) cache_bytes: Option<u64>,
    pub(crate) cache_precision: Option<String>,
    pub(crate) weights: WeightsForm,
    pub(crate) unpack: Unpack,
    pub(crate) cache_dir: Option<PathBuf>,
    pub(crate) properties: Vec<Properties>,
    pub(crate) attention_share: Option<f32>,
}

impl Config {
    /// Refuses at once what loading would find out late.
    ///
    /// # Errors
    /// There is no model to serve, or a name would mean several things.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        if self.model.is_none() && self.backend == Backend::OpenVino {
            bail!("no model is given: use --model PATH, or --backend sim to do without");
        }
        if self.cached_tokens_max.is_some() && self.draft_model.is_some() {
            bail!(
                "--kv-eviction-tokens: a draft model needs all that was said; use it without --draft-model"
            );
        }
        if self.adapters.len() > ADAPTERS_MAX {
            bail!("--lora: {} adapters are more than {ADAPTERS_MAX}", self.adapters.len());
        }
        let mut names = self.names();
        for NamedAdapter { name, .. } in &self.adapters {
            if names.contains(name) {
                bail!("--lora: the name {name:?} is given twice, or is that of the model");
            }
            names.push(name.clone());
        }
        Ok(())
    }

    /// The names of the model.
    pub(crate) fn names(&self) -> Vec<String> {
        match (&self.names[..], &self.model) {
            ([], Some(path)) => vec![name_of(path)],
            ([], None) => vec!["sim".to_owned()],
            (names, _) => names.to_vec(),
        }
    }
}

/// Loads the model and starts its engine.
///
/// # Errors
/// The model or the machine is not what it should be.
pub(crate) fn start(config: &Config, metrics: &Metrics) -> anyhow::Result<(Serving, Engine)> {
    let started = Instant::now();
    let source = config.model.as_ref().map(TextSource::open).transpose().context(NO_TOKENIZER)?;
    let made_for = source.as_ref().map(TextSource::context_tokens_max).transpose().context(NO_TOKENIZER)?;
    let context = config.sequence_tokens_max.or(made_for.flatten());
    let Loaded { text, runner, draft, computed, identity } = load(config, source.as_ref(), context)?;
    let layout = runner.layout();
    let engine = EngineConfig {
        max_num_batched_tokens: config.batch_tokens_max,
        max_chunk_tokens: config.chunk_tokens_max,
        max_itl: config.step_time_max,
        max_num_seqs: config.sequences_max,
        max_queue: config.waiting_max,
        max_model_len: match config.backend {
            Backend::Sim => context.unwrap_or(config.sim.sim_model_len),
            Backend::OpenVino => context.unwrap_or(u32::MAX),
        },
        prefix_caching: config.prefix_caching,
        kv_eviction_tokens: config.cached_tokens_max,
        clock: Clock::real(),
    };
    let spill = config.spill.clone().map(|(folder, bytes_max)| SpillConfig { folder, bytes_max, identity });
    let extras = EngineOptions { draft, spill };
    let engine = Engine::start_with_options(engine, runner, extras, metrics.observer())
        .context("failed to start the engine")?;
    let CacheLayout { block_tokens, blocks_total, block_bytes, vocabulary } = layout;
    let mut model = Model::new(config.names(), text, &computed)
        .with_formats(config.tool_format, config.reasoning_format)?
        .with_adapters(config.adapters.clone())
        .with_tokenizer_memory(config.tokenizer_memory);
    model.prompt_lookup = config.prompt_lookup;
    model.api_rules = config.api_rules;
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
    let serving =
        Serving { model, engine: engine.handle(), sequences_max: config.sequences_max, block_tokens };
    Ok((serving, engine))
}

/// What is said when a part of the text's side fails.
const NO_TOKENIZER: &str = "failed to load the model's tokenizer";

/// A model, and its draft model if it is to have one.
struct Loaded {
    text: ModelText,
    runner: Box<dyn ModelRunner>,
    draft: Option<DraftRunner>,
    /// By what it is computed.
    computed: String,
    /// What its cache depends on.
    identity: SpillIdentity,
}

/// What computes: the model, and the draft model if there is one.
struct Runners {
    runners: Vec<Box<dyn ModelRunner>>,
    computed: String,
    identity: SpillIdentity,
}

/// Text and runner, at the same time: neither needs more of the other than `context`, the tokens that a prompt and its
/// answer may have.
fn load(config: &Config, source: Option<&TextSource>, context: Option<u32>) -> anyhow::Result<Loaded> {
    if config.backend == Backend::Sim {
        let (text, draft_tokens_max) = texts(config, source)?;
        let adapters = (1..=config.adapters.len() as u64).collect();
        let identity = SpillIdentity { description: "sim".to_owned(), files: Vec::new(), adapters };
        let runners = Runners { runners: draft::sim(config, &text)?, computed: "sim".to_owned(), identity };
        return Ok(loaded((text, draft_tokens_max), runners));
    }
    std::thread::scope(|scope| {
        let text = std::thread::Builder::new()
            .name("text".to_owned())
            .spawn_scoped(scope, || texts(config, source))
            .context("failed to start a thread")?;
        let runners = openvino(config, context);
        let text = text.join().map_err(|_| anyhow!("loading the tokenizer panicked"))??;
        Ok(loaded(text, runners?))
    })
}

fn loaded((text, draft_tokens_max): (ModelText, u32), runners: Runners) -> Loaded {
    let Runners { mut runners, computed, identity } = runners;
    let runner = runners.remove(0);
    let draft = runners.pop().map(|runner| DraftRunner { runner, max_model_len: draft_tokens_max });
    Loaded { text, runner, draft, computed, identity }
}

/// The text side of the model, and the tokens of the longest text that its draft model reads.
fn texts(config: &Config, source: Option<&TextSource>) -> anyhow::Result<(ModelText, u32)> {
    let mut text = text(source)?;
    let draft = config.draft_model.as_deref().map(|path| draft::text(path, &mut text)).transpose()?;
    let tokens_max = draft.and_then(|draft| draft.context_tokens_max).unwrap_or(u32::MAX);
    Ok((text, tokens_max))
}

fn text(source: Option<&TextSource>) -> anyhow::Result<ModelText> {
    let started = Instant::now();
    let text = match source {
        Some(source) => source.load(&LoadOptions::default()).context(NO_TOKENIZER),
        None => built_in_text(),
    };
    tracing::info!(ms = started.elapsed().as_millis() as u64, "loaded the tokenizer");
    text
}

fn sim(config: &Config, text: &ModelText) -> anyhow::Result<Box<dyn ModelRunner>> {
    let SimArgs {
        sim_step_time,
        sim_prefill_token_time,
        sim_decode_row_time,
        sim_blocks,
        sim_block_tokens,
        sim_fatal_step,
        sim_model_len: _,
        ref sim_answers,
    } = config.sim;
    let costs = SimCosts {
        step: sim_step_time,
        prefill_token: sim_prefill_token_time,
        decode_token: sim_decode_row_time,
    };
    let fatal = sim_fatal_step.map(|step| SimFault { step: step - 1, kind: SimFaultKind::Fatal });
    let adapters = config.adapters.len() as u32;
    let config = SimConfig {
        block_tokens: sim_block_tokens,
        blocks_total: sim_blocks,
        vocabulary: text.vocabulary_size,
        costs,
        faults: fatal.into_iter().collect(),
    };
    let runner = SimRunner::new(config, Clock::real()).with_adapters(adapters);
    Ok(Box::new(if sim_answers.is_empty() { runner } else { runner.with_script(script(sim_answers, text)?) }))
}

/// What the simulated model says in its turns of a conversation.
///
/// # Errors
/// The model has no turns, or no way to end one.
pub fn script(answers: &[String], text: &ModelText) -> anyhow::Result<SimScript> {
    let template = text.chat_template.as_ref().context("the model has no chat template, and so no turns")?;
    let messages = [json!({"role": "user", "content": "x"})];
    let render = |add_generation_prompt| {
        let input = RenderInput { messages: &messages, add_generation_prompt, ..RenderInput::default() };
        template.render(&input).context("failed to render the chat template")
    };
    let (with, without) = (render(true)?, render(false)?);
    let opening = with.strip_prefix(&without).filter(|opening| !opening.is_empty());
    let opening = opening.context("the chat template does not open the model's turn")?;
    let end = *text.defaults.eos.first().context("the model has no token that ends a turn")?;
    let encode =
        |said: &str| text.tokenizer.encode(said, false, true).context("failed to tokenise an answer");
    let answer = |said: &String| {
        let mut tokens = encode(said)?;
        tokens.push(end);
        Ok(tokens)
    };
    Ok(SimScript {
        opening: encode(opening)?,
        answers: answers.iter().map(answer).collect::<anyhow::Result<_>>()?,
    })
}

#[cfg(feature = "openvino")]
fn openvino(config: &Config, context: Option<u32>) -> anyhow::Result<Runners> {
    /// Of a model that does not say what it was made for.
    const CONTEXT_DEFAULT: u32 = 8192;

    let OpenVino {
        device,
        cache_bytes,
        cache_precision,
        weights,
        unpack,
        cache_dir,
        properties,
        attention_share,
    } = &config.openvino;
    let mut properties: Vec<(String, String)> =
        properties.iter().flat_map(|properties| properties.0.iter().cloned()).collect();
    let mut set = |key: &str, value: &str| {
        // What is given by name wins.
        if !properties.iter().any(|(known, _)| known == key) {
            properties.push((key.to_owned(), value.to_owned()));
        }
    };
    if let Some(precision) = cache_precision {
        set("KV_CACHE_PRECISION", precision);
    }
    if let Some(folder) = cache_dir {
        std::fs::create_dir_all(folder).with_context(|| format!("failed to make {}", folder.display()))?;
        // What is compiled for the CPU is kept there by the runner: its plugin does not take paged graphs back by itself.
        if device != "CPU" {
            set("CACHE_DIR", &folder.to_string_lossy());
        }
    }
    let tokens = u64::from(context.unwrap_or(CONTEXT_DEFAULT)) * u64::from(config.sequences_max);
    // The runtime goes by the name of the file, which a link to it need not have.
    let path_of = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    let draft = config.draft_model.as_ref().map(path_of);
    let config = server_openvino::Config {
        model: config.model.as_ref().map(path_of).context("no model is given: use --model")?,
        device: device.clone(),
        properties,
        weights: match weights {
            WeightsForm::Auto => server_openvino::Weights::Auto,
            WeightsForm::Compact => server_openvino::Weights::As(server_openvino::Form::Compact),
            WeightsForm::Fine => server_openvino::Weights::As(server_openvino::Form::Fine),
            WeightsForm::Rounded => server_openvino::Weights::As(server_openvino::Form::Rounded),
        },
        unpack: match unpack {
            Unpack::Auto => server_openvino::Unpack::Auto,
            Unpack::Never => server_openvino::Unpack::Never,
            Unpack::Always => server_openvino::Unpack::FromTokens(server_openvino::LARGE_STEP_TOKENS),
        },
        cache_bytes: *cache_bytes,
        graph_folder: cache_dir.clone(),
        context_tokens_max: config.sequence_tokens_max,
        cache_tokens_max: tokens,
        adapters: config.adapters.iter().map(adapter).collect(),
        attention: server_openvino::Attention {
            share: *attention_share,
            weighs: config.cached_tokens_max.is_some(),
        },
    };
    let (runners, loaded) = load_runners(&config, draft)?;
    let weights =
        loaded.form.map_or_else(|| "as published".to_owned(), |form| format!("{form:?}").to_lowercase());
    tracing::info!(
        device = config.device,
        weights,
        warm = loaded.warm,
        unpacks = loaded.unpacks,
        own_kernels = loaded.own_kernels,
        inference_precision = loaded.inference_precision,
        kv_cache_precision = loaded.cache_precision,
        "compiled the model"
    );
    let mut computed = format!(
        "openvino {} {weights} {} {}",
        config.device, loaded.inference_precision, loaded.cache_precision
    );
    for (adapter, digest) in config.adapters.iter().zip(&loaded.adapters) {
        computed.push_str(&format!(" {}:{digest:016x}", adapter.name));
    }
    let server_openvino::CacheIdentity { description, files } = loaded.cache_identity;
    let identity = SpillIdentity { description, files, adapters: loaded.adapters };
    Ok(Runners { runners, computed, identity })
}

#[cfg(feature = "openvino")]
fn adapter(NamedAdapter { name, path }: &NamedAdapter) -> server_openvino::AdapterSource {
    server_openvino::AdapterSource { name: name.clone(), path: path.clone() }
}

/// The model that `config` says, and a draft model that is loaded in the same way.
#[cfg(feature = "openvino")]
fn load_runners(
    config: &server_openvino::Config,
    draft: Option<PathBuf>,
) -> anyhow::Result<(Vec<Box<dyn ModelRunner>>, server_openvino::Loaded)> {
    let mut progress = |stage: server_openvino::Stage| {
        tracing::info!(stage = stage.name, ms = stage.took.as_millis() as u64, "loading");
    };
    match draft {
        Some(model) => {
            let draft_config = server_openvino::Config { model, adapters: Vec::new(), ..config.clone() };
            let [model, draft] = server_openvino::load_pair(config, &draft_config, &mut progress)
                .context("failed to load the model and its draft model")?;
            let sleepers = [
                server_openvino::Sleeper::new(model.0, &model.1, config.clone()),
                server_openvino::Sleeper::new(draft.0, &draft.1, draft_config),
            ];
            Ok((sleepers.map(|runner| Box::new(runner) as Box<dyn ModelRunner>).into(), model.1))
        }
        None => {
            let (runner, loaded) =
                server_openvino::load(config, &mut progress).context("failed to load the model")?;
            Ok((vec![Box::new(server_openvino::Sleeper::new(runner, &loaded, config.clone()))], loaded))
        }
    }
}

#[cfg(not(feature = "openvino"))]
fn openvino(_: &Config, _: Option<u32>) -> anyhow::Result<Runners> {
    bail!("this server was built without OpenVINO: only --backend sim is there")
}

/// The chat template of a model that has none.
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n\
    {{ message.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The text side of a model that has none: a token for each byte, and a plain chat template.
///
/// # Errors
/// There is no room for temporary files, by which it is loaded as any other.
pub fn built_in_text() -> anyhow::Result<ModelText> {
    built_in_text_with(TEMPLATE, &[])
}

/// The same with a chat template, and more special tokens after the three of its own.
///
/// # Errors
/// As there, or the template is none.
pub fn built_in_text_with(template: &str, special_tokens: &[&str]) -> anyhow::Result<ModelText> {
    let special =
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].into_iter().chain(special_tokens.iter().copied());
    let mut vocabulary: Map<String, Value> =
        (0..=255).zip(0u32..).map(|(byte, id)| (byte_letter(byte).to_string(), json!(id))).collect();
    let mut added = Vec::new();
    for (id, text) in (256u32..).zip(special) {
        vocabulary.insert(text.to_owned(), json!(id));
        added.push(json!({
            "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }));
    }
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocabulary, "merges": []
        }
    });
    let settings = json!({"eos_token": "<|im_end|>", "chat_template": template});
    let folder = tempfile::tempdir().context("failed to make a temporary directory")?;
    for (name, content) in [("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)] {
        std::fs::write(folder.path().join(name), content.to_string())
            .with_context(|| format!("failed to write a temporary {name}"))?;
    }
    ModelText::load(folder.path()).context("failed to load the built-in tokenizer")
}

/// The letter that byte-level vocabularies write for a byte.
fn byte_letter(byte: u8) -> char {
    let plain = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if plain(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !plain(other)).count() as u32;
    char::from_u32(0x100 + before).expect("invariant: these are all letters")
}
