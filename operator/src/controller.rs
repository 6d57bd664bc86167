//! The controller, in which each change of an object triggers a reconcile of the resource that it belongs to. It
//! connects the steps of a reconcile; the pure functions [`validate`], [`desired`] and [`status`] make the decisions.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use jiff::Timestamp;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::ApiResource;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::controller::{self, Action, Controller};
use kube::runtime::events::Recorder;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::{Predicate as _, WatchStreamExt as _, predicates, reflector, watcher};
use kube::{Client, Resource, ResourceExt as _};
use operator_api::{LlmDeployment, LlmDeploymentStatus, UpgradePolicy, UpgradeState};
use rand::RngExt as _;
use serde_json::json;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::apply::{Applier, ApplyFailure, ApplyResult, ReplicaTokens};
use crate::desired::desired;
use crate::desired::release::{UpgradePermission, UpgradeStep, available_release};
use crate::events::transitions;
use crate::metrics::Metrics;
use crate::names::FIELD_MANAGER;
use crate::observe::{ObservedState, observe};
use crate::pod::PodState;
use crate::pod_reports::{CacheSampling, PodClient, PodReports, ReportCollector};
use crate::status::{RefusedResource, is_same_except_times, refused_status, status};
use crate::trace::ReconcileSpan;
use crate::upgrades::UpgradeLimiter;
use crate::valid_deployment::ValidDeployment;
use crate::validate::{Defaults, ValidationError, validate};
use crate::watch::{StoredDeployment, Stores, WatchScope, Watches, record_failure};
use process::trace::Tracer;

/// Changes of a resource within this time trigger one reconcile.
const DEBOUNCE: Duration = Duration::from_millis(30);
/// The pause before a resource that waits for an upgrade slot is reconciled again.
const UPGRADE_RETRY_PAUSE: Duration = Duration::from_secs(10);
/// The pause before a resource is reconciled again whose objects were rejected. The cause may be outside of the resource,
/// such as an object of another owner or an admission policy, and the watches do not report that it is removed.
const REJECTION_RETRY_PAUSE: Duration = Duration::from_secs(180);
/// The shortest pause after a failed reconcile.
const BACKOFF_MIN: Duration = Duration::from_millis(500);
/// The longest pause after a failed reconcile.
const BACKOFF_MAX: Duration = Duration::from_secs(120);

/// The configuration of a controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The defaults for fields that a resource omits.
    pub defaults: Defaults,
    /// The interval at which the usage of KV caches is requested from routers; `None` to never request it.
    pub load_interval: Option<Duration>,
    /// The maximum number of resources that are reconciled at the same time.
    pub max_concurrent_reconciles: u16,
    /// The maximum number of resources that are upgraded to another release at the same time.
    pub max_concurrent_upgrades: u16,
    /// The interval at which a cluster without the kind ServiceMonitor is checked for it.
    pub discovery_interval: Duration,
    /// The exporter of spans; `None` if spans are not exported.
    pub tracer: Option<Tracer>,
}

/// The state that all reconciles of a controller share.
struct Context {
    config: Config,
    stores: Arc<Stores>,
    applier: Applier,
    report_collector: ReportCollector,
    upgrades: UpgradeLimiter,
    recorder: Recorder,
    metrics: Metrics,
    memory: Mutex<HashMap<String, ResourceMemory>>,
}

/// The state of a resource between reconciles. All of it can be lost without harm.
#[derive(Clone, Debug, Default)]
struct ResourceMemory {
    /// The status that was written last, which the watch may not have reported yet.
    status: Option<LlmDeploymentStatus>,
    /// The time of the last request to routers for the usage of KV caches.
    sampled: Option<Instant>,
    /// The number of consecutive failures.
    failures: u32,
}

/// The reason why a reconcile is retried.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Some objects could not be applied.
    #[error("failed to apply {0} objects")]
    Apply(usize),
    /// The status could not be read.
    #[error("failed to read the status")]
    ReadStatus(#[source] kube::Error),
    /// The status could not be written.
    #[error("failed to write the status")]
    WriteStatus(#[source] kube::Error),
}

impl Error {
    fn label(&self) -> &'static str {
        match self {
            Self::Apply(_) => "apply_failed",
            Self::ReadStatus(_) | Self::WriteStatus(_) => "status_failed",
        }
    }
}

/// The scope of a controller, and the services that it uses.
pub struct Scope {
    /// The client for the API server.
    pub client: Client,
    /// The namespace that the controller manages; `None` for all namespaces.
    pub namespace: Option<String>,
    /// Whether the cluster has the kind ServiceMonitor at the start.
    pub has_service_monitors: bool,
    /// The client that connects to pods.
    pub pods: Arc<dyn PodClient>,
    /// The limiter of concurrent upgrades.
    pub upgrades: UpgradeLimiter,
    /// The metrics that reconciles are recorded in.
    pub metrics: Metrics,
}

/// Reconciles all resources of a scope until `stop`, then finishes the running reconciles. `ready` receives the store of
/// resources once they have been listed, after all other objects.
///
/// # Errors
/// A watch has ended, which is a bug.
///
/// # Cancel safety
/// If the future is dropped, an apply may be incomplete; the next reconcile completes it.
pub async fn run(
    scope: Scope,
    config: Config,
    stop: CancellationToken,
    ready: tokio::sync::oneshot::Sender<Store<StoredDeployment>>,
) -> anyhow::Result<()> {
    let Scope { client, namespace, has_service_monitors, pods, upgrades, metrics } = scope;
    let stores = Arc::new(Stores::new(has_service_monitors));
    let mut tasks = JoinSet::new();
    let scope = WatchScope {
        client: &client,
        namespace: namespace.as_deref(),
        stores: &stores,
        metrics: &metrics,
        discovery_interval: config.discovery_interval,
    };
    let mut watches = Watches::start(scope, &mut tasks);
    tokio::select! {
        () = watches.ready() => {}
        () = stop.cancelled() => return Ok(()),
    }
    let api: Api<StoredDeployment> = match &namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    let (reader, writer) = reflector::store();
    let report_collector = ReportCollector::new(pods, watches.sender.clone());
    let watch_metrics = metrics.clone();
    // `Store::wait_until_ready` wakes only one of several tasks, and the controller waits for it itself.
    let (listed, mut ready) = (reader.clone(), Some(ready));
    let resources = watcher(api, watcher::Config::default())
        .default_backoff()
        .inspect_err(move |error| record_failure(&watch_metrics, "LLMDeployment", error))
        // Managed fields take as much memory as the rest of the object.
        .modify(|object| object.managed_fields_mut().clear())
        .reflect(writer)
        .inspect_ok(move |event| {
            if matches!(event, watcher::Event::InitDone)
                && let Some(ready) = ready.take()
            {
                let _ = ready.send(listed.clone());
            }
        })
        .applied_objects()
        // The operator itself writes the status, so a changed status triggers no reconcile.
        .predicate_filter(predicates::generation.combine(predicates::annotations), Default::default());
    let changes = stream::poll_fn(move |context| watches.changes.poll_recv(context))
        .map(|owner| owner.into_kind_unchecked(()));
    let runtime =
        controller::Config::default().debounce(DEBOUNCE).concurrency(config.max_concurrent_reconciles);
    let recorder = Recorder::new(client.clone(), FIELD_MANAGER.into());
    let applier = Applier {
        client,
        stores: stores.clone(),
        metrics: metrics.clone(),
        replica_tokens: ReplicaTokens::default(),
    };
    let context = Arc::new(Context {
        config,
        stores,
        applier,
        report_collector,
        upgrades,
        recorder,
        metrics,
        memory: Mutex::default(),
    });
    context.upgrades.register(reader.clone());
    let outcomes = Controller::for_stream(resources, reader.clone())
        .with_config(runtime)
        .reconcile_on(changes)
        .graceful_shutdown_on(stop.cancelled_owned())
        .run(reconcile_measured, retry_later, Arc::clone(&context));
    let all = outcomes.for_each(async |outcome| match outcome {
        // An object of a deleted resource has changed.
        Err(controller::Error::ObjectNotFound(_)) => context.retain(&reader),
        Err(error) => tracing::debug!(%error, "a reconcile failed"),
        Ok(_) => {}
    });
    tokio::select! {
        () = all => Ok(()),
        Some(ended) = tasks.join_next() => ended.unwrap_or_else(|error| Err(error.into())),
    }
}

async fn reconcile_measured(object: Arc<StoredDeployment>, context: Arc<Context>) -> Result<Action, Error> {
    let started = Instant::now();
    let span = ReconcileSpan::start(context.config.tracer.as_ref(), object.as_ref());
    let result = match &object.0 {
        Ok(object) => reconcile(object, &context, &span).await,
        Err(invalid) => refuse_undecodable(&object, invalid, &context).await,
    };
    let outcome = result.as_ref().map_or_else(Error::label, |_| "done");
    span.end(outcome, result.as_ref().err().map(|error| process::error::chain(error)));
    context.metrics.record_reconcile(outcome, started.elapsed());
    let name = object.name_any();
    tracing::debug!(
        name,
        namespace = object.namespace(),
        outcome,
        ms = started.elapsed().as_millis() as u64,
        "reconciled"
    );
    result
}

async fn reconcile(object: &LlmDeployment, context: &Context, span: &ReconcileSpan) -> Result<Action, Error> {
    if object.metadata.deletion_timestamp.is_some() {
        // Kubernetes deletes the objects that the resource owns.
        return Ok(Action::await_change());
    }
    let step = span.step("observe");
    let observed = context.observe(object);
    drop(step);
    let step = span.step("validate");
    let valid = validate(object, &observed, &context.config.defaults);
    drop(step);
    let valid = match valid {
        Ok(valid) => valid,
        Err(error) => {
            let previous = context.previous_status(object);
            context.upgrades.release(object.metadata.uid.as_deref().unwrap_or_default());
            let refused = RefusedResource {
                metadata: &object.metadata,
                spec: Some(&object.spec),
                previous: previous.as_ref(),
                observed: &observed,
                error: &error,
            };
            let _step = span.step("status");
            return refuse(object, &refused, context).await;
        }
    };
    let step = span.step("desired");
    let permission = context.upgrade_permission(&valid, &observed);
    let desired = desired(&valid, &observed, permission);
    drop(step);
    let step = span.step("apply");
    let applied = context.applier.apply(valid, desired, observed).await;
    drop(step);
    let _step = span.step("status");
    let previous = context.previous_status(object);
    let status = status(object, previous.as_ref(), &applied, Timestamp::now());
    if status.release.as_ref().is_some_and(|release| release.state != UpgradeState::Rolling) {
        context.upgrades.release(&applied.valid.owner.uid);
    }
    context.write_status(object, previous, status).await?;
    context.next_action(object, &applied)
}

/// Refuses a resource that cannot be decoded.
async fn refuse_undecodable(
    object: &StoredDeployment,
    invalid: &InvalidObject,
    context: &Context,
) -> Result<Action, Error> {
    if object.meta().deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let (name, namespace) = (object.name_any(), object.namespace());
    tracing::warn!(
        name,
        namespace,
        error = invalid.error,
        "an LLMDeployment cannot be decoded: its objects are not changed"
    );
    let previous = match context.with_memory(object, |memory| memory.status.clone()) {
        Some(status) => Some(status),
        None => context.stored_status(object).await?,
    };
    let refused = RefusedResource {
        metadata: object.meta(),
        spec: None,
        previous: previous.as_ref(),
        observed: &context.observe(object),
        error: &ValidationError::Undecodable(invalid.error.clone()),
    };
    refuse(object, &refused, context).await
}

/// Reports in the status that a resource is refused. Its objects are not changed, but pods are replaced all the same,
/// and their replacements receive requests only if the operator sets their readiness gates.
async fn refuse(
    object: &impl Resource<DynamicType = ()>,
    refused: &RefusedResource<'_>,
    context: &Context,
) -> Result<Action, Error> {
    let namespace = object.namespace().unwrap_or_default();
    let failures = context.applier.change_gates(&namespace, refused.observed).await;
    let status = refused_status(refused, Timestamp::now());
    context.write_status(object, refused.previous.cloned(), status).await?;
    context.check_failures(object, &failures)?;
    Ok(Action::await_change())
}

/// Retries a failed reconcile with exponential backoff and jitter.
#[expect(clippy::needless_pass_by_value, reason = "the controller requires this signature")]
fn retry_later(object: Arc<StoredDeployment>, error: &Error, context: Arc<Context>) -> Action {
    let failures = context.with_memory(object.as_ref(), |memory| {
        memory.failures = memory.failures.saturating_add(1);
        memory.failures
    });
    let pause = BACKOFF_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(BACKOFF_MAX);
    let pause = pause.mul_f64(rand::rng().random_range(0.75..1.25));
    let chain = process::error::chain(error);
    let name = object.name_any();
    tracing::warn!(
        name,
        namespace = object.namespace(),
        error = chain,
        ?pause,
        "the reconcile will be retried"
    );
    Action::requeue(pause)
}

impl Context {
    fn memory(&self) -> MutexGuard<'_, HashMap<String, ResourceMemory>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with_memory<T>(&self, object: &impl Resource, access: impl FnOnce(&mut ResourceMemory) -> T) -> T {
        access(self.memory().entry(object.uid().unwrap_or_default()).or_default())
    }

    /// Forgets the resources that no longer exist.
    fn retain(&self, present: &Store<StoredDeployment>) {
        let present: HashSet<String> = present.state().iter().filter_map(|object| object.uid()).collect();
        self.memory().retain(|uid, _| present.contains(uid));
        self.report_collector.retain(&present);
        self.applier.replica_tokens.retain(&present);
    }

    fn observe(&self, object: &impl Resource) -> ObservedState {
        let mut observed = observe(object, &self.stores, PodReports::default());
        let owner = ObjectRef::new(&object.name_any()).within(&object.namespace().unwrap_or_default());
        let uid = object.uid().unwrap_or_default();
        let sampling = self.cache_sampling(object);
        observed.pod_reports = self.report_collector.reports(&owner, &uid, &observed.pods, sampling);
        observed
    }

    /// Whether the upgrade of the resource may start, if one is available.
    fn upgrade_permission(&self, valid: &ValidDeployment, observed: &ObservedState) -> UpgradePermission {
        let Some(release) = available_release(valid, observed) else { return UpgradePermission::Granted };
        let is_approved = observed.approved_release.as_ref() == Some(&release);
        if valid.upgrade_policy == UpgradePolicy::Manual && !is_approved {
            return UpgradePermission::AwaitsApproval;
        }
        // A resource that serves no requests cannot be disrupted, and the upgrade may even fix it. If it does not, the
        // release is not to blame, so the resource must not make others wait.
        let is_serving = observed.pods.iter().any(PodState::receives_requests);
        if !is_serving {
            return UpgradePermission::GrantedWithoutSlot;
        }
        if self.upgrades.acquire(&valid.owner.uid) {
            UpgradePermission::Granted
        } else if self.upgrades.are_listed() {
            UpgradePermission::AwaitsSlot
        } else {
            UpgradePermission::AwaitsLists
        }
    }

    /// Returns the current status of the resource.
    fn previous_status(&self, object: &LlmDeployment) -> Option<LlmDeploymentStatus> {
        self.with_memory(object, |memory| memory.status.clone()).or_else(|| object.status.clone())
    }

    /// Requests the status of a resource that cannot be decoded. Returns `None` if the status cannot be decoded either.
    async fn stored_status(&self, object: &StoredDeployment) -> Result<Option<LlmDeploymentStatus>, Error> {
        let kind = ApiResource::erase::<LlmDeployment>(&());
        let namespace = object.namespace().unwrap_or_default();
        let api: Api<DynamicObject> = Api::namespaced_with(self.applier.client.clone(), &namespace, &kind);
        self.metrics.record_api_call("get", "LLMDeployment");
        let stored = api.get_opt(&object.name_any()).await.map_err(Error::ReadStatus)?;
        Ok(stored.and_then(|stored| serde_json::from_value(stored.data.get("status")?.clone()).ok()))
    }

    /// Returns whether this reconcile requests the usage of KV caches from routers.
    fn cache_sampling(&self, object: &impl Resource) -> CacheSampling {
        let Some(interval) = self.config.load_interval else { return CacheSampling::Skip };
        self.with_memory(object, |memory| {
            if memory.sampled.is_some_and(|sampled| sampled.elapsed() < interval) {
                return CacheSampling::Skip;
            }
            memory.sampled = Some(Instant::now());
            CacheSampling::Sample
        })
    }

    /// Writes the status if it has changed, and publishes events about the changes.
    async fn write_status(
        &self,
        object: &impl Resource<DynamicType = ()>,
        previous: Option<LlmDeploymentStatus>,
        status: LlmDeploymentStatus,
    ) -> Result<(), Error> {
        if previous.as_ref().is_some_and(|previous| is_same_except_times(previous, &status)) {
            return Ok(());
        }
        let name = object.name_any();
        let api: Api<StoredDeployment> =
            Api::namespaced(self.applier.client.clone(), &object.namespace().unwrap_or_default());
        let patch = json!({
            "apiVersion": LlmDeployment::api_version(&()),
            "kind": LlmDeployment::kind(&()),
            "metadata": {"name": name, "uid": object.uid()},
            "status": status,
        });
        self.metrics.record_api_call("apply_status", "LLMDeployment");
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        match api.patch_status(&name, &parameters, &Patch::Apply(&patch)).await {
            // The resource was deleted, and perhaps recreated with the same name.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return Ok(()),
            result => drop(result.map_err(Error::WriteStatus)?),
        }
        if previous.as_ref().map(|previous| previous.phase) != Some(status.phase) {
            tracing::info!(
                name,
                namespace = object.namespace(),
                phase = status.phase.name(),
                "the phase has changed"
            );
        }
        let events = transitions(previous.as_ref(), &status);
        self.with_memory(object, |memory| memory.status = Some(status));
        let reference = object.object_ref(&());
        for event in events {
            self.metrics.record_event();
            if let Err(error) = self.recorder.publish(&event, &reference).await {
                tracing::warn!(%error, "failed to publish an event");
            }
        }
        Ok(())
    }

    /// Returns when the resource is reconciled again if nothing changes until then.
    fn next_action(&self, object: &LlmDeployment, applied: &ApplyResult) -> Result<Action, Error> {
        self.check_failures(object, &applied.failures)?;
        let pause = next_pause(applied, self.config.load_interval);
        Ok(pause.map_or_else(Action::await_change, Action::requeue))
    }

    /// Logs transient failures and returns an error if there are any, so that the reconcile is retried.
    fn check_failures(&self, object: &impl Resource, failures: &[ApplyFailure]) -> Result<(), Error> {
        let transient = failures.iter().filter(|failure| !failure.source.is_permanent());
        for failure in transient.clone() {
            tracing::warn!(error = process::error::chain(failure), "failed to apply the desired state");
        }
        match transient.count() {
            0 => {}
            failures => return Err(Error::Apply(failures)),
        }
        self.with_memory(object, |memory| memory.failures = 0);
        Ok(())
    }
}

/// The pause after which a resource without transient failures is reconciled again if nothing changes until then; `None`
/// to wait for a change.
fn next_pause(applied: &ApplyResult, load_interval: Option<Duration>) -> Option<Duration> {
    let jittered = |pause: Duration, range| pause.mul_f64(rand::rng().random_range(range));
    let awaits_slot = matches!(
        applied.desired.upgrade,
        UpgradeStep::Wait(UpgradePermission::AwaitsSlot | UpgradePermission::AwaitsLists)
    );
    let is_serving = applied.valid.server.replicas > 0
        && applied.observed.pods.iter().any(|pod| pod.is_routable == Some(true));
    let pauses = [
        awaits_slot.then(|| jittered(UPGRADE_RETRY_PAUSE, 0.75..1.25)),
        (!applied.failures.is_empty()).then(|| jittered(REJECTION_RETRY_PAUSE, 0.75..1.25)),
        load_interval.filter(|_| is_serving).map(|interval| jittered(interval, 1.0..1.2)),
    ];
    pauses.into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::apply::FailureCause;

    /// The result of an apply with these failures.
    fn applied(failures: Vec<ApplyFailure>, pods: Vec<PodState>) -> ApplyResult {
        let object = json!({
            "apiVersion": "ovfleet.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat", "namespace": "models", "uid": "1"},
            "spec": {"model": {"source": {"pvc": {"claim": "models"}}}},
        });
        let object: LlmDeployment = serde_json::from_value(object).unwrap();
        let observed = ObservedState { pods, ..ObservedState::default() };
        let valid = validate(&object, &observed, &Defaults::with_images("s", "r")).unwrap();
        let desired = desired(&valid, &observed, UpgradePermission::Granted);
        ApplyResult { valid, desired, objects: BTreeMap::new(), observed, failures }
    }

    #[test]
    fn a_rejected_object_is_applied_again_after_some_minutes() {
        let rejected = || {
            let name = "chat-server".to_owned();
            vec![ApplyFailure { verb: "apply", kind: "Deployment", name, source: FailureCause::NameTaken }]
        };
        let minutes = Duration::from_secs(60)..Duration::from_secs(300);
        let pause = next_pause(&applied(rejected(), vec![]), None).unwrap();
        assert!(minutes.contains(&pause), "{pause:?}");
        assert_eq!(next_pause(&applied(vec![], vec![]), None), None);
        // A resource that is reconciled more often for another reason still is.
        let replica = PodState { is_routable: Some(true), ..PodState::default() };
        let interval = Some(Duration::from_secs(30));
        let pause = next_pause(&applied(rejected(), vec![replica]), interval).unwrap();
        assert!(pause < Duration::from_secs(60), "{pause:?}");
    }
}
