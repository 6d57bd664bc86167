//! Adds transition times to conditions. This module is pure.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use operator_api::LlmDeploymentStatus;

use super::conditions::ConditionState;

/// Returns the conditions in `states`, each with the time at which its status last changed.
pub(super) fn with_transition_times(
    states: impl IntoIterator<Item = (&'static str, ConditionState)>,
    generation: Option<i64>,
    previous: Option<&LlmDeploymentStatus>,
    now: Timestamp,
) -> Vec<Condition> {
    /// Length of the message of a condition, in characters.
    ///
    /// If exceeded: the message is truncated.
    const MESSAGE_MAX: usize = 2000;
    let before = previous.map(|previous| previous.conditions.as_slice()).unwrap_or_default();
    // The API server stores times with a resolution of one second.
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let conditions = states.into_iter().map(|(name, state)| {
        let status = state.holds.map_or("Unknown", |holds| if holds { "True" } else { "False" });
        let same = before.iter().find(|condition| condition.type_ == name && condition.status == status);
        Condition {
            type_: name.to_owned(),
            status: status.to_owned(),
            reason: state.reason,
            message: state.message.chars().take(MESSAGE_MAX).collect(),
            observed_generation: generation,
            last_transition_time: same.map_or(Time(now), |condition| condition.last_transition_time.clone()),
        }
    });
    conditions.collect()
}
