//! Computes the status of a resource that is invalid or cannot be decoded. The operator does not change the objects of
//! such a resource. The status therefore reports the error and describes the replicas that exist; the other fields of
//! the status retain their previous values. This module is pure.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use operator_api::{LlmDeploymentSpec, LlmDeploymentStatus, Phase, conditions as types};

use super::conditions::{ConditionState, available};
use super::summary::{present_pods, status_count};
use super::transition_times::with_transition_times;
use crate::names::{Component, Owner};
use crate::observe::ObservedState;
use crate::pod::PodState;
use crate::validate::ValidationError;

/// A resource that is invalid or cannot be decoded.
#[derive(Clone, Copy, Debug)]
pub struct RefusedResource<'a> {
    /// The metadata of the resource.
    pub metadata: &'a ObjectMeta,
    /// The `spec` of the resource; `None` if it cannot be decoded.
    pub spec: Option<&'a LlmDeploymentSpec>,
    /// The previous status of the resource.
    pub previous: Option<&'a LlmDeploymentStatus>,
    /// The observed state of the resource.
    pub observed: &'a ObservedState,
    /// The reason why the resource is refused.
    pub error: &'a ValidationError,
}

/// Returns the status of a refused resource.
#[must_use]
pub fn refused_status(resource: &RefusedResource<'_>, now: Timestamp) -> LlmDeploymentStatus {
    let RefusedResource { metadata, spec, previous, observed, error } = *resource;
    let former = previous.cloned().unwrap_or_default();
    let owner = Owner::new(metadata);
    let deployment = |component| observed.deployment(&owner.component_name(component));
    let live_replicas = deployment(Component::Server)
        .and_then(|server| server.data.pointer("/spec/replicas")?.as_i64())
        .and_then(|replicas| i32::try_from(replicas).ok());
    let requested = spec.filter(|spec| !spec.suspend).map(|spec| spec.replicas);
    let desired = live_replicas.or(requested).unwrap_or(0);
    let pods: Vec<&PodState> = present_pods(observed, Component::Server).collect();
    let count = |test: &dyn Fn(&PodState) -> bool| pods.iter().filter(|pod| test(pod)).count() as i32;
    let ready = count(&|pod| pod.is_ready);
    let routable = count(&PodState::receives_requests);
    let template = former.release.as_ref().map(|release| release.template.as_str());
    let draining = observed.pods_of(Component::Server).filter(|pod| pod.is_terminating && !pod.is_finished);

    let has_router =
        deployment(Component::Router).is_some_and(|router| status_count(router, "readyReplicas") > 0);
    let router = ConditionState::new(has_router, "Starting", "no router is ready yet");
    let message = error.to_string();
    let mut states = vec![
        (types::ACCEPTED, ConditionState::new(false, error.reason(), message.clone())),
        (types::READY, ConditionState::new(false, "NotAccepted", message)),
    ];
    for condition in &former.conditions {
        let known = types::ALL.into_iter().find(|name| *name == condition.type_);
        let Some(name) = known.filter(|name| ![types::ACCEPTED, types::READY].contains(name)) else {
            continue;
        };
        let state = if name == types::AVAILABLE {
            available(desired, routable, &router)
        } else {
            let holds = match condition.status.as_str() {
                "True" => Some(true),
                "False" => Some(false),
                _ => None,
            };
            ConditionState::new(holds, &condition.reason, condition.message.clone())
        };
        states.push((name, state));
    }
    states.sort_by_key(|(name, _)| types::ALL.iter().position(|known| known == name));
    let requested_model = spec.map(|spec| spec.model.name.clone().unwrap_or_else(|| owner.name.clone()));
    LlmDeploymentStatus {
        observed_generation: metadata.generation.unwrap_or(0),
        phase: Phase::Refused,
        replicas: pods.len() as i32,
        ready_replicas: ready,
        routable_replicas: routable,
        updated_replicas: count(&|pod| Some(pod.template_hash.as_str()) == template),
        draining_replicas: draining.count() as i32,
        ready: format!("{ready}/{desired}"),
        model: requested_model.unwrap_or(former.model),
        conditions: with_transition_times(states, metadata.generation, previous, now),
        ..former
    }
}
