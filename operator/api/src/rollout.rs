//! The settings for replacing, draining and evicting replicas.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Period;
use crate::schema::{amount_of_additional_replicas, amount_of_replicas, rules};

/// The settings of a rollout, which replaces replicas when their pod template changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])", "rollout.maxSurge and rollout.maxUnavailable must not both be 0, because then no replica could be replaced")])))]
pub struct Rollout {
    /// Maximum number or percentage of additional replicas during a rollout.
    #[schemars(schema_with = "amount_of_additional_replicas")]
    pub max_surge: IntOrString,
    /// Maximum number or percentage of unavailable replicas during a rollout.
    #[schemars(schema_with = "amount_of_replicas")]
    pub max_unavailable: IntOrString,
    /// Number of seconds for which a new replica must be ready before it counts as available.
    #[schemars(range(min = 0, max = 86_400))]
    pub min_ready_seconds: i32,
    /// Time without progress after which a rollout is reported as failed. The rollout continues nevertheless. This time
    /// must be longer than `rollout.minReadySeconds`. The operator extends it by the estimated time to load the model,
    /// which is 2 minutes plus 1 second for each 50 MB of the memory limit. Without a memory limit, the estimate
    /// assumes 64 GiB.
    pub progress_deadline: Period,
    /// Whether rollouts are paused.
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

/// The settings for draining replicas and routers before they stop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Drain {
    /// Maximum time that a replica or router spends finishing its requests before it stops. Requests that are still
    /// running after this time are canceled.
    pub timeout: Period,
}

impl Default for Drain {
    fn default() -> Self {
        Self { timeout: Period("2m".to_owned()) }
    }
}

/// The number of replicas that a node drain may evict at the same time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!(has(self.minAvailable) && has(self.maxUnavailable))", "disruption must not set both minAvailable and maxUnavailable")])))]
pub struct Disruption {
    /// Number or percentage of replicas that must remain available after an eviction.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "amount_of_replicas")]
    pub min_available: Option<IntOrString>,
    /// Number or percentage of replicas that may be unavailable after an eviction.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "amount_of_replicas")]
    pub max_unavailable: Option<IntOrString>,
}
