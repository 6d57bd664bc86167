//! Attacks that hold connections, buffers and permits.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

use crate::hostile::client::{Client, Statuses, Targets, chat};
use crate::hostile::raw;

const CHAT: &str = "/v1/chat/completions";

/// Returns the addresses of both processes, because a client may be able to reach the server directly.
fn addresses(targets: &Targets) -> [&String; 2] {
    [&targets.router, &targets.server]
}

fn streamed(content: &str, max_tokens: usize) -> Value {
    chat(content, json!({"stream": true, "max_tokens": max_tokens, "ignore_eos": true}))
}

/// The status of the response to a request whose body does not end.
async fn unfinished(address: String, bytes: Arc<Vec<u8>>) -> u16 {
    raw::exchange(&address, &bytes).await.map_or(0, |answer| raw::status(&answer))
}

/// Bodies whose last MiB never arrives.
pub(super) async fn bodies_that_never_end(targets: Targets) -> anyhow::Result<String> {
    let mut attempts = Vec::new();
    for address in addresses(&targets) {
        let head = raw::head(address, &targets.key, CHAT, 8 << 20);
        let bytes = Arc::new([head.as_bytes(), &vec![b' '; 7 << 20]].concat());
        attempts.extend((0..100).map(|_| unfinished(address.clone(), Arc::clone(&bytes))));
    }
    let statuses: Statuses = tests::http::join_all(attempts).await.into_iter().collect();
    Ok(statuses.only(&[408, 429])?.some(408)?.to_string())
}

/// Connections on which the client never sends a byte, including connections to the port on which the server reports
/// its load to the router.
pub(super) async fn silent_sockets(targets: Targets) -> anyhow::Result<String> {
    const CONNECT_LIMIT: Duration = Duration::from_secs(2);
    let [router, server] = addresses(&targets);
    let mut sockets = Vec::new();
    // A process need not accept all connections: the listen backlog of the operating system can hold the others.
    for (address, count) in [(router, 4500), (server, 4500), (&targets.server_grpc, 1000)] {
        for number in 0..count {
            let connected = tokio::time::timeout(CONNECT_LIMIT, TcpStream::connect(address.as_str())).await;
            // A process may leave connections in the listen backlog, but must not refuse them.
            let connected = connected.map_err(|_| {
                anyhow::anyhow!("connecting to {address} timed out after {number} successful connections")
            });
            sockets.push(connected??);
        }
    }
    let client = Client::of_router(&targets);
    let (status, body) = client.post(CHAT, &chat("Hello", json!({}))).await?;
    ensure!(status == 200, "a request failed while silent sockets were open: {status} {body:.300}");
    Ok(format!("{} sockets", sockets.len()))
}

/// Clients that never read their streams, and whose receive buffers are as small as the system allows.
pub(super) async fn readers_that_never_read(targets: Targets) -> anyhow::Result<String> {
    const STREAMS: usize = 200;
    let client = Client::of_router(&targets);
    let mut body = streamed("Count.", 24);
    body["logprobs"] = json!(true);
    body["top_logprobs"] = json!(20);
    let mut streams = Vec::new();
    for number in 0..STREAMS {
        let address = addresses(&targets)[number % 2];
        let request = raw::post(address, &targets.key, CHAT, &body.to_string());
        streams.push(raw::narrow(address, &request).await?);
        if number % 4 == 3 {
            // Send an ordinary request between the streams, so that only a few streams are generated at the same time.
            let (status, body) = client.post(CHAT, &chat("Hello", json!({}))).await?;
            ensure!(
                status == 200,
                "a request failed while {} streams were unread: {status} {body:.300}",
                streams.len()
            );
        }
    }
    Ok(format!("{} unread streams", streams.len()))
}

/// Reads a response sixteen bytes at a time, which takes a few seconds.
async fn slow_reader(address: String, request: Vec<u8>) -> anyhow::Result<u16> {
    let mut stream = raw::narrow(&address, &request).await?;
    let mut pace = tokio::time::interval(Duration::from_millis(40));
    let mut text = Vec::new();
    loop {
        pace.tick().await;
        let mut piece = [0; 16];
        let count = stream.read(&mut piece).await?;
        text.extend_from_slice(&piece[..count]);
        if count == 0 {
            break;
        }
    }
    let is_complete = text.windows(6).any(|window| window == b"[DONE]");
    let status = raw::status(&text);
    ensure!(status != 200 || is_complete, "a slow reader received an incomplete response");
    Ok(status)
}

/// Clients that read their streams slowly but steadily, and receive them completely. They arrive one after another:
/// generating 200 responses at the same time would delay other clients, regardless of how fast the responses are read.
pub(super) async fn slow_readers(targets: Targets) -> anyhow::Result<String> {
    const READERS: usize = 200;
    let body = streamed("Count.", 4).to_string();
    let mut arrivals = tokio::time::interval(Duration::from_millis(30));
    let mut running = tokio::task::JoinSet::new();
    for number in 0..READERS {
        arrivals.tick().await;
        let address = addresses(&targets)[number % 2].clone();
        let request = raw::post(&address, &targets.key, CHAT, &body);
        running.spawn(slow_reader(address, request));
    }
    let mut statuses = Statuses::default();
    while let Some(status) = running.join_next().await {
        statuses.add(status??);
    }
    Ok(statuses.only(&[200])?.to_string())
}

/// Clients that disconnect right after a request for a long response, and clients that disconnect during the response.
pub(super) async fn disconnects(targets: Targets) -> anyhow::Result<String> {
    const CLIENTS: usize = 200;
    let body = streamed("Tell a story.", 2000).to_string();
    for number in 0..CLIENTS {
        let address = addresses(&targets)[number % 2];
        let request = raw::post(address, &targets.key, CHAT, &body);
        let mut stream = raw::narrow(address, &request).await?;
        if number % 4 < 2 {
            stream.read_exact(&mut [0; 16]).await?;
        }
        drop(stream);
    }
    Ok(format!("{CLIENTS} clients disconnected"))
}
