//! The controller, which reconciles a resource when the resource or an object that belongs to it changes. The
//! controller connects the steps of a reconcile; the pure functions [`validate`], [`desired`] and [`status`] make the
//! decisions.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use jiff::Timestamp;
use kube::api::ApiResource;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::controller::{self, Action, Controller};
use kube::runtime::events::Recorder;
use kube::runtime::reflector::Store;
use kube::runtime::{Predicate as _, WatchStreamExt as _, predicates, reflector, watcher};
use kube::{Client, Resource, ResourceExt as _};
use operator_api::{LlmDeployment, UpgradeState};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::apply::{Applier, ReplicaTokens};
use crate::client::objects_api;
use crate::desired::desired;
use crate::metrics::Metrics;
use crate::names::FIELD_MANAGER;
use crate::pod_reports::{PodClient, ReportCollector};
use crate::status::{RefusedResource, refused_status, status};
use crate::trace::ReconcileSpan;
use crate::upgrades::UpgradeLimiter;
use crate::validate::{ValidationError, validate};
use crate::watch::{StoredDeployment, Stores, WatchScope, Watches, record_failure, stored_deployment};

mod context;
mod error;
mod requeue;
mod resource_status;

pub use context::Config;
use context::Context;
pub use error::Error;
use requeue::retry_later;

/// Changes to a resource or its objects within this time trigger a single reconcile.
const DEBOUNCE: Duration = Duration::from_millis(30);

/// The scope of a controller, and the services that it uses.
pub struct Scope {
    /// The client for the API server.
    pub client: Client,
    /// The namespace that the controller manages; `None` for all namespaces.
    pub namespace: Option<String>,
    /// Whether the cluster has the kind ServiceMonitor when the controller starts.
    pub has_service_monitors: bool,
    /// The client that connects to pods.
    pub pods: Arc<dyn PodClient>,
    /// The limiter of concurrent upgrades.
    pub upgrades: UpgradeLimiter,
    /// The metrics that reconciles are recorded in.
    pub metrics: Metrics,
}

/// Reconciles all resources of a scope until `stop` is canceled, then finishes the running reconciles. `ready` receives
/// the store of resources once the resources and all other objects have been listed.
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
    let api = objects_api(&client, namespace.as_deref(), &ApiResource::erase::<LlmDeployment>(&()));
    let (reader, writer) = reflector::store();
    let report_collector = ReportCollector::new(pods, watches.sender.clone());
    let watch_metrics = metrics.clone();
    // `Store::wait_until_ready` wakes only one of several waiting tasks, and the controller itself is one of them.
    let (listed, mut ready) = (reader.clone(), Some(ready));
    let resources = watcher(api, watcher::Config::default())
        .default_backoff()
        .map_ok(stored_deployment)
        .inspect_err(move |error| record_failure(&watch_metrics, "LLMDeployment", error))
        // Managed fields use as much memory as the rest of the object.
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
        // A reconcile was requested for a deleted resource, for example because one of its objects has changed.
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
        "an LLMDeployment cannot be decoded, so its objects are not changed"
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

/// Reports in the status that a resource is refused. Its objects are not changed. Kubernetes may still replace its
/// pods, and a replacement becomes ready only once its readiness gate is set, so the operator continues to change the
/// gates.
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
