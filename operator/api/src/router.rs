//! The router in front of the replicas, which is what clients talk to.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ResourceRequirements, Toleration, TopologySpreadConstraint};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::flags::{ExtraArgs, ROUTER_FLAGS};
use crate::{Period, PodTemplate, formats, resources, rules};

/// The flags of the router that `router.extraArgs` may not hold, and what to use instead.
pub const TAKEN_ROUTER_FLAGS: [(&str, &str); 28] = [
    ("--access-log", "use observability.accessLog"),
    ("--admin-port", "the operator sets it"),
    ("--answer-timeout", "use router.timeouts.answer"),
    ("--api-keys", "use access.apiKeysSecretRef"),
    ("--attempts", "use router.retry.max"),
    ("--config", "the operator sets it"),
    ("--connect-timeout", "use router.timeouts.connect"),
    ("--drain-timeout", "use drain.timeout"),
    ("--first-token-timeout", "use router.timeouts.firstToken"),
    ("--grpc-port", "the operator sets it"),
    ("--host", "the operator sets it"),
    ("--idle-timeout", "use router.timeouts.streamIdle"),
    ("--key-isolation", "use router.keyIsolation"),
    ("--key-requests", "use access.requestsPerMinute"),
    ("--key-tokens", "use access.tokensPerMinute"),
    ("--log", "use observability.logLevel"),
    ("--log-format", "the operator sets it"),
    ("--otlp-endpoint", "use observability.tracing"),
    ("--policy", "use router.policy"),
    ("--port", "the operator sets it"),
    ("--queue-requests", "use router.queue.maxRequests"),
    ("--queue-timeout", "use router.queue.timeout"),
    ("--queue-tokens", "use router.queue.maxTokens"),
    ("--replica", "the operator sets it"),
    ("--replica-token-file", "use security.replicaTokenSecretRef"),
    ("--replicas-dns", "the operator sets it"),
    ("--replicas-service", "the operator sets it"),
    ("--retry-share", "use router.retry.budgetPercent"),
];

fn extra_args_rules() -> serde_json::Value {
    ExtraArgs { field: "router", program: "router", known: ROUTER_FLAGS, taken: &TAKEN_ROUTER_FLAGS }.rules()
}

/// The router in front of the replicas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = extra_args_rules()))]
pub struct Router {
    /// The router's image. Default: the one of the operator's own version.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-kubernetes-validations" = formats::image()))]
    pub image: Option<String>,
    /// How many routers. With two, one may fail without a client noticing.
    #[schemars(range(min = 1, max = 32))]
    pub replicas: i32,
    /// How a replica is chosen for a request. `kv`: by the time to the first token that it promises, by its KV cache
    /// and by what it has cached of the prompt.
    pub policy: Policy,
    /// Which API keys share stored responses, conversations and cached prompts. `key`: none. `name`: those with the same
    /// name in the Secret of keys, so that a key can be replaced without losing what is stored. `none`: all of them.
    /// Without `access.apiKeysSecretRef` it has no effect.
    pub key_isolation: KeyIsolation,
    /// Requests that wait in the router while no replica has room.
    pub queue: Queue,
    /// Requests that are sent to another replica when one fails before its first byte.
    pub retry: Retry,
    /// Times after which the router gives up.
    pub timeouts: Timeouts,
    /// The Service that clients use.
    pub service: Service,
    /// Processors and memory of each router. Default: 100m and 128Mi requested, 512Mi at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "resources")]
    pub resources: Option<ResourceRequirements>,
    /// On which nodes routers run.
    pub placement: RouterPlacement,
    /// Further flags of the router, each with its value: `--hang-timeout=20s`. None that has a field of its own.
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)))]
    pub extra_args: Vec<String>,
    /// Merged into the pod of each router, for what has no field of its own. The router's container is called `router`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_template: Option<PodTemplate>,
}

/// On which nodes routers run. The fields are those of a pod, and mean what they mean there. For an affinity there is
/// `router.podTemplate`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RouterPlacement {
    /// Labels that a node must have.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that are tolerated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// How routers are spread. A constraint without a selector is for the routers of this resource. Default: over
    /// nodes, as far as possible.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// The PriorityClass.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub priority_class_name: Option<String>,
}

impl Default for Router {
    fn default() -> Self {
        Self {
            image: None,
            replicas: 2,
            policy: Policy::default(),
            key_isolation: KeyIsolation::default(),
            queue: Queue::default(),
            retry: Retry::default(),
            timeouts: Timeouts::default(),
            service: Service::default(),
            resources: None,
            placement: RouterPlacement::default(),
            extra_args: Vec::new(),
            pod_template: None,
        }
    }
}

/// How a replica is chosen for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// By the time to the first token that it promises.
    #[default]
    Kv,
    /// The one with the fewest requests.
    LeastRequests,
    /// The one with fewer requests of two drawn at random.
    PowerOfTwo,
    /// One after the other.
    RoundRobin,
    /// The one that had the client's session before.
    Session,
}

impl Policy {
    /// As the router's configuration has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::LeastRequests => "least-requests",
            Self::PowerOfTwo => "power-of-two",
            Self::RoundRobin => "round-robin",
            Self::Session => "session",
        }
    }
}

/// Which API keys share stored responses, conversations and cached prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KeyIsolation {
    /// None: each has its own.
    #[default]
    Key,
    /// Those with the same name.
    Name,
    /// All of them.
    None,
}

impl KeyIsolation {
    /// As the router's configuration has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Name => "name",
            Self::None => "none",
        }
    }
}

/// Requests that wait in each router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Queue {
    /// Most requests that wait. Further ones are refused with 429.
    #[schemars(range(min = 0, max = 1_048_576))]
    pub max_requests: u32,
    /// Most prompt tokens, estimated, that wait.
    #[schemars(range(min = 0, max = 4_294_967_295_u64))]
    pub max_tokens: u64,
    /// Longest time that a request waits.
    pub timeout: Period,
}

impl Default for Queue {
    fn default() -> Self {
        Self { max_requests: 1024, max_tokens: 4_000_000, timeout: Period::seconds(30) }
    }
}

/// Requests that are sent again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Retry {
    /// Most times that one request is sent again.
    #[schemars(range(min = 0, max = 15))]
    pub max: u32,
    /// Most requests that are sent again, in percent of all.
    #[schemars(range(min = 0, max = 100))]
    pub budget_percent: u32,
}

impl Default for Retry {
    fn default() -> Self {
        Self { max: 2, budget_percent: 10 }
    }
}

/// Times after which the router gives up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Timeouts {
    /// For connecting to a replica.
    pub connect: Period,
    /// For the first token of an answer that is streamed. A replica that hangs is noticed earlier, by its silence
    /// about its load.
    pub first_token: Period,
    /// For the whole of an answer that is not streamed.
    pub answer: Period,
    /// Between two bytes of an answer.
    pub stream_idle: Period,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Period::seconds(2),
            first_token: Period("5m".to_owned()),
            answer: Period("10m".to_owned()),
            stream_idle: Period::seconds(60),
        }
    }
}

/// The Service that clients use. It has the name of this resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!has(self.nodePort) || self.type != 'ClusterIP'", "router.service.nodePort needs the type NodePort or LoadBalancer")])))]
pub struct Service {
    /// Who can reach it.
    pub r#type: ServiceType,
    /// Its port.
    #[schemars(range(min = 1, max = 65_535))]
    pub port: i32,
    /// The port on each node, with the types NodePort and LoadBalancer. Default: any free one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_535))]
    pub node_port: Option<i32>,
    /// Annotations, as load balancers of clouds want them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Default for Service {
    fn default() -> Self {
        Self { r#type: ServiceType::default(), port: 80, node_port: None, annotations: BTreeMap::new() }
    }
}

/// Who can reach a Service, in Kubernetes' words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ServiceType {
    /// Pods of the cluster.
    #[default]
    ClusterIP,
    /// Whoever reaches a node.
    NodePort,
    /// Whoever reaches the load balancer that the cloud makes for it.
    LoadBalancer,
}

impl ServiceType {
    /// As Kubernetes has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ClusterIP => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
        }
    }
}
