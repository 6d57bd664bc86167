//! Tests the server as a process: its libraries in an image, its messages when it cannot start, and its shutdown.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use tests::http::{self, Stream};
use tests::process::{ExitReport, Process, await_condition, group_exists};
use tests::server::{START_LIMIT, STOP_LIMIT, Server, bare_command, binary, command, command_for, probe};

/// Runs a server that must fail to start, and checks that it reports the error in one line.
fn refusal(command: &mut Command, mentions: &str) -> ExitReport {
    let ended =
        Process::start(command).and_then(|process| process.wait(START_LIMIT)).expect("the server ends");
    assert_eq!(ended.status.code(), Some(1), "{}", ended.output);
    assert!(!ended.output.contains("panicked"), "{}", ended.output);
    let errors: Vec<&str> = ended.output.lines().filter(|line| line.starts_with("error:")).collect();
    assert!(matches!(errors[..], [line] if line.contains(mentions)), "{mentions}: {}", ended.output);
    ended
}

/// The server compiles costly grammars on trial in a child process, which it starts without environment variables.
#[test]
fn the_server_of_an_image_finds_its_libraries_without_environment_variables() {
    let binary = binary().unwrap();
    let image = tempfile::tempdir().unwrap();
    let mut stage = Command::new(tests::root().join("deploy/stage"));
    let staged = stage.arg("server").arg(binary.parent().unwrap()).arg(image.path()).output().unwrap();
    assert!(staged.status.success(), "{}", String::from_utf8_lossy(&staged.stderr));
    // With this variable, the dynamic loader lists the libraries instead of starting the program.
    let mut server = Command::new(image.path().join("usr/local/bin/ovfleet-server"));
    let listed = server.env_clear().env("LD_TRACE_LOADED_OBJECTS", "1").output().unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout);
    let of_openvino = |line: &&str| line.starts_with("libopenvino") || line.starts_with("libtbb");
    let libraries: Vec<&str> = listed.lines().map(str::trim).filter(of_openvino).collect();
    // The directory in which the build found the libraries does not exist where the image runs.
    let directory = image.path().join("usr/local/bin/../lib").display().to_string();
    assert!(libraries.len() > 1 && libraries.iter().all(|line| line.contains(&directory)), "{listed}");
}

#[test]
fn the_error_names_a_model_that_does_not_exist() {
    let directory = tempfile::tempdir().unwrap();
    refusal(&mut command_for(&directory.path().join("gone.gguf"), &[]).unwrap(), "gone.gguf");
    // The directory does not contain a model.
    refusal(&mut command_for(directory.path(), &[]).unwrap(), &directory.path().display().to_string());
}

#[test]
fn a_truncated_model_is_rejected_wherever_it_ends() {
    let whole = std::fs::read(tests::sample_model()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("short.gguf");
    // The file ends in the header, the metadata, the tensor list or the weights, or lacks its last byte.
    for length in [0, 3, 20, 1000, 1_000_000, 1_790_000, 50_000_000, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        refusal(&mut command_for(&path, &[]).unwrap(), "short.gguf");
    }
    std::fs::write(&path, "this is not a model, but it is longer than the header").unwrap();
    refusal(&mut command_for(&path, &[]).unwrap(), "short.gguf");
}

#[test]
fn the_error_names_a_port_that_is_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (http, grpc) in [(port.as_str(), "0"), ("0", port.as_str())] {
        let mut command = bare_command().unwrap();
        command.arg("--model").arg(tests::sample_model());
        refusal(command.args(["--host", "127.0.0.1", "--port", http, "--grpc-port", grpc]), &port);
    }
}

#[tokio::test]
async fn a_full_cache_disk_disables_only_the_cache() {
    let directory = tempfile::tempdir().unwrap();
    let cache = directory.path().join("cache");
    let server = command(&["--cache-dir", &cache.display().to_string()]).unwrap();
    // The file size limit of 1 MiB makes a write fail halfway, as on a full disk.
    let mut limited = Command::new("bash");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 1024; exec \"$@\"", "limited"]);
    limited.arg(server.get_program()).args(server.get_args());
    let server = Server::from_command(&mut limited).unwrap();
    let answer = http::post(&server.url("/v1/completions"), &capital(&server, 4).await).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    let warnings = || server.process().output().matches("WARN").count();
    await_condition("the compiled model not to be cached", STOP_LIMIT, || (warnings() == 2).then_some(()))
        .unwrap();
    let output = server.process().output();
    // The first warning is about the temporary file for the front end.
    let warnings: Vec<_> = output.lines().filter(|line| line.contains("WARN")).collect();
    assert!(warnings[0].contains("create a temporary file"), "{}", warnings[0]);
    assert!(warnings[1].contains(&*cache.to_string_lossy()), "{}", warnings[1]);
    assert!(warnings.iter().all(|warning| warning.contains("File too large")), "{warnings:?}");
    assert!(!output.contains("panicked"), "{output}");
    // The fingerprint of the model has only a few bytes, which fit within the limit.
    let left: Vec<String> =
        files_in(&cache).into_iter().filter(|path| !path.contains("/fingerprint-")).collect();
    assert_eq!(left, [""; 0], "an incomplete file remains");
}

#[tokio::test]
async fn on_sigterm_running_requests_finish_and_new_ones_are_refused() {
    let server = Server::start(&[]).unwrap();
    let url = server.url("/v1/completions");
    let mut body = capital(&server, 200).await;
    let whole = http::post(&url, &body).await.unwrap();
    body["stream"] = json!(true);
    let mut stream = Stream::open(&url, &body).await.unwrap();
    let first = stream.next().await.unwrap().expect("the stream has begun");
    server.process().signal("TERM").unwrap();
    await_condition("new connections to be refused", STOP_LIMIT, || {
        (!probe(server.address(), "/v2/health/ready").is_ok_and(|status| status == 200)).then_some(())
    })
    .unwrap();
    let rest = stream.text().await.expect("the running stream finishes");
    assert_eq!(format!("{}{rest}", http::delta(&first)), whole.text());
    let ended = server.wait().unwrap();
    assert!(ended.status.success(), "{:?}\n{}", ended.status, ended.output);
}

#[test]
fn a_killed_server_leaves_no_process_and_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::from_command(
        command(&[])
            .unwrap()
            .current_dir(directory.path())
            .env("TMPDIR", directory.path())
            .env("HOME", directory.path()),
    )
    .unwrap();
    let group = server.process().id();
    let address = server.address().to_owned();
    server.process().signal("KILL").unwrap();
    assert!(!server.wait().unwrap().status.success());
    assert!(!group_exists(group), "a process remains");
    assert_eq!(files_in(directory.path()), [""; 0]);
    TcpListener::bind(&address).expect("the port is free again");
}

/// The body of a request for a completion of `tokens` tokens.
async fn capital(server: &Server, tokens: u32) -> serde_json::Value {
    let models = http::get(&server.url("/v1/models")).await.expect("the models are listed");
    json!({
        "model": models.body["data"][0]["id"],
        "prompt": "The capital of France is",
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": true,
    })
}

/// The files below `directory`, at any depth.
fn files_in(directory: &Path) -> Vec<String> {
    let entries = directory.read_dir().expect("the directory can be listed");
    let paths = entries.flatten().map(|entry| entry.path());
    paths
        .flat_map(|path| if path.is_dir() { files_in(&path) } else { vec![path.display().to_string()] })
        .collect()
}
