//! The status of an LLMDeployment.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The observed state of an LLMDeployment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct LlmDeploymentStatus {
    /// Generation of the resource that this status describes.
    pub observed_generation: i64,
    /// Human-readable summary of the state. `Refused`: the resource is invalid, or the cluster rejects one of its
    /// objects. `Degraded`: a problem probably needs intervention. The conditions contain the reason. Programs should
    /// read the conditions instead of the phase.
    pub phase: Phase,
    /// Number of replicas that exist, including those that are starting and excluding those that are being deleted.
    pub replicas: i32,
    /// Number of replicas that are ready.
    pub ready_replicas: i32,
    /// Number of ready replicas that the routers have admitted.
    pub routable_replicas: i32,
    /// Number of replicas with the current pod template.
    pub updated_replicas: i32,
    /// Number of replicas that are being deleted and are finishing their requests.
    pub draining_replicas: i32,
    /// Ready and desired replicas, as `READY/DESIRED`.
    pub ready: String,
    /// Label selector of the replicas' pods.
    pub selector: String,
    /// Base URL of the API for clients in the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Name under which the model is served.
    pub model: String,
    /// Digest of the model's files, as `sha256:…`, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_digest: Option<String>,
    /// Percentage of all replicas' KV cache blocks that are used by running requests or are being restored from disk.
    /// It is sampled at intervals and rounded to a multiple of 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_percent: Option<i32>,
    /// Commit that replicas fetch from the repository in `model.source.hf`. It is the commit to which `revision`
    /// pointed when the model was first fetched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_revision: Option<String>,
    /// Progress of fetching the model's files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheStatus>,
    /// Release whose images and pod templates are applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release: Option<ReleaseStatus>,
    /// Conditions of the resource: `Accepted`, `ModelAvailable`, `ReplicasReady`, `RouterReady`, `Available`,
    /// `Progressing`, `Degraded` and `Ready`.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// The summary of the state of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// The operator has not reconciled the resource yet.
    #[default]
    Pending,
    /// The resource is invalid, or the cluster rejects one of its objects.
    Refused,
    /// The model's files are being fetched.
    Fetching,
    /// Replicas are starting: the resource is new or has been resumed, or no replica receives requests.
    Starting,
    /// All replicas are up to date and ready, and requests are served.
    Ready,
    /// Requests are served while replicas are replaced or their number changes.
    Updating,
    /// A problem requires intervention.
    Degraded,
    /// The resource is scaled to zero.
    Suspended,
}

impl Phase {
    /// All phases, in the order in which the documentation lists them.
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

    /// Returns the name of the phase in the status.
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

/// The release whose images and pod templates are applied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ReleaseStatus {
    /// State of the upgrade to the operator's release.
    pub state: UpgradeState,
    /// Image of the replicas.
    pub server_image: String,
    /// Image of the routers.
    pub router_image: String,
    /// Hash of the pod template of the replicas, which is also the value of the label `ovfleet.dev/template` on their
    /// pods.
    pub template: String,
    /// Release that is waiting for an upgrade slot or for approval. To approve it, set the annotation
    /// `ovfleet.dev/upgrade` to this value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available: Option<String>,
    /// Reason why the upgrade is waiting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The state of an upgrade.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum UpgradeState {
    /// No upgrade is needed, or the pods are being replaced without an upgrade slot because none of them served
    /// requests.
    #[default]
    Current,
    /// The upgrade to another release waits for an upgrade slot or for approval.
    Waiting,
    /// The pods are being replaced by those of another release.
    Rolling,
}

impl UpgradeState {
    /// All states of an upgrade.
    pub const ALL: [Self; 3] = [Self::Current, Self::Waiting, Self::Rolling];

    /// Returns the name of the state in the status.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Current => "Current",
            Self::Waiting => "Waiting",
            Self::Rolling => "Rolling",
        }
    }
}

/// The progress of fetching the model's files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CacheStatus {
    /// State of the fetch.
    pub state: CacheState,
    /// Number of bytes that have been fetched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<i64>,
    /// Total number of bytes, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_total: Option<i64>,
    /// Human-readable progress, such as `1.2 GiB of 4.9 GiB`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<String>,
}

/// The state of fetching the model's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CacheState {
    /// The fetch has not started.
    #[default]
    Pending,
    /// The files are being fetched.
    Fetching,
    /// The files have been fetched.
    Ready,
    /// The files could not be fetched.
    Failed,
}

/// The types of the conditions of a resource.
pub mod conditions {
    /// The resource is valid, and the cluster rejects none of its objects.
    pub const ACCEPTED: &str = "Accepted";
    /// The model's files are available.
    pub const MODEL_AVAILABLE: &str = "ModelAvailable";
    /// All replicas are up to date and ready.
    pub const REPLICAS_READY: &str = "ReplicasReady";
    /// At least one router is ready.
    pub const ROUTER_READY: &str = "RouterReady";
    /// A change toward the desired state is in progress.
    pub const PROGRESSING: &str = "Progressing";
    /// A problem requires intervention.
    pub const DEGRADED: &str = "Degraded";
    /// At least one replica of any version serves requests.
    pub const AVAILABLE: &str = "Available";
    /// The desired number of replicas is up to date and serves requests, or the resource is scaled to zero.
    pub const READY: &str = "Ready";

    /// All types of conditions, in the order in which the status lists them.
    pub const ALL: [&str; 8] =
        [ACCEPTED, MODEL_AVAILABLE, REPLICAS_READY, ROUTER_READY, AVAILABLE, PROGRESSING, DEGRADED, READY];
}
