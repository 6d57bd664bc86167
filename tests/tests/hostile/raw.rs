//! Sends raw bytes on a socket, for HTTP that no well-behaved client would send.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

/// The time limit for a response.
const ANSWER_LIMIT: Duration = Duration::from_secs(90);

/// Sends `bytes` on a new connection and reads at most 64 KiB of the response, until the peer closes the connection.
pub(crate) async fn exchange(address: &str, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await?;
    // A peer may respond and close the connection before it has received the whole request.
    let sent = stream.write_all(bytes).await;
    let answer = answer(stream).await?;
    if answer.is_empty() { sent.map(|()| answer) } else { Ok(answer) }
}

/// Reads at most 64 KiB of a response, until the peer closes the connection.
pub(crate) async fn answer(stream: TcpStream) -> std::io::Result<Vec<u8>> {
    let mut answer = Vec::new();
    let mut limited = stream.take(64 << 10);
    let read = tokio::time::timeout(ANSWER_LIMIT, limited.read_to_end(&mut answer))
        .await
        .map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))?;
    // A reset may follow the response, because the rest of the request was never read.
    if answer.is_empty() { read.map(|_| answer) } else { Ok(answer) }
}

/// The status of an HTTP/1.1 response, or 0 for anything else. Interim responses are skipped.
pub(crate) fn status(answer: &[u8]) -> u16 {
    let text = String::from_utf8_lossy(answer);
    let statuses = text.split("\r\n\r\n").map(|head| {
        let status = head.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3));
        status.and_then(|status| status.parse().ok()).unwrap_or(0)
    });
    statuses.into_iter().find(|status| !(100..200).contains(status)).unwrap_or(0)
}

/// A POST request for `path` with a JSON `body`.
pub(crate) fn post(address: &str, key: &str, path: &str, body: &str) -> Vec<u8> {
    [head(address, key, path, body.len()).as_bytes(), body.as_bytes()].concat()
}

/// The head of a POST request whose JSON body has `length` bytes.
pub(crate) fn head(address: &str, key: &str, path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {key}\r\n\
         content-type: application/json\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    )
}

/// Sends `request` on a connection with the smallest receive buffer that the system allows.
pub(crate) async fn narrow(address: &str, request: &[u8]) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(1)?;
    let address = address.parse().map_err(|_| std::io::Error::from(std::io::ErrorKind::InvalidInput))?;
    let mut stream = socket.connect(address).await?;
    stream.write_all(request).await?;
    Ok(stream)
}
