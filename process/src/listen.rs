//! Accepts connections for the HTTP listeners.

use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

/// Time to wait after a failure: if the process has no free file descriptors, some will be free soon.
const PAUSE: Duration = Duration::from_millis(50);

/// Accepts the next connection. A failure is logged, and accepting continues after a pause.
///
/// # Cancel safety
/// No connection is lost if the future is dropped.
pub async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((connection, _)) => {
                // Tokens are small, and Nagle's algorithm would delay them.
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
