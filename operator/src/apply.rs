//! Making it so: objects are applied server-side under one field manager, what is not wanted any more is deleted, and
//! gates are turned. It touches the cluster and decides nothing but the order. An object that is already as it should
//! be costs no call.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{
    Api, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions, PropagationPolicy,
    ValidationDirective,
};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::desired::Resources;
use crate::desired::names::{APPLIED, ROUTABLE};
use crate::gate;
use crate::manifest::{Kind, Manifest, covers};
use crate::metrics::Metrics;
use crate::observe::Observed;
use crate::validate::ValidDeployment;
use crate::watch::Stores;

mod replica_token;

pub use replica_token::ReplicaTokens;

/// Under which name fields are owned.
pub const FIELD_MANAGER: &str = "ovfleet-operator";

/// What was made so.
#[derive(Debug)]
pub struct Applied {
    /// What was to be made so.
    pub valid: ValidDeployment,
    /// Which objects that meant.
    pub resources: Resources,
    /// The objects as they are now.
    pub objects: BTreeMap<(Kind, String), Arc<DynamicObject>>,
    /// What was seen before.
    pub observed: Observed,
    /// What could not be made so.
    pub failures: Vec<Failure>,
}

/// An object that could not be made as it should be.
#[derive(Debug, thiserror::Error)]
#[error("failed to {verb} {kind} {name}")]
pub struct Failure {
    /// What was tried.
    pub verb: &'static str,
    /// The object's kind.
    pub kind: &'static str,
    /// Its name.
    pub name: String,
    /// Why.
    #[source]
    pub source: FailureCause,
}

/// Why an object could not be made as it should be.
#[derive(Debug, thiserror::Error)]
pub enum FailureCause {
    /// It is somebody else's.
    #[error("it exists and does not belong to this LLMDeployment")]
    NameTaken,
    /// The API server said no, or nothing.
    #[error(transparent)]
    Api(#[from] kube::Error),
}

impl FailureCause {
    /// Whether only whoever wrote the resource can do something about it.
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self {
            Self::NameTaken => true,
            // An unknown field or a wrong type in what the user laid over a pod is an internal error to the API server.
            Self::Api(kube::Error::Api(status)) => {
                matches!(status.code, 400 | 422)
                    || status.message.starts_with("failed to create typed patch object")
            }
            Self::Api(_) => false,
        }
    }

    /// In the API server's words.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::Api(kube::Error::Api(status)) => status.message.clone(),
            other => other.to_string(),
        }
    }
}

/// Somebody who makes it so.
#[derive(Clone)]
pub struct Applier {
    /// By whom.
    pub client: Client,
    /// What is known, and learns what was made.
    pub stores: Arc<Stores>,
    /// What was done.
    pub metrics: Metrics,
    /// Which Secrets with a replica token exist.
    pub replica_tokens: ReplicaTokens,
}

impl Applier {
    /// Makes it so. It goes on after a failure, so that one object that cannot be does not keep the others from being.
    pub async fn apply(&self, valid: ValidDeployment, resources: Resources, observed: Observed) -> Applied {
        let namespace = valid.owner.namespace.clone();
        let mut failures = Vec::new();
        let mut objects = observed.owned.clone();
        let token = self.ensure_replica_token(&valid, &resources, &observed).await;
        for manifest in &resources.manifests {
            // Pods could not start without the token.
            if manifest.kind == Kind::Deployment && token.is_err() {
                continue;
            }
            match self.make(&valid, manifest, &observed).await {
                Ok(Some(object)) => drop(objects.insert((manifest.kind, manifest.name.clone()), object)),
                Ok(None) => {}
                Err(source) => failures.push(failure("apply", manifest.kind, &manifest.name, source)),
            }
        }
        failures.extend(token.err());
        for key in unwanted(&resources, &observed) {
            match self.delete(&namespace, key.0, &observed.owned[&key]).await {
                Ok(()) => drop(objects.remove(&key)),
                Err(source) => failures.push(failure("delete", key.0, &key.1, source.into())),
            }
        }
        for (pod, turn) in gate::turns(&observed.pods, &observed.pod_reports.admitted) {
            if let Err(source) = self.turn(&namespace, pod, turn).await {
                failures.push(Failure {
                    verb: "patch",
                    kind: "Pod",
                    name: pod.to_owned(),
                    source: source.into(),
                });
            }
        }
        Applied { valid, resources, objects, observed, failures }
    }

    /// Creates the Secret with the replica token unless it is known to exist. If pods wait for their volumes, it may have
    /// been deleted.
    async fn ensure_replica_token(
        &self,
        valid: &ValidDeployment,
        resources: &Resources,
        observed: &Observed,
    ) -> Result<(), Failure> {
        let Some(secret) = &resources.replica_token else { return Ok(()) };
        let is_awaited = observed.pods.iter().any(|pod| pod.awaits.is_some());
        if self.replica_tokens.exists(&valid.owner.uid) && !is_awaited {
            return Ok(());
        }
        self.metrics.call("create", secret.kind.name());
        let created = replica_token::create(&self.client, &valid.owner.namespace, secret).await;
        created.map_err(|source| failure("create", secret.kind, &secret.name, source.into()))?;
        self.replica_tokens.insert(&valid.owner.uid);
        Ok(())
    }

    /// Makes one object so; gives it if that took a call.
    async fn make(
        &self,
        valid: &ValidDeployment,
        manifest: &Manifest,
        observed: &Observed,
    ) -> Result<Option<Arc<DynamicObject>>, FailureCause> {
        let key = (manifest.kind, manifest.name.clone());
        let api = self.api(&valid.owner.namespace, manifest.kind);
        match observed.owned.get(&key) {
            Some(live) if is_as_wanted(live, manifest) => return Ok(None),
            Some(_) => {}
            None => {
                // It may be there nevertheless, unseen as it is somebody else's.
                self.metrics.call("get", manifest.kind.name());
                let present = api.get_metadata_opt(&manifest.name).await?;
                let is_owned = |owners: &[_]| {
                    owners.iter().any(
                        |owner: &k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference| {
                            owner.uid == valid.owner.uid
                        },
                    )
                };
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
        self.metrics.call("apply", manifest.kind.name());
        let mut object = api.patch(&manifest.name, &parameters, &Patch::Apply(&manifest.body)).await?;
        tracing::debug!(kind = manifest.kind.name(), name = manifest.name, "applied");
        object.managed_fields_mut().clear();
        self.stores.insert(manifest.kind, object.clone());
        Ok(Some(Arc::new(object)))
    }

    async fn delete(&self, namespace: &str, kind: Kind, object: &DynamicObject) -> kube::Result<()> {
        if object.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        // A Job that is there may write to its volume, so it is there until its pods have gone.
        let propagation =
            if kind == Kind::Job { PropagationPolicy::Foreground } else { PropagationPolicy::Background };
        let parameters = DeleteParams {
            // This very object: by now there might be another one of its name.
            preconditions: Some(Preconditions { uid: object.uid(), resource_version: None }),
            propagation_policy: Some(propagation),
            ..DeleteParams::default()
        };
        let name = object.name_any();
        self.metrics.call("delete", kind.name());
        match self.api(namespace, kind).delete(&name, &parameters).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            result => drop(result?),
        }
        tracing::info!(kind = kind.name(), name, "deleted what is not wanted any more");
        Ok(())
    }

    async fn turn(&self, namespace: &str, pod: &str, turn: gate::Turn) -> kube::Result<()> {
        let (status, reason, message) = turn.condition();
        let condition = json!({
            "type": ROUTABLE,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        });
        let patch = json!({"apiVersion": "v1", "kind": "Pod", "status": {"conditions": [condition]}});
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        self.metrics.call("patch_status", "Pod");
        match pods.patch_status(pod, &PatchParams::default(), &Patch::Strategic(patch)).await {
            // It has gone.
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            result => result.map(|_| tracing::info!(pod, status, reason, "turned the gate")),
        }
    }

    fn api(&self, namespace: &str, kind: Kind) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, &kind.resource())
    }
}

fn failure(verb: &'static str, kind: Kind, name: &str, source: FailureCause) -> Failure {
    Failure { verb, kind: kind.name(), name: name.to_owned(), source }
}

/// The objects that exist but are not in `resources`.
fn unwanted(resources: &Resources, observed: &Observed) -> Vec<(Kind, String)> {
    let is_wanted = |key: &(Kind, String)| {
        resources.manifests.iter().any(|manifest| manifest.kind == key.0 && manifest.name == key.1)
    };
    observed.owned.keys().filter(|key| !is_wanted(key)).cloned().collect()
}

/// Whether an object was applied as it should be and nobody has changed that since.
fn is_as_wanted(live: &DynamicObject, manifest: &Manifest) -> bool {
    let digest =
        manifest.body.pointer("/metadata/annotations").and_then(|annotations| annotations.get(APPLIED));
    if live.annotations().get(APPLIED).map(String::as_str) != digest.and_then(Value::as_str) {
        return false;
    }
    let Ok(mut live) = serde_json::to_value(live) else { return false };
    // A watch leaves these out of the objects of a list.
    live["apiVersion"] = manifest.body["apiVersion"].clone();
    live["kind"] = manifest.body["kind"].clone();
    covers(&live, &manifest.body)
}
