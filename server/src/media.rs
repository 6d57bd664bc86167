//! Fetches the bytes of an image to which a request refers by a URL or a path.
//!
//! Nothing is fetched unless flags allow it, because a client could otherwise use the server to access hosts and files
//! that only the server may access. This module does not parse images. The only parts of a request that it uses are the
//! reference and the tenant.
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
use clap::Args;
use ipnet::IpNet;
use process::units::{ByteSize, duration};
use reqwest::dns::Resolve;

use addresses::{AddressPolicy, network};
pub(crate) use error::MediaError;
use files::MediaDirectory;
use resolve::SystemResolver;
pub use urls::MediaDomain;
use urls::{Reference, UrlPolicy};
use web::{RedirectPolicy, WebClient};

use crate::limits::{FairSlot, FairSlots, NoSlot};
use crate::tenant::Tenant;

/// Number of images that are fetched at the same time. Each takes up to `--max-image-bytes` of memory. Tenants take
/// turns.
///
/// If exceeded: further fetches wait up to `--image-fetch-timeout`; then 429, `image_fetch_busy`, with `Retry-After`.
pub(crate) const FETCHES_MAX: usize = 16;

/// The flags that decide what the server may fetch, and the limits of a fetch.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Images")]
pub struct MediaPolicy {
    /// Hosts, such as `images.example.com,minio.storage.svc:9000`, from which the server may fetch images that requests
    /// reference by an http: or https: URL. Repeatable. `all` allows every host on ports 80 and 443.
    ///
    /// The host of the URL must match exactly; subdomains are not included. A host without a port is allowed on ports
    /// 80 and 443, a host with a port only on that port. The server resolves host names itself, connects only to public
    /// addresses (see --allowed-media-networks), and does not use a proxy. Default: http: and https: URLs are rejected;
    /// clients can send images as data: URLs instead.
    #[arg(long, value_name = "HOST", value_delimiter = ',')]
    pub allowed_media_domains: Vec<MediaDomain>,

    /// Non-public networks, such as `10.96.0.0/12` for an object store in the cluster, to which the server may also
    /// connect to fetch images from the hosts in --allowed-media-domains. Repeatable.
    ///
    /// Link-local addresses and the addresses of cloud metadata services are always rejected. Default: the server
    /// connects only to public addresses.
    #[arg(long, value_name = "CIDR", value_delimiter = ',', value_parser = network)]
    pub allowed_media_networks: Vec<IpNet>,

    /// Directory from which the server may read images that requests reference by an absolute path or a file: URL.
    ///
    /// Every client can use every image file in the directory. Symbolic links that lead out of the directory are
    /// rejected. Default: no files are read.
    #[arg(long, value_name = "PATH")]
    pub allowed_local_media_path: Option<PathBuf>,

    /// Follow up to five redirects when fetching an image. The URL of each redirect must be allowed, too.
    #[arg(long)]
    pub media_url_allow_redirects: bool,

    /// Time within which an image must be fetched, including redirects, or read from a file. The time that an image
    /// waits for other images to be fetched is not included.
    ///
    /// If exceeded: the request is rejected with 400, `invalid_image_url`.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    pub image_fetch_timeout: Duration,

    /// Maximum file size of an image that is fetched from a URL or read from a file. Accepts a unit suffix, as in 4MiB.
    /// Images larger than 20 MiB are rejected regardless of this flag.
    ///
    /// If exceeded: the request is rejected with 400, `invalid_image_url`.
    #[arg(long, value_name = "SIZE", default_value = "20MB")]
    pub max_image_bytes: ByteSize,
}

impl Default for MediaPolicy {
    /// Returns a policy that allows nothing, with the default limits of the flags.
    fn default() -> Self {
        Self {
            allowed_media_domains: Vec::new(),
            allowed_media_networks: Vec::new(),
            allowed_local_media_path: None,
            media_url_allow_redirects: false,
            image_fetch_timeout: Duration::from_secs(5),
            max_image_bytes: ByteSize(20_000_000),
        }
    }
}

/// Fetches images that a policy allows.
#[derive(Debug)]
pub(crate) struct MediaFetcher {
    /// `None` if no URLs are allowed.
    web: Option<WebClient>,
    /// `None` if no files are allowed.
    directory: Option<Arc<MediaDirectory>>,
    timeout: Duration,
    bytes_max: usize,
    slots: FairSlots,
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
            max_image_bytes,
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
        // Creating the client requires the system's certificates, which a server without allowed domains may lack.
        let web = if domains.is_empty() {
            None
        } else {
            let policy = UrlPolicy { domains, addresses: AddressPolicy { allowed_networks } };
            let client = WebClient::new(policy, redirects, resolver);
            Some(client.context("failed to create the HTTP client for --allowed-media-domains")?)
        };
        let bytes_max = max_image_bytes.to_usize();
        Ok(Self { web, directory, timeout, bytes_max, slots: FairSlots::new(FETCHES_MAX) })
    }

    /// Fetches the image that an `http:`, `https:` or `file:` URL or an absolute path refers to. The content is not
    /// checked and can have any media type. `tenant` is the tenant of the request.
    ///
    /// Dropping the future closes the connection. A file that is being read remains open until the read returns.
    ///
    /// # Errors
    /// The policy does not allow the reference, the image is too large, fetching it fails or takes too long, or too
    /// many images are being fetched.
    pub(crate) async fn fetch(&self, reference: &str, tenant: Tenant) -> Result<Bytes, MediaError> {
        // Check the reference before waiting for a slot, so that a forbidden reference is rejected immediately.
        match Reference::parse(reference)? {
            Reference::Web(url) => {
                let web = self.web.as_ref().ok_or(MediaError::UrlsDisabled)?;
                web.check(&url)?;
                let _slot = self.slot(tenant).await?;
                self.in_time(web.get(url, self.bytes_max)).await
            }
            Reference::File(path) => {
                let directory = Arc::clone(self.directory.as_ref().ok_or(MediaError::FilesDisabled)?);
                directory.relative(&path)?;
                let slot = self.slot(tenant).await?;
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

    async fn slot(&self, tenant: Tenant) -> Result<FairSlot, MediaError> {
        self.slots.slot(tenant, self.timeout).await.map_err(|NoSlot| MediaError::Busy)
    }
}

#[cfg(test)]
mod tests;
