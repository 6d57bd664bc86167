//! HTTP below what a well-behaved client would send: bytes on a socket.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

/// How long an answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Sends `bytes` on a connection of its own and reads what comes back until the peer closes, at most 64 KiB.
pub(crate) async fn exchange(address: &str, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(bytes).await?;
    let mut answer = Vec::new();
    let mut limited = stream.take(64 << 10);
    tokio::time::timeout(ANSWER_LIMIT, limited.read_to_end(&mut answer))
        .await
        .map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
    Ok(answer)
}

/// The status of an HTTP/1.1 answer, 0 if it is none.
pub(crate) fn status(answer: &[u8]) -> u16 {
    let text = String::from_utf8_lossy(&answer[..answer.len().min(64)]).into_owned();
    text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
}

/// A POST request for `path` with a JSON `body`.
pub(crate) fn post(address: &str, path: &str, body: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// A connection with the smallest receive buffer that the system allows, whose owner never reads.
pub(crate) async fn never_reads(address: &str, request: &[u8]) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(1)?;
    let address = address.parse().map_err(|_| std::io::Error::from(std::io::ErrorKind::InvalidInput))?;
    let mut stream = socket.connect(address).await?;
    stream.write_all(request).await?;
    Ok(stream)
}
