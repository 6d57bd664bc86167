//! Applies the desired state: applies objects with server-side apply, creates the Secret with the replica token,
//! deletes objects that are no longer desired, and changes readiness gates. This is the only module that writes to the
//! cluster, except for statuses, events and the Lease. Objects that already have their desired state are skipped.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions, PropagationPolicy,
    ValidationDirective,
};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::client::objects_api;
use crate::desired::DesiredState;
use crate::gate::{GateChange, gate_changes};
use crate::manifest::{Kind, Manifest, covers};
use crate::metrics::Metrics;
use crate::names::{APPLIED, FIELD_MANAGER, ROUTABLE};
use crate::observe::ObservedState;
use crate::valid_deployment::ValidDeployment;
use crate::watch::Stores;

mod replica_token;

pub use replica_token::ReplicaTokens;

/// The result of applying the desired state of a resource.
#[derive(Debug)]
pub struct ApplyResult {
    /// The resource after its validation.
    pub valid: ValidDeployment,
    /// The desired state that was applied.
    pub desired: DesiredState,
    /// The objects that the resource owns after the apply.
    pub objects: BTreeMap<(Kind, String), Arc<DynamicObject>>,
    /// The state that was observed before the apply.
    pub observed: ObservedState,
    /// The objects that could not be created, applied, patched or deleted.
    pub failures: Vec<ApplyFailure>,
}

/// An object that could not be created, applied, patched or deleted.
#[derive(Debug, thiserror::Error)]
#[error("failed to {verb} {kind} {name}")]
pub struct ApplyFailure {
    /// The operation that failed.
    pub verb: &'static str,
    /// The kind of the object.
    pub kind: &'static str,
    /// The name of the object.
    pub name: String,
    /// The cause of the failure.
    #[source]
    pub source: FailureCause,
}

/// The reason why an object could not be created, applied, patched or deleted.
#[derive(Debug, thiserror::Error)]
pub enum FailureCause {
    /// An object with this name exists and does not belong to the resource.
    #[error("the object exists and does not belong to this LLMDeployment")]
    NameTaken,
    /// The API server rejected the request or did not respond.
    #[error(transparent)]
    Api(#[from] kube::Error),
}

impl FailureCause {
    /// Whether retries fail until the user changes the resource or the cluster.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::NameTaken => true,
            // The API server reports an unknown field or a wrong type in a podTemplate as an internal error.
            Self::Api(kube::Error::Api(status)) => {
                matches!(status.code, 400 | 422)
                    || status.message.starts_with("failed to create typed patch object")
            }
            Self::Api(_) => false,
        }
    }

    /// Returns the message of the API server, if it sent one, or else the message of this error.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::Api(kube::Error::Api(status)) => status.message.clone(),
            other => other.to_string(),
        }
    }
}

/// Applies the desired states of resources.
#[derive(Clone)]
pub struct Applier {
    /// The client for the API server.
    pub client: Client,
    /// The caches that the watches fill, and to which applied objects are added.
    pub stores: Arc<Stores>,
    /// The metrics that count requests.
    pub metrics: Metrics,
    /// The resources whose Secret with the replica token is known to exist.
    pub replica_tokens: ReplicaTokens,
}

impl Applier {
    /// Applies the desired state. Continues after a failure, so that an invalid object does not block the others.
    /// However, if the Secret with the replica token cannot be created, the Deployments are not applied.
    pub async fn apply(
        &self,
        valid: ValidDeployment,
        desired: DesiredState,
        observed: ObservedState,
    ) -> ApplyResult {
        let namespace = valid.owner.namespace.clone();
        let mut failures = Vec::new();
        let mut objects = observed.owned.clone();
        let token = self.ensure_replica_token(&valid, &desired, &observed).await;
        for manifest in &desired.manifests {
            // Pods cannot start without the token.
            if manifest.kind == Kind::Deployment && token.is_err() {
                continue;
            }
            match self.apply_object(&valid, manifest, &observed).await {
                Ok(Some(object)) => drop(objects.insert((manifest.kind, manifest.name.clone()), object)),
                Ok(None) => {}
                Err(source) => failures.push(failure("apply", manifest.kind, &manifest.name, source)),
            }
        }
        failures.extend(token.err());
        for key in undesired(&desired, &observed) {
            match self.delete(&namespace, key.0, &observed.owned[&key]).await {
                Ok(()) => drop(objects.remove(&key)),
                Err(source) => failures.push(failure("delete", key.0, &key.1, source.into())),
            }
        }
        failures.extend(self.change_gates(&namespace, &observed).await);
        ApplyResult { valid, desired, objects, observed, failures }
    }

    /// Sets and clears the readiness gates of replicas. Returns the failures.
    pub async fn change_gates(&self, namespace: &str, observed: &ObservedState) -> Vec<ApplyFailure> {
        let mut failures = Vec::new();
        for (pod, change) in gate_changes(&observed.pods, &observed.pod_reports.admitted) {
            if let Err(source) = self.change_gate(namespace, pod, change).await {
                let (name, source) = (pod.to_owned(), source.into());
                failures.push(ApplyFailure { verb: "patch", kind: "Pod", name, source });
            }
        }
        failures
    }

    /// Creates the Secret with the replica token unless it is known to exist. If pods wait for their volumes, the
    /// Secret may have been deleted, so the operator tries to create it again.
    async fn ensure_replica_token(
        &self,
        valid: &ValidDeployment,
        desired: &DesiredState,
        observed: &ObservedState,
    ) -> Result<(), ApplyFailure> {
        let Some(secret) = &desired.replica_token else { return Ok(()) };
        let is_awaited = observed.pods.iter().any(|pod| pod.awaits.is_some());
        if self.replica_tokens.contains(&valid.owner.uid) && !is_awaited {
            return Ok(());
        }
        self.metrics.record_api_call("create", secret.kind.name());
        let created = replica_token::create(&self.client, &valid.owner.namespace, secret).await;
        created.map_err(|source| failure("create", secret.kind, &secret.name, source.into()))?;
        self.replica_tokens.insert(&valid.owner.uid);
        Ok(())
    }

    /// Applies an object. Returns the applied object, or `None` if it already had the desired state.
    async fn apply_object(
        &self,
        valid: &ValidDeployment,
        manifest: &Manifest,
        observed: &ObservedState,
    ) -> Result<Option<Arc<DynamicObject>>, FailureCause> {
        let key = (manifest.kind, manifest.name.clone());
        let api = self.api(&valid.owner.namespace, manifest.kind);
        match observed.owned.get(&key) {
            Some(live) if has_desired_state(live, manifest) => return Ok(None),
            Some(_) => {}
            None => {
                // The watches select by labels and owner, so they do not report an object of another owner.
                self.metrics.record_api_call("get", manifest.kind.name());
                let present = api.get_metadata_opt(&manifest.name).await?;
                let is_owned =
                    |owners: &[OwnerReference]| owners.iter().any(|owner| owner.uid == valid.owner.uid);
                if present.is_some_and(|present| !is_owned(present.owner_references())) {
                    return Err(FailureCause::NameTaken);
                }
            }
        }
        let parameters = PatchParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            field_validation: Some(ValidationDirective::Strict),
            force: true,
            ..PatchParams::default()
        };
        self.metrics.record_api_call("apply", manifest.kind.name());
        let mut object = api.patch(&manifest.name, &parameters, &Patch::Apply(&manifest.body)).await?;
        tracing::debug!(kind = manifest.kind.name(), name = manifest.name, "applied");
        object.managed_fields_mut().clear();
        self.stores.insert_applied(manifest.kind, object.clone());
        Ok(Some(Arc::new(object)))
    }

    async fn delete(&self, namespace: &str, kind: Kind, object: &DynamicObject) -> kube::Result<()> {
        if object.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        // The pods of a Job may still write to the shared volume, so the Job must exist until they are deleted.
        let propagation =
            if kind == Kind::Job { PropagationPolicy::Foreground } else { PropagationPolicy::Background };
        let parameters = DeleteParams {
            // Another object with this name may have been created in the meantime.
            preconditions: Some(Preconditions { uid: object.uid(), resource_version: None }),
            propagation_policy: Some(propagation),
            ..DeleteParams::default()
        };
        let name = object.name_any();
        self.metrics.record_api_call("delete", kind.name());
        match self.api(namespace, kind).delete(&name, &parameters).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            result => drop(result?),
        }
        tracing::info!(
            kind = kind.name(),
            name,
            "requested the deletion of an object that is no longer desired"
        );
        Ok(())
    }

    async fn change_gate(&self, namespace: &str, pod: &str, change: GateChange) -> kube::Result<()> {
        let (status, reason) = (change.status(), change.reason());
        let condition = json!({
            "type": ROUTABLE,
            "status": status,
            "reason": reason,
            "message": change.message(),
            "lastTransitionTime": jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        });
        let patch = json!({"apiVersion": "v1", "kind": "Pod", "status": {"conditions": [condition]}});
        let pods = objects_api(&self.client, Some(namespace), &ApiResource::erase::<Pod>(&()));
        self.metrics.record_api_call("patch_status", "Pod");
        match pods.patch_status(pod, &PatchParams::default(), &Patch::Strategic(patch)).await {
            // The pod was deleted.
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            result => result
                .map(|_| tracing::info!(pod, status, reason, "changed the condition of the readiness gate")),
        }
    }

    fn api(&self, namespace: &str, kind: Kind) -> Api<DynamicObject> {
        objects_api(&self.client, Some(namespace), &kind.api_resource())
    }
}

fn failure(verb: &'static str, kind: Kind, name: &str, source: FailureCause) -> ApplyFailure {
    ApplyFailure { verb, kind: kind.name(), name: name.to_owned(), source }
}

/// The existing objects that are neither desired nor needed by pods.
fn undesired(desired: &DesiredState, observed: &ObservedState) -> Vec<(Kind, String)> {
    let is_desired = |key: &(Kind, String)| {
        desired.manifests.iter().any(|manifest| manifest.kind == key.0 && manifest.name == key.1)
    };
    observed.owned.keys().filter(|key| !is_desired(key) && !desired.in_use.contains(key)).cloned().collect()
}

/// Whether `manifest` has been applied and its fields have not changed since.
fn has_desired_state(live: &DynamicObject, manifest: &Manifest) -> bool {
    let digest =
        manifest.body.pointer("/metadata/annotations").and_then(|annotations| annotations.get(APPLIED));
    if live.annotations().get(APPLIED).map(String::as_str) != digest.and_then(Value::as_str) {
        return false;
    }
    let Ok(mut live) = serde_json::to_value(live) else { return false };
    // The API server omits these fields from the items of a list, and `covers` would report them as missing.
    live["apiVersion"] = manifest.body["apiVersion"].clone();
    live["kind"] = manifest.body["kind"].clone();
    covers(&live, &manifest.body)
}

#[cfg(test)]
mod tests {
    use std::slice;

    use operator_api::LlmDeployment;

    use super::*;
    use crate::desired::desired;
    use crate::desired::release::UpgradePermission;
    use crate::names::{REVISION_VARIABLE, SOURCE};
    use crate::pod::PodState;
    use crate::source::ModelSourceKey;
    use crate::validate::{Defaults, validate};

    fn desired_for(model: &Value, observed: &ObservedState) -> DesiredState {
        let object = json!({
            "apiVersion": "ovfleet.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat", "namespace": "models", "uid": "1"},
            "spec": {"model": model},
        });
        let object: LlmDeployment = serde_json::from_value(object).unwrap();
        let valid = validate(&object, observed, &Defaults::with_images("s", "r")).unwrap();
        desired(&valid, observed, UpgradePermission::Granted)
    }

    #[test]
    fn the_cache_and_the_revisions_are_deleted_once_no_pod_needs_them() {
        let shared = json!({
            "source": {"hf": {"repo": "owner/model"}}, "cache": {"mode": "shared", "size": "1Gi"},
        });
        let former = desired_for(&shared, &ObservedState::default());
        let mut owned = BTreeMap::new();
        for manifest in former.manifests {
            if matches!(manifest.kind, Kind::PersistentVolumeClaim | Kind::ConfigMap) {
                let object: DynamicObject = serde_json::from_value(manifest.body).unwrap();
                owned.insert((manifest.kind, manifest.name), Arc::new(object));
            }
        }
        let mounted = json!({"source": {"pvc": {"claim": "models"}}});
        let deleted = |pods: &[PodState], deployment: Option<&Value>| {
            let mut observed =
                ObservedState { owned: owned.clone(), pods: pods.to_vec(), ..ObservedState::default() };
            if let Some(deployment) = deployment {
                let object: DynamicObject = serde_json::from_value(deployment.clone()).unwrap();
                observed.owned.insert((Kind::Deployment, "chat-server".to_owned()), Arc::new(object));
            }
            let deleted = undesired(&desired_for(&mounted, &observed), &observed);
            deleted.into_iter().map(|(_, name)| name).collect::<Vec<_>>()
        };
        let replica = |source| PodState { component: "server".to_owned(), source, ..PodState::default() };
        let serving = replica(ModelSourceKey::Shared("ab".to_owned()));
        let fetching = PodState { revision_key: Some("ab".to_owned()), ..replica(ModelSourceKey::NotShared) };

        assert_eq!(deleted(&[], None), ["chat-revisions", "chat-model"]);
        assert_eq!(deleted(slice::from_ref(&serving), None), ["chat-revisions"]);
        assert_eq!(deleted(&[replica(ModelSourceKey::Unknown)], None), ["chat-revisions"]);
        assert_eq!(deleted(slice::from_ref(&fetching), None), ["chat-model"]);
        let finished = [serving, fetching].map(|pod| PodState { is_finished: true, ..pod });
        let router = PodState { component: "router".to_owned(), ..PodState::default() };
        let others = [finished.to_vec(), vec![router]].concat();
        assert_eq!(deleted(&others, None), ["chat-revisions", "chat-model"]);
        // The Deployment still creates pods from the former template if the new one could not be applied.
        let reference = json!({"name": "chat-revisions", "key": "ab"});
        let variable = json!({"name": REVISION_VARIABLE, "valueFrom": {"configMapKeyRef": reference}});
        let deployment = json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "chat-server", "annotations": {SOURCE: "ab"}},
            "spec": {"template": {"spec": {"initContainers": [{"name": "fetch", "env": [variable]}]}}},
        });
        assert_eq!(deleted(&[], Some(&deployment)), [""; 0]);
    }
}
