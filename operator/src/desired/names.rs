//! What things are called, and how they are found again.

use serde_json::{Value, json};

use crate::manifest::{Kind, Manifest};
use crate::validate::Owner;

/// The label that says whose an object is: the name of the resource.
pub const INSTANCE: &str = "app.kubernetes.io/instance";
/// The label that says who made an object.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Its value on all that this operator makes.
pub const OPERATOR: &str = "ovfleet-operator";
/// The label that says which part of a deployment an object belongs to.
pub const COMPONENT: &str = "app.kubernetes.io/component";
/// The label of pods that says which template they were made from.
pub const TEMPLATE: &str = "ovfleet.dev/template";
/// The annotation with the digest of an object as it was applied last.
pub const APPLIED: &str = "ovfleet.dev/applied";
/// The annotation of a fetch Job with what it has found.
pub const FETCHED: &str = "ovfleet.dev/fetched";
/// The annotation of a resource whose change makes a failed fetch begin again.
pub const RETRY: &str = "ovfleet.dev/retry";
/// The annotation of a resource that approves a release where `upgradePolicy` is `Manual`: the value of
/// `status.release.available`.
pub const UPGRADE: &str = "ovfleet.dev/upgrade";
/// The annotation of a Deployment with a digest of the fields of the resource that its pod template was made from.
pub const INPUTS: &str = "ovfleet.dev/inputs";
/// The condition of pods that says whether a router has admitted them.
pub const ROUTABLE: &str = "ovfleet.dev/routable";

/// A part of a deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// The replicas.
    Server,
    /// What is in front of them.
    Router,
    /// What fetches the model.
    Fetch,
}

impl Component {
    /// As in labels and names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Router => "router",
            Self::Fetch => "fetch",
        }
    }
}

impl Owner {
    /// The name of a part.
    #[must_use]
    pub fn part(&self, component: Component) -> String {
        format!("{}-{}", self.name, component.name())
    }

    /// The name of the Service by which routers find replicas.
    #[must_use]
    pub fn replicas(&self) -> String {
        format!("{}-replicas", self.name)
    }

    /// The name of the claim of a shared cache.
    #[must_use]
    pub fn claim(&self) -> String {
        format!("{}-model", self.name)
    }

    /// The labels by which pods of a part are selected. Deployments cannot change theirs, so neither may these.
    #[must_use]
    pub fn selector(&self, component: Component) -> Value {
        json!({
            "app.kubernetes.io/name": "ovfleet",
            INSTANCE: self.name,
            COMPONENT: component.name(),
        })
    }

    /// The same as text.
    #[must_use]
    pub fn selector_text(&self, component: Component) -> String {
        format!("app.kubernetes.io/name=ovfleet,{INSTANCE}={},{COMPONENT}={}", self.name, component.name())
    }

    /// The labels of all that belongs to a part.
    #[must_use]
    pub fn labels(&self, component: Component) -> Value {
        let mut labels = self.selector(component);
        labels[MANAGED_BY] = json!(OPERATOR);
        labels
    }

    /// An object of a part. `content` is all but `apiVersion`, `kind` and `metadata`.
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
