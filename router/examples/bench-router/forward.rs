//! The least that anything between a client and a replica costs: it passes bytes on and reads none of them.
//!
//! It runs as a process of its own, on one thread, as what is left of a router that decides nothing: a connection to a
//! replica for each of a client. No router can add less than the wake-ups and copies that it adds.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Passes on what comes to `port`, to one of `targets` after the other, until the process is killed.
///
/// # Errors
/// The port cannot be listened on.
pub(crate) async fn run(port: u16, targets: Arc<[SocketAddr]>) -> anyhow::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port)).await.context("failed to listen")?;
    let mut connections = JoinSet::new();
    let mut turn = 0;
    loop {
        let (client, _) = listener.accept().await.context("failed to accept")?;
        let target = targets[turn % targets.len()];
        turn += 1;
        while connections.try_join_next().is_some() {}
        connections.spawn(async move {
            // A side that goes away ends the other: that is all there is to do about it.
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
