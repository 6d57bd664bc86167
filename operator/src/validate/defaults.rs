//! The defaults for fields that a resource omits. They come from the command line and from the platform.

use std::net::{IpAddr, Ipv4Addr};

/// The defaults for fields that a resource omits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// The image of the server.
    pub server_image: String,
    /// The image of the router.
    pub router_image: String,
    /// The pull policy of images; `None` for the default of Kubernetes.
    pub image_pull_policy: Option<String>,
    /// The address that pods listen on: the unspecified address of the cluster's IP family.
    pub host: IpAddr,
    /// Whether the operator or the platform sets the user that pods run as.
    pub pod_user: PodUser,
}

impl Defaults {
    /// Creates defaults with these images for an IPv4 cluster that does not assign users.
    #[must_use]
    pub fn with_images(server_image: &str, router_image: &str) -> Self {
        Self {
            server_image: server_image.to_owned(),
            router_image: router_image.to_owned(),
            image_pull_policy: None,
            host: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            pod_user: PodUser::Fixed,
        }
    }
}

/// Whether the operator or the platform sets the user that pods run as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodUser {
    /// The operator sets a fixed user.
    Fixed,
    /// The platform assigns the user: OpenShift has a range of user IDs for each namespace and rejects other user IDs.
    Platform,
}
