//! What a child process writes: passed on under its name, but for why it ends, which is for whoever tells of its end. On
//! the way is read where it listens. Nothing else is concluded from logs.

use std::net::SocketAddr;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::sync::watch;

/// Size of a line of output that `operator local` passes on from a process.
///
/// Beyond it: the line is split.
const LINE_BYTES_MAX: usize = 64 << 10;
/// Bytes that are kept of what a process says of its end.
const ERROR_BYTES_MAX: usize = 4 << 10;
/// How it begins.
const ERROR: &str = "error: ";

/// What a process has said so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Said {
    /// Where it listens.
    pub(super) listens: Option<Listens>,
    /// Why it ends, from the line that says so on.
    pub(super) error: String,
}

/// Where a process listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listens {
    pub(super) http: SocketAddr,
    /// Of a server, for load reports; of a router, for reports about its replicas.
    pub(super) grpc: Option<SocketAddr>,
}

/// Passes lines on, with the name of whom they are of.
pub(super) async fn pass_on(
    name: String,
    stream: impl tokio::io::AsyncRead + Unpin,
    said: watch::Sender<Said>,
) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        // What is longer comes in pieces.
        let limit = LINE_BYTES_MAX as u64;
        match (&mut reader).take(limit).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if !take(&said, text) {
            eprintln!("{name} | {text}");
        }
    }
}

/// Takes note of a line; gives whether that was all there is to do with it.
fn take(said: &watch::Sender<Said>, text: &str) -> bool {
    let is_error = text.starts_with(ERROR) || !said.borrow().error.is_empty();
    let listens = listens(text);
    if is_error || listens.is_some() {
        said.send_modify(|said| {
            said.listens = said.listens.or(listens);
            if is_error && said.error.len() + text.len() < ERROR_BYTES_MAX {
                said.error.push_str(text);
                said.error.push('\n');
            }
        });
    }
    is_error
}

/// Where a process listens, in the line by which it says so.
fn listens(line: &str) -> Option<Listens> {
    let (_, addresses) = line.split_once("listening on http://")?;
    let (http, grpc) = match addresses.split_once(", gRPC on ") {
        Some((http, grpc)) => (http, Some(grpc)),
        None => (addresses, None),
    };
    let address = |text: &str| {
        let end = text.find(|letter: char| letter.is_whitespace() || letter == '"').unwrap_or(text.len());
        text[..end].parse().ok()
    };
    Some(Listens { http: address(http)?, grpc: grpc.and_then(address) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_process_listens_is_read_from_its_log() {
        let told = |http: &str, grpc: Option<&str>| {
            Some(Listens { http: http.parse().unwrap(), grpc: grpc.map(|grpc| grpc.parse().unwrap()) })
        };
        for (line, wanted) in [
            (
                "2026 INFO listening on http://127.0.0.1:41, gRPC on 127.0.0.1:42",
                told("127.0.0.1:41", Some("127.0.0.1:42")),
            ),
            ("2026  INFO listening on http://[::1]:8000", told("[::1]:8000", None)),
            (
                r#"{"message":"listening on http://1.2.3.4:5, gRPC on 1.2.3.4:6","target":"x"}"#,
                told("1.2.3.4:5", Some("1.2.3.4:6")),
            ),
            ("loading", None),
            ("failed: listening on http://somewhere", None),
        ] {
            assert_eq!(listens(line), wanted, "{line}");
        }
    }

    #[tokio::test]
    async fn why_it_ends_is_kept_for_who_tells_of_its_end() {
        let (sender, said) = watch::channel(Said::default());
        let text = "INFO listening on http://127.0.0.1:1\nerror: no model\n\nUsage: server\n";
        pass_on("server".to_owned(), text.as_bytes(), sender).await;
        let said = said.borrow().clone();
        assert!(said.listens.is_some());
        assert_eq!(said.error, "error: no model\n\nUsage: server\n");
    }
}
