//! The replica token, with which routers authenticate themselves to replicas: the Secret that contains it, and its
//! mount.
//!
//! The operator creates the Secret with a random token. It may create Secrets but cannot read, change or delete them,
//! so it has no access to the token once the Secret exists: `docs/decisions/0078-replica-token.md`.

use serde_json::{Value, json};

use crate::manifest::{Kind, Manifest};
use crate::names::Component;
use crate::valid_deployment::{DataKey, ValidDeployment};

/// The key of the token in the Secret that the operator creates.
pub const KEY: &str = "token";
/// The name of the volume.
const VOLUME: &str = "replica-token";
/// The path at which the volume is mounted.
const MOUNT_PATH: &str = "/etc/ovfleet-replica-token";
/// The path of the file with the token in the containers of routers and replicas.
pub(super) const FILE: &str = "/etc/ovfleet-replica-token/token";

/// Returns the Secret that must exist, without its data. `None` if the resource refers to a Secret of the user.
pub(super) fn secret(valid: &ValidDeployment) -> Option<Manifest> {
    if valid.security.replica_token.is_some() {
        return None;
    }
    let owner = &valid.owner;
    let content = json!({"type": "Opaque"});
    Some(owner.manifest(Kind::Secret, &owner.replica_token_secret(), Component::Server, content))
}

/// Returns the volume with the token. Every user in the container can read its files, because the pod does not set an
/// `fsGroup` if that would change the group of the model's files.
pub(super) fn volume(valid: &ValidDeployment) -> Value {
    let created = || DataKey { name: valid.owner.replica_token_secret(), key: KEY.to_owned() };
    let DataKey { name, key } = valid.security.replica_token.clone().unwrap_or_else(created);
    json!({"name": VOLUME, "secret": {"secretName": name, "items": [{"key": key, "path": "token"}]}})
}

/// Returns the mount of the volume. It does not use `subPath`, because Kubernetes does not update such a mount when the
/// token changes.
pub(super) fn mount() -> Value {
    json!({"name": VOLUME, "mountPath": MOUNT_PATH, "readOnly": true})
}

/// Whether the pods of a Deployment mount the token.
pub(super) fn is_mounted(deployment: &Value) -> bool {
    let volumes = deployment.pointer("/spec/template/spec/volumes").and_then(Value::as_array);
    volumes.into_iter().flatten().any(|volume| volume["name"] == VOLUME)
}
