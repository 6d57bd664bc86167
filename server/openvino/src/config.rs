//! The model to load, and the settings for loading and running it.

use std::path::PathBuf;

use crate::adapters::AdapterSource;

/// The configuration of a model to load.
#[derive(Clone, Debug)]
pub struct Config {
    /// Path of a GGUF file, or of a directory with an OpenVINO IR (`openvino_model.xml`) or with a vision-language
    /// model (`openvino_language_model.xml`).
    pub model: PathBuf,
    /// The OpenVINO device, such as `CPU`, `GPU.1` or `HETERO:GPU,CPU`. Only `CPU` is tested.
    pub device: String,
    /// Properties that are passed to the device's plugin. If the native kernels compute all projections and the
    /// attention, the plugin receives `f32` as `INFERENCE_PRECISION_HINT` instead of the configured value.
    pub plugin_config: Vec<(String, String)>,
    /// The precision in which the native projections multiply activations by integer weights.
    pub activation_precision: ActivationPrecision,
    /// Bytes of the KV cache. `None` derives the size from the available memory.
    pub kv_cache_bytes: Option<u64>,
    /// Maximum number of tokens for which a KV cache of derived size has room.
    pub kv_cache_tokens_max: u64,
    /// The directory in which rewritten graphs and compiled models are cached, so that the next start is faster.
    pub cache_dir: Option<PathBuf>,
    /// Length of the longest sequence in tokens. It selects the rotary embeddings of models with different embeddings
    /// for short and for long contexts (LongRoPE). `None` stands for the context length in a GGUF file; an IR with such
    /// embeddings requires a value.
    pub max_model_len: Option<u32>,
    /// The adapters. Sequences refer to them by numbers from 1.
    pub adapters: Vec<AdapterSource>,
    /// The fraction of the attention mass that the selected keys of long prompts must cover, from 0 to 1. With `None`,
    /// prompts attend to all keys. The results of prompts with sparse attention are not exact. Only the native
    /// attention supports sparse attention.
    pub sparse_attention: Option<f32>,
    /// Whether decodes report the attention to each block
    /// ([`ModelRunner::block_scores`](server_engine::ModelRunner::block_scores)). Only the native attention reports
    /// these scores.
    pub block_scores: bool,
}

impl Config {
    /// The configuration of a model on the CPU, without adapters, sparse attention or a cache directory. The size of
    /// the KV cache is derived from the available memory, with no other limit.
    pub fn new(model: PathBuf) -> Self {
        Self {
            model,
            device: "CPU".to_owned(),
            plugin_config: Vec::new(),
            activation_precision: ActivationPrecision::Auto,
            kv_cache_bytes: None,
            // A cache for this many tokens exceeds the memory of any machine, and its size in bytes fits in a u64.
            kv_cache_tokens_max: u64::from(u32::MAX),
            cache_dir: None,
            max_model_len: None,
            adapters: Vec::new(),
            sparse_attention: None,
            block_scores: false,
        }
    }
}

/// The precision in which the native projections multiply activations by integer weights. Kernels for AMX always use
/// bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationPrecision {
    /// A precision whose rounding errors are not larger than those of bf16.
    #[default]
    Auto,
    /// 8-bit integers, with a scale for every 32 activations, and outliers in f32. This precision is faster, but with
    /// some models its rounding errors exceed those of bf16.
    Int8,
}
