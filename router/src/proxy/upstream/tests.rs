use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http::Method;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

const LIMIT: Duration = Duration::from_secs(30);

/// Returns a connection to a replica and its other end, which the test uses to simulate the replica.
async fn connected() -> (ReplicaConnection, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (connection, accepted) = tokio::join!(ReplicaConnection::connect(address, LIMIT), listener.accept());
    (connection.unwrap(), accepted.unwrap().0)
}

fn request(body: impl Into<Bytes>) -> Request<RequestBody> {
    let mut request = Request::new(RequestBody::whole(body.into()));
    *request.method_mut() = Method::POST;
    request
}

async fn all(connection: &mut ReplicaConnection) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    while let Some(bytes) = connection.next().await.transpose()? {
        body.extend_from_slice(&bytes);
    }
    Ok(body)
}

/// Returns the answer to a request if the replica writes these pieces and closes the connection.
async fn answer(pieces: [&[u8]; 2]) -> Result<(Parts, io::Result<Vec<u8>>, bool), SendError> {
    let (mut connection, mut replica) = connected().await;
    let send = async move {
        let parts = connection.send(request("x")).await?;
        let body = all(&mut connection).await;
        Ok((parts, body, connection.is_idle()))
    };
    let write = async {
        replica.read_exact(&mut [0; 10]).await.unwrap();
        for piece in pieces {
            replica.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
        replica.shutdown().await.unwrap();
        // Wait until the other side has closed the connection too, so that no data is lost.
        let _ = replica.read_to_end(&mut Vec::new()).await;
    };
    tokio::time::timeout(LIMIT, async { tokio::join!(send, write).0 }).await.unwrap()
}

#[tokio::test]
async fn a_connection_to_a_replica_does_not_wait_for_acknowledgements_and_is_probed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = open(listener.local_addr().unwrap(), LIMIT).await.unwrap();
    assert!(stream.nodelay().unwrap());
    let socket = socket2::SockRef::from(&stream);
    assert!(socket.keepalive().unwrap());
    assert_eq!(socket.tcp_keepalive_time().unwrap(), PROBE_AFTER);
    assert_eq!(socket.tcp_keepalive_retries().unwrap(), PROBES_MAX);
}

#[tokio::test]
async fn an_answer_is_passed_on_with_any_framing() {
    let cases = [
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", "hello"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ""),
        ("HTTP/1.1 204 No\r\n\r\n", ""),
        ("HTTP/1.0 200 OK\r\nx: y\r\n\r\nall of it", "all of it"),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
             3;x=\"y\"\r\nhel\r\n02\r\nlo\r\n1 \r\n!\r\n0\r\nx-trailer: 1\r\n\r\n",
            "hello!",
        ),
        ("HTTP/1.1 103 Early\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na", "a"),
    ];
    for (text, expected) in cases {
        for split in (0..text.len()).step_by(3) {
            let (first, second) = text.as_bytes().split_at(split);
            let (parts, body, _) = answer([first, second]).await.unwrap();
            assert_eq!(String::from_utf8(body.unwrap()).unwrap(), expected, "{text:?} {split}");
            assert!(!parts.headers.contains_key("transfer-encoding") && !parts.headers.contains_key("link"));
        }
    }
}

#[tokio::test]
async fn invalid_and_truncated_answers_are_errors() {
    for wrong in [
        "",
        "HTTP/1.1 200",
        "SSH-2.0-OpenSSH\r\n\r\n",
        "HTTP/2 200 OK\r\n\r\n",
        "HTTP/1.1 101 Now\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    ] {
        let error = answer([wrong.as_bytes(), b""]).await.unwrap_err();
        assert!(matches!(error, SendError::Sent(_)), "{wrong:?}: {error}");
    }
    let long = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "x".repeat(2 * BUFFER_BYTES_MAX));
    assert!(answer([long.as_bytes(), b""]).await.is_err());
    for early in [
        "content-length: 2\r\n\r\na",
        "transfer-encoding: chunked\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n2\r\nab\r\n",
        "transfer-encoding: chunked\r\n\r\nzz\r\n",
        "transfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
    ] {
        let (_, body, is_idle) = answer([b"HTTP/1.1 200 OK\r\n", early.as_bytes()]).await.unwrap();
        assert!(body.is_err() && !is_idle, "{early:?}: {body:?}");
    }
}

#[tokio::test]
async fn hop_by_hop_headers_are_not_passed_on() {
    let text = b"HTTP/1.1 429 Slow\r\nConnection: Keep-Alive, x-hop\r\nx-hop: 1\r\nKeep-Alive: timeout=5\r\n\
                 set-cookie: a\r\nset-cookie: b\r\nretry-after: 3\r\ncontent-length: 0\r\n\r\n";
    let (parts, ..) = answer([text, b""]).await.unwrap();
    let mut names: Vec<&str> = parts.headers.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["content-length", "retry-after", "set-cookie", "set-cookie"]);
}

#[tokio::test]
async fn chunks_that_arrive_together_are_joined() {
    let (mut connection, mut replica) = connected().await;
    let chunks = "1\r\na\r\n".repeat(100);
    let text = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunks}");
    exchange(&mut connection, &mut replica, &text).await;
    assert_eq!(connection.next().await.unwrap().unwrap(), "a".repeat(100));
}

/// Sends a request that the replica answers with `text`.
async fn exchange(connection: &mut ReplicaConnection, replica: &mut TcpStream, text: &str) {
    let reply = async {
        assert!(replica.read(&mut [0; 1024]).await.unwrap() > 0);
        replica.write_all(text.as_bytes()).await.unwrap();
    };
    let (parts, ()) = tokio::join!(connection.send(request("")), reply);
    parts.unwrap();
}

/// Bytes that record that they were dropped.
struct TrackedBytes(Vec<u8>, Arc<AtomicBool>);

impl AsRef<[u8]> for TrackedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for TrackedBytes {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Relaxed);
    }
}

#[tokio::test]
async fn a_stream_releases_the_body_of_its_request() {
    const BYTES: usize = 4 << 20;
    let is_released = Arc::new(AtomicBool::new(false));
    let (mut connection, mut replica) = connected().await;
    let body = Bytes::from_owner(TrackedBytes(vec![b'x'; BYTES], Arc::clone(&is_released)));
    let read = async {
        // Read the whole request: after the first `BYTES` bytes, the rest is as long as the head.
        replica.read_exact(&mut vec![0; BYTES]).await.unwrap();
        let _ = replica.read(&mut [0; 1024]).await.unwrap();
        let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n";
        replica.write_all(head).await.unwrap();
    };
    let (parts, ()) = tokio::join!(connection.send(request(body)), read);
    assert!(parts.unwrap().status.is_success());
    assert_eq!(connection.next().await.unwrap().unwrap(), "a");
    assert!(is_released.load(Ordering::Relaxed), "the stream continues, and its request is no longer needed");
}

#[tokio::test]
async fn a_request_is_known_to_be_unsent_only_if_the_replica_cannot_have_it() {
    // The connection is closed before the request is sent.
    let (mut connection, replica) = connected().await;
    drop(replica);
    for _ in 0..1000 {
        // The runtime polls for events only occasionally while a task is ready.
        tokio::task::yield_now().await;
    }
    assert!(matches!(connection.send(request("x")).await.unwrap_err(), SendError::Unsent));
    // The replica receives the beginning of the request, and then closes the connection without an answer.
    let (mut connection, mut replica) = connected().await;
    let receive = async {
        replica.read_exact(&mut [0; 1]).await.unwrap();
        drop(replica);
    };
    let (answer, ()) = tokio::join!(connection.send(request("x")), receive);
    assert!(matches!(answer.unwrap_err(), SendError::Sent(_)));
}

#[tokio::test]
async fn a_connection_is_pooled_after_its_answer_until_the_replica_closes_it() {
    let pool = Pool::default();
    let (mut connection, mut replica) = connected().await;
    let address = replica.local_addr().unwrap();
    let text = "HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na";
    exchange(&mut connection, &mut replica, text).await;
    pool.put(address, connection);
    assert!(pool.get(address).await.is_none(), "the previous answer was not read");

    let (mut connection, mut replica) = connected().await;
    for _ in 0..2 {
        exchange(&mut connection, &mut replica, text).await;
        assert_eq!(all(&mut connection).await.unwrap(), b"a");
        pool.put(address, connection);
        connection = pool.get(address).await.unwrap();
    }
    pool.put(address, connection);
    drop(replica);
    tokio::time::timeout(LIMIT, async {
        while let Some(connection) = pool.get(address).await {
            pool.put(address, connection);
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
}
