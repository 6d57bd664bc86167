//! The flags for images that requests refer to by URL or path.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::media::{MediaDomain, MediaPolicy, Network};
use process::units::{ByteSize, duration};

/// The flags for images that requests refer to by URL or path.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Images")]
pub struct MediaArgs {
    /// Hosts from which the server fetches images that requests refer to by an http: or https: URL, such as
    /// `images.example.com,minio.storage.svc:9000`. Repeatable. `all` allows every host.
    ///
    /// A host must be equal to the host of the URL: its subdomains are other hosts. A host without a port is allowed on
    /// ports 80 and 443, a host with a port only on that port. The server resolves names itself, connects only to public
    /// addresses (see --allowed-media-networks), and uses no proxy. Default: URLs are refused; clients send images as
    /// data: URLs.
    #[arg(long, value_name = "HOST", value_delimiter = ',')]
    pub allowed_media_domains: Vec<MediaDomain>,

    /// Networks that are not public, from which the server may nevertheless fetch images of --allowed-media-domains, such
    /// as `10.96.0.0/12` for an object store in the cluster. Repeatable.
    ///
    /// Link-local addresses and others at which clouds offer credentials are always refused. Default: the server connects
    /// only to public addresses.
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    pub allowed_media_networks: Vec<Network>,

    /// Directory from which the server reads images that requests refer to by an absolute path or a file: URL.
    ///
    /// Every client can read every file in the directory that is an image. Links that lead out of the directory are refused.
    /// Default: no files are read.
    #[arg(long, value_name = "PATH")]
    pub allowed_local_media_path: Option<PathBuf>,

    /// Follow up to five redirects when fetching an image. The URL of each redirect must be allowed too.
    #[arg(long)]
    pub media_url_allow_redirects: bool,

    /// Time in which an image must be fetched, including redirects.
    ///
    /// Beyond it: 400, `invalid_image_url`.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    pub image_fetch_timeout: Duration,

    /// Size of the file of an image that is fetched or read. Accepts a unit, such as 4MiB. No image may be larger than
    /// 20 MiB.
    ///
    /// Beyond it: 400, `invalid_image_url`.
    #[arg(long, value_name = "SIZE", default_value = "20MB")]
    pub max_image_bytes: ByteSize,
}

impl MediaArgs {
    pub(crate) fn policy(self) -> MediaPolicy {
        let Self {
            allowed_media_domains,
            allowed_media_networks,
            allowed_local_media_path,
            media_url_allow_redirects,
            image_fetch_timeout,
            max_image_bytes,
        } = self;
        MediaPolicy {
            allowed_media_domains,
            allowed_media_networks,
            allowed_local_media_path,
            media_url_allow_redirects,
            image_fetch_timeout,
            max_image_bytes: max_image_bytes.to_usize(),
        }
    }
}
