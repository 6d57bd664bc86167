//! Whose turn it is to be upgraded: how many resources may be restarted at a time because the operator is of a new release.
//! A resource keeps its turn until its pods are replaced and work. One whose upgrade fails therefore keeps the others from
//! following it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::ResourceExt as _;
use kube::runtime::reflector::Store;
use operator_api::{LlmDeployment, UpgradeState};

/// The turns of all resources that this operator looks after. Clones share them.
#[derive(Clone)]
pub struct Upgrades(Arc<Mutex<Turns>>);

struct Turns {
    /// Most resources that are upgraded at the same time.
    limit: usize,
    /// How many stores there are going to be: one for each namespace, or one for all.
    scopes: usize,
    stores: Vec<Store<LlmDeployment>>,
    /// Who has a turn, by identity: what their status does not say yet, too.
    holders: HashSet<String>,
}

impl Upgrades {
    /// At most `limit` at the same time, of the resources of as many stores as there are `scopes`.
    #[must_use]
    pub fn new(limit: usize, scopes: usize) -> Self {
        let turns = Turns { limit, scopes, stores: Vec::new(), holders: HashSet::new() };
        Self(Arc::new(Mutex::new(turns)))
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of the resources of a scope.
    pub fn register(&self, store: Store<LlmDeployment>) {
        self.turns().stores.push(store);
    }

    /// Whether the resource with this identity may be upgraded now. If so, it has its turn until [`Self::release`].
    #[must_use]
    pub fn acquire(&self, uid: &str) -> bool {
        let mut turns = self.turns();
        // Until all resources are known, so is not who is being upgraded since before this process started.
        if turns.stores.len() < turns.scopes {
            return false;
        }
        let objects: Vec<_> = turns.stores.iter().flat_map(Store::state).collect();
        let present: HashSet<String> = objects.iter().filter_map(|object| object.uid()).collect();
        turns.holders.retain(|holder| present.contains(holder));
        let rolling = objects.iter().filter(|object| is_rolling(object)).filter_map(|object| object.uid());
        let mut upgrading: HashSet<String> = rolling.collect();
        upgrading.extend(turns.holders.iter().cloned());
        let has_turn = upgrading.contains(uid) || upgrading.len() < turns.limit;
        if has_turn {
            turns.holders.insert(uid.to_owned());
        }
        has_turn
    }

    /// The resource with this identity is not being upgraded, or not any more.
    pub fn release(&self, uid: &str) {
        self.turns().holders.remove(uid);
    }
}

fn is_rolling(object: &LlmDeployment) -> bool {
    let release = object.status.as_ref().and_then(|status| status.release.as_ref());
    release.is_some_and(|release| release.state == UpgradeState::Rolling)
}

#[cfg(test)]
mod tests {
    use kube::runtime::{reflector, watcher};
    use operator_api::{LlmDeploymentStatus, ReleaseStatus};
    use serde_json::json;

    use super::*;

    fn object(uid: &str, state: UpgradeState) -> LlmDeployment {
        let mut object: LlmDeployment = serde_json::from_value(json!({
            "apiVersion": "ovfleet.dev/v1alpha1", "kind": "LLMDeployment",
            "metadata": {"name": uid, "namespace": "models", "uid": uid},
            "spec": {"model": {"source": {"pvc": {"claim": "models"}}}},
        }))
        .unwrap();
        let release = Some(ReleaseStatus { state, ..ReleaseStatus::default() });
        object.status = Some(LlmDeploymentStatus { release, ..LlmDeploymentStatus::default() });
        object
    }

    #[test]
    fn so_many_at_a_time_and_the_next_when_one_is_done() {
        let (store, mut writer) = reflector::store();
        for uid in ["a", "b", "c"] {
            writer.apply_watcher_event(&watcher::Event::Apply(object(uid, UpgradeState::Waiting)));
        }
        let upgrades = Upgrades::new(2, 1);
        assert!(!upgrades.acquire("a"), "nobody is known yet");
        upgrades.register(store);
        assert_eq!(["a", "b", "c", "a"].map(|uid| upgrades.acquire(uid)), [true, true, false, true]);
        upgrades.release("a");
        assert!(upgrades.acquire("c"));
        // One that is deleted gives its turn back.
        writer.apply_watcher_event(&watcher::Event::Delete(object("b", UpgradeState::Rolling)));
        assert!(upgrades.acquire("a"));
    }

    #[test]
    fn an_upgrade_that_began_before_this_process_has_its_turn() {
        let (store, mut writer) = reflector::store();
        writer.apply_watcher_event(&watcher::Event::Apply(object("a", UpgradeState::Rolling)));
        writer.apply_watcher_event(&watcher::Event::Apply(object("b", UpgradeState::Waiting)));
        let upgrades = Upgrades::new(1, 1);
        upgrades.register(store);
        assert!(!upgrades.acquire("b"));
        writer.apply_watcher_event(&watcher::Event::Apply(object("a", UpgradeState::Current)));
        assert!(upgrades.acquire("b"));
    }
}
