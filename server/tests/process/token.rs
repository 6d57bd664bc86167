//! Tests a server with a replica token: its API, its admin port, `ovfleet-server drain`, and replacing the token.

use std::io::Write as _;
use std::net::TcpStream;
use std::process::{Command, Stdio};

use crate::harness::{Server, command, rest};
use crate::refusal;

const OLD: &str = "old-0123456789abcdef";
const NEW: &str = "new-0123456789abcdef";

/// Returns the status of the answer to `GET path` with this token.
fn get(address: &str, path: &str, token: &str) -> u16 {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-ovfleet-replica-token: {token}\r\n\r\n"
    )
    .unwrap();
    rest(stream).split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn the_api_and_drain_need_the_token_and_the_admin_port_does_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, OLD).unwrap();
    let flag = format!("--replica-token-file={}", path.display());
    for compatible in [&[][..], &["--ovms-compat"]] {
        let server = Server::start(command(&["--admin-port", "0", &flag]).args(compatible));
        let admin = server.logged("metrics and probes on ");
        for path in ["/metrics", "/v2/health/live", "/v2/health/ready"] {
            assert_eq!(get(&admin, path, ""), 200, "{path}");
        }
        for path in ["/v3/models", "/v2/health/live", "/v1/config", "/v2/models/sim/ready"] {
            assert_eq!(get(&server.address, path, NEW), 401, "{path}");
        }
        assert_eq!(get(&server.address, "/v3/models", OLD), 200);
    }
}

#[test]
fn the_token_can_be_replaced_and_drain_sends_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, OLD).unwrap();
    let flag = format!("--replica-token-file={}", path.display());
    let server = Server::start(&mut command(&[&flag]));
    let grpc = server.logged("gRPC on ");
    let drain = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ovfleet-server"));
        let port = grpc.rsplit(':').next().unwrap();
        command.args(["drain", "--grpc-port", port, "--timeout", "60s", "--settle", "0s"]).args(flags);
        command.stderr(Stdio::null()).status().unwrap().success()
    };
    std::fs::write(&path, format!("{NEW}\n{OLD}\n")).unwrap();
    while get(&server.address, "/v3/models", NEW) != 200 {
        assert_eq!(get(&server.address, "/v3/models", OLD), 200);
    }
    assert_eq!(get(&server.address, "/v3/models", OLD), 200);
    std::fs::write(&path, "too short").unwrap();
    server.await_log("the previous tokens remain in effect");
    std::fs::write(&path, NEW).unwrap();
    while get(&server.address, "/v3/models", OLD) == 200 {}
    assert!(!drain(&[]));
    assert_eq!(get(&server.address, "/v2/health/ready", NEW), 200, "the server was not drained");
    assert!(drain(&[&flag]));
    assert_eq!(get(&server.address, "/v2/health/ready", NEW), 503);
    server.signal("TERM");
    let (_, log) = server.ended();
    assert!(!log.contains(OLD) && !log.contains(NEW), "{log}");
}

#[test]
fn a_server_does_not_start_with_a_file_that_has_no_token() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    let flag = format!("--replica-token-file={}", path.display());
    let said = refusal(&mut command(&[&flag]));
    assert!(
        said.contains("failed to read the replica token from") && said.contains("No such file"),
        "{said}"
    );
    std::fs::write(&path, "short").unwrap();
    let said = refusal(&mut command(&[&flag]));
    assert!(said.contains("line 1 is not a token") && !said.contains("short"), "{said}");
}
