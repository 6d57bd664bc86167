//! The loop: something has changed, so a resource is looked at, and what is not as it should be is made so. This is the
//! wiring; what is right is decided in [`validate`], [`desired`] and [`status`], none of which knows a cluster.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::controller::{self, Action, Controller};
use kube::runtime::events::Recorder;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::{Predicate as _, WatchStreamExt as _, predicates, reflector, watcher};
use kube::{Client, Resource as _, ResourceExt as _};
use operator_api::{LlmDeployment, LlmDeploymentStatus, Phase, UpgradePolicy, UpgradeState};
use rand::RngExt as _;
use serde_json::json;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::apply::{Applied, Applier, FIELD_MANAGER, ReplicaTokens};
use crate::desired::desired;
use crate::desired::release::{Permission, Upgrade, pending};
use crate::events::transitions;
use crate::fleet::{Fleet, PodClient, PodReports, Sample};
use crate::metrics::Metrics;
use crate::observe::{Observed, observe};
use crate::status::{refused, says_the_same, status};
use crate::trace::{Trace, Tracer};
use crate::upgrades::Upgrades;
use crate::validate::{Defaults, ValidDeployment, validate};
use crate::watch::{Stores, Watches};

/// What comes within this time is one change.
const DEBOUNCE: Duration = Duration::from_millis(30);
/// The pause before a resource that waits for the upgrades of others looks again whether it is its turn.
const TURN_PAUSE: Duration = Duration::from_secs(10);
/// The pauses after failures: the first, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(120));

/// How resources are looked after.
#[derive(Clone, Debug)]
pub struct Config {
    /// What is used where a resource does not say.
    pub defaults: Defaults,
    /// How often routers are asked how busy replicas are; never without.
    pub load_interval: Option<Duration>,
    /// How many resources are reconciled at the same time.
    pub concurrency: u16,
    /// How many resources are upgraded to another release at the same time.
    pub max_concurrent_upgrades: u16,
    /// Who sends spans of reconciles, if somebody does.
    pub tracer: Option<Tracer>,
}

/// What looking at a resource needs.
struct Context {
    config: Config,
    stores: Arc<Stores>,
    applier: Applier,
    fleet: Fleet,
    upgrades: Upgrades,
    recorder: Recorder,
    metrics: Metrics,
    memory: Mutex<HashMap<String, Memory>>,
}

/// What is remembered of a resource. All of it can be lost without harm.
#[derive(Clone, Debug, Default)]
struct Memory {
    /// The status that was written last: the watch may not have told it yet.
    status: Option<LlmDeploymentStatus>,
    /// When routers were asked how busy replicas are.
    sampled: Option<Instant>,
    /// Failures in a row.
    failures: u32,
}

/// Why a resource has to be looked at again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Some objects are not as they should be.
    #[error("failed to make {0} objects as they should be")]
    Apply(usize),
    /// The status could not be written.
    #[error("failed to write the status")]
    Status(#[source] kube::Error),
}

impl Error {
    fn label(&self) -> &'static str {
        match self {
            Self::Apply(_) => "apply_failed",
            Self::Status(_) => "status_failed",
        }
    }
}

/// What runs one controller.
pub struct Scope {
    /// By whom.
    pub client: Client,
    /// Which namespace is looked after; all without.
    pub namespace: Option<String>,
    /// Whether the cluster knows ServiceMonitors.
    pub monitors: bool,
    /// What connects to pods.
    pub pods: Arc<dyn PodClient>,
    /// Whose turn it is to be upgraded.
    pub upgrades: Upgrades,
    /// What is counted.
    pub metrics: Metrics,
}

/// Looks after all resources of a scope until `stop`, then finishes what is under way. `known` gets the store of
/// resources once all of them are known.
///
/// # Errors
/// A watch has ended, which it does not.
///
/// # Cancel safety
/// If it is dropped, some objects may be left as they are half-way; whoever runs next goes on.
pub async fn run(
    scope: Scope,
    config: Config,
    stop: CancellationToken,
    known: tokio::sync::oneshot::Sender<Store<LlmDeployment>>,
) -> anyhow::Result<()> {
    let Scope { client, namespace, monitors, pods, upgrades, metrics } = scope;
    let stores = Arc::new(Stores::new(monitors));
    let mut tasks = JoinSet::new();
    let mut watches = Watches::start(&client, namespace.as_deref(), &stores, &mut tasks);
    tokio::select! {
        () = watches.ready() => {}
        () = stop.cancelled() => return Ok(()),
    }
    let api: Api<LlmDeployment> = match &namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    let (reader, writer) = reflector::store();
    let fleet = Fleet::new(pods, watches.sender.clone());
    let resources = watcher(api, watcher::Config::default())
        .default_backoff()
        // Who wrote which field when, which is as long as the rest.
        .modify(|object| object.managed_fields_mut().clear())
        .reflect(writer)
        .applied_objects()
        // What the operator itself writes, the status, is no reason to look again.
        .predicate_filter(predicates::generation.combine(predicates::annotations), Default::default());
    let changes = stream::poll_fn(move |context| watches.changes.poll_recv(context));
    let runtime = controller::Config::default().debounce(DEBOUNCE).concurrency(config.concurrency);
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
        fleet,
        upgrades,
        recorder,
        metrics,
        memory: Mutex::default(),
    });
    context.upgrades.register(reader.clone());
    let _ = known.send(reader.clone());
    let outcomes = Controller::for_stream(resources, reader.clone())
        .with_config(runtime)
        .reconcile_on(changes)
        .graceful_shutdown_on(stop.cancelled_owned())
        .run(reconcile_measured, again_later, Arc::clone(&context));
    let all = outcomes.for_each(async |outcome| match outcome {
        // It has gone, and something that it owned has told.
        Err(controller::Error::ObjectNotFound(_)) => context.forget(&reader),
        Err(error) => tracing::debug!(%error, "not reconciled"),
        Ok(_) => {}
    });
    tokio::select! {
        () = all => Ok(()),
        Some(ended) = tasks.join_next() => ended.unwrap_or_else(|error| Err(error.into())),
    }
}

async fn reconcile_measured(object: Arc<LlmDeployment>, context: Arc<Context>) -> Result<Action, Error> {
    let begun = Instant::now();
    let trace = Trace::start(context.config.tracer.as_ref(), &object);
    let result = reconcile(&object, &context, &trace).await;
    let outcome = result.as_ref().map_or_else(Error::label, |_| "done");
    trace.end(outcome, result.as_ref().err().map(|error| chain(error)));
    context.metrics.reconciled(outcome, begun.elapsed());
    let name = object.name_any();
    tracing::debug!(
        name,
        namespace = object.namespace(),
        outcome,
        ms = begun.elapsed().as_millis() as u64,
        "reconciled"
    );
    result
}

async fn reconcile(object: &LlmDeployment, context: &Context, trace: &Trace) -> Result<Action, Error> {
    if object.metadata.deletion_timestamp.is_some() {
        // What it owns goes with it.
        return Ok(Action::await_change());
    }
    let step = trace.step("observe");
    let mut observed = context.observe(object);
    drop(step);
    let step = trace.step("validate");
    let valid = validate(object, &observed, &context.config.defaults);
    drop(step);
    let valid = match valid {
        Ok(valid) => valid,
        Err(invalid) => {
            let previous = context.previous(object);
            let status = refused(object, previous.as_ref(), &invalid, Timestamp::now());
            let _step = trace.step("status");
            context.tell(object, previous, status).await?;
            return Ok(Action::await_change());
        }
    };
    let step = trace.step("desired");
    observed.upgrade = context.permission(&valid, &observed);
    let resources = desired(&valid, &observed);
    drop(step);
    let step = trace.step("apply");
    let applied = context.applier.apply(valid, resources, observed).await;
    drop(step);
    let _step = trace.step("status");
    let previous = context.previous(object);
    let status = status(object, previous.as_ref(), &applied, Timestamp::now());
    if status.release.as_ref().is_some_and(|release| release.state != UpgradeState::Rolling) {
        context.upgrades.release(&applied.valid.owner.uid);
    }
    context.tell(object, previous, status).await?;
    context.next(object, &applied)
}

/// After a failure: later and later, and not all at once.
#[expect(clippy::needless_pass_by_value, reason = "the controller has it so")]
fn again_later(object: Arc<LlmDeployment>, error: &Error, context: Arc<Context>) -> Action {
    let failures = context.remember(&object, |memory| {
        memory.failures = memory.failures.saturating_add(1);
        memory.failures
    });
    let pause = BACKOFF.0.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(BACKOFF.1);
    let pause = pause.mul_f64(rand::rng().random_range(0.75..1.25));
    let chain = chain(error);
    let name = object.name_any();
    tracing::warn!(name, namespace = object.namespace(), error = chain, ?pause, "will be tried again");
    Action::requeue(pause)
}

/// An error and its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

impl Context {
    fn memory(&self) -> MutexGuard<'_, HashMap<String, Memory>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remember<T>(&self, object: &LlmDeployment, change: impl FnOnce(&mut Memory) -> T) -> T {
        change(self.memory().entry(object.uid().unwrap_or_default()).or_default())
    }

    /// Forgets what has gone.
    fn forget(&self, present: &Store<LlmDeployment>) {
        let present: HashSet<String> = present.state().iter().filter_map(|object| object.uid()).collect();
        self.memory().retain(|uid, _| present.contains(uid));
        self.fleet.retain(&present);
        self.applier.replica_tokens.retain(&present);
    }

    fn observe(&self, object: &LlmDeployment) -> Observed {
        let mut observed = observe(object, &self.stores, PodReports::default());
        let (owner, uid) = (ObjectRef::from_obj(object), object.uid().unwrap_or_default());
        observed.pod_reports = self.fleet.reports(&owner, &uid, &observed.pods, self.sample(object));
        observed
    }

    /// Whether an upgrade of the resource may begin, if there is one.
    fn permission(&self, valid: &ValidDeployment, observed: &Observed) -> Permission {
        let Some(release) = pending(valid, observed) else { return Permission::Granted };
        let is_approved = observed.approved_release.as_ref() == Some(&release);
        if valid.upgrade_policy == UpgradePolicy::Manual && !is_approved {
            return Permission::AwaitsApproval;
        }
        // What answers no requests has nothing to lose, and may be waiting for just this upgrade.
        let serves = observed.pods.iter().any(|pod| pod.is_routable == Some(true) && pod.is_ready);
        if serves && !self.upgrades.acquire(&valid.owner.uid) {
            return Permission::AwaitsTurn;
        }
        Permission::Granted
    }

    /// The status as it is.
    fn previous(&self, object: &LlmDeployment) -> Option<LlmDeploymentStatus> {
        self.remember(object, |memory| memory.status.clone()).or_else(|| object.status.clone())
    }

    /// How much is to be asked of routers.
    fn sample(&self, object: &LlmDeployment) -> Sample {
        let Some(interval) = self.config.load_interval else { return Sample::Needed };
        self.remember(object, |memory| {
            if memory.sampled.is_some_and(|sampled| sampled.elapsed() < interval) {
                return Sample::Needed;
            }
            memory.sampled = Some(Instant::now());
            Sample::All
        })
    }

    /// Writes the status, if it says anything new, and publishes what that leads to.
    async fn tell(
        &self,
        object: &LlmDeployment,
        previous: Option<LlmDeploymentStatus>,
        status: LlmDeploymentStatus,
    ) -> Result<(), Error> {
        if previous.as_ref().is_some_and(|previous| says_the_same(previous, &status)) {
            return Ok(());
        }
        let name = object.name_any();
        let api: Api<LlmDeployment> =
            Api::namespaced(self.applier.client.clone(), &object.namespace().unwrap_or_default());
        let patch = json!({
            "apiVersion": LlmDeployment::api_version(&()),
            "kind": LlmDeployment::kind(&()),
            "metadata": {"name": name, "uid": object.uid()},
            "status": status,
        });
        self.metrics.call("apply_status", "LLMDeployment");
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        match api.patch_status(&name, &parameters, &Patch::Apply(&patch)).await {
            // It has gone, or another one of its name has come.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return Ok(()),
            result => drop(result.map_err(Error::Status)?),
        }
        if previous.as_ref().map(|previous| previous.phase) != Some(status.phase) {
            tracing::info!(name, namespace = object.namespace(), phase = status.phase.name(), "changed");
        }
        let events = transitions(previous.as_ref(), &status);
        self.remember(object, |memory| memory.status = Some(status));
        let reference = object.object_ref(&());
        for event in events {
            self.metrics.event();
            if let Err(error) = self.recorder.publish(&event, &reference).await {
                tracing::warn!(%error, "failed to publish an event");
            }
        }
        Ok(())
    }

    /// When to look again if nothing changes until then.
    fn next(&self, object: &LlmDeployment, applied: &Applied) -> Result<Action, Error> {
        let passing = applied.failures.iter().filter(|failure| !failure.source.is_final());
        for failure in passing.clone() {
            tracing::warn!(error = chain(failure), "not as it should be");
        }
        match passing.count() {
            0 => {}
            failures => return Err(Error::Apply(failures)),
        }
        self.remember(object, |memory| memory.failures = 0);
        let pods = &applied.observed.pods;
        if applied.resources.upgrade == Upgrade::Waits(Permission::AwaitsTurn) {
            return Ok(Action::requeue(TURN_PAUSE.mul_f64(rand::rng().random_range(0.75..1.25))));
        }
        match self.config.load_interval {
            Some(interval)
                if applied.valid.server.replicas > 0
                    && pods.iter().any(|pod| pod.is_routable == Some(true)) =>
            {
                Ok(Action::requeue(interval.mul_f64(rand::rng().random_range(1.0..1.2))))
            }
            _ => Ok(Action::await_change()),
        }
    }
}

/// How many resources are in a phase.
#[must_use]
pub fn count(stores: &[Store<LlmDeployment>], phase: Phase) -> usize {
    let all = stores.iter().flat_map(Store::state);
    all.filter(|object| object.status.as_ref().map(|status| status.phase).unwrap_or_default() == phase)
        .count()
}

/// How many resources are in a state of an upgrade.
#[must_use]
pub fn count_releases(stores: &[Store<LlmDeployment>], state: UpgradeState) -> usize {
    let all = stores.iter().flat_map(Store::state);
    all.filter(|object| {
        let release = object.status.as_ref().and_then(|status| status.release.as_ref());
        release.is_some_and(|release| release.state == state)
    })
    .count()
}
