//! The limits of the HTTP listeners, whose values come from flags.

use std::time::Duration;

/// The limits of the HTTP listeners. The fields have the names of the flags.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Size of a request body in bytes.
    pub max_body_bytes: usize,
    /// Total size in bytes of the request bodies and of their values in memory, from their arrival until the requests
    /// are prepared.
    pub max_buffered_body_bytes: usize,
    /// Number of concurrent requests. A request counts from the arrival of its body until its answer fits into the
    /// buffers of its connection.
    pub max_concurrent_requests: usize,
    /// Number of open connections. Further connections wait in the operating system's queue.
    pub max_connections: usize,
    /// Time within which a client must send the headers of a request, and the same time again for the body.
    pub read_timeout: Duration,
    /// Time within which a client must read a part of its answer once the connection's buffers are full.
    pub write_timeout: Duration,
}

impl Default for HttpLimits {
    /// Returns the defaults of the flags.
    fn default() -> Self {
        Self {
            max_body_bytes: 32 << 20,
            max_buffered_body_bytes: 256 << 20,
            max_concurrent_requests: 1024,
            max_connections: 4096,
            read_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
        }
    }
}

impl HttpLimits {
    /// Rejects limits that contradict each other.
    ///
    /// # Errors
    /// The largest body would not fit into the buffer of all bodies.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let (body, all) = (self.max_body_bytes, self.max_buffered_body_bytes);
        anyhow::ensure!(
            all >= body,
            "--max-buffered-body-bytes ({all} bytes) must be at least --max-body-bytes ({body} bytes)"
        );
        Ok(())
    }

    /// Returns the limits of the admin port, whose requests are few and small.
    pub(crate) fn of_admin_port(self) -> Self {
        /// Number of open connections to the port given by `--admin-port`.
        ///
        /// If exceeded: further connections wait, and connections that have not sent a request within one second are
        /// closed to make room for them.
        const CONNECTIONS_MAX: usize = 256;
        /// Time within which a client of the port given by `--admin-port` must send a request, and the same time again
        /// for reading the response.
        ///
        /// If exceeded: the connection is closed.
        const TIMEOUT: Duration = Duration::from_secs(5);
        Self { max_connections: CONNECTIONS_MAX, read_timeout: TIMEOUT, write_timeout: TIMEOUT, ..self }
    }
}
