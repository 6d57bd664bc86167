//! How replicas are replaced, leave and are protected.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Period, rules};

/// How replicas are replaced when what they run changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])", "rollout.maxSurge and rollout.maxUnavailable may not both be 0: no replica could ever be replaced")])))]
pub struct Rollout {
    /// Replicas, a number or a percentage, that may be there beyond `replicas` meanwhile.
    pub max_surge: IntOrString,
    /// Replicas, a number or a percentage, that may be missing meanwhile.
    pub max_unavailable: IntOrString,
    /// Seconds for which a new replica must be ready before the next one is replaced.
    #[schemars(range(min = 0, max = 86_400))]
    pub min_ready_seconds: i32,
    /// Time without progress after which a rollout is reported as failed. It goes on nevertheless. The time that a replica
    /// may take to load its model (2 minutes, and 1 second for each 50 MB of its memory limit) comes on top of it.
    pub progress_deadline: Period,
    /// Whether a rollout stops where it is.
    pub pause: bool,
}

impl Default for Rollout {
    fn default() -> Self {
        Self {
            max_surge: IntOrString::Int(1),
            max_unavailable: IntOrString::Int(0),
            min_ready_seconds: 0,
            progress_deadline: Period("10m".to_owned()),
            pause: false,
        }
    }
}

/// How a replica leaves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Drain {
    /// Time that a replica has for finishing its requests, before they are cut off. It leaves as soon as they are
    /// finished.
    pub timeout: Period,
}

impl Default for Drain {
    fn default() -> Self {
        Self { timeout: Period("2m".to_owned()) }
    }
}

/// How many replicas maintenance of the cluster may take away. Default: one at a time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!(has(self.minAvailable) && has(self.maxUnavailable))", "disruption takes minAvailable or maxUnavailable, not both")])))]
pub struct Disruption {
    /// Replicas, a number or a percentage, that must stay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_available: Option<IntOrString>,
    /// Replicas, a number or a percentage, that may go at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_unavailable: Option<IntOrString>,
}
