//! Tests `ovfleet-server drain` against a server with the simulator.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

/// A running server. Dropping it kills the process.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the status of the answer to `GET path`.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn a_drained_server_is_alive_and_not_ready() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ovfleet-server"));
    command
        .args(["--backend", "sim", "--host", "127.0.0.2", "--port", "0", "--grpc-port", "0"])
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let server = Server(child);
    let listening = lines.find(|line| line.contains("http://")).unwrap();
    let (_, addresses) = listening.split_once("http://").unwrap();
    let (http, grpc) = addresses.split_once(", gRPC on ").unwrap();
    let grpc_port = grpc.trim().rsplit(':').next().unwrap();
    lines.find(|line| line.ends_with("ready")).unwrap();
    assert_eq!(get(http, "/v2/health/ready"), "200");

    let drain = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ovfleet-server"));
        command.args(["drain", "--host", "127.0.0.2"]).args(arguments).stderr(Stdio::null()).status().unwrap()
    };
    assert!(drain(&["--grpc-port", grpc_port, "--timeout", "60s", "--settle", "0s"]).success());
    assert_eq!(get(http, "/v2/health/ready"), "503");
    assert_eq!(get(http, "/v2/health/live"), "200");
    drop(server);
    assert!(!drain(&["--grpc-port", grpc_port, "--timeout", "60s"]).success(), "the server has stopped");
}

#[test]
fn a_server_that_does_not_answer_is_an_error() {
    // The kernel accepts connections to this port, but no process answers them.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ovfleet-server"));
    let output = command.args(["drain", "--grpc-port", &port, "--timeout", "50ms"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains(&format!("127.0.0.1:{port} did not answer within 50ms")), "{message}");
}
