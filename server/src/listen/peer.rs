//! Whether a client still waits for its answer. One that has closed its connection looks like one that only says that it
//! sends no more: both send a FIN. An interim response tells them apart, since only the first answers it with a reset.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::http::Version;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;

/// What asks a client that sends no more whether it is there. RFC 9110 has clients skip interim responses that they do not
/// expect.
const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Between looks at a connection whose next bytes nobody has read yet.
const PAUSE: Duration = Duration::from_millis(100);

/// The other end of a connection. Clones are of the same.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    stream: Arc<OwnedReadHalf>,
    /// Whether part of an answer waits for the client to read.
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

    /// Waits until the client of a request without an answer is gone.
    ///
    /// # Cancel safety
    /// A future that is dropped before it is ready may have sent an interim response.
    pub(super) async fn gone(&self, version: Version) {
        if self.closes().await.is_err() {
            return;
        }
        // Interim responses are not for HTTP/1.0, nor for the middle of another answer.
        let can_probe = version >= Version::HTTP_11 && !self.is_stalled.load(Ordering::Relaxed);
        if !can_probe || self.stream().try_write(PROBE).ok() != Some(PROBE.len()) {
            return;
        }
        // An error here is the reset too.
        let _ = self.stream().ready(Interest::ERROR).await;
    }

    /// Waits until the client sends no more.
    async fn closes(&self) -> std::io::Result<()> {
        while self.stream().peek(&mut [0]).await? > 0 {
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }
}
