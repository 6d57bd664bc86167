//! The output of a child process. Lines are forwarded with the name of the process, except for the error that ends
//! the process, which is stored for the message about the exit. The addresses that the process listens on are parsed
//! from its log.

use std::net::SocketAddr;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::sync::watch;

/// Size of a line of output that `ovfleet-operator local` forwards from a process.
///
/// If exceeded: the line is split.
const LINE_BYTES_MAX: usize = 64 << 10;
/// Maximum number of bytes of an error that are stored.
const ERROR_BYTES_MAX: usize = 4 << 10;
/// The prefix of the line in which a program reports the error that ends it.
const ERROR: &str = "error: ";

/// The information that was parsed from the output of a process.
#[derive(Clone, Debug, Default)]
pub(super) struct ProcessOutput {
    /// The addresses that the process listens on.
    pub(super) addresses: Option<ListenAddresses>,
    /// The error with which the process exits, and the lines after it, up to [`ERROR_BYTES_MAX`].
    pub(super) error: String,
}

/// The addresses that a process listens on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListenAddresses {
    pub(super) http: SocketAddr,
    /// The address at which a server reports its load, or a router reports on its replicas.
    pub(super) grpc: Option<SocketAddr>,
}

/// Forwards the lines of a process to standard error, prefixed with the name of the process.
pub(super) async fn forward(
    name: String,
    stream: impl tokio::io::AsyncRead + Unpin,
    output: watch::Sender<ProcessOutput>,
) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        // Split lines that exceed the limit.
        let limit = LINE_BYTES_MAX as u64;
        match (&mut reader).take(limit).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if !record(&output, text) {
            eprintln!("{name} | {text}");
        }
    }
}

/// Records the information in a line. Returns whether the line is part of the error.
fn record(output: &watch::Sender<ProcessOutput>, text: &str) -> bool {
    let is_error = text.starts_with(ERROR) || !output.borrow().error.is_empty();
    let addresses = listen_addresses(text);
    if is_error || addresses.is_some() {
        output.send_modify(|output| {
            output.addresses = output.addresses.or(addresses);
            if is_error && output.error.len() + text.len() < ERROR_BYTES_MAX {
                output.error.push_str(text);
                output.error.push('\n');
            }
        });
    }
    is_error
}

/// Parses the log line that contains the addresses on which a process listens.
fn listen_addresses(line: &str) -> Option<ListenAddresses> {
    let (_, addresses) = line.split_once("listening on http://")?;
    let (http, grpc) = match addresses.split_once(", gRPC on ") {
        Some((http, grpc)) => (http, Some(grpc)),
        None => (addresses, None),
    };
    let address = |text: &str| {
        let end = text.find(|letter: char| letter.is_whitespace() || letter == '"').unwrap_or(text.len());
        text[..end].parse().ok()
    };
    Some(ListenAddresses { http: address(http)?, grpc: grpc.and_then(address) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_addresses_of_a_process_are_read_from_its_log() {
        let addresses = |http: &str, grpc: Option<&str>| {
            let grpc = grpc.map(|grpc| grpc.parse().unwrap());
            Some(ListenAddresses { http: http.parse().unwrap(), grpc })
        };
        for (line, expected) in [
            (
                "2026 INFO listening on http://127.0.0.1:41, gRPC on 127.0.0.1:42",
                addresses("127.0.0.1:41", Some("127.0.0.1:42")),
            ),
            ("2026  INFO listening on http://[::1]:8000", addresses("[::1]:8000", None)),
            (
                r#"{"message":"listening on http://1.2.3.4:5, gRPC on 1.2.3.4:6","target":"x"}"#,
                addresses("1.2.3.4:5", Some("1.2.3.4:6")),
            ),
            ("loading", None),
            ("failed: listening on http://somewhere", None),
        ] {
            assert_eq!(listen_addresses(line), expected, "{line}");
        }
    }

    #[tokio::test]
    async fn the_error_of_a_process_is_stored() {
        let (sender, output) = watch::channel(ProcessOutput::default());
        let text = "INFO listening on http://127.0.0.1:1\nerror: no model\n\nUsage: server\n";
        forward("server".to_owned(), text.as_bytes(), sender).await;
        let output = output.borrow().clone();
        assert!(output.addresses.is_some());
        assert_eq!(output.error, "error: no model\n\nUsage: server\n");
    }
}
