//! The resource, and the parts of its spec that have no file of their own.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema::{resources, rules};
use crate::{
    Disruption, Drain, Engine, LlmDeploymentStatus, LocalReference, Model, Period, Placement, PodTemplate,
    Rollout, Router, formats,
};

/// The desired state of an LLMDeployment.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "ovfleet.dev",
    version = "v1alpha1",
    kind = "LLMDeployment",
    root = "LlmDeployment",
    plural = "llmdeployments",
    shortname = "llmd",
    category = "ovfleet",
    namespaced,
    cel,
    doc = "A language model that replicas behind routers serve with OpenVINO through the OpenAI API.",
    status = "LlmDeploymentStatus",
    derive = "PartialEq",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Model", type_ = "string", json_path = ".status.model"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.ready",
        description = "Ready replicas and desired replicas."
    ),
    printcolumn(
        name = "KV %",
        type_ = "integer",
        json_path = ".status.kvCachePercent",
        description = "Percentage of all replicas' KV cache blocks that are used by running requests or are being restored from disk."
    ),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Routable", type_ = "integer", json_path = ".status.routableReplicas", priority = 1),
    printcolumn(name = "Updated", type_ = "integer", json_path = ".status.updatedReplicas", priority = 1),
    printcolumn(name = "Endpoint", type_ = "string", json_path = ".status.endpoint", priority = 1),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')").message(
        "the name must begin with a letter, end with a letter or digit, and contain only lowercase letters, digits and '-', because a Service has the same name"
    ),
    validation = Rule::new("self.metadata.name.size() <= 40").message(
        "the name must have at most 40 characters, because the names of the created objects begin with it"
    )
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!has(self.engine.kvCache.size) || !isQuantity(string(self.engine.kvCache.size)) || \
!has(self.resources.limits) || !('memory' in self.resources.limits) || \
quantity(string(self.engine.kvCache.size)).isLessThan(quantity(string(self.resources.limits['memory'])))", "engine.kvCache.size must be less than resources.limits.memory, which must also cover the weights"), ("!self.placement.cpuPinning || (has(self.resources.limits) && \
'cpu' in self.resources.limits && 'memory' in self.resources.limits && \
[quantity(string(self.resources.limits['cpu'])).asApproximateFloat()].all(cpus, cpus == double(int(cpus))))", "placement.cpuPinning requires memory and a whole number of CPUs in resources.limits, such as cpu: \"8\", memory: 32Gi"), ("!self.placement.cpuPinning || !has(self.resources.limits) || \
!has(self.resources.requests) || self.resources.requests.all(name, name in self.resources.limits && \
quantity(string(self.resources.requests[name])).compareTo(quantity(string(self.resources.limits[name]))) == 0)", "placement.cpuPinning requires resources.requests equal to resources.limits, or no requests")])))]
pub struct LlmDeploymentSpec {
    /// The model that is served.
    pub model: Model,

    /// The inference server of each replica.
    #[serde(default)]
    pub engine: Engine,

    /// CPU and memory of each replica. Default: no requests and no limits, which is suitable for evaluation only.
    #[serde(default)]
    #[schemars(schema_with = "resources")]
    pub resources: ResourceRequirements,

    /// The placement of replicas on nodes.
    #[serde(default)]
    pub placement: Placement,

    /// Number of replicas. `kubectl scale` and a HorizontalPodAutoscaler set this field.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1024))]
    pub replicas: i32,

    /// The settings of a rollout, which replaces replicas when their pod template changes.
    #[serde(default)]
    pub rollout: Rollout,

    /// Policy for restarting replicas and routers after an upgrade of the operator. A restart is needed if the new
    /// version uses different default images or pod templates. `Auto`: the operator limits the number of resources that
    /// it upgrades at the same time (1 by default). Resources that serve no requests are upgraded immediately and do
    /// not count toward this limit. A resource whose upgrade fails still counts, so it can block the upgrades of other
    /// resources. `Manual`: as with `Auto`, but the upgrade of a resource does not start until its annotation
    /// `ovfleet.dev/upgrade` has the value of `status.release.available`. With both policies, a change to this resource
    /// that restarts replicas or routers also upgrades the restarted pods.
    #[serde(default)]
    pub upgrade_policy: UpgradePolicy,

    /// The settings for draining replicas and routers before they stop.
    #[serde(default)]
    pub drain: Drain,

    /// The number of replicas that a node drain may evict at the same time. Default: one, or all if they share a volume
    /// with the access mode `ReadWriteOnce`, because they can move to another node only together.
    #[serde(default)]
    pub disruption: Disruption,

    /// The routers in front of the replicas.
    #[serde(default)]
    pub router: Router,

    /// API keys and rate limits.
    #[serde(default)]
    pub access: Access,

    /// Logs, metrics and traces.
    #[serde(default)]
    pub observability: Observability,

    /// Security settings of the pods, and NetworkPolicies.
    #[serde(default)]
    pub security: Security,

    /// Whether replicas and routers are scaled to zero. The Service and, with `model.cache.mode: shared`, the fetched
    /// files remain.
    #[serde(default)]
    pub suspend: bool,

    /// An object that is merged into the pod template of the replicas, for settings that have no field of their own.
    /// The container of the server is named `server`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_template: Option<PodTemplate>,
}

fn one() -> i32 {
    1
}

/// The policy for restarting pods after an upgrade of the operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UpgradePolicy {
    /// Pods are restarted when an upgrade slot is free.
    #[default]
    Auto,
    /// Pods are restarted when the release is approved and an upgrade slot is free.
    Manual,
}

/// API keys and rate limits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = rules(&[("has(self.apiKeysSecretRef) || !(has(self.requestsPerMinute) || has(self.tokensPerMinute))", "access.requestsPerMinute and access.tokensPerMinute require access.apiKeysSecretRef, because they apply to each API key")])))]
pub struct Access {
    /// Secret with API keys, in the namespace of the resource. It is mounted into the routers, which reload it when it
    /// changes; the operator does not read it. Default: no API key is required.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_keys_secret_ref: Option<KeysReference>,
    /// Maximum number of requests per minute for each API key. Each router counts separately. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub requests_per_minute: Option<u32>,
    /// Maximum number of prompt and completion tokens per minute for each API key. Each router counts separately.
    /// Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub tokens_per_minute: Option<u32>,
}

/// An entry of a Secret with API keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeysReference {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::object_name()))]
    pub name: String,
    /// Key of the Secret under which the API keys are stored, one per line. An API key may be followed by a space and a
    /// name, which is used in logs and for `router.keyIsolation: name`. A `#` begins a comment.
    #[serde(default = "keys")]
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::data_key()))]
    pub key: String,
}

fn keys() -> String {
    "keys".to_owned()
}

/// Logs, metrics and traces.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Observability {
    /// Log level. Prompts and answers are never logged.
    pub log_level: LogLevel,
    /// Whether the routers log a line for each request.
    pub access_log: bool,
    /// Collection of the metrics of servers and routers.
    pub metrics: Metrics,
    /// Export of request traces by the routers. Default: no traces are exported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracing: Option<Tracing>,
}

/// The log level of servers and routers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Only errors are logged.
    Error,
    /// Errors and warnings are logged.
    Warn,
    /// Important state changes are logged as well.
    #[default]
    Info,
    /// Each request is logged as well.
    Debug,
    /// All log events are logged.
    Trace,
}

impl LogLevel {
    /// Returns the value of the flag `--log`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// The collection of metrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Metrics {
    /// Whether a ServiceMonitor is created for the Prometheus operator. If the cluster does not have the kind
    /// ServiceMonitor, none is created, and the message of the condition `Accepted` says so.
    pub service_monitor: bool,
    /// Scrape interval of the ServiceMonitor.
    pub interval: Period,
    /// Labels of the ServiceMonitor, such as `release: kube-prometheus-stack`, by which a Prometheus instance selects
    /// it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub service_monitor_labels: BTreeMap<String, String>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            service_monitor: false,
            interval: Period::seconds(30),
            service_monitor_labels: BTreeMap::new(),
        }
    }
}

/// The export of traces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tracing {
    /// URL to which spans are sent with OTLP over gRPC, such as `http://collector:4317`.
    #[schemars(length(max = 1024), extend("x-kubernetes-validations" = formats::plain_url()))]
    pub endpoint: String,
}

/// Security settings of the pods, and NetworkPolicies. All pods meet the restricted Pod Security Standard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Security {
    /// Whether NetworkPolicies are created. The API of a replica is then reachable only from the routers of the same
    /// resource; the ports that serve only metrics and probes are reachable from anywhere. Outgoing connections of
    /// replicas are blocked, unless replicas fetch their model or images.
    pub network_policy: bool,
    /// User ID and group ID that pods run as. Default: 65532, or on OpenShift the IDs that the platform assigns.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub run_as_user: Option<i64>,
    /// Secrets for pulling the images of the pods. They must be in the namespace of the resource.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub image_pull_secrets: Vec<LocalReference>,
    /// Secret with the replica token, with which routers authenticate to replicas. The Secret must be in the namespace
    /// of the resource, and may contain several tokens, one per line. Each token consists of 16 to 256 characters:
    /// letters, digits and `-._~+/=`. The Secret is mounted into routers and replicas, which reload it when it changes;
    /// the operator does not read it. Default: the operator creates a Secret with a random token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replica_token_secret_ref: Option<TokenReference>,
}

impl Default for Security {
    fn default() -> Self {
        Self {
            network_policy: true,
            run_as_user: None,
            image_pull_secrets: Vec::new(),
            replica_token_secret_ref: None,
        }
    }
}

/// An entry of a Secret with the replica token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TokenReference {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::object_name()))]
    pub name: String,
    /// Key of the Secret under which the tokens are stored, one per line.
    #[serde(default = "token")]
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::data_key()))]
    pub key: String,
}

fn token() -> String {
    "token".to_owned()
}
