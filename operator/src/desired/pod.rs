//! The parts that the pods of several components share: security contexts according to the restricted Pod Security
//! Standard, ports and placement.

use k8s_openapi::api::core::v1::TopologySpreadConstraint;
use serde_json::{Value, json};

use crate::manifest::{is_empty, to_json};
use crate::ports::{ADMIN_PORT, GRPC_PORT, HTTP_PORT};
use crate::valid_deployment::{PodPlacement, SecuritySettings};

/// The way in which a pod accesses its volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VolumeUse {
    /// The group of the pod need not own the volumes.
    Shared,
    /// The pod writes to a volume, or reads files that only their group may read, so the group of the pod must own the
    /// volumes.
    Owned,
}

/// Returns the security context of a pod. If `security` contains no user, the platform assigns the user and the group,
/// and rejects pods that set them.
pub(super) fn security_context(security: &SecuritySettings, volumes: VolumeUse) -> Value {
    let mut context = json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}});
    let Some(user) = security.run_as_user else { return context };
    context["runAsUser"] = json!(user);
    context["runAsGroup"] = json!(user);
    if volumes == VolumeUse::Owned {
        context["fsGroup"] = json!(user);
        context["fsGroupChangePolicy"] = json!("OnRootMismatch");
    }
    context
}

pub(super) fn container_security_context() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": true,
    })
}

pub(super) fn image_pull_secrets(security: &SecuritySettings) -> Value {
    security.image_pull_secrets.iter().map(|name| json!({"name": name})).collect()
}

/// Returns the ports of the container of a server or router.
pub(super) fn ports() -> Value {
    let port = |name: &str, port: u16| json!({"name": name, "containerPort": port, "protocol": "TCP"});
    json!([port("http", HTTP_PORT), port("grpc", GRPC_PORT), port("admin", ADMIN_PORT)])
}

/// Returns the `httpGet` action of a probe that requests a health endpoint.
pub(super) fn health(path: &str) -> Value {
    json!({"path": format!("/v2/health/{path}"), "port": "admin"})
}

/// Sets the fields of a pod spec that place the pod. `affinity` replaces the affinity of `placement`, and `selector`
/// contains the labels of the pods that are spread.
pub(super) fn set_placement(
    spec: &mut Value,
    placement: &PodPlacement,
    affinity: Option<Value>,
    selector: &Value,
) {
    let spread = spread(&placement.topology_spread_constraints, selector);
    set_member(spec, "topologySpreadConstraints", Some(spread));
    set_member(spec, "nodeSelector", Some(to_json(&placement.node_selector)));
    set_member(spec, "tolerations", Some(to_json(&placement.tolerations)));
    set_member(spec, "affinity", affinity);
    set_member(spec, "priorityClassName", placement.priority_class_name.clone());
    set_member(spec, "runtimeClassName", placement.runtime_class_name.clone());
}

/// The topology spread constraints of pods. A constraint without a selector applies to the pods that match `selector`.
/// Without constraints, pods are spread over nodes as evenly as possible.
fn spread(constraints: &[TopologySpreadConstraint], selector: &Value) -> Value {
    let selector = json!({"matchLabels": selector});
    if constraints.is_empty() {
        return json!([{
            "topologyKey": "kubernetes.io/hostname",
            "maxSkew": 1,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": selector,
        }]);
    }
    let mut constraints = to_json(&constraints);
    for constraint in constraints.as_array_mut().into_iter().flatten() {
        if constraint.get("labelSelector").is_none_or(Value::is_null) {
            constraint["labelSelector"] = selector.clone();
        }
    }
    constraints
}

/// Inserts a member into an object, unless its value is absent or empty.
pub(super) fn set_member(object: &mut Value, name: &str, value: Option<impl Into<Value>>) {
    let Some(value) = value.map(Into::into) else { return };
    if let (false, Value::Object(members)) = (is_empty(&value), object) {
        members.insert(name.to_owned(), value);
    }
}
