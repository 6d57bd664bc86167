//! The limits of the HTTP listeners. Their values come from flags, except for some limits of the admin port.

use std::sync::Arc;
use std::time::Duration;

use super::budget::ByteBudget;
use super::json::values_bytes_max;

/// The limits of the HTTP listeners. The fields have the names of the flags.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Size of a request body in bytes.
    pub max_body_bytes: usize,
    /// Total size in bytes of the request bodies in memory, including their parsed values and images. A body counts
    /// toward the limit from its arrival until its request is prepared.
    pub max_buffered_body_bytes: usize,
    /// Number of concurrent requests. A request counts toward the limit from the arrival of its body until its answer
    /// fits into the buffers of its connection.
    pub max_concurrent_requests: usize,
    /// Number of open connections. Further connections wait in the operating system's queue.
    pub max_connections: usize,
    /// Time within which a client must send the headers of a request, and the same time again for its body.
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
    /// A request with the largest body might not fit into the buffer of all bodies, even if it is the only request. Up
    /// to four times the size of a body is in memory at the same time: its text, its values, the images that it
    /// contains, and the items that are retained for the response.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let (body, all) = (self.max_body_bytes, self.max_buffered_body_bytes);
        anyhow::ensure!(
            all / 4 >= body,
            "--max-buffered-body-bytes ({all} bytes) must be at least four times --max-body-bytes ({body} bytes)"
        );
        Ok(())
    }

    /// Returns the maximum memory in bytes for the values of a body, including their text.
    pub(crate) fn values_bytes_max(&self) -> usize {
        values_bytes_max(self.max_body_bytes, self.max_buffered_body_bytes)
    }

    /// Returns the budget for the bodies of all requests. A single request with the largest body, and with as many
    /// values as a body can have, fits into the unused budget.
    pub(crate) fn body_budget(&self) -> Arc<ByteBudget> {
        let request_bytes_max = self.max_body_bytes.saturating_add(self.values_bytes_max().saturating_mul(2));
        ByteBudget::new(self.max_buffered_body_bytes, request_bytes_max)
    }

    /// Returns the limits of the admin port, whose requests are few and small.
    pub(crate) fn of_admin_port(self) -> Self {
        /// Number of open connections to the port given by `--admin-port`.
        ///
        /// If exceeded: further connections wait, and connections that have not sent a request within one second are
        /// closed to make room for them.
        const CONNECTIONS_MAX: usize = 256;
        /// Time within which a client of the port given by `--admin-port` must send a request and, counted separately,
        /// read the response.
        ///
        /// If exceeded: the connection is closed.
        const TIMEOUT: Duration = Duration::from_secs(5);
        Self { max_connections: CONNECTIONS_MAX, read_timeout: TIMEOUT, write_timeout: TIMEOUT, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_request_fits_into_the_buffer() {
        const MIB: usize = 1 << 20;
        for (max_body_bytes, max_buffered_body_bytes) in [(32, 256), (32, 128), (1, 4), (100, 4096)] {
            let limits = HttpLimits {
                max_body_bytes: max_body_bytes * MIB,
                max_buffered_body_bytes: max_buffered_body_bytes * MIB,
                ..HttpLimits::default()
            };
            limits.check().unwrap();
            assert!(
                limits.values_bytes_max() >= limits.max_body_bytes,
                "a text alone is not too many values"
            );
            let mut request = limits.body_budget().empty_reservation();
            let bytes = limits.max_body_bytes + 2 * limits.values_bytes_max();
            assert_eq!(request.grow_to(bytes), Ok(()), "{limits:?}");
        }
        let default = HttpLimits::default();
        let limits = HttpLimits { max_buffered_body_bytes: 4 * default.max_body_bytes - 1, ..default };
        let error = limits.check().unwrap_err().to_string();
        assert!(error.contains("must be at least four times --max-body-bytes"), "{error}");
    }
}
