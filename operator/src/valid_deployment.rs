//! A validated resource: every default of the spec is resolved, so that the modules that render objects do not depend
//! on the structure of the spec. The names are those of the flags and of the fields of the rendered objects;
//! [`crate::validate`] is the only place that translates from the fields of the resource.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Affinity, ResourceRequirements, Toleration, TopologySpreadConstraint};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use operator_api::{
    AccessMode, KeyIsolation, KvPrecision, LogLevel, MediaSources, Policy, ServiceType, UpgradePolicy,
};
use serde_json::Value;

use crate::names::Owner;

/// A resource that has passed validation.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidDeployment {
    /// The resource that owns the objects.
    pub owner: Owner,
    /// The names under which the model is served; at least one.
    pub model_names: Vec<String>,
    /// How the files of the model reach the replicas.
    pub files: ModelFiles,
    /// The settings of the replicas.
    pub server: ServerSettings,
    /// The settings of the routers.
    pub router: RouterSettings,
    /// The security settings of all pods.
    pub security: SecuritySettings,
    /// The address that pods listen on.
    pub host: IpAddr,
    /// The settings of the ServiceMonitor, if one is created.
    pub service_monitor: Option<ServiceMonitorSettings>,
    /// Digests of the user's settings, which distinguish an upgrade of the operator from a change of the resource.
    pub inputs: InputDigests,
    /// The policy for restarting pods after an upgrade of the operator.
    pub upgrade_policy: UpgradePolicy,
    /// The pull policy of images; `None` for the default of Kubernetes.
    pub image_pull_policy: Option<String>,
    /// Messages about settings that have no effect but do not make the resource invalid.
    pub warnings: Vec<String>,
}

/// The security settings of all pods of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecuritySettings {
    /// Whether NetworkPolicies are created.
    pub network_policy: bool,
    /// The user that pods run as; `None` if the platform assigns it.
    pub run_as_user: Option<i64>,
    /// The names of the Secrets for pulling images.
    pub image_pull_secrets: Vec<String>,
    /// The user's Secret with the replica token; `None` if the operator creates one.
    pub replica_token: Option<DataKey>,
}

/// An entry of a Secret or of a ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataKey {
    /// The name of the Secret or ConfigMap.
    pub name: String,
    /// The key of the entry.
    pub key: String,
}

/// The settings of a ServiceMonitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceMonitorSettings {
    /// The interval at which Prometheus scrapes the metrics.
    pub interval: Duration,
    /// The labels of the ServiceMonitor.
    pub labels: BTreeMap<String, String>,
}

/// Digests of the fields of a resource from which pod templates are rendered. Fields that a later schema adds are
/// excluded while they have their default value, so that the same resource has the same digests under that schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputDigests {
    /// The digest for the pod template of the replicas.
    pub server: String,
    /// The digest that earlier versions computed for the pod template of the replicas: it includes all settings of the
    /// model.
    pub former_server: String,
    /// The digest for the pod template of the routers.
    pub router: String,
}

/// How the files of a model reach the replicas.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelFiles {
    /// The files are in a volume that pods mount.
    Mounted(MountedModel),
    /// The files are fetched.
    Fetched(Box<FetchedModel>),
}

impl ModelFiles {
    /// Returns the model if it is fetched.
    #[must_use]
    pub fn fetched(&self) -> Option<&FetchedModel> {
        match self {
            Self::Fetched(fetched) => Some(fetched),
            Self::Mounted(_) => None,
        }
    }

    /// Returns the model and its volume if it is fetched once, by a Job, into a volume that all replicas mount.
    #[must_use]
    pub fn shared(&self) -> Option<(&FetchedModel, &CacheVolume)> {
        let fetched = self.fetched()?;
        match &fetched.cache {
            ModelCache::Shared(volume) => Some((fetched, volume)),
            ModelCache::Scratch { .. } | ModelCache::PerPod(_) => None,
        }
    }
}

/// A volume that contains the files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MountedModel {
    /// A PersistentVolumeClaim with the files.
    Claim {
        /// The name of the claim.
        claim: String,
        /// The path of the model in the volume; `None` for its root.
        path: Option<String>,
    },
    /// A container image that is mounted as a volume.
    Image {
        /// The reference of the image.
        image: String,
        /// The path of the model in the image; `None` for its root.
        path: Option<String>,
    },
}

/// A model that is fetched.
#[derive(Clone, Debug, PartialEq)]
pub struct FetchedModel {
    /// The source of the files.
    pub source: ModelSource,
    /// The value of the flag `--format`; `None` if the format is detected from the names of the files.
    pub format: Option<&'static str>,
    /// The name of the Secret with credentials; `None` if the source needs none.
    pub credentials: Option<String>,
    /// The settings of the container that fetches the files.
    pub container: FetchContainer,
    /// The place where the files are stored.
    pub cache: ModelCache,
}

impl FetchedModel {
    /// Returns the revision if the source is a repository on the Hugging Face Hub.
    #[must_use]
    pub fn revision(&self) -> Option<&Revision> {
        match &self.source {
            ModelSource::HuggingFace { revision, .. } => Some(revision),
            ModelSource::Http { .. } | ModelSource::S3 { .. } => None,
        }
    }
}

/// The source of the files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// A repository on the Hugging Face Hub.
    HuggingFace {
        /// The repository, in the form `OWNER/NAME`.
        repo: String,
        /// The revision of the repository.
        revision: Revision,
        /// The URL of the Hub.
        endpoint: String,
        /// The patterns of the names of files to fetch; empty for all files.
        files: Vec<String>,
    },
    /// A file on a web server.
    Http {
        /// The URL of the file.
        url: String,
        /// The expected SHA-256 of the file.
        sha256: Option<String>,
    },
    /// Objects in an S3 bucket.
    S3 {
        /// The bucket and the key, in the form `BUCKET/KEY`.
        object: String,
        /// The region of the bucket.
        region: String,
        /// The URL of the service; `None` for AWS.
        endpoint: Option<String>,
        /// The expected SHA-256 of the object.
        sha256: Option<String>,
    },
}

/// A branch, tag or commit of a repository on the Hugging Face Hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision {
    /// The revision in the resource.
    pub requested: String,
    /// A digest of the Hub, the repository and the revision, under which the fetched commit is stored.
    pub key: String,
}

/// The settings of the container that fetches a model.
#[derive(Clone, Debug, PartialEq)]
pub struct FetchContainer {
    /// The environment variables of the container.
    pub env: BTreeMap<String, String>,
    /// The entry of a ConfigMap with the certificates of the trusted authorities; `None` for those of the image.
    pub ca_bundle: Option<DataKey>,
    /// The annotations of the ServiceAccount of the pods that fetch the model.
    pub service_account_annotations: BTreeMap<String, String>,
    /// The resources of the container; `None` for the default.
    pub resources: Option<ResourceRequirements>,
}

/// The place where fetched files are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelCache {
    /// The scratch space of each pod.
    Scratch {
        /// The maximum size, as a quantity.
        size_limit: Option<String>,
    },
    /// A volume for each pod.
    PerPod(CacheVolume),
    /// A volume that all replicas share.
    Shared(CacheVolume),
}

/// A volume that is created for fetched files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheVolume {
    /// The size of the volume, as a quantity.
    pub size: String,
    /// The StorageClass of the volume; `None` for the default of the cluster.
    pub storage_class: Option<String>,
    /// The access mode of the volume.
    pub access_mode: AccessMode,
}

/// The settings for scheduling and running pods on nodes. The fields have the same meaning as in the spec of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodPlacement {
    /// The labels that a node must have.
    pub node_selector: BTreeMap<String, String>,
    /// The taints that pods tolerate.
    pub tolerations: Vec<Toleration>,
    /// The node affinity, pod affinity and pod anti-affinity of pods.
    pub affinity: Option<Affinity>,
    /// The rules that spread pods; empty for the default.
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// The name of the PriorityClass.
    pub priority_class_name: Option<String>,
    /// The name of the RuntimeClass.
    pub runtime_class_name: Option<String>,
}

/// The limit on evictions of replicas, for example while a node is drained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DisruptionLimit {
    /// The number or percentage of replicas that must remain available.
    MinAvailable(IntOrString),
    /// The number or percentage of replicas that may be unavailable.
    MaxUnavailable(IntOrString),
}

/// The settings of the replicas.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerSettings {
    /// The image of the server.
    pub image: String,
    /// The settings of the inference engine.
    pub engine: EngineSettings,
    /// The resources of the server's container.
    pub resources: ResourceRequirements,
    /// The placement of the pods.
    pub placement: PodPlacement,
    /// The number of replicas.
    pub replicas: i32,
    /// The number or percentage of additional replicas during a rollout.
    pub max_surge: IntOrString,
    /// The number or percentage of replicas that may be unavailable during a rollout.
    pub max_unavailable: IntOrString,
    /// The number of seconds for which a new replica must be ready before it counts as available.
    pub min_ready_seconds: i32,
    /// The time without progress after which a rollout is reported as failed, not including the estimated time that a
    /// replica needs to start.
    pub progress_deadline: Duration,
    /// Whether the rollout is paused.
    pub paused: bool,
    /// The time that a replica has to finish its requests before it stops.
    pub drain_timeout: Duration,
    /// The limit on evictions of replicas, for example while a node is drained.
    pub disruption: DisruptionLimit,
    /// The log level of the server.
    pub log: LogLevel,
    /// An object that is merged into the pod template.
    pub pod_template: Option<Value>,
}

/// The settings of the inference engine of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// The OpenVINO device that runs the model.
    pub device: String,
    /// The size of the KV cache in bytes; `None` for the default of the server.
    pub kv_cache_size: Option<u64>,
    /// The data type of the cached keys and values; `None` for the default of the device.
    pub kv_cache_precision: Option<KvPrecision>,
    /// Whether prompts reuse cached prefixes.
    pub prefix_caching: bool,
    /// The maximum number of sequences that run at the same time.
    pub max_num_seqs: u32,
    /// The maximum number of tokens in a step.
    pub max_num_batched_tokens: u32,
    /// The maximum number of tokens of a prompt and its answer; `None` for the default of the server.
    pub max_model_len: Option<u32>,
    /// The sources from which the server may fetch the images in requests.
    pub media: MediaSources,
    /// The properties of the OpenVINO plugin.
    pub plugin_config: BTreeMap<String, String>,
    /// Additional flags of the server.
    pub extra_args: Vec<String>,
}

/// The settings of the routers.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterSettings {
    /// The image of the router.
    pub image: String,
    /// The number of routers.
    pub replicas: i32,
    /// The policy by which a router chooses a replica for a request.
    pub policy: Policy,
    /// The maximum number of requests that wait in a router.
    pub queue_requests: u32,
    /// The maximum total number of prompt tokens in the requests that wait in a router.
    pub queue_tokens: u64,
    /// The maximum time that a request waits in a router.
    pub queue_timeout: Duration,
    /// The maximum number of attempts to send a request to a replica.
    pub attempts: u32,
    /// The maximum number of retries per 100 requests.
    pub retry_budget_percent: u32,
    /// The timeout for connecting to a replica.
    pub connect_timeout: Duration,
    /// The timeout for the first token of a streamed answer.
    pub first_token_timeout: Duration,
    /// The timeout for an answer that is not streamed.
    pub answer_timeout: Duration,
    /// The maximum time without data from the replica after an answer has begun.
    pub idle_timeout: Duration,
    /// The Service that clients use.
    pub service: ServiceSettings,
    /// The resources of the router's container; `None` for the default.
    pub resources: Option<ResourceRequirements>,
    /// The placement of the pods.
    pub placement: PodPlacement,
    /// Additional flags of the router.
    pub extra_args: Vec<String>,
    /// An object that is merged into the pod template.
    pub pod_template: Option<Value>,
    /// The entry of a Secret with API keys, if requests need a key.
    pub api_keys: Option<DataKey>,
    /// Determines which API keys share stored responses, conversations and cached prompts.
    pub key_isolation: KeyIsolation,
    /// The maximum number of requests per minute with one key.
    pub requests_per_minute: Option<u32>,
    /// The maximum number of tokens per minute with one key.
    pub tokens_per_minute: Option<u32>,
    /// The log level of the router.
    pub log: LogLevel,
    /// Whether the router logs each request.
    pub access_log: bool,
    /// The URL to which the router sends spans; `None` if it sends none.
    pub otlp_endpoint: Option<String>,
}

/// The Service that clients use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceSettings {
    /// The type of the Service.
    pub service_type: ServiceType,
    /// The port of the Service.
    pub port: i32,
    /// The port on each node; `None` if Kubernetes assigns one.
    pub node_port: Option<i32>,
    /// The annotations of the Service.
    pub annotations: BTreeMap<String, String>,
}
