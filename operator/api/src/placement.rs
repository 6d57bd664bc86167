//! The placement of replicas on nodes.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, Toleration, TopologySpreadConstraint};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The placement of replicas on nodes. The fields have the same meaning as in a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Placement {
    /// Labels that a node must have. Unless they include `kubernetes.io/arch`, the node must also have
    /// `kubernetes.io/arch: amd64`, because the images are built for x86-64.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that the pods tolerate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Toleration>,
    /// Node affinity, pod affinity and pod anti-affinity of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// Constraints that spread the replicas over nodes or zones. A constraint without a `labelSelector` applies to the
    /// replicas of this resource. Default: replicas are spread over nodes as evenly as possible.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// Name of the PriorityClass of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub priority_class_name: Option<String>,
    /// Name of the RuntimeClass of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub runtime_class_name: Option<String>,
    /// Whether each replica has exclusive CPUs. `resources.limits` must then contain memory and a whole number of CPUs,
    /// and each value in `resources.requests` must be equal to its limit. The nodes must use the static CPU manager
    /// policy.
    pub cpu_pinning: bool,
}
