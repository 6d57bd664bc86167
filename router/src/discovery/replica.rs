//! Describes a replica as discovery reports it.

use std::net::SocketAddr;

/// A replica that discovery has reported.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiscoveredReplica {
    /// The address of the replica's API.
    pub http: SocketAddr,
    /// The address of the replica's load reports, if it reports its load.
    pub grpc: Option<SocketAddr>,
    /// The name of the replica in logs, headers and metrics.
    pub name: String,
    /// The pod behind the address, if Kubernetes reports it.
    pub pod: Option<Pod>,
}

/// A reference to a Kubernetes pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pod {
    /// The namespace of the pod.
    pub namespace: String,
    /// The name of the pod.
    pub name: String,
    /// The UID of the pod, which is empty if the EndpointSlice does not contain it.
    pub uid: String,
}
