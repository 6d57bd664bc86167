//! Code that the mock services share: an HTTP server on a free port, digests and byte ranges.

use std::net::SocketAddr;

use axum::Router;
use axum::http::{HeaderMap, header};
use sha2::{Digest as _, Sha256};
use tokio::task::JoinSet;

/// An HTTP server that runs until it is dropped.
#[derive(Debug)]
pub(crate) struct MockServer {
    /// The address that the server listens on.
    pub(crate) address: SocketAddr,
    _task: JoinSet<()>,
}

impl MockServer {
    /// Serves `routes` on a free port of `host`.
    ///
    /// # Errors
    /// This machine does not have the address `host`.
    pub(crate) async fn start(host: &str, routes: Router) -> anyhow::Result<Self> {
        let listener = tokio::net::TcpListener::bind((host, 0)).await?;
        let address = listener.local_addr()?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            drop(axum::serve(listener, routes).await);
        });
        Ok(Self { address, _task: task })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// Formats `bytes` as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The SHA-256 digest of `bytes`, in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The position of the first byte that an open-ended range request (`bytes=N-`) asks for.
pub(crate) fn range_start(headers: &HeaderMap) -> Option<usize> {
    let range = headers.get(header::RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
}
