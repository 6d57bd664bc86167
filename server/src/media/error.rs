//! The reasons why an image was not fetched. The messages name the host, address or path that was refused, and the flag
//! that would allow it, if one exists. They reveal the status of a host's answer and, for a redirect, the scheme, host
//! and port of the target, but never the body.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::StatusCode;

/// The reason why an image was not fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MediaError {
    /// The reference is neither a supported URL nor an absolute path.
    #[error(
        "the image is neither a supported URL nor an absolute path; use a data: URL, such as data:image/png;base64,…"
    )]
    InvalidReference,
    #[error("the URL or path is longer than {bytes_max} bytes")]
    ReferenceTooLong { bytes_max: usize },
    #[error("URLs with the scheme {scheme:?} are not supported; use data:, http:, https: or file:")]
    UnsupportedScheme { scheme: String },
    /// The server fetches no URLs.
    #[error(
        "this server does not fetch images from URLs unless --allowed-media-domains is set; use a data: URL"
    )]
    UrlsDisabled,
    #[error("URLs with a user name or password are not supported")]
    Credentials,
    #[error("the host {host:?} is not in --allowed-media-domains")]
    HostNotAllowed { host: String },
    /// The host is allowed, but only on other ports.
    #[error("--allowed-media-domains does not allow port {port} of the host {host:?}")]
    PortNotAllowed { host: String, port: u16 },
    /// The host of the URL is an address that the server does not connect to.
    #[error("{address} is not a public address, and --allowed-media-networks does not allow it")]
    AddressNotAllowed { address: IpAddr },
    /// The host of the URL is an address that no flag allows.
    #[error(
        "{address} is a link-local address or belongs to a cloud metadata service; the server never connects to such addresses"
    )]
    AddressNeverAllowed { address: IpAddr },
    /// The host does not exist, or has only addresses that the server does not connect to. The message does not
    /// distinguish these cases, so that clients cannot probe for names in the network.
    #[error(
        "the host {host:?} has no public address and no address in --allowed-media-networks, or its name cannot be resolved"
    )]
    NoAllowedAddress {
        host: String,
        #[source]
        source: reqwest::Error,
    },
    #[error(
        "the host {host:?} redirects to another URL, but redirects are not followed without --media-url-allow-redirects"
    )]
    RedirectNotAllowed { host: String },
    #[error("the URL redirects more than {redirects_max} times")]
    TooManyRedirects { redirects_max: usize },
    /// The host sent a redirect to an invalid URL.
    #[error("the host {host:?} redirects to an invalid URL")]
    InvalidRedirect { host: String },
    /// The status of the host's answer is neither a success nor a redirect with a location.
    #[error("the host {host:?} answered with status {}", status.as_u16())]
    Status { host: String, status: StatusCode },
    /// The connection failed. The cause is for the log only.
    #[error("failed to fetch the image from the host {host:?}")]
    Transport {
        host: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("the image could not be fetched within {:?} (--image-fetch-timeout)", timeout)]
    TimedOut { timeout: Duration },
    #[error("the image is larger than {bytes_max} bytes (--max-image-bytes)")]
    TooLarge { bytes_max: usize },
    /// The server reads no files.
    #[error(
        "this server does not read images from files unless --allowed-local-media-path is set; use a data: URL"
    )]
    FilesDisabled,
    #[error("the path {path:?} is not below --allowed-local-media-path, or has a component \"..\"")]
    PathNotAllowed { path: PathBuf },
    /// The file does not exist or cannot be read, or a link in its path leads out of the directory.
    #[error(
        "the file {path:?} cannot be read, or a link in its path leads out of --allowed-local-media-path"
    )]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path:?} is not a regular file")]
    NotAFile { path: PathBuf },
    /// Too many images are being fetched.
    #[error("too many images are being fetched")]
    Busy,
}
