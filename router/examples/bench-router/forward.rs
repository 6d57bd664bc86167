//! The forwarder, which copies bytes without parsing them. Its cost is a lower bound for the cost of a router.
//!
//! It runs as a separate process with one thread, and opens one connection to a replica for each client. A router that
//! parses requests needs at least as many wake-ups and copies.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Accepts connections on `port` and forwards them to the `targets` in turn, until the process is killed.
///
/// # Errors
/// The process cannot listen on the port or accept a connection.
pub(crate) async fn run(port: u16, targets: Arc<[SocketAddr]>) -> anyhow::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port))
        .await
        .with_context(|| format!("failed to listen on port {port}"))?;
    let mut connections = JoinSet::new();
    let mut turn = 0;
    loop {
        let (client, _) = listener.accept().await.context("failed to accept a connection")?;
        let target = targets[turn % targets.len()];
        turn += 1;
        while connections.try_join_next().is_some() {}
        connections.spawn(async move {
            // An error needs no handling: it closes both connections, so that the client and the replica notice it.
            let _ = pass(client, target).await;
        });
    }
}

async fn pass(mut client: TcpStream, target: SocketAddr) -> std::io::Result<()> {
    let mut replica = TcpStream::connect(target).await?;
    client.set_nodelay(true)?;
    replica.set_nodelay(true)?;
    copy_bidirectional(&mut client, &mut replica).await?;
    Ok(())
}
