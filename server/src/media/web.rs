//! Fetches images from web servers.
//!
//! The client uses no proxy, because a proxy would resolve names itself and thereby bypass the check of addresses. It
//! does not reuse connections, so each request resolves and checks its host again. It sends no cookies and no
//! `Referer`. It does not decompress answers, because a small answer could become an image of any size.

use std::sync::Arc;

use axum::body::Bytes;
use reqwest::dns::Resolve;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, LOCATION};
use reqwest::redirect;
use reqwest::{Client, Response, StatusCode, Url};

use super::error::MediaError;
use super::resolve::PolicyResolver;
use super::urls::UrlPolicy;

/// Number of redirects that a fetch of an image follows with `--media-url-allow-redirects`.
///
/// If exceeded: 400, `invalid_image_url`.
const REDIRECTS_MAX: usize = 5;

/// Whether the client follows redirects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RedirectPolicy {
    Refuse,
    /// Follow redirects to URLs that the policy allows.
    Follow,
}

/// Fetches images from web servers.
#[derive(Debug)]
pub(super) struct WebClient {
    client: Client,
    policy: UrlPolicy,
    redirects: RedirectPolicy,
}

impl WebClient {
    /// Creates a client that resolves hosts with `resolver` and connects only to addresses that the policy allows.
    ///
    /// # Errors
    /// The system's certificates cannot be read.
    pub(super) fn new(
        policy: UrlPolicy,
        redirects: RedirectPolicy,
        resolver: Arc<dyn Resolve>,
    ) -> reqwest::Result<Self> {
        // Installing fails only if a provider is already installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let resolver = PolicyResolver { policy: Arc::new(policy.addresses.clone()), resolver };
        let client = Client::builder()
            .dns_resolver(resolver)
            .no_proxy()
            .redirect(redirect::Policy::none())
            .referer(false)
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .pool_max_idle_per_host(0)
            .user_agent(concat!("ovfleet/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self { client, policy, redirects })
    }

    /// Checks a URL without resolving its host.
    ///
    /// # Errors
    /// The policy does not allow the URL.
    pub(super) fn check(&self, url: &Url) -> Result<(), MediaError> {
        self.policy.check(url)
    }

    /// Fetches at most `bytes_max` bytes. Dropping the future closes the connection.
    ///
    /// # Errors
    /// The policy does not allow a URL or an address, the fetch fails, or the body is larger than `bytes_max`.
    pub(super) async fn get(&self, mut url: Url, bytes_max: usize) -> Result<Bytes, MediaError> {
        for _ in 0..=REDIRECTS_MAX {
            self.check(&url)?;
            let host = url.host_str().unwrap_or_default().to_owned();
            let request = self.client.get(url.clone()).header(ACCEPT_ENCODING, "identity");
            let sent = request.header(ACCEPT, "image/*, */*;q=0.1").send().await;
            let response = sent.map_err(|error| failure(&host, error))?;
            if let Some(location) = location(&response) {
                if self.redirects == RedirectPolicy::Refuse {
                    return Err(MediaError::RedirectNotAllowed { host });
                }
                let target = location.to_str().ok().and_then(|location| url.join(location).ok());
                url = target.ok_or(MediaError::InvalidRedirect { host })?;
                continue;
            }
            if !response.status().is_success() {
                return Err(MediaError::Status { host, status: response.status() });
            }
            return read(response, &host, bytes_max).await;
        }
        Err(MediaError::TooManyRedirects { redirects_max: REDIRECTS_MAX })
    }
}

/// Returns the target if the response is a redirect.
fn location(response: &Response) -> Option<&reqwest::header::HeaderValue> {
    let is_redirect = matches!(
        response.status(),
        StatusCode::MOVED_PERMANENTLY
            | StatusCode::FOUND
            | StatusCode::SEE_OTHER
            | StatusCode::TEMPORARY_REDIRECT
            | StatusCode::PERMANENT_REDIRECT
    );
    response.headers().get(LOCATION).filter(|_| is_redirect)
}

/// Reads the body. The declared length serves only to reject a body early.
async fn read(mut response: Response, host: &str, bytes_max: usize) -> Result<Bytes, MediaError> {
    let too_large = MediaError::TooLarge { bytes_max };
    if response.content_length().is_some_and(|length| length > bytes_max as u64) {
        return Err(too_large);
    }
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| failure(host, error))? {
        if chunk.len() > bytes_max - bytes.len() {
            return Err(too_large);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes.into())
}

fn failure(host: &str, error: reqwest::Error) -> MediaError {
    let host = host.to_owned();
    let is_unresolved = error.is_dns();
    // Remove the URL, which may contain a signature, because the error is logged.
    let source = error.without_url();
    if is_unresolved {
        MediaError::NoAllowedAddress { host, source }
    } else {
        MediaError::Transport { host, source }
    }
}
