//! The ServiceAccounts of the pods, and the permissions of the routers.

use serde_json::json;

use crate::manifest::{Kind, Manifest};
use crate::names::Component;
use crate::valid_deployment::ValidDeployment;

/// Returns the ServiceAccounts of all components, and the Role and the RoleBinding that allow the routers to read
/// EndpointSlices. The other accounts have no permissions in the cluster, and their pods mount no token.
pub(super) fn manifests(valid: &ValidDeployment) -> Vec<Manifest> {
    let owner = &valid.owner;
    let is_shared = valid.files.shared().is_some();
    let fetching_component = if is_shared { Component::Fetch } else { Component::Server };
    let account = |component: Component| {
        let content = json!({"automountServiceAccountToken": false});
        let name = owner.component_name(component);
        let mut account = owner.manifest(Kind::ServiceAccount, &name, component, content);
        if let Some(fetched) = valid.files.fetched().filter(|_| component == fetching_component) {
            account.body["metadata"]["annotations"] = json!(fetched.container.service_account_annotations);
        }
        account
    };
    let name = owner.component_name(Component::Router);
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
    if is_shared {
        manifests.push(account(Component::Fetch));
    }
    manifests
}
