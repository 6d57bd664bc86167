//! Limits the number of resources that are upgraded at the same time after an upgrade of the operator. A resource holds
//! its slot until its pods are replaced and ready, so if the upgrades in all slots fail, no other resource is upgraded.
//! A resource that serves no requests is upgraded without a slot: it may never become ready.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::reflector::Store;
use kube::{Resource as _, ResourceExt as _};
use operator_api::UpgradeState;
use operator_api::conditions::ACCEPTED;

use crate::validate::REFUSED_BY_CLUSTER;
use crate::watch::StoredDeployment;

/// The upgrade slots of all resources that this operator manages. Clones share them.
#[derive(Clone)]
pub struct UpgradeLimiter(Arc<Mutex<Slots>>);

struct Slots {
    /// The number of slots.
    limit: usize,
    /// The number of stores that will be registered: one for each namespace, or a single one for all namespaces.
    scopes: usize,
    stores: Vec<Store<StoredDeployment>>,
    /// The UIDs of the resources that have acquired a slot from this process. Their statuses may not show it yet.
    holders: HashSet<String>,
}

impl UpgradeLimiter {
    /// Creates a limiter with `limit` slots for the resources of `scopes` stores.
    #[must_use]
    pub fn new(limit: usize, scopes: usize) -> Self {
        let slots = Slots { limit, scopes, stores: Vec::new(), holders: HashSet::new() };
        Self(Arc::new(Mutex::new(slots)))
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers the store that contains the resources of a scope.
    pub fn register(&self, store: Store<StoredDeployment>) {
        self.slots().stores.push(store);
    }

    /// Returns whether the resource with this UID may be upgraded now. If so, the resource holds a slot until
    /// [`Self::release`] is called, or until it is deleted or can no longer be decoded.
    #[must_use]
    pub fn acquire(&self, uid: &str) -> bool {
        let mut slots = self.slots();
        let objects: Vec<_> = slots.stores.iter().flat_map(Store::state).collect();
        let upgradable = objects.iter().filter(|object| is_upgradable(object));
        let upgradable: HashSet<String> = upgradable.filter_map(|object| object.uid()).collect();
        slots.holders.retain(|holder| upgradable.contains(holder));
        let rolling = objects.iter().filter(|object| is_rolling(object)).filter_map(|object| object.uid());
        let mut upgrading: HashSet<String> = rolling.collect();
        upgrading.extend(slots.holders.iter().cloned());
        // Only the status of a resource shows that its upgrade began before this process started, so further upgrades
        // begin only after all resources are listed.
        let has_slot = upgrading.contains(uid) || slots.are_listed() && upgrading.len() < slots.limit;
        if has_slot {
            slots.holders.insert(uid.to_owned());
        }
        has_slot
    }

    /// Whether the resources of all scopes have been listed. Before that, no further upgrade receives a slot.
    #[must_use]
    pub fn are_listed(&self) -> bool {
        self.slots().are_listed()
    }

    /// Releases the slot of the resource with this UID, if it has one.
    pub fn release(&self, uid: &str) {
        self.slots().holders.remove(uid);
    }
}

impl Slots {
    /// Whether the resources of all scopes are listed.
    fn are_listed(&self) -> bool {
        let is_listed = |store: &Store<_>| matches!(store.wait_until_ready().now_or_never(), Some(Ok(())));
        self.stores.len() == self.scopes && self.stores.iter().all(is_listed)
    }
}

/// Whether a resource may hold a slot. The operator does not change the objects of a resource that is being deleted,
/// which can take a long time, or that cannot be decoded, so such a resource would never release its slot.
fn is_upgradable(object: &StoredDeployment) -> bool {
    object.0.is_ok() && object.meta().deletion_timestamp.is_none()
}

/// Whether a resource is being upgraded. An invalid resource does not count, because its objects are not changed until
/// the resource is corrected.
fn is_rolling(object: &StoredDeployment) -> bool {
    let status = object.0.as_ref().ok().and_then(|object| object.status.as_ref());
    let is_invalid = |condition: &Condition| {
        condition.type_ == ACCEPTED && condition.status == "False" && condition.reason != REFUSED_BY_CLUSTER
    };
    is_upgradable(object)
        && status.is_some_and(|status| {
            let release = status.release.as_ref();
            release.is_some_and(|release| release.state == UpgradeState::Rolling)
                && !status.conditions.iter().any(is_invalid)
        })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use kube::core::DeserializeGuard;
    use kube::core::error_boundary::InvalidObject;
    use kube::runtime::reflector::store::Writer;
    use kube::runtime::{reflector, watcher};
    use operator_api::{LlmDeployment, LlmDeploymentStatus, ReleaseStatus};
    use serde_json::json;

    use super::*;

    fn object(uid: &str, state: UpgradeState) -> StoredDeployment {
        let mut object: LlmDeployment = serde_json::from_value(json!({
            "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment",
            "metadata": {"name": uid, "namespace": "models", "uid": uid},
            "spec": {"model": {"source": {"pvc": {"claim": "models"}}}},
        }))
        .unwrap();
        let release = Some(ReleaseStatus { state, ..ReleaseStatus::default() });
        object.status = Some(LlmDeploymentStatus { release, ..LlmDeploymentStatus::default() });
        DeserializeGuard(Ok(object))
    }

    fn listed(
        objects: impl IntoIterator<Item = StoredDeployment>,
    ) -> (Store<StoredDeployment>, Writer<StoredDeployment>) {
        let (store, mut writer) = reflector::store();
        writer.apply_watcher_event(&watcher::Event::Init);
        for object in objects {
            writer.apply_watcher_event(&watcher::Event::InitApply(object));
        }
        writer.apply_watcher_event(&watcher::Event::InitDone);
        (store, writer)
    }

    #[test]
    fn a_limited_number_of_resources_is_upgraded_at_the_same_time() {
        let (store, mut writer) = listed(["a", "b", "c"].map(|uid| object(uid, UpgradeState::Waiting)));
        let limiter = UpgradeLimiter::new(2, 1);
        assert!(!limiter.acquire("a"), "no store is registered yet");
        limiter.register(store);
        assert_eq!(["a", "b", "c", "a"].map(|uid| limiter.acquire(uid)), [true, true, false, true]);
        limiter.release("a");
        assert!(limiter.acquire("c"));
        // A deleted resource loses its slot.
        writer.apply_watcher_event(&watcher::Event::Delete(object("b", UpgradeState::Rolling)));
        assert!(limiter.acquire("a"));
    }

    #[test]
    fn an_upgrade_that_began_before_this_process_holds_a_slot() {
        let (store, mut writer) =
            listed([object("a", UpgradeState::Rolling), object("b", UpgradeState::Waiting)]);
        let limiter = UpgradeLimiter::new(1, 1);
        limiter.register(store);
        assert!(!limiter.acquire("b"));
        writer.apply_watcher_event(&watcher::Event::Apply(object("a", UpgradeState::Current)));
        assert!(limiter.acquire("b"));
    }

    #[test]
    fn an_upgrade_begins_once_the_resources_of_all_namespaces_are_listed() {
        let (store, _writer) =
            listed([object("a", UpgradeState::Rolling), object("b", UpgradeState::Waiting)]);
        let (other, mut writer) = reflector::store();
        let limiter = UpgradeLimiter::new(2, 2);
        limiter.register(store);
        limiter.register(other);
        assert_eq!(
            ["a", "b"].map(|uid| limiter.acquire(uid)),
            [true, false],
            "an upgrade that has begun continues"
        );
        writer.apply_watcher_event(&watcher::Event::Init);
        writer.apply_watcher_event(&watcher::Event::InitApply(object("c", UpgradeState::Rolling)));
        assert!(!limiter.acquire("b") && !limiter.are_listed());
        writer.apply_watcher_event(&watcher::Event::InitDone);
        assert!(!limiter.acquire("b") && limiter.are_listed());
        writer.apply_watcher_event(&watcher::Event::Apply(object("c", UpgradeState::Current)));
        assert!(limiter.acquire("b"));
    }

    #[test]
    fn a_resource_whose_objects_are_not_changed_any_more_holds_no_slot() {
        let deleted = |uid: &str| {
            let mut object = object(uid, UpgradeState::Rolling);
            let now = Time(jiff::Timestamp::UNIX_EPOCH);
            object.0.as_mut().unwrap().metadata.deletion_timestamp = Some(now);
            object
        };
        let undecodable = |uid: &str| {
            let metadata = object(uid, UpgradeState::Rolling).meta().clone();
            DeserializeGuard(Err(InvalidObject { error: "too large".to_owned(), metadata }))
        };
        for stopped in [deleted("a"), undecodable("a")] {
            // The slot was acquired by this process.
            let (store, mut writer) = listed(["a", "b"].map(|uid| object(uid, UpgradeState::Waiting)));
            let limiter = UpgradeLimiter::new(1, 1);
            limiter.register(store);
            assert_eq!(["a", "b"].map(|uid| limiter.acquire(uid)), [true, false]);
            writer.apply_watcher_event(&watcher::Event::Apply(stopped.clone()));
            assert!(limiter.acquire("b"));

            // The status of the resource shows that the upgrade began before this process started.
            let (store, _writer) = listed([stopped, object("b", UpgradeState::Waiting)]);
            let limiter = UpgradeLimiter::new(1, 1);
            limiter.register(store);
            assert!(limiter.acquire("b"));
        }
    }

    #[test]
    fn an_upgrade_that_stopped_because_the_resource_is_invalid_holds_no_slot() {
        for (reason, has_slot) in [("InvalidField", false), (REFUSED_BY_CLUSTER, true)] {
            let mut stopped = object("a", UpgradeState::Rolling);
            let accepted = json!({
                "type": ACCEPTED, "status": "False", "reason": reason, "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            });
            let status = stopped.0.as_mut().unwrap().status.as_mut().unwrap();
            status.conditions = vec![serde_json::from_value(accepted).unwrap()];
            let (store, _writer) = listed([stopped, object("b", UpgradeState::Waiting)]);
            let limiter = UpgradeLimiter::new(1, 1);
            limiter.register(store);
            assert_eq!(limiter.acquire("b"), !has_slot, "{reason}");
        }
    }
}
