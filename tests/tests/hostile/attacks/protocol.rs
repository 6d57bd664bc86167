//! Attacks below the level of the API: HTTP that no library would send.

use anyhow::ensure;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::hostile::client::{Statuses, Targets, chat};
use crate::hostile::raw;

/// Clients that close the sending half of their connection after the request. The server responds to them. The router,
/// like many proxies, assumes that they have disconnected, and closes their connections.
pub(super) async fn half_closed_clients(targets: Targets) -> anyhow::Result<String> {
    let mut by_process = [Statuses::default(), Statuses::default()];
    for number in 0..32 {
        let address = if number % 2 == 0 { &targets.router } else { &targets.server };
        let body = chat("Hello", json!({"stream": number % 4 < 2}));
        let mut stream = TcpStream::connect(address.as_str()).await?;
        let path = "/v1/chat/completions";
        stream.write_all(&raw::post(address, &targets.key, path, &body.to_string())).await?;
        stream.shutdown().await?;
        by_process[number % 2].add(raw::status(&raw::answer(stream).await?));
    }
    let [router, server] = by_process;
    Ok(format!("router: {}; server: {}", router.only(&[0, 200])?, server.only(&[200])?))
}

/// Requests that are ambiguous, malformed or too large.
pub(super) async fn broken_http(targets: Targets) -> anyhow::Result<String> {
    let post = |headers: &str, body: &str| {
        let key = &targets.key;
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
        format!("{head}authorization: Bearer {key}\r\n{headers}\r\n{body}").into_bytes()
    };
    let get = |target: &str, headers: &str| {
        let key = &targets.key;
        format!("GET {target} HTTP/1.1\r\nauthorization: Bearer {key}\r\nconnection: close\r\n{headers}\r\n")
            .into_bytes()
    };
    let requests = [
        b"\x00\x01\x02\x03\r\n\r\n".to_vec(),
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n".to_vec(),
        get("/v1/models", ""),
        get("/v1/models", "host: a\r\nhost: b\r\n"),
        get("/v3/models/%ff", "host: x\r\n"),
        get("/v3/responses/%ff", "host: x\r\n"),
        get("/v3/conversations/%ff", "host: x\r\n"),
        get(&format!("/v1/{}", "a".repeat(100_000)), "host: x\r\n"),
        get("/v1/models", &format!("host: x\r\nx: {}\r\n", "a".repeat(300_000))),
        get("/v1/models", &format!("host: x\r\n{}", "a: b\r\n".repeat(1_000))),
        post("transfer-encoding: gzip, chunked\r\n", "0\r\n\r\n"),
        post("content-length: 1\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n"),
        post("content-length: 1\r\ncontent-length: 2\r\n", "{}"),
        post("content-length: -1\r\n", ""),
        post("transfer-encoding: chunked\r\n", "FFFFFFFFFFFFFFFFF\r\n"),
        post("transfer-encoding: chunked\r\n", "2\r\n{}0\r\n\r\n"),
        post("content-length: 2\r\n", "\u{fffd}"),
        post("content-type: text/plain\r\ncontent-length: 2\r\n", "{}"),
    ];
    let mut statuses = Statuses::default();
    for address in [&targets.router, &targets.server] {
        for (number, request) in requests.iter().enumerate() {
            let answer = raw::exchange(address, request).await.unwrap_or_default();
            let status = raw::status(&answer);
            ensure!(status < 500, "{address} answered request {number} with status {status}");
            statuses.add(status);
        }
    }
    Ok(statuses.some(400)?.some(431)?.to_string())
}
