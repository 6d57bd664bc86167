//! The settings of the routers, to which clients send requests.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ResourceRequirements, Toleration, TopologySpreadConstraint};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::flags::{ExtraArgs, ROUTER_FLAGS};
use crate::schema::{resources, rules};
use crate::{Period, PodTemplate, formats};

/// The flags of the router that `router.extraArgs` must not contain, each with what to use instead, or with the reason.
pub const RESERVED_ROUTER_FLAGS: [(&str, &str); 28] = [
    ("--access-log", "use observability.accessLog"),
    ("--admin-port", "the operator sets it"),
    ("--answer-timeout", "use router.timeouts.answer"),
    ("--api-keys", "use access.apiKeysSecretRef"),
    ("--attempts", "use router.retry.attempts"),
    ("--config", "the operator sets it"),
    ("--connect-timeout", "use router.timeouts.connect"),
    ("--drain-timeout", "use drain.timeout"),
    ("--first-token-timeout", "use router.timeouts.firstToken"),
    ("--grpc-port", "the operator sets it"),
    ("--host", "the operator sets it"),
    ("--idle-timeout", "use router.timeouts.idle"),
    ("--key-isolation", "use router.keyIsolation"),
    ("--log", "use observability.logLevel"),
    ("--log-format", "the operator sets it"),
    ("--otlp-endpoint", "use observability.tracing"),
    ("--policy", "use router.policy"),
    ("--port", "the operator sets it"),
    ("--queue-requests", "use router.queue.requests"),
    ("--queue-timeout", "use router.queue.timeout"),
    ("--queue-tokens", "use router.queue.tokens"),
    ("--replica", "the operator sets --replicas-service"),
    ("--replica-token-file", "use security.replicaTokenSecretRef"),
    ("--replicas-dns", "the operator sets --replicas-service"),
    ("--replicas-service", "the operator sets it"),
    ("--requests-per-minute", "use access.requestsPerMinute"),
    ("--retry-budget-percent", "use router.retry.budgetPercent"),
    ("--tokens-per-minute", "use access.tokensPerMinute"),
];

/// The rules for the flags in `router.extraArgs`.
fn extra_args_rules() -> serde_json::Value {
    ExtraArgs { field: "router", program: "router", known: ROUTER_FLAGS, reserved: &RESERVED_ROUTER_FLAGS }
        .rules()
}

/// The routers in front of the replicas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = extra_args_rules()))]
pub struct Router {
    /// Image of the router. Default: the image that the operator is configured with (`routerImage` of the chart).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-kubernetes-validations" = formats::image()))]
    pub image: Option<String>,
    /// Number of routers. With two or more routers, the model remains reachable if one of them fails. The requests that
    /// the failed router was handling fail.
    #[schemars(range(min = 1, max = 32))]
    pub replicas: i32,
    /// Policy by which the router picks a replica for a request. `kv`: the replica with the shortest estimated time to
    /// the first token, based on its load, its free KV cache and the cached prefix of the prompt. `least-requests`: the
    /// replica with the fewest requests in flight. `power-of-two`: of two random replicas, the one with fewer requests
    /// in flight. `round-robin`: each replica in turn. `session`: the same replica for all requests with the same
    /// `x-session-id` header or `user` field, until the set of available replicas changes; requests with neither are
    /// routed as with `kv`.
    pub policy: Policy,
    /// Determines which API keys share stored responses, conversations and cached prompts. `key`: no two keys share
    /// them. `name`: keys with the same name in the Secret share them, so that a key can be replaced without losing
    /// access to stored items. `none`: all keys share them. This field has no effect without `access.apiKeysSecretRef`.
    pub key_isolation: KeyIsolation,
    /// The queue of each router, in which requests wait for a replica with capacity.
    pub queue: Queue,
    /// Retries of requests whose replica fails before the first byte of the response.
    pub retry: Retry,
    /// Timeouts of the requests that the router sends to replicas.
    pub timeouts: Timeouts,
    /// The Service that clients use. It has the name of this resource.
    pub service: Service,
    /// CPU and memory of each router. Default: requests of 100m CPU and 128Mi memory, and a memory limit of 512Mi.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "resources")]
    pub resources: Option<ResourceRequirements>,
    /// The placement of routers on nodes.
    pub placement: RouterPlacement,
    /// Additional flags of the router. Each item is one flag with its value, such as `--hang-timeout=20s`. Flags that
    /// the operator sets and flags for which the resource has a field are rejected. Unknown flags are rejected unless
    /// `router.image` is set. In a pod, Kubernetes replaces `$(NAME)` with the value of the environment variable
    /// `NAME`, and `$$` with `$`.
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)))]
    pub extra_args: Vec<String>,
    /// An object that is merged into the pod template of the routers, for settings that have no field of their own. The
    /// container of the router is named `router`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_template: Option<PodTemplate>,
}

/// The placement of routers on nodes. The fields have the same meaning as in a pod. An affinity can be set in
/// `router.podTemplate`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RouterPlacement {
    /// Labels that a node must have. Unless they include `kubernetes.io/arch`, the node must also have
    /// `kubernetes.io/arch: amd64`, because the images are built for x86-64.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that the pods tolerate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// Constraints that spread the routers over nodes or zones. A constraint without a `labelSelector` applies to the
    /// routers of this resource. Default: routers are spread over nodes as evenly as possible.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// Name of the PriorityClass of the pods.
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

/// The policy by which the router picks a replica for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The replica with the shortest estimated time to the first token.
    #[default]
    Kv,
    /// The replica with the fewest requests in flight.
    LeastRequests,
    /// The one of two random replicas that has fewer requests in flight.
    PowerOfTwo,
    /// Each replica in turn.
    RoundRobin,
    /// The same replica for all requests of a session.
    Session,
}

impl Policy {
    /// Returns the value of the router's option `policy`.
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

/// The API keys that share stored responses, conversations and cached prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KeyIsolation {
    /// Each key has its own items.
    #[default]
    Key,
    /// Keys with the same name share items.
    Name,
    /// All keys share items.
    None,
}

impl KeyIsolation {
    /// Returns the value of the router's option `key-isolation`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Name => "name",
            Self::None => "none",
        }
    }
}

/// The queue of each router.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Queue {
    /// Maximum number of waiting requests. Further requests are rejected with 429.
    #[schemars(range(min = 0, max = 1_048_576))]
    pub requests: u32,
    /// Maximum total number of prompt tokens in the waiting requests, as estimated by the router. Further requests are
    /// rejected with 429. A request may exceed this limit if no other request is waiting.
    #[schemars(range(min = 0, max = 4_294_967_295_u64))]
    pub tokens: u64,
    /// Maximum time that a request waits before it is rejected with 429.
    pub timeout: Period,
}

impl Default for Queue {
    fn default() -> Self {
        Self { requests: 1024, tokens: 4_000_000, timeout: Period::seconds(30) }
    }
}

/// The limits for retries of requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Retry {
    /// Maximum number of attempts to send a request to a replica before the client receives the first byte. Attempts
    /// that fail to connect do not count.
    #[schemars(range(min = 1, max = 16))]
    pub attempts: u32,
    /// Maximum number of retries as a percentage of the requests. Unused retries are saved for later failures. Retries
    /// after a failure to connect, after a rejected replica token, or after the status 429 or 503 do not count. 0
    /// disables all other retries.
    #[schemars(range(min = 0, max = 100))]
    pub budget_percent: u32,
}

impl Default for Retry {
    fn default() -> Self {
        Self { attempts: 4, budget_percent: 20 }
    }
}

/// The timeouts of the requests that the router sends to replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Timeouts {
    /// Timeout for connecting to a replica.
    pub connect: Period,
    /// Timeout for the first token of a streaming response. A replica that hangs is detected earlier by its missing
    /// load reports, provided that another replica still sends reports.
    pub first_token: Period,
    /// Time within which a replica must complete a non-streaming response of up to 1 MiB, or must begin a larger one.
    pub answer: Period,
    /// Maximum time between two bytes of a response.
    pub idle: Period,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Period::seconds(1),
            first_token: Period::seconds(60),
            answer: Period("10m".to_owned()),
            idle: Period::seconds(60),
        }
    }
}

/// The Service that clients use. It has the name of this resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!has(self.nodePort) || self.type != 'ClusterIP'", "router.service.nodePort requires the type NodePort or LoadBalancer")])))]
pub struct Service {
    /// Type of the Service.
    pub r#type: ServiceType,
    /// Port of the Service.
    #[schemars(range(min = 1, max = 65_535))]
    pub port: i32,
    /// Port on each node, for the types NodePort and LoadBalancer. Default: Kubernetes assigns a port.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_535))]
    pub node_port: Option<i32>,
    /// Annotations of the Service, such as those that configure a cloud provider's load balancer.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Default for Service {
    fn default() -> Self {
        Self { r#type: ServiceType::default(), port: 80, node_port: None, annotations: BTreeMap::new() }
    }
}

/// The type of a Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ServiceType {
    /// The Service is reachable from the cluster.
    #[default]
    ClusterIP,
    /// The Service is reachable at a port of each node.
    NodePort,
    /// The Service is reachable through a load balancer of the cloud.
    LoadBalancer,
}

impl ServiceType {
    /// Returns the name of the type in Kubernetes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ClusterIP => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
        }
    }
}
