//! Tests the server process with the simulator: how it starts, fails to start, and exits.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod harness;
mod hostile;
mod media;
mod token;

use std::io::Write as _;
use std::process::{Command, Output};

use harness::{Server, command, rest};

/// Returns the number of files in a directory and its subdirectories.
fn files(directory: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { files(&path) } else { 1 }).sum()
}

/// Runs a server that fails to start. Returns its standard error.
fn refusal(command: &mut Command) -> String {
    let Output { status, stderr, .. } = command.output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert!(!status.success(), "{said}");
    assert!(!said.contains("panicked") && !said.contains("backtrace"), "{said}");
    said
}

#[test]
fn start_errors_are_reported_in_one_line() {
    let errors = |said: &str| said.lines().filter(|line| line.starts_with("error: ")).count();
    let said = refusal(&mut command(&["--model", "/no/such/model.gguf"]));
    assert!(said.contains("/no/such/model.gguf") && errors(&said) == 1, "{said}");

    let said = refusal(&mut command(&["--draft-model", "/no/such/draft.gguf"]));
    assert!(said.contains("/no/such/draft.gguf") && errors(&said) == 1, "{said}");

    let server = Server::start(&mut command(&[]));
    let port = server.address.rsplit(':').next().unwrap().to_owned();
    let mut second = Command::new(env!("CARGO_BIN_EXE_ovfleet-server"));
    let said = refusal(second.args(["--backend", "sim", "--grpc-port", "0", "--port", &port]));
    assert!(said.contains(&port) && said.contains("in use") && errors(&said) == 1, "{said}");

    let said = refusal(&mut Command::new(env!("CARGO_BIN_EXE_ovfleet-server")));
    assert!(said.contains("--model") && errors(&said) == 1, "{said}");
    let said = refusal(&mut command(&["--max-num-seqs", "0"]));
    assert!(said.contains("--max-num-seqs"), "{said}");
    let said = refusal(&mut command(&["--log", "=,="]));
    assert!(errors(&said) == 1, "{said}");
    let said = refusal(command(&[]).env("OVFLEET_READ_TIMEOUT", "soon"));
    assert!(said.contains("soon") && said.contains("--read-timeout"), "{said}");
}

#[test]
fn help_lists_flags_variables_and_examples() {
    let output = command(&["--help"]).output().unwrap();
    assert!(output.status.success());
    let help = String::from_utf8(output.stdout).unwrap();
    for said in ["--model <PATH>", "OVFLEET_KV_CACHE_SIZE", "Examples:", "curl http://"] {
        assert!(help.contains(said), "no {said} in {help}");
    }
}

#[test]
fn sigterm_finishes_running_requests_and_exits_with_success() {
    let server = Server::start(&mut command(&["--sim-step-time", "10ms"]));
    let stream = server.begun(60);
    server.signal("TERM");
    server.await_log("stopping: finishing requests");
    let answer = rest(stream);
    assert!(answer.contains("data: [DONE]"), "{answer}");
    let (status, log) = server.ended();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn the_drain_timeout_cuts_off_requests_and_exits_with_success() {
    let server = Server::start(&mut command(&["--sim-step-time", "10ms", "--drain-timeout", "50ms"]));
    let stream = server.begun(8000);
    server.signal("INT");
    assert!(!rest(stream).contains("[DONE]"));
    let (status, log) = server.ended();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("aborting the remaining requests"), "{log}");
}

#[test]
fn the_drain_timeout_stores_background_responses_as_failed_and_spills_cached_blocks() {
    let (directory, spill) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [stored, spilled] = [&directory, &spill].map(|directory| directory.path().to_str().unwrap());
    let server = Server::start(&mut command(&[
        "--sim-step-time=10ms",
        "--drain-timeout=50ms",
        "--response-store-dir",
        stored,
        "--kv-spill-dir",
        spilled,
    ]));
    let before = files(spill.path());
    let prompt = "a prompt of several blocks ".repeat(4);
    let body = format!(
        r#"{{"model":"sim","input":"{prompt}","background":true,"ignore_eos":true,"max_output_tokens":8000}}"#
    );
    let mut stream = server.connect();
    let head = "POST /v1/responses HTTP/1.1\r\nhost: x\r\nconnection: close";
    write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let answer = rest(stream);
    assert!(answer.contains(r#""status":"queued""#), "{answer}");
    server.signal("TERM");
    let (status, log) = server.ended();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("aborting the remaining requests"), "{log}");
    assert!(files(spill.path()) > before, "cached blocks are spilled");
    let stored = std::fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().path());
    let record =
        stored.filter(|path| path.extension().is_some()).map(|path| std::fs::read_to_string(path).unwrap());
    let record: Vec<String> = record.collect();
    assert!(record.len() == 1 && record[0].contains(r#""status":"failed""#), "{record:?}");
}

#[test]
fn a_second_signal_exits_at_once() {
    let server = Server::start(&mut command(&["--sim-step-time", "10ms", "--drain-timeout", "1h"]));
    let stream = server.begun(8000);
    server.signal("TERM");
    server.await_log("stopping: finishing requests");
    server.signal("TERM");
    assert!(!rest(stream).contains("[DONE]"));
    let (status, log) = server.ended();
    assert_eq!(status.code(), Some(1), "{log}");
}

#[test]
fn a_dead_engine_ends_requests_with_errors_and_the_process_with_failure() {
    let server = Server::start(&mut command(&["--sim-fatal-step", "3"]));
    let answer = rest(server.begun(60));
    assert!(answer.contains(r#""code":"stopped""#) && !answer.contains("[DONE]"), "{answer}");
    let (status, log) = server.ended();
    assert_eq!(status.code(), Some(1), "{log}");
    let last = log.lines().last().unwrap();
    assert!(
        last.starts_with("error: the engine died: ") && last.contains("a simulated fatal fault"),
        "{last}"
    );
}

#[test]
fn a_client_that_does_not_complete_its_request_is_disconnected() {
    let server = Server::start(&mut command(&["--read-timeout", "100ms"]));
    let mut slow = server.connect();
    slow.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n").unwrap();
    assert!(!rest(slow).contains("200 OK"));
    let mut body = server.connect();
    body.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{").unwrap();
    let answer = rest(body);
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("request_incomplete"), "{answer}");
}

#[test]
fn logs_can_be_json_and_never_contain_prompts_or_answers() {
    let server =
        Server::start(command(&["--log", "debug", "--log-format", "json"]).env("OVFLEET_SIM_STEP_TIME", "0"));
    let stream = server.begun(4);
    server.await_log("request answered");
    server.signal("TERM");
    assert!(rest(stream).contains("data: [DONE]"));
    let (_, log) = server.ended();
    for line in log.lines() {
        assert!(serde_json::from_str::<serde_json::Value>(line).is_ok(), "not JSON: {line}");
    }
    assert!(log.contains(r#""prompt_tokens":27"#), "{log}");
    assert!(!log.contains("secret") && !log.contains("data: "), "{log}");
}
