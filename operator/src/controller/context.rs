//! The state that all reconciles of a controller share. It provides the observed state of a resource, and the
//! permission to upgrade the resource.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube::runtime::events::Recorder;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Resource, ResourceExt as _};
use operator_api::{LlmDeploymentStatus, UpgradePolicy};
use process::trace::Tracer;

use crate::apply::Applier;
use crate::desired::release::{UpgradePermission, available_release};
use crate::metrics::Metrics;
use crate::observe::{ObservedState, observe};
use crate::pod::PodState;
use crate::pod_reports::{CacheSampling, PodReports, ReportCollector};
use crate::upgrades::UpgradeLimiter;
use crate::valid_deployment::ValidDeployment;
use crate::validate::Defaults;
use crate::watch::{StoredDeployment, Stores};

/// The configuration of a controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The defaults for fields that a resource omits.
    pub defaults: Defaults,
    /// The interval at which the usage of KV caches is requested from routers; `None` to request it only while replicas
    /// wait for admission.
    pub load_interval: Option<Duration>,
    /// The maximum number of resources that are reconciled at the same time.
    pub max_concurrent_reconciles: u16,
    /// The maximum number of resources that are upgraded to another release at the same time.
    pub max_concurrent_upgrades: u16,
    /// The interval at which a cluster without the kind ServiceMonitor is checked for it.
    pub discovery_interval: Duration,
    /// The span exporter; `None` if spans are not exported.
    pub tracer: Option<Tracer>,
}

/// The state that all reconciles of a controller share.
pub(super) struct Context {
    pub(super) config: Config,
    pub(super) stores: Arc<Stores>,
    pub(super) applier: Applier,
    pub(super) report_collector: ReportCollector,
    pub(super) upgrades: UpgradeLimiter,
    pub(super) recorder: Recorder,
    pub(super) metrics: Metrics,
    /// The state of each resource, by UID.
    pub(super) memory: Mutex<HashMap<String, ResourceMemory>>,
}

/// The state of a resource between reconciles. All of it can be lost without harm.
#[derive(Clone, Debug, Default)]
pub(super) struct ResourceMemory {
    /// The status that was written last, which the watch may not have reported yet.
    pub(super) status: Option<LlmDeploymentStatus>,
    /// The time at which the usage of KV caches was last requested from routers.
    sampled: Option<Instant>,
    /// The number of consecutive failures.
    pub(super) failures: u32,
}

impl Context {
    fn memory(&self) -> MutexGuard<'_, HashMap<String, ResourceMemory>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn with_memory<T>(
        &self,
        object: &impl Resource,
        access: impl FnOnce(&mut ResourceMemory) -> T,
    ) -> T {
        access(self.memory().entry(object.uid().unwrap_or_default()).or_default())
    }

    /// Forgets the resources that no longer exist.
    pub(super) fn retain(&self, present: &Store<StoredDeployment>) {
        let present: HashSet<String> = present.state().iter().filter_map(|object| object.uid()).collect();
        self.memory().retain(|uid, _| present.contains(uid));
        self.report_collector.retain(&present);
        self.applier.replica_tokens.retain(&present);
    }

    pub(super) fn observe(&self, object: &impl Resource) -> ObservedState {
        let mut observed = observe(object, &self.stores, PodReports::default());
        let owner = ObjectRef::new(&object.name_any()).within(&object.namespace().unwrap_or_default());
        let uid = object.uid().unwrap_or_default();
        let sampling = self.cache_sampling(object);
        observed.pod_reports = self.report_collector.reports(&owner, &uid, &observed.pods, sampling);
        observed
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

    /// Returns whether the upgrade of the resource may start, or [`UpgradePermission::Granted`] if no upgrade is
    /// available.
    pub(super) fn upgrade_permission(
        &self,
        valid: &ValidDeployment,
        observed: &ObservedState,
    ) -> UpgradePermission {
        let Some(release) = available_release(valid, observed) else { return UpgradePermission::Granted };
        let is_approved = observed.approved_release.as_ref() == Some(&release);
        if valid.upgrade_policy == UpgradePolicy::Manual && !is_approved {
            return UpgradePermission::AwaitsApproval;
        }
        // A resource that serves no requests cannot be disrupted, and the upgrade may even repair it. If the resource
        // still does not become ready, the release is probably not at fault, so the resource must not delay the
        // upgrades of others.
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
}
