//! The replica token, by which replicas recognize their routers: the Secret that holds it, and how it is mounted.
//!
//! The operator creates the Secret with a random token and never looks at it again. It may create Secrets and cannot read,
//! change or delete any, so the token is out of its reach as soon as it exists: `docs/decisions/0078-replica-token.md`.

use serde_json::{Value, json};

use super::names::Component;
use crate::manifest::{Kind, Manifest, digest};
use crate::validate::{Owner, ValidDeployment};

/// The key of the token in the Secret that the operator creates.
pub const KEY: &str = "token";
/// The name of the volume.
const VOLUME: &str = "replica-token";
/// Where the volume is mounted.
const PATH: &str = "/etc/ovfleet-replica-token";
/// The file with the token, as a path in the containers of routers and replicas.
pub(super) const FILE: &str = "/etc/ovfleet-replica-token/token";

impl Owner {
    /// The name of the Secret that the operator creates. It depends on the identity of the resource: the Secret of a
    /// deleted resource, which may still exist, cannot be mistaken for the one of a new resource with the same name.
    #[must_use]
    pub fn replica_token(&self) -> String {
        format!("{}-replica-token-{}", self.name, digest(&json!(self.uid)))
    }
}

/// The Secret that must exist, without its data. `None` if the resource names a Secret of the user.
#[must_use]
pub(super) fn secret(valid: &ValidDeployment) -> Option<Manifest> {
    if valid.security.replica_token.is_some() {
        return None;
    }
    let owner = &valid.owner;
    let content = json!({"type": "Opaque"});
    Some(owner.manifest(Kind::Secret, &owner.replica_token(), Component::Server, content))
}

/// The volume with the token. Its files are readable for everybody, that is, for the container that mounts it: pods do not
/// have a group of their own if that would change the owner of the files of a model.
#[must_use]
pub(super) fn volume(valid: &ValidDeployment) -> Value {
    let own = (valid.owner.replica_token(), KEY.to_owned());
    let (name, key) = valid
        .security
        .replica_token
        .as_ref()
        .map_or(own, |reference| (reference.name.clone(), reference.key.clone()));
    json!({"name": VOLUME, "secret": {"secretName": name, "items": [{"key": key, "path": "token"}]}})
}

/// How a container mounts the volume. Not by `subPath`: such a mount would never show a changed token.
#[must_use]
pub(super) fn mount() -> Value {
    json!({"name": VOLUME, "mountPath": PATH, "readOnly": true})
}

/// Whether the pods of a Deployment have the token.
#[must_use]
pub(super) fn is_mounted(deployment: &Value) -> bool {
    let volumes = deployment.pointer("/spec/template/spec/volumes").and_then(Value::as_array);
    volumes.into_iter().flatten().any(|volume| volume["name"] == VOLUME)
}
