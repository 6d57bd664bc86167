//! Accepts connections for the HTTP and gRPC listeners, up to a limit.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// How long a connection may be idle while other connections wait to be accepted.
pub const IDLE_UNDER_PRESSURE: Duration = Duration::from_secs(1);

/// The interval at which idle connections are notified to close while the connection limit is reached.
pub const PRESSURE_INTERVAL: Duration = Duration::from_millis(500);

/// The pause after a failure: a process that has run out of file descriptors usually has free ones again soon.
const PAUSE: Duration = Duration::from_millis(50);

/// Accepts the next connection once `room` has a permit for it. Until then `pressure` wakes the open connections
/// periodically, and connections that have had no request for [`IDLE_UNDER_PRESSURE`] are expected to close.
///
/// # Cancel safety
/// No connection is lost if the future is dropped.
pub async fn accept_within(
    room: &Arc<Semaphore>,
    pressure: &Notify,
    listener: &TcpListener,
) -> (TcpStream, OwnedSemaphorePermit) {
    loop {
        let permit = tokio::time::timeout(PRESSURE_INTERVAL, Arc::clone(room).acquire_owned()).await;
        match permit {
            Ok(permit) => {
                let permit = permit.expect("invariant: the semaphore is never closed");
                return (accept(listener).await, permit);
            }
            Err(_) => pressure.notify_waiters(),
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
    use super::*;

    #[tokio::test]
    async fn data_for_a_client_does_not_wait_for_acknowledgements() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_client, accepted) = tokio::join!(TcpStream::connect(address), accept(&listener));
        assert!(accepted.nodelay().unwrap());
    }
}
