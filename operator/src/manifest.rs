//! What the operator writes: an object of a kind, as JSON. The list of kinds here is the list of what the operator
//! owns, watches and may touch.

use kube::core::{ApiResource, GroupVersionKind};
use serde_json::Value;

/// A kind of object that the operator makes, in the order in which they are applied: what others refer to comes
/// first, and what starts processes comes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// An identity for pods.
    ServiceAccount,
    /// What an identity may do.
    Role,
    /// Who has a role.
    RoleBinding,
    /// The replica token. It is created once and never watched, read or changed.
    Secret,
    /// The router's configuration.
    ConfigMap,
    /// The volume of a shared cache.
    PersistentVolumeClaim,
    /// Who may talk to whom.
    NetworkPolicy,
    /// Addresses.
    Service,
    /// What maintenance may take away.
    PodDisruptionBudget,
    /// The fetching of a model.
    Job,
    /// Replicas and routers.
    Deployment,
    /// What Prometheus scrapes; of the Prometheus operator, and absent without it.
    ServiceMonitor,
}

impl Kind {
    /// All kinds that every cluster has and that the operator watches.
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

    /// Group, version, kind and plural, as the API has them.
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

    /// As the API has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.names().2
    }

    /// The API group, empty for the core.
    #[must_use]
    pub fn group(self) -> &'static str {
        self.names().0
    }

    /// The name in addresses and in roles.
    #[must_use]
    pub fn plural(self) -> &'static str {
        self.names().3
    }

    /// The `apiVersion` of its objects.
    #[must_use]
    pub fn api_version(self) -> String {
        match self.names() {
            ("", version, ..) => version.to_owned(),
            (group, version, ..) => format!("{group}/{version}"),
        }
    }

    /// For clients.
    #[must_use]
    pub fn resource(self) -> ApiResource {
        let (group, version, kind, plural) = self.names();
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
    }
}

/// An object as it should be.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// All that is to be applied, `apiVersion`, `kind` and `metadata` included.
    pub body: Value,
}

/// `value` with the members of all objects in the order of their names, so that equal values are equal texts.
#[must_use]
pub fn canonical(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let mut sorted: Vec<(&String, &Value)> = members.iter().collect();
            sorted.sort_by_key(|(name, _)| *name);
            Value::Object(sorted.into_iter().map(|(name, value)| (name.clone(), canonical(value))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(canonical).collect()),
        other => other.clone(),
    }
}

/// Ten hexadecimal digits that change with `value`.
#[must_use]
pub fn digest(value: &Value) -> String {
    use sha2::{Digest as _, Sha256};
    let hash = Sha256::digest(canonical(value).to_string());
    hash.iter().take(5).map(|byte| format!("{byte:02x}")).collect()
}

/// Whether `live` has all that `wanted` says. What `live` has beyond that, as defaults and what others have added, is
/// theirs. Quantities are compared as what they are: the API server rewrites `1000m` to `1`.
#[must_use]
pub fn covers(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => wanted.iter().all(|(name, wanted)| {
            live.get(name).map_or_else(|| is_empty(wanted), |live| covers(live, wanted))
        }),
        (Value::Array(live), Value::Array(wanted)) => {
            live.len() == wanted.len() && live.iter().zip(wanted).all(|(live, wanted)| covers(live, wanted))
        }
        (Value::String(live), Value::String(wanted)) => {
            live == wanted || matches!((quantity(live), quantity(wanted)), (Some(a), Some(b)) if a == b)
        }
        (live, wanted) => live == wanted,
    }
}

/// The API server leaves out what is empty.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(members) => members.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

/// A quantity in thousandths, if `text` is one.
#[must_use]
pub fn quantity(text: &str) -> Option<i128> {
    const SUFFIXES: [(&str, i128); 13] = [
        ("Ki", 1 << 10),
        ("Mi", 1 << 20),
        ("Gi", 1 << 30),
        ("Ti", 1 << 40),
        ("Pi", 1 << 50),
        ("Ei", 1 << 60),
        ("k", 1_000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
        ("T", 1_000_000_000_000),
        ("P", 1_000_000_000_000_000),
        ("E", 1_000_000_000_000_000_000),
        ("", 1),
    ];
    if let Some(number) = text.strip_suffix('m') {
        return decimal(number).map(|(whole, thousandths)| (whole * 1000 + thousandths) / 1000);
    }
    let (suffix, factor) = SUFFIXES.iter().find(|(suffix, _)| text.ends_with(suffix))?;
    let (whole, thousandths) = decimal(&text[..text.len() - suffix.len()])?;
    Some((whole * 1000 + thousandths) * factor)
}

/// The whole part and the thousandths.
fn decimal(text: &str) -> Option<(i128, i128)> {
    /// Beyond this no quantity is, and no product of it with a factor leaves the type.
    const DIGITS_MAX: usize = 16;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.len() <= DIGITS_MAX && text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) {
        return None;
    }
    let thousandths = format!("{fraction:0<3}");
    Some((whole.parse().ok()?, thousandths[..3].parse().ok()?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn quantities_are_numbers_whatever_their_suffix() {
        for (text, thousandths) in [
            ("1", 1000),
            ("1000m", 1000),
            ("500m", 500),
            ("1.5", 1500),
            ("1Ki", 1_024_000),
            ("1.5Ki", 1_536_000),
            ("2k", 2_000_000),
        ] {
            assert_eq!(quantity(text), Some(thousandths), "{text}");
        }
        for text in ["", "Gi", "one", "1x", "-1", "1.2.3", "99999999999999999999"] {
            assert_eq!(quantity(text), None, "{text}");
        }
    }

    #[test]
    fn what_others_add_is_no_drift_and_what_they_change_is() {
        let wanted = json!({"a": {"b": "1000m"}, "list": [{"name": "x"}], "none": {}});
        let same = json!({"a": {"b": "1", "c": 2}, "list": [{"name": "x", "default": true}], "more": 1});
        assert!(covers(&same, &wanted));
        for drifted in [
            json!({"a": {"b": "2"}, "list": [{"name": "x"}]}),
            json!({"a": {"b": "1"}, "list": []}),
            json!({"a": {"b": "1"}, "list": [{"name": "x"}, {"name": "y"}]}),
            json!({"list": [{"name": "x"}]}),
        ] {
            assert!(!covers(&drifted, &wanted), "{drifted}");
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
