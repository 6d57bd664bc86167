//! What is used where a resource does not say: it comes from the command line and from the platform.

use std::net::{IpAddr, Ipv4Addr};

/// What is used where a resource does not say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// The server's image.
    pub server_image: String,
    /// The router's image.
    pub router_image: String,
    /// When images are pulled, in Kubernetes' words; what Kubernetes does by itself without.
    pub image_pull_policy: Option<String>,
    /// The address that pods listen on: any address of the cluster's IP family.
    pub listen: IpAddr,
    /// Who decides which user pods run as where a resource does not say.
    pub pod_user: PodUser,
}

impl Defaults {
    /// These images, and otherwise what suits a cluster of IPv4 without users of its own.
    #[must_use]
    pub fn with_images(server_image: &str, router_image: &str) -> Self {
        Self {
            server_image: server_image.to_owned(),
            router_image: router_image.to_owned(),
            image_pull_policy: None,
            listen: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            pod_user: PodUser::Fixed,
        }
    }
}

/// Who decides which user pods run as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodUser {
    /// The operator: always the same one.
    Fixed,
    /// The platform: OpenShift assigns a range of users to each namespace and rejects others.
    Platform,
}

/// The user that pods run as where neither the resource nor the platform decides.
pub(super) const POD_USER: i64 = 65532;
