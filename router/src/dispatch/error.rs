//! The reasons why no replica was assigned to a request.

use std::time::Duration;

/// The reason why no replica was assigned to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementError {
    /// The queue is full.
    QueueFull {
        /// The time after which a replica is expected to have room.
        retry_after: Duration,
    },
    /// The request has waited for room until its timeout.
    QueueTimeout {
        /// The time after which a replica is expected to have room.
        retry_after: Duration,
    },
    /// No replica of the model accepts requests. Either none became available in time, or too many requests are already
    /// waiting for one.
    NoReplica,
    /// No replica became available within the time that the client has set.
    ClientTimeout(WaitTarget),
    /// The only replica that could answer the request is gone, or does not serve the model.
    ReplicaGone,
}

/// The replicas that can serve a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitTarget {
    /// The replicas of the model.
    Model,
    /// The replica that has the stored object.
    StoredObject,
}
