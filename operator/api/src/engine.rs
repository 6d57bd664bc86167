//! The settings of the inference engine in each replica.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::flags::{ExtraArgs, SERVER_FLAGS};
use crate::formats;
use crate::schema::rules;

/// The flags of the server that `engine.extraArgs` must not contain, and the replacement for each.
pub const RESERVED_SERVER_FLAGS: [(&str, &str); 21] = [
    ("--admin-port", "the operator sets it"),
    ("--allowed-media-domains", "use engine.media.allowedDomains"),
    ("--allowed-media-networks", "use engine.media.allowedNetworks"),
    ("--device", "use engine.device"),
    ("--drain-timeout", "use drain.timeout"),
    ("--grpc-port", "the operator sets it"),
    ("--host", "the operator sets it"),
    ("--kv-cache-precision", "use engine.kvCache.precision"),
    ("--kv-cache-size", "use engine.kvCache.size"),
    ("--log", "use observability.logLevel"),
    ("--log-format", "the operator sets it"),
    ("--max-model-len", "use engine.maxModelLen"),
    ("--max-num-batched-tokens", "use engine.maxNumBatchedTokens"),
    ("--max-num-seqs", "use engine.maxNumSeqs"),
    ("--media-url-allow-redirects", "use engine.media.allowRedirects"),
    ("--model", "use model.source"),
    ("--model-name", "use model.name and model.aliases"),
    ("--no-prefix-caching", "use engine.kvCache.prefixCaching"),
    ("--plugin-config", "use engine.pluginConfig"),
    ("--port", "the operator sets it"),
    ("--replica-token-file", "use security.replicaTokenSecretRef"),
];

/// The rules for the flags in `engine.extraArgs`.
fn extra_args_rules() -> serde_json::Value {
    ExtraArgs { field: "engine", program: "server", known: SERVER_FLAGS, reserved: &RESERVED_SERVER_FLAGS }
        .rules()
}

/// The inference server of each replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = extra_args_rules()))]
pub struct Engine {
    /// Image of the server. Default: the image that the operator is configured with (`serverImage` of the chart).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-kubernetes-validations" = formats::image()))]
    pub image: Option<String>,

    /// OpenVINO device, such as `CPU`, `GPU`, `GPU.1`, `AUTO` or `HETERO:GPU,CPU`. Only `CPU` is tested. `NPU` is
    /// rejected, because OpenVINO has no paged attention for NPUs.
    #[schemars(length(max = 128), extend("x-kubernetes-validations" = formats::device()))]
    pub device: String,

    /// The KV cache. Its size determines how many tokens of running sequences and cached prefixes a replica can store.
    pub kv_cache: KvCache,

    /// Maximum number of sequences that a replica runs at the same time.
    #[schemars(range(min = 1, max = 65_536))]
    pub max_num_seqs: u32,

    /// Maximum number of tokens that a replica processes in one step. Prompts that exceed this limit are processed in
    /// chunks.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub max_num_batched_tokens: u32,

    /// Maximum number of tokens of a prompt and its completion together. Default: the context length of the model, or
    /// the capacity of the KV cache if that is less.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 16_777_216))]
    pub max_model_len: Option<u32>,

    /// Sources from which replicas of a vision-language model may fetch images that requests reference by URL. Default:
    /// none; clients must send images as `data:` URLs.
    pub media: MediaSources,

    /// Properties of the OpenVINO plugin, such as `INFERENCE_NUM_THREADS: "8"`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub plugin_config: BTreeMap<String, String>,

    /// Additional flags of the server. Each item is one flag with its value, such as `--max-itl=50ms`. Flags that the
    /// operator sets and flags for which the resource has a field are rejected. Unknown flags are rejected unless
    /// `engine.image` is set. In a pod, Kubernetes replaces `$(NAME)` with the value of the environment variable
    /// `NAME`, and `$$` with `$`.
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
            max_num_batched_tokens: 512,
            max_model_len: None,
            media: MediaSources::default(),
            plugin_config: BTreeMap::new(),
            extra_args: Vec::new(),
        }
    }
}

/// The sources from which replicas fetch images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = rules(&[(
    "size(self.allowedDomains) > 0 || (size(self.allowedNetworks) == 0 && !self.allowRedirects)",
    "engine.media.allowedNetworks and engine.media.allowRedirects require engine.media.allowedDomains",
)])))]
pub struct MediaSources {
    /// Hosts from which replicas may fetch images, such as `images.example.com` or `minio.storage.svc:9000`. A host
    /// without a port is allowed on ports 80 and 443. `all` allows every host on ports 80 and 443. If this list is not
    /// empty, the NetworkPolicy of the replicas permits all outgoing connections.
    #[schemars(
        length(max = 64),
        inner(length(min = 1, max = 260)),
        extend("x-kubernetes-validations" = formats::hosts())
    )]
    pub allowed_domains: Vec<String>,
    /// Non-public networks, such as `10.96.0.0/12`, to which replicas may also connect to fetch images from the hosts
    /// in `allowedDomains`. Default: replicas connect only to public addresses.
    #[schemars(
        length(max = 64),
        inner(length(min = 1, max = 64)),
        extend("x-kubernetes-validations" = formats::networks())
    )]
    pub allowed_networks: Vec<String>,
    /// Whether replicas follow redirects to allowed URLs. If not, a request with an image URL that redirects fails.
    pub allow_redirects: bool,
}

/// The cache of keys and values of a replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct KvCache {
    /// Size of the KV cache of each replica, such as `8Gi`. `resources.limits.memory` must cover this cache, the
    /// weights and another 2 GiB. For a vision-language model, it must also cover the image encoder and the image data.
    /// Default: half of the memory that is free after the model is loaded, but at most as much as `engine.maxNumSeqs`
    /// sequences of `engine.maxModelLen` tokens need.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 32, "x-kubernetes-validations" = rules(&[("isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('1')) >= 0", "engine.kvCache.size must be a positive number of bytes, such as 8Gi")])))]
    pub size: Option<Quantity>,
    /// Type of the cached keys and values. `u4` needs 0.6 times as much memory as `u8`, but is noticeably less
    /// accurate. Default: the type that the device prefers, which is `u8` on CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precision: Option<KvPrecision>,
    /// Whether the cached blocks of a prefix are reused for other prompts with the same prefix.
    pub prefix_caching: bool,
}

impl Default for KvCache {
    fn default() -> Self {
        Self { size: None, precision: None, prefix_caching: true }
    }
}

// kube uses this text, not that of the field, as the description of the optional field in the schema.
/// The type of the cached keys and values. `u4` needs 0.6 times as much memory as `u8`, but is noticeably less
/// accurate. Default: the type that the device prefers, which is `u8` on CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KvPrecision {
    /// 4-bit and 5-bit integers with scales: less accurate than `u8`, with 0.6 times the memory.
    U4,
    /// 8-bit integers with scales.
    U8,
    /// 16-bit floating point with the range of `f32`.
    Bf16,
    /// 16-bit IEEE floating point.
    F16,
    /// 32-bit IEEE floating point.
    F32,
}

impl KvPrecision {
    /// Returns the value of the server's flag `--kv-cache-precision`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::U4 => "u4",
            Self::U8 => "u8",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        }
    }
}
