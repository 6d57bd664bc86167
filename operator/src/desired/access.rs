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
    let fetches = match &valid.files {
        Files::Fetched(fetched) if matches!(fetched.cache, Cache::Shared(_)) => {
            Some((Component::Fetch, fetched))
        }
        Files::Fetched(fetched) => Some((Component::Server, fetched)),
        Files::Mounted(_) => None,
    };
    let account = |component: Component| {
        let content = json!({"automountServiceAccountToken": false});
        let mut account = owner.manifest(Kind::ServiceAccount, &owner.part(component), component, content);
        if let Some((_, fetched)) = fetches.filter(|(of, _)| *of == component) {
            account.body["metadata"]["annotations"] = json!(fetched.container.service_account_annotations);
        }
        account
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
    if fetches.is_some_and(|(of, _)| of == Component::Fetch) {
        manifests.push(account(Component::Fetch));
    }
    manifests
}
