//! Turns the reference of an image in a request into its bytes.
//!
//! Nothing is fetched unless flags allow it, because a client that chooses what a server connects to or reads can reach
//! what only the server should. This module knows nothing of requests and images.
//!
//! ```text
//! reference ─► urls: scheme, host, port ─► resolve: addresses ─► web: a request for each redirect ─► bytes
//!          └─► files: a path below a directory ─────────────────────────────────────────────────────┘
//! ```

mod addresses;
mod error;
mod files;
mod resolve;
mod urls;
mod web;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::body::Bytes;
use reqwest::dns::Resolve;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use addresses::AddressPolicy;
pub use addresses::Network;
pub(crate) use error::MediaError;
use files::MediaDirectory;
use resolve::SystemResolver;
pub use urls::MediaDomain;
use urls::{Reference, UrlPolicy};
use web::{RedirectPolicy, WebClient};

/// Number of images that are fetched at the same time. Each takes up to `--max-image-bytes` of memory.
///
/// Beyond it: further fetches wait up to `--image-fetch-timeout`; then 429, `image_fetch_busy`, with `Retry-After`.
pub(crate) const FETCHES_MAX: usize = 16;

/// What the server may fetch, and the limits of a fetch. The fields have the names of the flags.
#[derive(Clone, Debug)]
pub struct MediaPolicy {
    /// The hosts from which images are fetched. None is allowed if this is empty.
    pub allowed_media_domains: Vec<MediaDomain>,
    /// The networks whose addresses are allowed in addition to public ones.
    pub allowed_media_networks: Vec<Network>,
    /// The directory from which files are read.
    pub allowed_local_media_path: Option<PathBuf>,
    /// Whether redirects to allowed URLs are followed.
    pub media_url_allow_redirects: bool,
    /// Time in which an image must be fetched, and time to wait until that begins.
    pub image_fetch_timeout: Duration,
    /// Size of an image file in bytes.
    pub max_image_bytes: usize,
}

impl Default for MediaPolicy {
    /// A policy that allows nothing, with the default limits of the flags.
    fn default() -> Self {
        Self {
            allowed_media_domains: Vec::new(),
            allowed_media_networks: Vec::new(),
            allowed_local_media_path: None,
            media_url_allow_redirects: false,
            image_fetch_timeout: Duration::from_secs(5),
            max_image_bytes: 20_000_000,
        }
    }
}

/// Fetches images as far as a policy allows it.
#[derive(Debug)]
pub(crate) struct MediaFetcher {
    /// `None` if no URLs are allowed.
    web: Option<WebClient>,
    /// `None` if no files are allowed.
    directory: Option<Arc<MediaDirectory>>,
    timeout: Duration,
    bytes_max: usize,
    slots: Arc<Semaphore>,
}

impl MediaFetcher {
    /// Creates a fetcher.
    ///
    /// # Errors
    /// The directory cannot be opened, or the system's certificates cannot be read.
    pub(crate) fn new(policy: MediaPolicy) -> anyhow::Result<Self> {
        Self::with_resolver(policy, Arc::new(SystemResolver::default()))
    }

    fn with_resolver(policy: MediaPolicy, resolver: Arc<dyn Resolve>) -> anyhow::Result<Self> {
        let MediaPolicy {
            allowed_media_domains: domains,
            allowed_media_networks: allowed_networks,
            allowed_local_media_path,
            media_url_allow_redirects,
            image_fetch_timeout: timeout,
            max_image_bytes: bytes_max,
        } = policy;
        let directory = match allowed_local_media_path {
            Some(path) => {
                let directory = MediaDirectory::open(&path);
                let problem = || format!("failed to open --allowed-local-media-path {}", path.display());
                Some(Arc::new(directory.with_context(problem)?))
            }
            None => None,
        };
        let redirects =
            if media_url_allow_redirects { RedirectPolicy::Follow } else { RedirectPolicy::Refuse };
        // Without allowed hosts, the server does not need certificates.
        let web = if domains.is_empty() {
            None
        } else {
            let policy = UrlPolicy { domains, addresses: AddressPolicy { allowed_networks } };
            let client = WebClient::new(policy, redirects, resolver);
            Some(client.context("failed to create the HTTP client of --allowed-media-domains")?)
        };
        Ok(Self { web, directory, timeout, bytes_max, slots: Arc::new(Semaphore::new(FETCHES_MAX)) })
    }

    /// Fetches the image that an `http:`, `https:` or `file:` URL or an absolute path refers to. The content may be
    /// anything: no media type is checked.
    ///
    /// Dropping the future closes the connection. A file that is being read remains open until the read returns.
    ///
    /// # Errors
    /// The policy does not allow the reference, the image is too large, fetching it fails or takes too long, or too many
    /// images are being fetched.
    pub(crate) async fn fetch(&self, reference: &str) -> Result<Bytes, MediaError> {
        // Check before waiting, so that a reference that is not allowed is refused immediately.
        match Reference::parse(reference)? {
            Reference::Web(url) => {
                let web = self.web.as_ref().ok_or(MediaError::UrlsDisabled)?;
                web.check(&url)?;
                let _slot = self.slot().await?;
                self.in_time(web.get(url, self.bytes_max)).await
            }
            Reference::File(path) => {
                let directory = Arc::clone(self.directory.as_ref().ok_or(MediaError::FilesDisabled)?);
                directory.relative(&path)?;
                let slot = self.slot().await?;
                let bytes_max = self.bytes_max;
                let name = path.clone();
                // A read that hangs in the file system cannot be canceled and occupies its slot until it returns.
                let read = tokio::task::spawn_blocking(move || {
                    let _slot = slot;
                    directory.read(&path, bytes_max)
                });
                let joined = async {
                    read.await.unwrap_or_else(|error| {
                        Err(MediaError::Unreadable { path: name, source: error.into() })
                    })
                };
                self.in_time(joined).await
            }
        }
    }

    async fn in_time(
        &self,
        fetch: impl Future<Output = Result<Bytes, MediaError>>,
    ) -> Result<Bytes, MediaError> {
        let timed_out = Err(MediaError::TimedOut { timeout: self.timeout });
        tokio::time::timeout(self.timeout, fetch).await.unwrap_or(timed_out)
    }

    async fn slot(&self) -> Result<OwnedSemaphorePermit, MediaError> {
        let slot = Arc::clone(&self.slots).acquire_owned();
        let slot = tokio::time::timeout(self.timeout, slot).await;
        let slot = slot.map_err(|_| MediaError::Busy)?;
        Ok(slot.expect("invariant: the semaphore is never closed"))
    }
}

#[cfg(test)]
mod tests;
