//! The resource as a whole, and those parts of it that are small.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Disruption, Drain, Engine, LlmDeploymentStatus, LocalReference, Model, Period, Placement, Rollout,
    Router, any_object, formats, resources, rules,
};

/// What is to be served, and how.
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
    doc = "A language model, served by replicas on OpenVINO behind a router that speaks OpenAI's API.",
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
        description = "Replicas that are ready, of those wanted."
    ),
    printcolumn(
        name = "KV %",
        type_ = "integer",
        json_path = ".status.kvCachePercent",
        description = "How much of the KV cache running requests hold, over all replicas."
    ),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Routable", type_ = "integer", json_path = ".status.routableReplicas", priority = 1),
    printcolumn(name = "Updated", type_ = "integer", json_path = ".status.updatedReplicas", priority = 1),
    printcolumn(name = "Endpoint", type_ = "string", json_path = ".status.endpoint", priority = 1),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')").message(
        "the name must begin with a letter and hold only lower-case letters, digits and '-': a Service is named after it"
    ),
    validation = Rule::new("self.metadata.name.size() <= 40").message(
        "the name may have 40 characters at most: the names of all that is made for it begin with it"
    )
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!has(self.engine.kvCache.size) || !isQuantity(string(self.engine.kvCache.size)) || \
!has(self.resources.limits) || !('memory' in self.resources.limits) || \
quantity(string(self.engine.kvCache.size)).isLessThan(quantity(string(self.resources.limits['memory'])))", "engine.kvCache.size must be less than resources.limits.memory: the weights need room beside it"), ("!self.placement.cpuPinning || (has(self.resources.limits) && \
'cpu' in self.resources.limits && 'memory' in self.resources.limits && \
quantity(string(self.resources.limits['cpu'])).isInteger())", "placement.cpuPinning needs whole CPUs and memory in resources.limits, as in cpu: \"8\", memory: 32Gi"), ("!self.placement.cpuPinning || !has(self.resources.limits) || \
!has(self.resources.requests) || self.resources.requests.all(name, name in self.resources.limits && \
quantity(string(self.resources.requests[name])).compareTo(quantity(string(self.resources.limits[name]))) == 0)", "placement.cpuPinning needs resources.requests equal to resources.limits, or none at all")])))]
pub struct LlmDeploymentSpec {
    /// The model that is served.
    pub model: Model,

    /// The server of each replica.
    #[serde(default)]
    pub engine: Engine,

    /// Processors and memory of each replica. Default: none requested, none forbidden, which is for trying out only.
    #[serde(default)]
    #[schemars(schema_with = "resources")]
    pub resources: ResourceRequirements,

    /// On which nodes replicas run.
    #[serde(default)]
    pub placement: Placement,

    /// How many replicas. `kubectl scale` and a HorizontalPodAutoscaler write this field.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1024))]
    pub replicas: i32,

    /// How replicas are replaced when what they run changes.
    #[serde(default)]
    pub rollout: Rollout,

    /// When replicas and routers are restarted because a new version of the operator brings other default images or
    /// renders other pods. `Auto`: when it is their turn; the operator upgrades a limited number of resources at a time,
    /// and a resource whose upgrade fails holds up the others. `Manual`: once the annotation `ovfleet.dev/upgrade` has
    /// the value of `status.release.available`. A change of this resource that restarts pods includes the upgrade.
    #[serde(default)]
    pub upgrade_policy: UpgradePolicy,

    /// How a replica leaves.
    #[serde(default)]
    pub drain: Drain,

    /// How many replicas maintenance of the cluster may take away.
    #[serde(default)]
    pub disruption: Disruption,

    /// The router in front of the replicas.
    #[serde(default)]
    pub router: Router,

    /// Who may send requests.
    #[serde(default)]
    pub access: Access,

    /// What is told about what goes on.
    #[serde(default)]
    pub observability: Observability,

    /// What the pods may do, and who may reach them.
    #[serde(default)]
    pub security: Security,

    /// Whether everything is scaled to zero. Nothing is deleted: the Service, volumes and fetched files stay.
    #[serde(default)]
    pub suspend: bool,

    /// Merged into the pod of each replica, for what has no field of its own. The server's container is called `server`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_template: Option<PodTemplate>,
}

fn one() -> i32 {
    1
}

/// When a new version of the operator may restart pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UpgradePolicy {
    /// When it is the resource's turn.
    #[default]
    Auto,
    /// When the release is approved.
    Manual,
}

/// Who may send requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = rules(&[("has(self.apiKeysSecretRef) || !(has(self.requestsPerMinute) || has(self.tokensPerMinute))", "access.requestsPerMinute and access.tokensPerMinute are for each API key: they need access.apiKeysSecretRef")])))]
pub struct Access {
    /// A Secret of the same namespace with API keys. It is mounted into the router and read again when it changes; the
    /// operator does not read it. Default: anybody who reaches the Service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_keys_secret_ref: Option<KeysReference>,
    /// Most requests a minute with one key, at each router. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub requests_per_minute: Option<u32>,
    /// Most tokens a minute with one key, prompts and answers together, at each router. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub tokens_per_minute: Option<u32>,
}

/// A key of a Secret that holds API keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeysReference {
    /// The Secret.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::object_name()))]
    pub name: String,
    /// Which of its entries is the router's file of keys.
    #[serde(default = "keys")]
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::data_key()))]
    pub key: String,
}

fn keys() -> String {
    "keys".to_owned()
}

/// What is told about what goes on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Observability {
    /// How much is logged. Prompts and answers never are.
    pub log_level: LogLevel,
    /// Whether the router logs a line for each request.
    pub access_log: bool,
    /// Metrics, which servers and routers always offer.
    pub metrics: Metrics,
    /// Traces of requests, sent by the router. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracing: Option<Tracing>,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What failed.
    Error,
    /// What may be wrong, too.
    Warn,
    /// What has happened, too.
    #[default]
    Info,
    /// Each request, too.
    Debug,
    /// Everything.
    Trace,
}

impl LogLevel {
    /// As the flags have it.
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

/// Metrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Metrics {
    /// Whether ServiceMonitors are made for the Prometheus operator. Without that operator's resources in the cluster,
    /// none are made and the condition `Accepted` says so.
    pub service_monitor: bool,
    /// How often they are scraped.
    pub interval: Period,
    /// Labels of the ServiceMonitor, for a Prometheus that selects ServiceMonitors by label, as in
    /// `release: kube-prometheus-stack`.
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

/// Traces of requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tracing {
    /// Where spans are sent, by OTLP over gRPC: `http://collector:4317`.
    #[schemars(length(max = 1024), extend("x-kubernetes-validations" = formats::url()))]
    pub endpoint: String,
}

/// What the pods may do, and who may reach them. All pods meet the restricted Pod Security Standard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Security {
    /// Whether NetworkPolicies are created. The API of a replica is then reachable from the routers of the same resource
    /// only; the ports of metrics and probes, which serve nothing else, are reachable from everywhere.
    pub network_policy: bool,
    /// The user that pods run as. Default: 65532, or on OpenShift whom the platform assigns.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub run_as_user: Option<i64>,
    /// Secrets with which images are pulled.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub image_pull_secrets: Vec<LocalReference>,
    /// A Secret of the same namespace with the replica token, by which replicas recognize their routers: 16 to 256 letters,
    /// digits and `-._~+/=`, or several such tokens, one per line. It is mounted into routers and replicas and read again
    /// when it changes; the operator does not read it. Default: the operator creates a Secret with a random token.
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

/// A key of a Secret that holds the replica token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TokenReference {
    /// The name of the Secret.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::object_name()))]
    pub name: String,
    /// The entry of the Secret that contains the token.
    #[serde(default = "token")]
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::data_key()))]
    pub key: String,
}

fn token() -> String {
    "token".to_owned()
}

/// Merged into a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PodTemplate {
    /// Labels and annotations to add.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<PodMetadata>,
    /// Any fields of a pod's `spec`. Objects are merged; lists of things with names (containers, volumes, variables)
    /// are merged by name, volume mounts by path; other lists and values replace what was there.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "any_object")]
    pub spec: Option<serde_json::Value>,
}

/// Labels and annotations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PodMetadata {
    /// Labels to add. Those that the operator sets cannot be changed.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations to add.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}
