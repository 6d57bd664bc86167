//! What discovery reports about a replica.

use std::net::SocketAddr;

/// A replica that discovery has found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiscoveredReplica {
    /// Where its API is.
    pub http: SocketAddr,
    /// Where it reports its load.
    pub grpc: Option<SocketAddr>,
    /// What it is called in logs, headers and metrics.
    pub name: String,
    /// The pod behind the address, where Kubernetes names it.
    pub pod: Option<Pod>,
}

/// A Kubernetes pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID; empty if the EndpointSlice does not contain it.
    pub uid: String,
}
