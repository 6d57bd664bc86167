//! The containers of a pod and their statuses. This module is pure.

use k8s_openapi::api::core::v1::{Container, ContainerStateTerminated, ContainerStatus, Pod, PodStatus};

use crate::names::Component;
use crate::ports::PROGRESS_PORT_NAME;

/// Returns the container that fetches a model. A container in the user's `podTemplate` may have the same name, so the
/// operator's container is also recognized by its port.
pub(super) fn fetch_container(pod: &Pod) -> Option<&Container> {
    let spec = pod.spec.as_ref()?;
    let mut containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    containers.find(|container| {
        let mut ports = container.ports.iter().flatten();
        container.name == Component::Fetch.name()
            && ports.any(|port| port.name.as_deref() == Some(PROGRESS_PORT_NAME))
    })
}

/// Returns the status of the container that fetches a model.
pub(super) fn fetch_status<'a>(pod: &Pod, status: &'a PodStatus) -> Option<&'a ContainerStatus> {
    let fetch = fetch_container(pod)?;
    containers(status).find(|container| container.name == fetch.name)
}

/// Returns the statuses of all containers, in the order in which they start.
pub(super) fn containers(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten())
}

/// Returns the last exit of the container, which may be running again or waiting for its restart.
pub(super) fn last_exit(container: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    let exits = [&container.state, &container.last_state];
    exits.into_iter().find_map(|state| state.as_ref()?.terminated.as_ref())
}
