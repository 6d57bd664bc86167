//! From what was written to what can be carried out: everything optional is settled here, everything that could still
//! be wrong is refused here, and after this nobody reads the `spec`. Pure; what the schema already refuses is repeated
//! only where the rest would otherwise have to look again.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;
use operator_api::{
    AccessMode, CacheMode, Disruption, Engine, Format, KeyIsolation, KeysReference, LlmDeployment, LogLevel,
    Model, Period, Placement, PodTemplate, Policy, RouterPlacement, Service, TokenReference, Tracing,
    UpgradePolicy,
};
use serde_json::json;

use crate::manifest::digest;
use crate::observe::Observed;

mod defaults;
mod inputs;

use defaults::POD_USER;
pub use defaults::{Defaults, PodUser};
use inputs::inputs;

/// A resource that can be carried out.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidDeployment {
    /// Whose it is.
    pub owner: Owner,
    /// The names under which the model is served, at least one.
    pub model_names: Vec<String>,
    /// How the model's files come to the replicas.
    pub files: Files,
    /// Each replica.
    pub server: Server,
    /// In front of them.
    pub router: Router,
    /// What pods may do, and who may reach them.
    pub security: Security,
    /// The address that pods listen on.
    pub listen: IpAddr,
    /// The ServiceMonitor, if there is to be one.
    pub monitor: Option<Monitor>,
    /// Digests of what the user has written, for telling upgrades from changes of the resource.
    pub inputs: Inputs,
    /// When a new version of the operator may restart pods.
    pub upgrade_policy: UpgradePolicy,
    /// When images are pulled.
    pub image_pull_policy: Option<String>,
    /// What is not as the resource says, but no reason to refuse it.
    pub remarks: Vec<String>,
}

/// The resource that owns what is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its identity.
    pub uid: String,
}

/// What pods may do, and who may reach them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Security {
    /// Whether NetworkPolicies are created.
    pub network_policy: bool,
    /// The user that pods run as; whom the platform assigns without.
    pub run_as_user: Option<i64>,
    /// The names of the Secrets with which images are pulled.
    pub image_pull_secrets: Vec<String>,
    /// The user's own Secret with the replica token; the operator creates one without.
    pub replica_token: Option<TokenReference>,
}

/// What Prometheus is to scrape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Monitor {
    /// How often.
    pub interval: Duration,
    /// The labels of the ServiceMonitor.
    pub labels: BTreeMap<String, String>,
}

/// Digests of the fields of a resource that pod templates are made from, without those that have their default value: the
/// same resource has the same digests under a later schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inputs {
    /// For the replicas.
    pub server: String,
    /// For the routers.
    pub router: String,
}

/// How the model's files come to the replicas.
#[derive(Clone, Debug, PartialEq)]
pub enum Files {
    /// They are in a volume that is mounted.
    Mounted(Mounted),
    /// They are fetched.
    Fetched(Box<Fetched>),
}

/// A volume with the model's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mounted {
    /// A PersistentVolumeClaim, and where in it.
    Claim(String, Option<String>),
    /// An image, and where in it.
    Image(String, Option<String>),
}

/// What is to be fetched.
#[derive(Clone, Debug, PartialEq)]
pub struct Fetched {
    /// The source, as flags of `server fetch`.
    pub flags: Vec<String>,
    /// What distinguishes the revision of a repository of the Hub from others, if the source is one.
    pub revision: Option<Revision>,
    /// The Secret with credentials.
    pub secret: Option<String>,
    /// How the container that fetches is set up.
    pub container: operator_api::Fetch,
    /// Who shares the files.
    pub cache: Cache,
}

/// A branch, tag or commit of a repository of the Hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision {
    /// As the resource has it.
    pub requested: String,
    /// A digest of the hub, the repository and the revision: what the commit is remembered by.
    pub key: String,
}

/// Where fetched files are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Scratch space of the pod, of this size at most.
    Scratch(Option<String>),
    /// A volume of the pod.
    PerPod(Volume),
    /// A volume of all replicas.
    Shared(Volume),
}

/// A volume to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its size, a quantity.
    pub size: String,
    /// Its StorageClass; the cluster's default without.
    pub class: Option<String>,
    /// How it may be mounted.
    pub access: AccessMode,
}

/// Each replica.
#[derive(Clone, Debug, PartialEq)]
pub struct Server {
    /// Its image.
    pub image: String,
    /// How it computes.
    pub engine: Engine,
    /// Its processors and memory.
    pub resources: ResourceRequirements,
    /// On which nodes.
    pub placement: Placement,
    /// How many.
    pub replicas: i32,
    /// How many more there may be while they are replaced.
    pub surge_max: IntOrString,
    /// How many may be missing meanwhile.
    pub unavailable_max: IntOrString,
    /// Seconds for which a new one must be ready.
    pub min_ready_seconds: i32,
    /// Time without progress after which a rollout is reported as failed.
    pub progress_deadline: Duration,
    /// Whether a rollout stops where it is.
    pub paused: bool,
    /// Time for finishing requests.
    pub drain_timeout: Duration,
    /// How many maintenance may take away.
    pub disruption: Disruption,
    /// How much is logged.
    pub log: LogLevel,
    /// What is laid over its pod.
    pub overlay: Option<PodTemplate>,
}

/// In front of the replicas.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// Its image.
    pub image: String,
    /// How many.
    pub replicas: i32,
    /// How a replica is chosen.
    pub policy: Policy,
    /// Most requests that wait.
    pub queue_requests: u32,
    /// Most prompt tokens that wait.
    pub queue_tokens: u64,
    /// Longest wait.
    pub queue_timeout: Duration,
    /// Replicas a request is tried on at most.
    pub attempts: u32,
    /// The share of requests that may be tried again, in percent.
    pub retry_percent: u32,
    /// For connecting, for the first token, for a whole answer, and between two bytes.
    pub timeouts: [Duration; 4],
    /// What clients use.
    pub service: Service,
    /// Its processors and memory.
    pub resources: Option<ResourceRequirements>,
    /// On which nodes.
    pub placement: RouterPlacement,
    /// Further flags.
    pub extra_args: Vec<String>,
    /// What is merged into its pod.
    pub overlay: Option<PodTemplate>,
    /// The Secret with API keys.
    pub keys: Option<KeysReference>,
    /// Which requests share what is stored and cached.
    pub key_isolation: KeyIsolation,
    /// Most requests and tokens a minute with one key.
    pub rates: [Option<u32>; 2],
    /// How much is logged.
    pub log: LogLevel,
    /// Whether a line is logged for each request.
    pub access_log: bool,
    /// Where spans are sent.
    pub tracing: Option<Tracing>,
}

/// Why a resource cannot be carried out: a mistake of whoever wrote it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// A value that is none.
    #[error("{field}: {problem}")]
    Field {
        /// Where, from `spec` down.
        field: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// The source of the model is not exactly one.
    #[error("model.source needs exactly one of hf, http, s3, oci and pvc")]
    Source,
    /// The API server refuses what the resource leads to.
    #[error("the cluster refuses the {kind} that this leads to: {message}")]
    Refused {
        /// The kind of object that was refused.
        kind: &'static str,
        /// In the API server's words.
        message: String,
    },
}

impl Invalid {
    /// For conditions: stable, in CamelCase.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Field { .. } => "InvalidField",
            Self::Source => "InvalidSource",
            Self::Refused { .. } => "RefusedByCluster",
        }
    }
}

/// Settles everything.
///
/// # Errors
/// The resource cannot be carried out as it is written.
pub fn validate(
    object: &LlmDeployment,
    observed: &Observed,
    defaults: &Defaults,
) -> Result<ValidDeployment, Invalid> {
    let owner = Owner {
        name: object.name_any(),
        namespace: object.namespace().unwrap_or_default(),
        uid: object.uid().unwrap_or_default(),
    };
    let spec = &object.spec;
    let monitor = &spec.observability.metrics;
    let mut remarks = Vec::new();
    if monitor.service_monitor && !observed.monitors {
        remarks.push(
            "observability.metrics.serviceMonitor has no effect: the cluster has no ServiceMonitors"
                .to_owned(),
        );
    }
    let interval = duration("observability.metrics.interval", &monitor.interval)?;
    let model = spec.model.name.clone().unwrap_or_else(|| owner.name.clone());
    Ok(ValidDeployment {
        model_names: std::iter::once(model).chain(spec.model.aliases.iter().cloned()).collect(),
        files: files(&spec.model)?,
        server: server(object, defaults)?,
        router: router(object, defaults)?,
        security: Security {
            network_policy: spec.security.network_policy,
            run_as_user: spec.security.run_as_user.or(match defaults.pod_user {
                PodUser::Fixed => Some(POD_USER),
                PodUser::Platform => None,
            }),
            image_pull_secrets: spec
                .security
                .image_pull_secrets
                .iter()
                .map(|secret| secret.name.clone())
                .collect(),
            replica_token: spec.security.replica_token_secret_ref.clone(),
        },
        listen: defaults.listen,
        monitor: (monitor.service_monitor && observed.monitors)
            .then(|| Monitor { interval, labels: monitor.service_monitor_labels.clone() }),
        inputs: inputs(spec),
        upgrade_policy: spec.upgrade_policy,
        image_pull_policy: defaults.image_pull_policy.clone(),
        owner,
        remarks,
    })
}

fn server(object: &LlmDeployment, defaults: &Defaults) -> Result<Server, Invalid> {
    let spec = &object.spec;
    let rollout = &spec.rollout;
    let progress_deadline = duration("rollout.progressDeadline", &rollout.progress_deadline)?;
    let min_ready = Duration::from_secs(u64::try_from(rollout.min_ready_seconds).unwrap_or(0));
    if progress_deadline <= min_ready {
        return Err(Invalid::Field {
            field: "rollout.progressDeadline",
            problem: "it must be longer than rollout.minReadySeconds".to_owned(),
        });
    }
    Ok(Server {
        image: spec.engine.image.clone().unwrap_or_else(|| defaults.server_image.clone()),
        engine: spec.engine.clone(),
        resources: spec.resources.clone(),
        placement: spec.placement.clone(),
        replicas: if spec.suspend { 0 } else { spec.replicas },
        surge_max: rollout.max_surge.clone(),
        unavailable_max: rollout.max_unavailable.clone(),
        min_ready_seconds: rollout.min_ready_seconds,
        progress_deadline,
        paused: rollout.pause,
        drain_timeout: duration("drain.timeout", &spec.drain.timeout)?,
        disruption: spec.disruption.clone(),
        log: spec.observability.log_level,
        overlay: spec.pod_template.clone(),
    })
}

fn router(object: &LlmDeployment, defaults: &Defaults) -> Result<Router, Invalid> {
    let spec = &object.spec;
    let router = &spec.router;
    Ok(Router {
        image: router.image.clone().unwrap_or_else(|| defaults.router_image.clone()),
        replicas: if spec.suspend { 0 } else { router.replicas },
        policy: router.policy,
        queue_requests: router.queue.max_requests,
        queue_tokens: router.queue.max_tokens,
        queue_timeout: duration("router.queue.timeout", &router.queue.timeout)?,
        attempts: router.retry.max.saturating_add(1),
        retry_percent: router.retry.budget_percent,
        timeouts: [
            duration("router.timeouts.connect", &router.timeouts.connect)?,
            duration("router.timeouts.firstToken", &router.timeouts.first_token)?,
            duration("router.timeouts.answer", &router.timeouts.answer)?,
            duration("router.timeouts.streamIdle", &router.timeouts.stream_idle)?,
        ],
        service: router.service.clone(),
        resources: router.resources.clone(),
        placement: router.placement.clone(),
        extra_args: router.extra_args.clone(),
        overlay: router.pod_template.clone(),
        keys: spec.access.api_keys_secret_ref.clone(),
        key_isolation: router.key_isolation,
        rates: [spec.access.requests_per_minute, spec.access.tokens_per_minute],
        log: spec.observability.log_level,
        access_log: spec.observability.access_log,
        tracing: spec.observability.tracing.clone(),
    })
}

fn files(model: &Model) -> Result<Files, Invalid> {
    let source = &model.source;
    let revision = source.hf.as_ref().map(|hf| Revision {
        requested: hf.revision.clone(),
        key: digest(&json!([hf.endpoint, hf.repo, hf.revision])),
    });
    let mut flags = match (&source.hf, &source.http, &source.s3, &source.oci, &source.pvc) {
        (None, None, None, Some(oci), None) => {
            return Ok(Files::Mounted(Mounted::Image(oci.image.clone(), inside(oci.path.as_deref())?)));
        }
        (None, None, None, None, Some(pvc)) => {
            return Ok(Files::Mounted(Mounted::Claim(pvc.claim.clone(), inside(pvc.path.as_deref())?)));
        }
        (Some(hf), None, None, None, None) => {
            let files = hf.files.iter().map(|file| format!("--hf-file={file}"));
            let mut flags = vec![
                format!("--hf-repo={}", hf.repo),
                format!("--hf-revision={}", hf.revision),
                format!("--hf-endpoint={}", hf.endpoint),
            ];
            flags.extend(files);
            flags
        }
        (None, Some(http), None, None, None) => {
            let sha256 = http.sha256.iter().map(|sha256| format!("--sha256={sha256}"));
            std::iter::once(format!("--url={}", http.url)).chain(sha256).collect()
        }
        (None, None, Some(s3), None, None) => {
            let endpoint = s3.endpoint.iter().map(|endpoint| format!("--s3-endpoint={endpoint}"));
            let sha256 = s3.sha256.iter().map(|sha256| format!("--sha256={sha256}"));
            let object = format!("--s3-object={}/{}", s3.bucket, s3.key);
            [object, format!("--s3-region={}", s3.region)].into_iter().chain(endpoint).chain(sha256).collect()
        }
        _ => return Err(Invalid::Source),
    };
    match model.format {
        Format::Auto => {}
        Format::Gguf => flags.push("--format=gguf".to_owned()),
        Format::OpenvinoIr => flags.push("--format=openvino-ir".to_owned()),
    }
    Ok(Files::Fetched(Box::new(Fetched {
        flags,
        revision,
        container: model.fetch.clone().unwrap_or_default(),
        secret: model.credentials_secret_ref.as_ref().map(|secret| secret.name.clone()),
        cache: cache(model)?,
    })))
}

/// A path in a volume, which may not lead out of it.
fn inside(path: Option<&str>) -> Result<Option<String>, Invalid> {
    match path {
        Some(path) if path.starts_with('/') || path.split('/').any(|part| part == "..") => {
            Err(Invalid::Field {
                field: "model.source",
                problem: format!("the path {path:?} leads out of the volume"),
            })
        }
        path => Ok(path.map(str::to_owned)),
    }
}

fn cache(model: &Model) -> Result<Cache, Invalid> {
    let Some(cache) = &model.cache else { return Ok(Cache::Scratch(None)) };
    let size = cache.size.as_ref().map(|size| size.0.clone());
    let volume = |size: Option<String>| {
        let size = size.ok_or_else(|| Invalid::Field {
            field: "model.cache.size",
            problem: "the modes perPod and shared need it".to_owned(),
        })?;
        Ok(Volume { size, class: cache.storage_class.clone(), access: cache.access_mode })
    };
    match cache.mode {
        CacheMode::None => Ok(Cache::Scratch(size)),
        CacheMode::PerPod => volume(size).map(Cache::PerPod),
        CacheMode::Shared => volume(size).map(Cache::Shared),
    }
}

fn duration(field: &'static str, period: &Period) -> Result<Duration, Invalid> {
    /// Length of any period in a resource. More makes no sense in any of these fields, and Kubernetes counts seconds
    /// in 32 bits.
    ///
    /// Beyond it: the operator rejects the resource and reports the field in its status.
    const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
    let duration = period.duration().map_err(|error| Invalid::Field { field, problem: error.to_string() })?;
    if duration > LONGEST {
        return Err(Invalid::Field { field, problem: format!("{} is longer than a year", period.0) });
    }
    Ok(duration)
}
