//! The configuration of the backend. Most fields are named after their flags.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use server_engine::ADAPTERS_MAX;
use server_parsers::{ReasoningFormat, ToolFormat};

use crate::api_rules::ApiRules;
use crate::args::{ActivationPrecision, Backend, NamedAdapter, Properties, SimArgs};

/// The model, the backend that runs it, and the limits of the engine.
#[derive(Clone, Debug)]
pub(crate) struct BackendConfig {
    pub(crate) backend: Backend,
    pub(crate) model: Option<PathBuf>,
    pub(crate) model_names: Vec<String>,
    pub(crate) adapters: Vec<NamedAdapter>,
    /// The format of tool calls, or `None` to detect it from the chat template.
    pub(crate) tool_parser: Option<ToolFormat>,
    /// The format of reasoning, or `None` to detect it from the chat template.
    pub(crate) reasoning_parser: Option<ReasoningFormat>,
    #[cfg_attr(not(feature = "openvino"), expect(dead_code, reason = "there is no runtime to configure"))]
    pub(crate) openvino: OpenVinoConfig,
    pub(crate) sim: SimArgs,
    pub(crate) max_num_seqs: u32,
    pub(crate) max_num_batched_tokens: u32,
    pub(crate) max_chunk_tokens: u32,
    pub(crate) max_itl: Option<Duration>,
    pub(crate) max_queue: u32,
    pub(crate) max_model_len: Option<u32>,
    pub(crate) prefix_caching: bool,
    pub(crate) kv_eviction_tokens: Option<u32>,
    pub(crate) prompt_lookup: bool,
    pub(crate) api_rules: ApiRules,
    pub(crate) draft_model: Option<PathBuf>,
    pub(crate) kv_spill: Option<KvSpill>,
    /// Memory in bytes for texts that are being tokenized.
    pub(crate) max_tokenizer_memory: usize,
    /// Memory in bytes for the images of requests.
    pub(crate) max_image_memory: usize,
    /// Size in bytes of the cache for outputs of the image encoder.
    pub(crate) image_cache_size: u64,
}

/// The directory for evicted blocks, and the maximum total size of the blocks in bytes.
#[derive(Clone, Debug)]
pub(crate) struct KvSpill {
    pub(crate) dir: PathBuf,
    pub(crate) bytes: u64,
}

#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "openvino"), expect(dead_code, reason = "there is no runtime to configure"))]
pub(crate) struct OpenVinoConfig {
    pub(crate) device: String,
    pub(crate) kv_cache_size: Option<u64>,
    pub(crate) kv_cache_precision: Option<String>,
    pub(crate) activation_precision: ActivationPrecision,
    pub(crate) cache_dir: Option<PathBuf>,
    pub(crate) plugin_config: Vec<Properties>,
    /// Number of thread groups. With several groups on a CPU, the plugin uses the processors of all NUMA nodes and does
    /// not bind threads.
    pub(crate) tensor_parallel_size: u32,
    pub(crate) sparse_attention: Option<f32>,
}

impl BackendConfig {
    /// Rejects invalid configurations before the model is loaded.
    ///
    /// # Errors
    /// No model is given for the OpenVINO backend, two flags contradict each other, there are too many adapters, or an
    /// adapter has the name of the model or of another adapter.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        if self.model.is_none() && self.backend == Backend::OpenVino {
            bail!("no model is given: use --model PATH, or --backend sim to run without a model");
        }
        if self.kv_eviction_tokens.is_some() && self.draft_model.is_some() {
            bail!(
                "--kv-eviction-tokens cannot be combined with --draft-model, because a draft model needs all tokens"
            );
        }
        if self.adapters.len() > ADAPTERS_MAX {
            bail!("--lora: {} adapters are given (limit: {ADAPTERS_MAX})", self.adapters.len());
        }
        let mut names = self.names();
        for NamedAdapter { name, .. } in &self.adapters {
            if names.contains(name) {
                bail!("--lora: the name {name:?} is already the name of the model or of another adapter");
            }
            names.push(name.clone());
        }
        Ok(())
    }

    /// Returns the names of the model.
    pub(crate) fn names(&self) -> Vec<String> {
        match (&self.model_names[..], &self.model) {
            ([], Some(path)) => vec![server_text::model_name(path)],
            ([], None) => vec!["sim".to_owned()],
            (names, _) => names.to_vec(),
        }
    }
}
