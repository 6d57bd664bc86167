//! What all pods have in common: the restricted Pod Security Standard, and nothing they do not need.

use k8s_openapi::api::core::v1::TopologySpreadConstraint;
use serde_json::{Value, json};

use crate::validate::Security;

/// The security context of a pod. `volumes` says whether it has volumes that must be made its own. Without a user in
/// `security` the platform assigns user and group, and rejects pods that choose them.
#[must_use]
pub fn security_context(security: &Security, volumes: Volumes) -> Value {
    let mut context = json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}});
    let Some(user) = security.run_as_user else { return context };
    context["runAsUser"] = json!(user);
    context["runAsGroup"] = json!(user);
    if volumes == Volumes::Written {
        context["fsGroup"] = json!(user);
        context["fsGroupChangePolicy"] = json!("OnRootMismatch");
    }
    context
}

/// What a pod does with its volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Volumes {
    /// It reads them at most.
    Read,
    /// It writes to some.
    Written,
}

/// The security context of a container.
#[must_use]
pub fn container_security() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": true,
    })
}

/// The names of the Secrets with which images are pulled.
#[must_use]
pub fn image_pull_secrets(security: &Security) -> Value {
    security.image_pull_secrets.iter().map(|name| json!({"name": name})).collect()
}

/// How pods are spread: by `constraints`, of which those without a selector are for the pods of `selector`; without any,
/// over nodes as far as possible.
#[must_use]
pub fn spread(constraints: &[TopologySpreadConstraint], selector: &Value) -> Value {
    let selector = json!({"matchLabels": selector});
    if constraints.is_empty() {
        return json!([{
            "topologyKey": "kubernetes.io/hostname",
            "maxSkew": 1,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": selector,
        }]);
    }
    let mut constraints = json_of(&constraints);
    for constraint in constraints.as_array_mut().into_iter().flatten() {
        if constraint.get("labelSelector").is_none_or(Value::is_null) {
            constraint["labelSelector"] = selector.clone();
        }
    }
    constraints
}

/// Adds a member if there is something to add.
pub fn put(object: &mut Value, name: &str, value: Option<impl Into<Value>>) {
    let Some(value) = value.map(Into::into) else { return };
    let empty = match &value {
        Value::Null => true,
        Value::Object(members) => members.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    };
    if let (false, Value::Object(members)) = (empty, object) {
        members.insert(name.to_owned(), value);
    }
}

/// A Kubernetes type as JSON.
#[must_use]
pub fn json_of(value: &impl serde::Serialize) -> Value {
    serde_json::to_value(value).expect("invariant: the types of the API are JSON")
}
