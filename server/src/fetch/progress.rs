//! Reports the progress of a fetch over HTTP and in the log.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// The progress of a fetch.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    bytes: AtomicU64,
    /// The total size in bytes, or 0 while it is unknown.
    total: AtomicU64,
}

impl Progress {
    /// Sets the total size in bytes.
    pub(crate) fn expect(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
    }

    /// Adds downloaded bytes.
    pub(crate) fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Subtracts downloaded bytes that were discarded.
    pub(crate) fn remove(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns the number of downloaded bytes, and the total size if it is known.
    pub(crate) fn read(&self) -> (u64, Option<u64>) {
        let total = self.total.load(Ordering::Relaxed);
        (self.bytes.load(Ordering::Relaxed), (total > 0).then_some(total))
    }
}

/// Serves the progress on `port`. Errors are logged and do not stop the fetch.
pub(crate) async fn serve(port: u16, progress: Arc<Progress>) {
    let pages = Router::new().route("/progress", get(page)).with_state(progress);
    let outcome = match TcpListener::bind(&every_address(port)[..]).await {
        Ok(listener) => axum::serve(listener, pages).await,
        Err(error) => Err(error),
    };
    if let Err(error) = outcome {
        tracing::warn!(port, %error, "failed to serve the progress");
    }
}

/// Periodically logs the progress.
pub(crate) async fn log(progress: Arc<Progress>) {
    const INTERVAL: Duration = Duration::from_secs(5);
    loop {
        tokio::time::sleep(INTERVAL).await;
        let (bytes, total) = progress.read();
        tracing::info!(mib = bytes >> 20, mib_total = total.map(|total| total >> 20), "fetching");
    }
}

async fn page(State(progress): State<Arc<Progress>>) -> Json<Value> {
    let (bytes, total) = progress.read();
    Json(json!({"bytes": bytes, "bytes_total": total}))
}

/// Returns the addresses to bind, in the order in which they are tried. The first one accepts connections over IPv6 and
/// IPv4, and the second one over IPv4 only.
fn every_address(port: u16) -> [SocketAddr; 2] {
    [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()]
}
