//! Requests that schemathesis makes up from `/openapi.json`, against a server with a simulated model: whatever they are,
//! the status and the body of the answer are those that the document describes, and none is a failure of the server.
//! Other than that of the rest, its time is fixed, so `make schema` runs it and `make test` does not.

use std::process::Command;
use std::time::Duration;

use tests::process::Process;
use tests::server::Server;

/// How long schemathesis makes up requests, in seconds, unless the environment says otherwise.
const SECONDS: &str = "120";
/// What the program takes besides, on a busy machine.
const GRACE: Duration = Duration::from_secs(300);

#[test]
fn answers_to_made_up_requests_are_as_the_document_describes_them() {
    let seconds = std::env::var("SECONDS_EACH").unwrap_or_else(|_| SECONDS.to_owned());
    let limit = Duration::from_secs(seconds.parse().expect("SECONDS_EACH is a number of seconds"));
    let python = tests::root().join(".deps/venv-schema/bin/python");
    assert!(python.exists(), "schemathesis is not installed: run `make schema`");
    let server = Server::scripted(&["Hello."], &["--enable-sleep-mode"]).expect("the server starts");
    let mut command = Command::new(python);
    command.arg("-B").arg(tests::root().join("tests/schema/run.py"));
    command.args([&server.url(""), "scripted", &seconds]);
    let ended =
        Process::start(&mut command).expect("the program starts").wait(limit + GRACE).expect("it ends");
    assert!(ended.status.success(), "{}", ended.output);
    assert!(ended.output.contains("schemathesis passed"), "{}", ended.output);
    assert_eq!(tests::server::probe(server.address(), "/v2/health/ready").expect("an answer"), 200);
}
