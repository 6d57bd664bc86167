//! The names, labels and annotations of the objects that the operator creates, and the resource that owns them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use crate::manifest::{Kind, Manifest, digest};

/// The label with the name of the application that an object belongs to.
pub const NAME: &str = "app.kubernetes.io/name";
/// The value of [`NAME`] on every object of an LLMDeployment.
pub const OVFLEET: &str = "ovfleet";
/// The label with the name of the resource that an object belongs to.
pub const INSTANCE: &str = "app.kubernetes.io/instance";
/// The label that names the program that manages an object.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// The value of [`MANAGED_BY`] on every object that this operator creates for an LLMDeployment.
pub const OPERATOR: &str = "ovfleet-operator";
/// The field manager of server-side apply, which owns the fields that the operator sets.
pub const FIELD_MANAGER: &str = OPERATOR;
/// The label with the component that an object belongs to.
pub const COMPONENT: &str = "app.kubernetes.io/component";
/// The label of pods with the hash of the pod template that they were created from.
pub const TEMPLATE: &str = "ovfleet.dev/template";
/// The annotation with the digest of an object as it was last applied.
pub const APPLIED: &str = "ovfleet.dev/applied";
/// The annotation in which a fetch Job retains the report of its pod after the pod is deleted.
pub const FETCHED: &str = "ovfleet.dev/fetched";
/// The annotation of an LLMDeployment whose change makes the operator replace the fetch Job, for example after a failed
/// fetch.
pub const RETRY: &str = "ovfleet.dev/retry";
/// The annotation of an LLMDeployment with the release that the user approves if `upgradePolicy` is `Manual`: the value
/// of `status.release.available`.
pub const UPGRADE: &str = "ovfleet.dev/upgrade";
/// The annotation of a Deployment with the digest of the fields of the resource that its pod template was rendered
/// from.
pub const INPUTS: &str = "ovfleet.dev/inputs";
/// The annotation of fetch Jobs, and of the Deployment and the pods of replicas, with the key of the source of a model
/// that is fetched into a shared volume.
pub const SOURCE: &str = "ovfleet.dev/source";
/// The pod condition that reports whether the routers have admitted a replica. It is a readiness gate.
pub const ROUTABLE: &str = "ovfleet.dev/routable";
/// The environment variable that passes the revision of a Hugging Face Hub repository to a fetch container.
pub const REVISION_VARIABLE: &str = "OVFLEET_HF_REVISION";

/// A component of an LLMDeployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// The replicas, which run the server.
    Server,
    /// The routers in front of the replicas.
    Router,
    /// The Job that fetches the model.
    Fetch,
}

impl Component {
    /// Returns the name of the component in labels and in names of objects.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Router => "router",
            Self::Fetch => "fetch",
        }
    }
}

/// The LLMDeployment that owns the objects that the operator creates for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The name of the resource.
    pub name: String,
    /// The namespace of the resource.
    pub namespace: String,
    /// The UID of the resource.
    pub uid: String,
}

impl Owner {
    /// Returns the resource with this metadata.
    #[must_use]
    pub fn new(metadata: &ObjectMeta) -> Self {
        Self {
            name: metadata.name.clone().unwrap_or_default(),
            namespace: metadata.namespace.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
        }
    }

    /// Returns the name of the objects of a component.
    #[must_use]
    pub fn component_name(&self, component: Component) -> String {
        format!("{}-{}", self.name, component.name())
    }

    /// Returns the name of the Service through which routers discover replicas.
    #[must_use]
    pub fn replicas_service(&self) -> String {
        format!("{}-replicas", self.name)
    }

    /// Returns the name of the PersistentVolumeClaim of a shared cache.
    #[must_use]
    pub fn cache_claim(&self) -> String {
        format!("{}-model", self.name)
    }

    /// Returns the name of the ConfigMap with the revisions that replicas fetch.
    #[must_use]
    pub fn revisions(&self) -> String {
        format!("{}-revisions", self.name)
    }

    /// Returns the name of the Secret that the operator creates. It depends on the UID of the resource: the Secret of a
    /// deleted resource, which may still exist, cannot be mistaken for that of a new resource with the same name.
    #[must_use]
    pub fn replica_token_secret(&self) -> String {
        format!("{}-replica-token-{}", self.name, digest(&json!(self.uid)))
    }

    /// Returns the labels that select the pods of a component. They must never change, because the selector of a
    /// Deployment is immutable.
    #[must_use]
    pub fn selector(&self, component: Component) -> Value {
        json!({
            NAME: OVFLEET,
            INSTANCE: self.name,
            COMPONENT: component.name(),
        })
    }

    /// Returns [`Self::selector`] in the text form of `kubectl --selector`.
    #[must_use]
    pub fn selector_text(&self, component: Component) -> String {
        format!("{NAME}={OVFLEET},{INSTANCE}={},{COMPONENT}={}", self.name, component.name())
    }

    /// Returns the labels of the objects of a component.
    #[must_use]
    pub fn labels(&self, component: Component) -> Value {
        let mut labels = self.selector(component);
        labels[MANAGED_BY] = json!(OPERATOR);
        labels
    }

    /// Returns the manifest of an object of a component. `content` is everything except `apiVersion`, `kind` and
    /// `metadata`.
    #[must_use]
    pub fn manifest(&self, kind: Kind, name: &str, component: Component, content: Value) -> Manifest {
        let mut body = json!({
            "apiVersion": kind.api_version(),
            "kind": kind.name(),
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": self.labels(component),
                "annotations": {},
                "ownerReferences": [{
                    "apiVersion": "ovfleet.dev/v1alpha1",
                    "kind": "LLMDeployment",
                    "name": self.name,
                    "uid": self.uid,
                    "controller": true,
                    "blockOwnerDeletion": true,
                }],
            },
        });
        if let (Value::Object(body), Value::Object(content)) = (&mut body, content) {
            body.extend(content);
        }
        Manifest { kind, name: name.to_owned(), body }
    }
}
