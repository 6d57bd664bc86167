//! What all pods have in common: the restricted Pod Security Standard, and nothing they do not need.

use operator_api::Security;
use serde_json::{Value, json};

/// The security context of a pod. `volumes` says whether it has volumes that must be made its own.
#[must_use]
pub fn security_context(security: &Security, volumes: Volumes) -> Value {
    let user = security.run_as_user;
    let mut context = json!({
        "runAsNonRoot": true,
        "runAsUser": user,
        "runAsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    });
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
    security.image_pull_secrets.iter().map(|secret| json!({"name": secret.name})).collect()
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
