//! Accepts connections for the HTTP and gRPC listeners, up to a limit.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

/// The time for which a connection may be idle while other connections wait to be accepted.
pub const IDLE_UNDER_PRESSURE: Duration = Duration::from_secs(1);

/// The interval at which idle connections are notified to close while the connection limit is reached.
pub const PRESSURE_INTERVAL: Duration = Duration::from_millis(500);

/// The pause after a failure to accept: if the process has run out of file descriptors, some usually become free soon.
const PAUSE: Duration = Duration::from_millis(50);

/// The slots for the open connections of a listener. While all slots are taken, connections that have been idle for
/// [`IDLE_UNDER_PRESSURE`] are notified to close.
#[derive(Debug)]
pub struct ConnectionSlots {
    free: Arc<Semaphore>,
    pressure: Arc<Notify>,
    /// The last time at which all slots were taken.
    last_full: Option<Instant>,
    /// The time of the next notification. It is sent if all slots are taken at that time.
    notifies_at: Instant,
}

impl ConnectionSlots {
    /// Creates slots for `max_connections` connections. `pressure` wakes the open connections once per
    /// [`PRESSURE_INTERVAL`] while all slots are taken and [`Self::accept`] waits for one.
    #[must_use]
    pub fn new(max_connections: usize, pressure: Arc<Notify>) -> Self {
        let free = Arc::new(Semaphore::new(max_connections.min(Semaphore::MAX_PERMITS)));
        Self { free, pressure, last_full: None, notifies_at: Instant::now() }
    }

    /// Accepts the next connection once a slot is free. The connection occupies the slot until the returned permit is
    /// dropped.
    ///
    /// # Cancel safety
    /// No connection is lost if the future is dropped.
    pub async fn accept(&mut self, listener: &TcpListener) -> (TcpStream, OwnedSemaphorePermit) {
        let permit = self.acquire().await;
        (accept(listener).await, permit)
    }

    async fn acquire(&mut self) -> OwnedSemaphorePermit {
        if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
            return permit;
        }
        // Postpone the next notification only if some slots were free for a while. If each connection that ends is
        // immediately replaced by another, the notification would otherwise be postponed each time and might never be
        // sent.
        let now = Instant::now();
        if self.last_full.is_none_or(|last| now.duration_since(last) > PRESSURE_INTERVAL) {
            self.notifies_at = now + PRESSURE_INTERVAL;
        }
        loop {
            let acquired = timeout_at(self.notifies_at, Arc::clone(&self.free).acquire_owned()).await;
            let now = Instant::now();
            self.last_full = Some(now);
            match acquired {
                Ok(permit) => return permit.expect("invariant: the semaphore is never closed"),
                Err(_) => {
                    self.pressure.notify_waiters();
                    self.notifies_at = now + PRESSURE_INTERVAL;
                }
            }
        }
    }
}

/// Accepts the next connection. A failure is logged, and accepting continues after a pause.
async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((connection, _)) => {
                // Messages with single tokens are small, and Nagle's algorithm would delay them.
                if connection.set_nodelay(true).is_ok() {
                    return connection;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    /// The time for which a connection is open.
    const OPEN: Duration = Duration::from_millis(10);

    /// Acquires a slot when the connection with the permit `open` ends after [`OPEN`].
    async fn replace(slots: &mut ConnectionSlots, open: OwnedSemaphorePermit) -> OwnedSemaphorePermit {
        let ends = async {
            tokio::time::sleep(OPEN).await;
            drop(open);
        };
        tokio::join!(slots.acquire(), ends).0
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connections_are_notified_while_other_connections_replace_each_other() {
        let pressure = Arc::new(Notify::new());
        let mut slots = ConnectionSlots::new(2, Arc::clone(&pressure));
        let (_idle, mut open) = (slots.acquire().await, slots.acquire().await);
        for _ in 0..2 {
            let begin = Instant::now();
            let mut notified = pin!(pressure.notified());
            while !notified.as_mut().enable() {
                open = replace(&mut slots, open).await;
                assert!(begin.elapsed() <= PRESSURE_INTERVAL + 2 * OPEN);
            }
            assert!(begin.elapsed() + 2 * OPEN >= PRESSURE_INTERVAL, "{:?}", begin.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connections_are_not_notified_if_all_slots_are_taken_only_briefly() {
        let pressure = Arc::new(Notify::new());
        let mut slots = ConnectionSlots::new(1, Arc::clone(&pressure));
        let mut notified = pin!(pressure.notified());
        for _ in 0..10 {
            let open = slots.acquire().await;
            let open = replace(&mut slots, open).await;
            assert!(!notified.as_mut().enable());
            drop(open);
            tokio::time::sleep(2 * PRESSURE_INTERVAL).await;
        }
    }

    #[tokio::test]
    async fn data_for_a_client_does_not_wait_for_acknowledgements() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_client, accepted) = tokio::join!(TcpStream::connect(address), accept(&listener));
        assert!(accepted.nodelay().unwrap());
    }
}
