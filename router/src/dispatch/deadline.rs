//! The time until which a request waits: the end of the router's timeout or the client's deadline, whichever is
//! earlier.

use std::time::{Duration, Instant};

use super::error::{PlacementError, WaitTarget};
use crate::queue::QueuedRequest;

/// The time until which a request waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    pub(super) at: Instant,
    /// Whether this is the client's deadline, and not the end of the router's timeout.
    pub(super) is_set_by_client: bool,
}

impl Deadline {
    /// The deadline of a request that begins to wait now and has this timeout.
    pub(super) fn after(timeout: Duration, queued: QueuedRequest) -> Self {
        Self::at(Instant::now() + timeout, queued)
    }

    /// The deadline of a request that waits until `latest`, or until the deadline of its client if that is earlier.
    pub(super) fn at(latest: Instant, queued: QueuedRequest) -> Self {
        match queued.deadline {
            Some(deadline) if deadline <= latest => Self { at: deadline, is_set_by_client: true },
            _ => Self { at: latest, is_set_by_client: false },
        }
    }

    /// The error for a request if no replica became available by the deadline.
    pub(super) fn no_replica(self, target: WaitTarget) -> PlacementError {
        if self.is_set_by_client { PlacementError::ClientTimeout(target) } else { PlacementError::NoReplica }
    }
}
