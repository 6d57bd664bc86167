//! Detects whether a client still waits for its answer. A client sends a FIN both when it closes its connection and
//! when it only stops sending. An interim response distinguishes the two cases, because only a closed connection
//! answers with a reset.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::http::Version;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;

/// The interim response that probes a client that has stopped sending. RFC 9110 requires clients to accept unexpected
/// interim responses.
const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// The interval between checks of a connection with unread bytes.
const PAUSE: Duration = Duration::from_millis(100);

/// The other end of a connection. Clones share the same connection.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    stream: Arc<OwnedReadHalf>,
    /// Whether a part of an answer cannot be sent until the client reads.
    is_stalled: Arc<AtomicBool>,
}

impl Peer {
    pub(super) fn new(stream: OwnedReadHalf) -> Self {
        Self { stream: Arc::new(stream), is_stalled: Arc::default() }
    }

    pub(super) fn stream(&self) -> &TcpStream {
        (*self.stream).as_ref()
    }

    pub(super) fn set_stalled(&self, is_stalled: bool) {
        self.is_stalled.store(is_stalled, Ordering::Relaxed);
    }

    /// Waits until the client of an unanswered request has closed its connection, or has stopped sending and cannot be
    /// probed.
    ///
    /// # Cancel safety
    /// If the future is dropped before it is ready, an interim response may already have been sent.
    pub(super) async fn disconnected(&self, version: Version) {
        if self.closes().await.is_err() {
            return;
        }
        // HTTP/1.0 has no interim responses, and the server must not send one in the middle of another answer. In these
        // cases, a client that has stopped sending counts as disconnected.
        let can_probe = version >= Version::HTTP_11 && !self.is_stalled.load(Ordering::Relaxed);
        if !can_probe || self.stream().try_write(PROBE).ok() != Some(PROBE.len()) {
            return;
        }
        // Waiting fails only after a reset, so an error also means that the client has closed its connection.
        let _ = self.stream().ready(Interest::ERROR).await;
    }

    /// Waits until the client has stopped sending, that is, until its FIN arrives.
    async fn closes(&self) -> std::io::Result<()> {
        while self.stream().peek(&mut [0]).await? > 0 {
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }
}
