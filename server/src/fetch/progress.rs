//! How far a fetch is, and telling it to whoever asks.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// How far a fetch is.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    bytes: AtomicU64,
    /// 0 while it is not known.
    total: AtomicU64,
}

impl Progress {
    /// So much there is in all.
    pub(crate) fn expect(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
    }

    /// So much more is there.
    pub(crate) fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So much was there and is not any more.
    pub(crate) fn remove(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes that are there, and bytes in all if that is known.
    pub(crate) fn read(&self) -> (u64, Option<u64>) {
        let total = self.total.load(Ordering::Relaxed);
        (self.bytes.load(Ordering::Relaxed), (total > 0).then_some(total))
    }
}

/// Tells it at `port`. That nobody can ask is no reason not to fetch.
pub(crate) async fn serve(port: u16, progress: Arc<Progress>) {
    let pages = Router::new().route("/progress", get(page)).with_state(progress);
    let outcome = match TcpListener::bind(&every_address(port)[..]).await {
        Ok(listener) => axum::serve(listener, pages).await,
        Err(error) => Err(error),
    };
    if let Err(error) = outcome {
        tracing::warn!(port, %error, "progress is not told");
    }
}

/// Logs it from time to time.
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

/// All addresses of the machine: of both families where it has IPv6, as the first that can be had is taken.
fn every_address(port: u16) -> [SocketAddr; 2] {
    [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()]
}
