//! Sends requests that schemathesis generates from `/openapi.json` to a server with a simulated model. Every response
//! must match the document, and none may be a server error. `make schema` runs this test; `make test` does not, because
//! the test takes a fixed time.

use std::process::Command;
use std::time::Duration;

use tests::process::Process;
use tests::server::Server;

/// The default time during which schemathesis generates requests, in seconds. `SECONDS_EACH` overrides it.
const SECONDS: &str = "120";
/// The additional time for starting the program, on a busy machine.
const GRACE: Duration = Duration::from_secs(300);

#[test]
fn responses_to_generated_requests_match_the_document() {
    let seconds = std::env::var("SECONDS_EACH").unwrap_or_else(|_| SECONDS.to_owned());
    let limit = Duration::from_secs(seconds.parse().expect("SECONDS_EACH is a number of seconds"));
    let python = tests::root().join(".deps/venv-schema/bin/python");
    assert!(python.exists(), "schemathesis is not installed: run `make schema`");
    let server = Server::scripted(&["Hello."], &["--enable-sleep-mode"]).expect("the server starts");
    let mut command = Command::new(python);
    command.arg("-B").arg(tests::root().join("tests/schema/run.py"));
    command.args([&server.url(""), "scripted", &seconds]);
    let ended = Process::start(&mut command)
        .expect("the program starts")
        .wait(limit + GRACE)
        .expect("the program ends");
    assert!(ended.status.success(), "{}", ended.output);
    assert!(ended.output.contains("schemathesis passed"), "{}", ended.output);
    assert_eq!(tests::server::probe(server.address(), "/v2/health/ready").expect("the server responds"), 200);
}
