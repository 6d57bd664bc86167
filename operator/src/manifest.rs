//! The objects that the operator applies, as JSON. This module lists all kinds of objects that the operator creates for
//! a resource.

use kube::core::{ApiResource, GroupVersionKind};
use serde_json::Value;

use crate::quantity::QuantityValue;

/// A kind of object that the operator creates. Kinds are in the order in which they are applied: objects that others
/// refer to come first, and objects that start pods come after the objects that these pods need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The identity of pods.
    ServiceAccount,
    /// The permissions of an identity.
    Role,
    /// The assignment of a Role to an identity.
    RoleBinding,
    /// The replica token. The operator creates it once and cannot watch, read or change it.
    Secret,
    /// The configuration of routers, or the revisions that replicas fetch.
    ConfigMap,
    /// The volume of a shared cache.
    PersistentVolumeClaim,
    /// The connections that pods may accept and open.
    NetworkPolicy,
    /// The addresses of routers and replicas.
    Service,
    /// The number of pods that node drains may evict at the same time.
    PodDisruptionBudget,
    /// The fetch of a model into a shared cache.
    Job,
    /// The pods of replicas or of routers.
    Deployment,
    /// The endpoints that Prometheus scrapes. The kind exists only in clusters with the Prometheus operator.
    ServiceMonitor,
}

impl Kind {
    /// The kinds that exist in every cluster and that the operator watches.
    pub const BUILT_IN: [Self; 10] = [
        Self::ServiceAccount,
        Self::Role,
        Self::RoleBinding,
        Self::ConfigMap,
        Self::PersistentVolumeClaim,
        Self::NetworkPolicy,
        Self::Service,
        Self::PodDisruptionBudget,
        Self::Job,
        Self::Deployment,
    ];

    /// The group, version, kind and plural name in the API.
    fn names(self) -> (&'static str, &'static str, &'static str, &'static str) {
        const RBAC: &str = "rbac.authorization.k8s.io";
        match self {
            Self::ServiceAccount => ("", "v1", "ServiceAccount", "serviceaccounts"),
            Self::Role => (RBAC, "v1", "Role", "roles"),
            Self::RoleBinding => (RBAC, "v1", "RoleBinding", "rolebindings"),
            Self::Secret => ("", "v1", "Secret", "secrets"),
            Self::ConfigMap => ("", "v1", "ConfigMap", "configmaps"),
            Self::PersistentVolumeClaim => ("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
            Self::NetworkPolicy => ("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"),
            Self::Service => ("", "v1", "Service", "services"),
            Self::PodDisruptionBudget => ("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
            Self::Job => ("batch", "v1", "Job", "jobs"),
            Self::Deployment => ("apps", "v1", "Deployment", "deployments"),
            Self::ServiceMonitor => ("monitoring.coreos.com", "v1", "ServiceMonitor", "servicemonitors"),
        }
    }

    /// Returns the name of the kind in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.names().2
    }

    /// Returns the API group, which is empty for the core group.
    #[must_use]
    pub fn group(self) -> &'static str {
        self.names().0
    }

    /// Returns the plural name, which URLs and roles use.
    #[must_use]
    pub fn plural(self) -> &'static str {
        self.names().3
    }

    /// Returns the `apiVersion` of the objects of this kind.
    #[must_use]
    pub fn api_version(self) -> String {
        match self.names() {
            ("", version, ..) => version.to_owned(),
            (group, version, ..) => format!("{group}/{version}"),
        }
    }

    /// Returns the description of the kind that API clients need.
    #[must_use]
    pub fn api_resource(self) -> ApiResource {
        let (group, version, kind, plural) = self.names();
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
    }
}

/// The desired state of an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// The kind of the object.
    pub kind: Kind,
    /// The name of the object.
    pub name: String,
    /// The whole object, including `apiVersion`, `kind` and `metadata`.
    pub body: Value,
}

/// Returns `value` with the members of all objects sorted by name, so that equal values are serialized to equal texts.
#[must_use]
pub fn canonical(value: &Value) -> Value {
    let mut sorted = value.clone();
    sorted.sort_all_objects();
    sorted
}

/// Returns the first ten hexadecimal digits of the SHA-256 of the canonical form of `value`.
#[must_use]
pub fn digest(value: &Value) -> String {
    use sha2::{Digest as _, Sha256};
    let hash = Sha256::digest(canonical(value).to_string());
    hash.iter().take(5).map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the object `live` has every non-empty field of `desired` with the same value. Additional fields of `live`
/// are ignored: they are defaults, or belong to other field managers. Quantities are compared by value, because the API
/// server rewrites `1000m` to `1` and rounds `0.1m` up to `1m`.
#[must_use]
pub fn covers(live: &Value, desired: &Value) -> bool {
    match (live, desired) {
        (Value::Object(live), Value::Object(desired)) => desired.iter().all(|(name, desired)| {
            live.get(name).map_or_else(|| is_empty(desired), |live| covers(live, desired))
        }),
        (Value::Array(live), Value::Array(desired)) => {
            live.len() == desired.len()
                && live.iter().zip(desired).all(|(live, desired)| covers(live, desired))
        }
        (Value::String(live), Value::String(desired)) => {
            live == desired || are_equal_quantities(live, desired)
        }
        (live, desired) => live == desired,
    }
}

/// Whether both texts are quantities and the API server stores them as the same value.
fn are_equal_quantities(a: &str, b: &str) -> bool {
    let thousandths = |text: &str| text.parse::<QuantityValue>().map(QuantityValue::thousandths);
    matches!((thousandths(a), thousandths(b)), (Ok(a), Ok(b)) if a == b)
}

/// Returns the JSON form of a type of the Kubernetes API.
///
/// # Panics
/// Never: all types of the API are serializable.
#[must_use]
pub fn to_json(value: &impl serde::Serialize) -> Value {
    serde_json::to_value(value).expect("invariant: the types of the API are JSON")
}

/// Whether the API server may omit the value because it is empty.
pub(crate) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(members) => members.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn added_fields_are_no_drift_and_changed_fields_are() {
        let desired = json!({"a": {"b": "1000m"}, "list": [{"name": "x"}], "none": {}});
        let same = json!({"a": {"b": "1", "c": 2}, "list": [{"name": "x", "default": true}], "more": 1});
        assert!(covers(&same, &desired));
        for drifted in [
            json!({"a": {"b": "2"}, "list": [{"name": "x"}]}),
            json!({"a": {"b": "1"}, "list": []}),
            json!({"a": {"b": "1"}, "list": [{"name": "x"}, {"name": "y"}]}),
            json!({"list": [{"name": "x"}]}),
        ] {
            assert!(!covers(&drifted, &desired), "{drifted}");
        }
    }

    #[test]
    fn quantities_are_equal_if_the_api_server_stores_the_same_value() {
        let is_same = |live: &str, desired: &str| covers(&json!([live]), &json!([desired]));
        for (live, desired) in
            [("512Mi", ".5Gi"), ("8Gi", "+8Gi"), ("5", "5."), ("2", "2000m"), ("1m", "100u"), ("8e9", "8G")]
        {
            assert!(is_same(live, desired), "{live} {desired}");
        }
        for (live, desired) in [("8Gi", "8G"), ("1", "-1"), ("0", "Gi"), ("1", "one"), ("", "0")] {
            assert!(!is_same(live, desired), "{live} {desired}");
        }
    }

    #[test]
    fn the_digest_does_not_depend_on_the_order_of_members() {
        assert_eq!(
            digest(&json!({"a": 1, "b": {"c": 2, "d": 3}})),
            digest(&json!({"b": {"d": 3, "c": 2}, "a": 1}))
        );
        assert_ne!(digest(&json!({"a": 1})), digest(&json!({"a": 2})));
    }
}
