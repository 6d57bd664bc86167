//! What computes, with how much memory, in batches of what size.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::flags::{ExtraArgs, SERVER_FLAGS};
use crate::{formats, rules};

/// The flags of the server that `engine.extraArgs` may not hold, and what to use instead.
pub const TAKEN_FLAGS: [(&str, &str); 18] = [
    ("--admin-port", "the operator sets it"),
    ("--device", "use engine.device"),
    ("--drain-timeout", "use drain.timeout"),
    ("--grpc-port", "the operator sets it"),
    ("--host", "the operator sets it"),
    ("--kv-cache-precision", "use engine.kvCache.precision"),
    ("--kv-cache-size", "use engine.kvCache.size"),
    ("--log", "use observability.logLevel"),
    ("--log-format", "the operator sets it"),
    ("--max-batched-tokens", "use engine.maxBatchedTokens"),
    ("--max-model-len", "use engine.maxModelLen"),
    ("--max-num-seqs", "use engine.maxNumSeqs"),
    ("--model", "use model.source"),
    ("--model-name", "use model.name and model.aliases"),
    ("--no-prefix-caching", "use engine.kvCache.prefixCaching"),
    ("--plugin-config", "use engine.pluginConfig"),
    ("--port", "the operator sets it"),
    ("--replica-token-file", "use security.replicaTokenSecretRef"),
];

/// Which flags `engine.extraArgs` may hold.
fn extra_args_rules() -> serde_json::Value {
    ExtraArgs { field: "engine", program: "server", known: SERVER_FLAGS, taken: &TAKEN_FLAGS }.rules()
}

/// The server of each replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = extra_args_rules()))]
pub struct Engine {
    /// The server's image. Default: the one of the operator's own version.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-kubernetes-validations" = formats::image()))]
    pub image: Option<String>,

    /// The OpenVINO device: `CPU`, `GPU`, `GPU.1`, `AUTO` or `HETERO:GPU,CPU`. Only `CPU` is tested. `NPU` is accepted but
    /// does not work, because OpenVINO has no paged attention for it.
    #[schemars(length(max = 128), extend("x-kubernetes-validations" = formats::device()))]
    pub device: String,

    /// The cache of keys and values, by which a replica's capacity is counted.
    pub kv_cache: KvCache,

    /// Most sequences that a replica runs at once.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_num_seqs: u32,

    /// Most tokens that a replica computes in one step. A longer prompt is computed in chunks.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub max_batched_tokens: u32,

    /// Most tokens of a prompt and its answer together. Default: what the model was made for, or what the KV cache
    /// holds if that is less.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 16_777_216))]
    pub max_model_len: Option<u32>,

    /// Properties for OpenVINO's plugin, as in `INFERENCE_NUM_THREADS: "8"`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub plugin_config: BTreeMap<String, String>,

    /// Further flags of the server, each with its value: `--weights=compact`. None that has a field of its own.
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)))]
    pub extra_args: Vec<String>,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            image: None,
            device: "CPU".to_owned(),
            kv_cache: KvCache::default(),
            max_num_seqs: 256,
            max_batched_tokens: 512,
            max_model_len: None,
            plugin_config: BTreeMap::new(),
            extra_args: Vec::new(),
        }
    }
}

/// The cache of keys and values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct KvCache {
    /// Bytes, as in `8Gi`. It must fit into the memory limit beside the weights. Default: half of the memory that is
    /// free once the model is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 32, "x-kubernetes-validations" = rules(&[("isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))", "engine.kvCache.size must be a number of bytes, as in 8Gi")])))]
    pub size: Option<Quantity>,
    /// The type of what is kept. Default: what the device prefers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precision: Option<KvPrecision>,
    /// Whether prompts reuse what is cached of prompts that begin the same.
    pub prefix_caching: bool,
}

impl Default for KvCache {
    fn default() -> Self {
        Self { size: None, precision: None, prefix_caching: true }
    }
}

/// The type of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KvPrecision {
    /// 4 bits with scales: half the memory of `u8`, less exact, and computed by the kernels of OpenVINO's plugin.
    U4,
    /// 8 bits with scales.
    U8,
    /// 16 bits, the range of 32.
    Bf16,
    /// 16 bits.
    F16,
    /// 32 bits.
    F32,
}

impl KvPrecision {
    /// As the server's flag has it.
    #[must_use]
    pub fn flag(self) -> &'static str {
        match self {
            Self::U4 => "u4",
            Self::U8 => "u8",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        }
    }
}
