//! Resolves host names to the addresses that the policy allows. The HTTP client connects to these addresses without
//! resolving the name again, so a name server cannot change an address after the check.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::Semaphore;

use super::addresses::AddressPolicy;

/// Number of host names that are resolved at the same time. The system's resolver cannot be canceled, so an
/// unresponsive name server occupies a thread for longer than a fetch lasts.
///
/// If exceeded: further fetches wait; the waiting time counts toward their `--image-fetch-timeout`.
const LOOKUPS_MAX: usize = 16;

/// The resolver of the operating system.
#[derive(Debug)]
pub(super) struct SystemResolver {
    lookups: Arc<Semaphore>,
}

impl Default for SystemResolver {
    fn default() -> Self {
        Self { lookups: Arc::new(Semaphore::new(LOOKUPS_MAX)) }
    }
}

impl Resolve for SystemResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let lookups = Arc::clone(&self.lookups);
        Box::pin(async move {
            let lookup = lookups.acquire_owned().await?;
            let addresses = tokio::task::spawn_blocking(move || {
                let _lookup = lookup;
                (name.as_str(), 0).to_socket_addrs()
            });
            Ok(Box::new(addresses.await??) as Addrs)
        })
    }
}

/// A resolver that returns only allowed addresses.
pub(super) struct PolicyResolver {
    pub(super) policy: Arc<AddressPolicy>,
    pub(super) resolver: Arc<dyn Resolve>,
}

impl Resolve for PolicyResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let policy = Arc::clone(&self.policy);
        let resolution = self.resolver.resolve(name);
        Box::pin(async move {
            let is_allowed = |address: &SocketAddr| policy.permits(address.ip());
            let allowed: Vec<SocketAddr> = resolution.await?.filter(is_allowed).collect();
            if allowed.is_empty() {
                return Err("the policy allows none of the addresses".into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}
