//! The statuses of the containers of a pod. This module is pure.

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, PodStatus};

/// Returns the statuses of all containers, in the order in which they start.
pub(super) fn containers(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten())
}

/// Returns the last exit of the container, which may be running again or waiting for its restart.
pub(super) fn last_exit(container: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    let exits = [&container.state, &container.last_state];
    exits.into_iter().find_map(|state| state.as_ref()?.terminated.as_ref())
}
