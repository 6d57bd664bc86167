//! What is the case.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is the case, as the operator last saw it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct LlmDeploymentStatus {
    /// The generation of the resource that this is about.
    pub observed_generation: i64,
    /// All of it in one word, for people. Programs read the conditions.
    pub phase: Phase,
    /// Replicas that are there, those that start included and those that leave not.
    pub replicas: i32,
    /// Replicas that are ready.
    pub ready_replicas: i32,
    /// Replicas that the router has admitted.
    pub routable_replicas: i32,
    /// Replicas that run what the resource says now.
    pub updated_replicas: i32,
    /// Replicas that finish their requests and leave.
    pub draining_replicas: i32,
    /// `ready/wanted`.
    pub ready: String,
    /// The selector of the replicas' pods, as text.
    pub selector: String,
    /// Where clients send requests, inside the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The name under which the model is served.
    pub model: String,
    /// The digest of the model's files, `sha256:…`, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_digest: Option<String>,
    /// Blocks of the KV cache that running requests hold, over all replicas, in percent: sampled from time to time and
    /// rounded to 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_percent: Option<i32>,
    /// The commit of the Hub's repository that replicas fetch (`model.source.hf`): what `revision` led to when the first
    /// of them fetched it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_revision: Option<String>,
    /// How far the model's files have come.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheStatus>,
    /// Which release of the images and pod templates is applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release: Option<ReleaseStatus>,
    /// What is so and what is not, each with a reason.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Where the deployment is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// Not looked at, or waiting for the cluster.
    #[default]
    Pending,
    /// The resource cannot be carried out as it is written.
    Refused,
    /// The model's files are being fetched.
    Fetching,
    /// Replicas start for the first time.
    Starting,
    /// All replicas run what the resource says, and requests are answered.
    Ready,
    /// Requests are answered while replicas are replaced or their number changes.
    Updating,
    /// Less is there than should be, and it does not get better by itself.
    Degraded,
    /// Scaled to zero, as the resource says.
    Suspended,
}

impl Phase {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Pending,
        Self::Refused,
        Self::Fetching,
        Self::Starting,
        Self::Ready,
        Self::Updating,
        Self::Degraded,
        Self::Suspended,
    ];

    /// As in the status.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Refused => "Refused",
            Self::Fetching => "Fetching",
            Self::Starting => "Starting",
            Self::Ready => "Ready",
            Self::Updating => "Updating",
            Self::Degraded => "Degraded",
            Self::Suspended => "Suspended",
        }
    }
}

/// Which release of the images and pod templates is applied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ReleaseStatus {
    /// Where the upgrade to the operator's release is.
    pub state: UpgradeState,
    /// The image that replicas are started with.
    pub server_image: String,
    /// The image that routers are started with.
    pub router_image: String,
    /// The hash of the pod template of the replicas, as in the label `ovfleet.dev/template` of their pods.
    pub template: String,
    /// The release that waits: the value for the annotation `ovfleet.dev/upgrade` that approves it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available: Option<String>,
    /// What the upgrade waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Where an upgrade is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UpgradeState {
    /// Pods are as this version of the operator renders them.
    #[default]
    Current,
    /// Another release is available, and waits for its turn or for approval.
    Waiting,
    /// Pods are being replaced by those of another release.
    Rolling,
}

impl UpgradeState {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Current, Self::Waiting, Self::Rolling];

    /// As in the status.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Current => "Current",
            Self::Waiting => "Waiting",
            Self::Rolling => "Rolling",
        }
    }
}

/// How far the model's files have come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CacheStatus {
    /// In one word.
    pub state: CacheState,
    /// Bytes that have arrived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<i64>,
    /// Bytes in all, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_total: Option<i64>,
    /// The same for people: `1.2 GiB of 4.9 GiB`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<String>,
}

/// How far the model's files have come, in one word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CacheState {
    /// Nothing fetches yet.
    #[default]
    Pending,
    /// They are on their way.
    Fetching,
    /// They are there and checked.
    Ready,
    /// They cannot be had.
    Failed,
}

/// The conditions of a resource, in the order in which they are shown.
pub mod conditions {
    /// The resource can be carried out as it is written.
    pub const ACCEPTED: &str = "Accepted";
    /// The model's files are there.
    pub const MODEL_AVAILABLE: &str = "ModelAvailable";
    /// All replicas run what the resource says and are ready.
    pub const REPLICAS_READY: &str = "ReplicasReady";
    /// Routers answer.
    pub const ROUTER_READY: &str = "RouterReady";
    /// Something is on its way to what the resource says.
    pub const PROGRESSING: &str = "Progressing";
    /// Something is wrong that does not get better by itself.
    pub const DEGRADED: &str = "Degraded";
    /// Requests are answered, by at least one replica, whatever it runs.
    pub const AVAILABLE: &str = "Available";
    /// The resource is as it says: all replicas that it asks for, which may be none, run what it says and answer requests.
    pub const READY: &str = "Ready";

    /// All of them.
    pub const ALL: [&str; 8] =
        [ACCEPTED, MODEL_AVAILABLE, REPLICAS_READY, ROUTER_READY, AVAILABLE, PROGRESSING, DEGRADED, READY];
}
