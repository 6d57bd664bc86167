//! Validates a resource: resolves the optional fields and rejects invalid values, so that rendering the objects does
//! not require the `spec`. Rules that the schema already enforces are repeated only where a later step depends on them.
//! This module is pure.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use operator_api::{
    AccessMode, Cache, CacheMode, Disruption, Engine, Format, LlmDeployment, LlmDeploymentSpec, MediaSources,
    Model, Period,
};
use serde_json::json;

use crate::manifest::{digest, to_json};
use crate::names::Owner;
use crate::observe::ObservedState;
use crate::quantity::QuantityValue;
use crate::valid_deployment::{
    CacheVolume, DataKey, DisruptionLimit, EngineSettings, FetchContainer, FetchedModel, ModelCache,
    ModelFiles, ModelSource, MountedModel, PodPlacement, Revision, RouterSettings, SecuritySettings,
    ServerSettings, ServiceMonitorSettings, ServiceSettings, ValidDeployment,
};

mod defaults;
mod inputs;
mod media;

pub use defaults::{Defaults, PodUser};
use inputs::input_digests;
use media::{check_domain, check_network};

/// The user ID of pods for which neither the resource nor the platform chooses a user.
const POD_USER: i64 = 65532;
/// The label of a node that names the architecture of its processors.
const ARCHITECTURE_LABEL: &str = "kubernetes.io/arch";
/// The architecture that the images are built for.
const IMAGE_ARCHITECTURE: &str = "amd64";

/// The reason why a resource is refused. In most cases, the author of the resource has to correct it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValidationError {
    /// The value of a field is invalid.
    #[error("{field}: {problem}")]
    Field {
        /// The path of the field below `spec`.
        field: &'static str,
        /// A description of the problem.
        problem: String,
    },
    /// The resource does not specify exactly one source of the model.
    #[error("model.source must have exactly one of hf, http, s3, oci and pvc")]
    Source,
    /// The resource was stored under another schema.
    #[error("the LLMDeployment cannot be decoded: {0}")]
    Undecodable(String),
    /// The API server rejects an object that is rendered from the resource, or the object belongs to another owner.
    #[error("the operator cannot apply the {kind} of this resource: {message}")]
    Rejected {
        /// The kind of the rejected object.
        kind: &'static str,
        /// The message of the API server, or a description of the problem.
        message: String,
    },
}

/// The reason of [`ValidationError::Rejected`]. For a resource with this reason, the operator continues to apply the
/// objects.
pub(crate) const REFUSED_BY_CLUSTER: &str = "RefusedByCluster";

impl ValidationError {
    /// Returns the reason that conditions contain: a stable identifier in CamelCase.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Field { .. } => "InvalidField",
            Self::Source => "InvalidSource",
            Self::Undecodable(_) => "Undecodable",
            Self::Rejected { .. } => REFUSED_BY_CLUSTER,
        }
    }
}

/// Validates a resource and resolves its optional fields.
///
/// # Errors
/// The resource is invalid.
pub fn validate(
    object: &LlmDeployment,
    observed: &ObservedState,
    defaults: &Defaults,
) -> Result<ValidDeployment, ValidationError> {
    let owner = Owner::new(&object.metadata);
    let spec = &object.spec;
    let metrics = &spec.observability.metrics;
    let mut warnings = Vec::new();
    if metrics.service_monitor && !observed.has_service_monitors {
        warnings.push(
            "observability.metrics.serviceMonitor has no effect: the cluster does not have the kind ServiceMonitor"
                .to_owned(),
        );
    }
    let interval = duration("observability.metrics.interval", &metrics.interval)?;
    let model_name = spec.model.name.clone().unwrap_or_else(|| owner.name.clone());
    Ok(ValidDeployment {
        model_names: std::iter::once(model_name).chain(spec.model.aliases.iter().cloned()).collect(),
        files: files(&spec.model)?,
        server: server(spec, defaults)?,
        router: router(spec, defaults)?,
        security: security(spec, defaults),
        host: defaults.host,
        service_monitor: (metrics.service_monitor && observed.has_service_monitors)
            .then(|| ServiceMonitorSettings { interval, labels: metrics.service_monitor_labels.clone() }),
        inputs: input_digests(spec),
        upgrade_policy: spec.upgrade_policy,
        image_pull_policy: defaults.image_pull_policy.clone(),
        owner,
        warnings,
    })
}

fn security(spec: &LlmDeploymentSpec, defaults: &Defaults) -> SecuritySettings {
    let security = &spec.security;
    let default_user = match defaults.pod_user {
        PodUser::Fixed => Some(POD_USER),
        PodUser::Platform => None,
    };
    let token = security.replica_token_secret_ref.as_ref();
    SecuritySettings {
        network_policy: security.network_policy,
        run_as_user: security.run_as_user.or(default_user),
        image_pull_secrets: security.image_pull_secrets.iter().map(|secret| secret.name.clone()).collect(),
        replica_token: token.map(|token| DataKey { name: token.name.clone(), key: token.key.clone() }),
    }
}

fn server(spec: &LlmDeploymentSpec, defaults: &Defaults) -> Result<ServerSettings, ValidationError> {
    let rollout = &spec.rollout;
    let progress_deadline = duration("rollout.progressDeadline", &rollout.progress_deadline)?;
    let min_ready = Duration::from_secs(u64::try_from(rollout.min_ready_seconds).unwrap_or(0));
    if progress_deadline <= min_ready {
        return Err(ValidationError::Field {
            field: "rollout.progressDeadline",
            problem: format!(
                "{:?} must be longer than rollout.minReadySeconds ({} s)",
                rollout.progress_deadline.0, rollout.min_ready_seconds
            ),
        });
    }
    let mut resources = spec.resources.clone();
    if spec.placement.cpu_pinning {
        // The static CPU manager policy assigns exclusive CPUs only to pods whose requests equal their limits.
        resources.requests.clone_from(&resources.limits);
    }
    let placement = &spec.placement;
    Ok(ServerSettings {
        image: spec.engine.image.clone().unwrap_or_else(|| defaults.server_image.clone()),
        engine: engine(&spec.engine)?,
        resources,
        placement: PodPlacement {
            node_selector: node_selector(&placement.node_selector),
            tolerations: placement.tolerations.clone(),
            affinity: placement.affinity.clone(),
            topology_spread_constraints: placement.topology_spread_constraints.clone(),
            priority_class_name: placement.priority_class_name.clone(),
            runtime_class_name: placement.runtime_class_name.clone(),
        },
        replicas: if spec.suspend { 0 } else { spec.replicas },
        max_surge: rollout.max_surge.clone(),
        max_unavailable: rollout.max_unavailable.clone(),
        min_ready_seconds: rollout.min_ready_seconds,
        progress_deadline,
        paused: rollout.pause,
        drain_timeout: duration("drain.timeout", &spec.drain.timeout)?,
        disruption: disruption(spec),
        log: spec.observability.log_level,
        pod_template: spec.pod_template.as_ref().map(to_json),
    })
}

/// Adds the architecture of the images to the labels that a node must have, unless they include an architecture.
fn node_selector(labels: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut selector = labels.clone();
    selector.entry(ARCHITECTURE_LABEL.to_owned()).or_insert_with(|| IMAGE_ARCHITECTURE.to_owned());
    selector
}

fn engine(engine: &Engine) -> Result<EngineSettings, ValidationError> {
    let cache = &engine.kv_cache;
    Ok(EngineSettings {
        device: engine.device.clone(),
        kv_cache_size: cache.size.as_ref().map(|size| bytes("engine.kvCache.size", size)).transpose()?,
        kv_cache_precision: cache.precision,
        prefix_caching: cache.prefix_caching,
        max_num_seqs: engine.max_num_seqs,
        max_num_batched_tokens: engine.max_num_batched_tokens,
        max_model_len: engine.max_model_len,
        media: media_sources(&engine.media)?,
        plugin_config: engine.plugin_config.clone(),
        extra_args: engine.extra_args.clone(),
    })
}

fn media_sources(media: &MediaSources) -> Result<MediaSources, ValidationError> {
    let invalid = |field| move |problem| ValidationError::Field { field, problem };
    for domain in &media.allowed_domains {
        check_domain(domain).map_err(invalid("engine.media.allowedDomains"))?;
    }
    for network in &media.allowed_networks {
        check_network(network).map_err(invalid("engine.media.allowedNetworks"))?;
    }
    Ok(media.clone())
}

fn disruption(spec: &LlmDeploymentSpec) -> DisruptionLimit {
    let Disruption { min_available, max_unavailable } = &spec.disruption;
    // If only one node can mount the volume, an evicted replica cannot start on another node while other replicas run
    // on the drained node, so a drain that evicts one replica at a time would never finish.
    let shares_node =
        |cache: &Cache| cache.mode == CacheMode::Shared && cache.access_mode == AccessMode::ReadWriteOnce;
    match (min_available, max_unavailable) {
        (Some(amount), _) => DisruptionLimit::MinAvailable(amount.clone()),
        (None, Some(amount)) => DisruptionLimit::MaxUnavailable(amount.clone()),
        (None, None) if spec.model.cache.as_ref().is_some_and(shares_node) => {
            DisruptionLimit::MaxUnavailable(IntOrString::String("100%".to_owned()))
        }
        (None, None) => DisruptionLimit::MaxUnavailable(IntOrString::Int(1)),
    }
}

fn router(spec: &LlmDeploymentSpec, defaults: &Defaults) -> Result<RouterSettings, ValidationError> {
    let router = &spec.router;
    let timeouts = &router.timeouts;
    let service = &router.service;
    let placement = &router.placement;
    let api_keys = spec.access.api_keys_secret_ref.as_ref();
    Ok(RouterSettings {
        image: router.image.clone().unwrap_or_else(|| defaults.router_image.clone()),
        replicas: if spec.suspend { 0 } else { router.replicas },
        policy: router.policy,
        queue_requests: router.queue.requests,
        queue_tokens: router.queue.tokens,
        queue_timeout: duration("router.queue.timeout", &router.queue.timeout)?,
        attempts: router.retry.attempts,
        retry_budget_percent: router.retry.budget_percent,
        connect_timeout: duration("router.timeouts.connect", &timeouts.connect)?,
        first_token_timeout: duration("router.timeouts.firstToken", &timeouts.first_token)?,
        answer_timeout: duration("router.timeouts.answer", &timeouts.answer)?,
        idle_timeout: duration("router.timeouts.idle", &timeouts.idle)?,
        service: ServiceSettings {
            service_type: service.r#type,
            port: service.port,
            node_port: service.node_port,
            annotations: service.annotations.clone(),
        },
        resources: router.resources.clone(),
        placement: PodPlacement {
            node_selector: node_selector(&placement.node_selector),
            tolerations: placement.tolerations.clone(),
            topology_spread_constraints: placement.topology_spread_constraints.clone(),
            priority_class_name: placement.priority_class_name.clone(),
            ..PodPlacement::default()
        },
        extra_args: router.extra_args.clone(),
        pod_template: router.pod_template.as_ref().map(to_json),
        api_keys: api_keys.map(|keys| DataKey { name: keys.name.clone(), key: keys.key.clone() }),
        key_isolation: router.key_isolation,
        requests_per_minute: spec.access.requests_per_minute,
        tokens_per_minute: spec.access.tokens_per_minute,
        log: spec.observability.log_level,
        access_log: spec.observability.access_log,
        otlp_endpoint: spec.observability.tracing.as_ref().map(|tracing| tracing.endpoint.clone()),
    })
}

fn files(model: &Model) -> Result<ModelFiles, ValidationError> {
    let source = &model.source;
    let source = match (&source.hf, &source.http, &source.s3, &source.oci, &source.pvc) {
        (None, None, None, Some(oci), None) => {
            let path = relative_path(oci.path.as_deref())?;
            return Ok(ModelFiles::Mounted(MountedModel::Image { image: oci.image.clone(), path }));
        }
        (None, None, None, None, Some(pvc)) => {
            let path = relative_path(pvc.path.as_deref())?;
            return Ok(ModelFiles::Mounted(MountedModel::Claim { claim: pvc.claim.clone(), path }));
        }
        (Some(hf), None, None, None, None) => ModelSource::HuggingFace {
            repo: hf.repo.clone(),
            revision: Revision {
                requested: hf.revision.clone(),
                key: digest(&json!([hf.endpoint, hf.repo, hf.revision])),
            },
            endpoint: hf.endpoint.clone(),
            files: hf.files.clone(),
        },
        (None, Some(http), None, None, None) => {
            ModelSource::Http { url: http.url.clone(), sha256: http.sha256.clone() }
        }
        (None, None, Some(s3), None, None) => ModelSource::S3 {
            object: format!("{}/{}", s3.bucket, s3.key),
            region: s3.region.clone(),
            endpoint: s3.endpoint.clone(),
            sha256: s3.sha256.clone(),
        },
        _ => return Err(ValidationError::Source),
    };
    let fetch = model.fetch.clone().unwrap_or_default();
    Ok(ModelFiles::Fetched(Box::new(FetchedModel {
        source,
        format: match model.format {
            Format::Auto => None,
            Format::Gguf => Some("gguf"),
            Format::OpenvinoIr => Some("openvino-ir"),
        },
        credentials: model.credentials_secret_ref.as_ref().map(|secret| secret.name.clone()),
        container: FetchContainer {
            env: fetch.env,
            ca_bundle: fetch.ca_bundle.map(|bundle| DataKey { name: bundle.config_map, key: bundle.key }),
            service_account_annotations: fetch.service_account_annotations,
            resources: fetch.resources,
        },
        cache: cache(model)?,
    })))
}

/// Checks that a path in a volume does not lead out of the volume.
fn relative_path(path: Option<&str>) -> Result<Option<String>, ValidationError> {
    match path {
        Some(path) if path.starts_with('/') || path.split('/').any(|part| part == "..") => {
            Err(ValidationError::Field {
                field: "model.source",
                problem: format!("the path {path:?} must be relative and must not contain a '..' component"),
            })
        }
        path => Ok(path.map(str::to_owned)),
    }
}

fn cache(model: &Model) -> Result<ModelCache, ValidationError> {
    let Some(cache) = &model.cache else { return Ok(ModelCache::Scratch { size_limit: None }) };
    let size = cache.size.as_ref().map(|size| size.0.clone());
    let volume = |size: Option<String>| {
        let size = size.ok_or_else(|| ValidationError::Field {
            field: "model.cache.size",
            problem: "the modes perPod and shared require a size".to_owned(),
        })?;
        Ok(CacheVolume { size, storage_class: cache.storage_class.clone(), access_mode: cache.access_mode })
    };
    match cache.mode {
        CacheMode::None => Ok(ModelCache::Scratch { size_limit: size }),
        CacheMode::PerPod => volume(size).map(ModelCache::PerPod),
        CacheMode::Shared => volume(size).map(ModelCache::Shared),
    }
}

/// Returns a size as a whole number of bytes, rounded up.
fn bytes(field: &'static str, size: &Quantity) -> Result<u64, ValidationError> {
    let invalid = |problem| ValidationError::Field { field, problem };
    let value = size.0.parse::<QuantityValue>().map_err(|error| invalid(error.to_string()))?;
    let bytes = u64::try_from(value.units()).ok().filter(|_| value >= QuantityValue::ONE);
    bytes.ok_or_else(|| invalid(format!("{:?} is not a positive number of bytes, such as 8Gi", size.0)))
}

fn duration(field: &'static str, period: &Period) -> Result<Duration, ValidationError> {
    /// Length of any duration in a resource. Longer durations are useless in all fields, and some fields of Kubernetes
    /// are 32-bit numbers of seconds.
    ///
    /// If exceeded: the operator rejects the resource and reports the field in its status.
    const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
    let duration =
        period.duration().map_err(|error| ValidationError::Field { field, problem: error.to_string() })?;
    if duration > LONGEST {
        let problem = format!("{:?} is longer than a year (the maximum is 8760h)", period.0);
        return Err(ValidationError::Field { field, problem });
    }
    Ok(duration)
}
