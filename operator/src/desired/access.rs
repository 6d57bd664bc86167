//! Identities, and the little that they may do.

use serde_json::json;

use super::names::Component;
use crate::manifest::{Kind, Manifest};
use crate::validate::{Cache, Files, ValidDeployment};

/// Identities for each part, and the router's role: it may see EndpointSlices. Nobody else may do anything, and has no
/// token to do it with.
#[must_use]
pub(super) fn manifests(valid: &ValidDeployment) -> Vec<Manifest> {
    let owner = &valid.owner;
    let account = |component: Component| {
        let content = json!({"automountServiceAccountToken": false});
        owner.manifest(Kind::ServiceAccount, &owner.part(component), component, content)
    };
    let name = owner.part(Component::Router);
    let role = json!({"rules": [{
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }]});
    let binding = json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": owner.namespace}],
    });
    let mut manifests = vec![
        account(Component::Server),
        account(Component::Router),
        owner.manifest(Kind::Role, &name, Component::Router, role),
        owner.manifest(Kind::RoleBinding, &name, Component::Router, binding),
    ];
    if matches!(&valid.files, Files::Fetched(fetched) if matches!(fetched.cache, Cache::Shared(_))) {
        manifests.push(account(Component::Fetch));
    }
    manifests
}
