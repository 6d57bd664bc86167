//! `server fetch` as a process, from a hub, from a service like S3, and onto a disk that is full: what it leaves, what it
//! reports, and its exit code, by which a cluster knows whether to try again.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tests::hub::{COMMIT, Hub};
use tests::process::Process;
use tests::s3::{Keys, S3};
use tests::server::{START_LIMIT, bare_command};

/// How a fetch ended.
#[derive(Debug)]
struct Fetch {
    code: Option<i32>,
    report: Value,
    output: String,
}

impl Fetch {
    fn reason(&self) -> &str {
        self.report["reason"].as_str().unwrap_or_default()
    }

    /// Its code and its reason.
    #[track_caller]
    fn assert_ended(&self, code: i32, reason: &str) {
        assert_eq!((self.code, self.reason()), (Some(code), reason), "{self:#?}");
        let line = self.output.lines().any(|line| line.starts_with("error: "));
        assert_eq!(line, code != 0, "{self:#?}");
    }
}

/// Fetches into `folder`/into, with the report beside it.
fn fetch(folder: &Path, arguments: &[&str]) -> Fetch {
    run(bare_command().unwrap(), folder, arguments)
}

fn run(mut command: Command, folder: &Path, arguments: &[&str]) -> Fetch {
    let report = folder.join("report");
    command.arg("fetch").arg("--into").arg(folder.join("into")).arg("--report").arg(&report);
    let ended = Process::start(command.args(arguments)).unwrap().wait(START_LIMIT).unwrap();
    let report = std::fs::read(&report).unwrap_or_default();
    Fetch {
        code: ended.status.code(),
        report: serde_json::from_slice(&report).unwrap_or_default(),
        output: ended.output,
    }
}

fn model(folder: &Path) -> Option<Vec<u8>> {
    std::fs::read(folder.join("into/current")).ok()
}

/// A folder of credentials.
fn credentials(folder: &Path, entries: &[(&str, &str)]) -> String {
    let path = folder.join("credentials");
    std::fs::create_dir_all(&path).unwrap();
    for (name, value) in entries {
        std::fs::write(path.join(name), format!("{value}\n")).unwrap();
    }
    path.display().to_string()
}

/// So much that it comes in many pieces.
fn content(seed: u8) -> Vec<u8> {
    (0..1_500_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8 ^ seed).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn from_a_hub_comes_what_is_like_the_pattern_and_nobody_is_asked_again() {
    let files = tempfile::tempdir().unwrap();
    let [small, large] = ["model-Q4.gguf", "model-Q8.gguf"].map(|name| files.path().join(name));
    std::fs::write(&small, content(4)).unwrap();
    std::fs::write(&large, content(8)).unwrap();
    let hub = Hub::start("127.0.0.1", "owner/name", &[&small, &large]).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let url = hub.url();
    let arguments = ["--hf-endpoint", &url, "--hf-repo", "owner/name", "--hf-file", "*-Q4.gguf"];
    let fetched = fetch(folder.path(), &arguments);
    fetched.assert_ended(0, "Fetched");
    assert_eq!(model(folder.path()), Some(content(4)));
    let hex: String = Sha256::digest(content(4)).iter().map(|byte| format!("{byte:02x}")).collect();
    let digest: String =
        Sha256::digest(format!("{hex}  model-Q4.gguf\n")).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(fetched.report["digest"], format!("sha256:{digest}"));
    assert_eq!(fetched.report["revision"], COMMIT, "the commit that the branch led to");
    drop(hub);
    let again = fetch(folder.path(), &arguments);
    again.assert_ended(0, "Fetched");
    assert_eq!(again.report["revision"], COMMIT);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_hub_does_not_give_has_its_own_reason_each() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("model.gguf");
    std::fs::write(&file, content(0)).unwrap();
    let open = Hub::start("127.0.0.1", "owner/name", &[&file]).await.unwrap();
    let private = Hub::start_for("127.0.0.1", "owner/name", &[&file], Some("hf_secret")).await.unwrap();
    let (open, private) = (open.url(), private.url());
    let folder = tempfile::tempdir().unwrap();
    let from = |url: &str, more: &[&str]| {
        let arguments = [&["--hf-endpoint", url, "--hf-repo", "owner/name"], more].concat();
        fetch(folder.path(), &arguments)
    };
    let repo = ["--hf-endpoint", &open, "--hf-repo", "owner/other"];
    fetch(folder.path(), &repo).assert_ended(10, "NotFound");
    from(&open, &["--hf-file", "*.bin"]).assert_ended(13, "InvalidSource");
    from(&private, &[]).assert_ended(12, "Unauthorized");
    let wrong = credentials(folder.path(), &[("token", "hf_wrong")]);
    let refused = from(&private, &["--credentials", &wrong]);
    refused.assert_ended(12, "Unauthorized");
    assert!(!refused.output.contains("hf_wrong"), "{}", refused.output);
    // The file has changed since it was listed.
    std::fs::write(&file, content(1)).unwrap();
    from(&open, &[]).assert_ended(11, "DigestMismatch");
    assert_eq!(model(folder.path()), None, "nothing of it is served");

    std::fs::write(&file, content(0)).unwrap();
    let right = credentials(folder.path(), &[("token", "hf_secret")]);
    from(&private, &["--credentials", &right]).assert_ended(0, "Fetched");
    assert_eq!(model(folder.path()), Some(content(0)));
}

fn keys(secret: &str, token: Option<&str>) -> Keys {
    Keys { access: "AKIATEST".to_owned(), secret: secret.to_owned(), token: token.map(str::to_owned) }
}

fn objects() -> BTreeMap<String, Vec<u8>> {
    let names =
        ["chat/openvino_model.xml", "chat/openvino_model.bin", "chat/deep/a b+ü.json", "chat/tokenizer.json"];
    let mut objects: BTreeMap<_, _> =
        (0..).zip(names).map(|(seed, name)| (name.to_owned(), content(seed))).collect();
    objects.insert("chat/".to_owned(), Vec::new());
    objects.insert("one/model.gguf".to_owned(), content(9));
    objects
}

#[tokio::test(flavor = "multi_thread")]
async fn from_s3_comes_an_object_or_a_folder_with_signed_requests() {
    let region = "eu-west-1";
    let s3 = S3::start("127.0.0.1", ("models", region), keys("secret/+", Some("to=ken")), objects())
        .await
        .unwrap();
    let url = s3.url();
    let folder = tempfile::tempdir().unwrap();
    let entries = [("accessKeyId", "AKIATEST"), ("secretAccessKey", "secret/+"), ("sessionToken", "to=ken")];
    let credentials = credentials(folder.path(), &entries);
    let from = |object: &str| {
        let place = ["--s3-endpoint", &url, "--s3-region", region, "--credentials", &credentials];
        fetch(folder.path(), &[&place[..], &["--s3-object", object]].concat())
    };
    from("models/one/model.gguf").assert_ended(0, "Fetched");
    assert_eq!(model(folder.path()), Some(content(9)));
    // More objects than a page of the list has.
    from("models/chat/").assert_ended(0, "Fetched");
    for (key, content) in
        objects().iter().filter(|(key, content)| key.starts_with("chat/") && !content.is_empty())
    {
        let path = folder.path().join("into/current").join(key.strip_prefix("chat/").unwrap());
        assert!(std::fs::read(&path).is_ok_and(|found| found == *content), "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_s3_does_not_give_has_its_own_reason_each() {
    let s3 = S3::start("127.0.0.1", ("models", "eu-west-1"), keys("secret", None), objects()).await.unwrap();
    let url = s3.url();
    for (object, region, secret, (code, reason)) in [
        ("models/gone.gguf", "eu-west-1", Some("secret"), (10, "NotFound")),
        ("others/one/model.gguf", "eu-west-1", Some("secret"), (10, "NotFound")),
        ("models/none/", "eu-west-1", Some("secret"), (13, "InvalidSource")),
        ("models", "eu-west-1", Some("secret"), (13, "InvalidSource")),
        ("models/one/model.gguf", "eu-west-1", Some("guess"), (12, "Unauthorized")),
        ("models/chat/", "eu-west-1", Some("guess"), (12, "Unauthorized")),
        ("models/one/model.gguf", "us-east-1", Some("secret"), (12, "Unauthorized")),
        ("models/one/model.gguf", "eu-west-1", None, (12, "Unauthorized")),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut arguments = vec!["--s3-endpoint", &url, "--s3-region", region, "--s3-object", object];
        let secret = secret.map(|secret| {
            credentials(folder.path(), &[("accessKeyId", "AKIATEST"), ("secretAccessKey", secret)])
        });
        arguments.extend(secret.iter().flat_map(|secret| ["--credentials", secret]));
        let refused = fetch(folder.path(), &arguments);
        refused.assert_ended(code, reason);
        assert_eq!(model(folder.path()), None, "{object}");
        // What is signed, and by what, is nobody's business.
        assert!(!refused.output.contains("X-Amz") && !refused.output.contains("guess"), "{}", refused.output);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_full_disk_it_says_so_serves_nothing_and_goes_on_once_there_is_room() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("model.gguf");
    std::fs::write(&file, content(0)).unwrap();
    let hub = Hub::start("127.0.0.1", "owner/name", &[&file]).await.unwrap();
    let url = hub.url();
    let arguments = ["--hf-endpoint", &url, "--hf-repo", "owner/name"];
    let folder = tempfile::tempdir().unwrap();
    // No file may grow beyond a megabyte: writing fails in the middle, as on a full disk.
    let mut limited = tests::server::without_settings(Command::new("bash"));
    limited
        .args(["-c", "trap '' XFSZ; ulimit -f 1024; exec \"$@\"", "limited"])
        .arg(tests::server::binary().unwrap());
    let full = run(limited, folder.path(), &arguments);
    full.assert_ended(20, "DiskFull");
    let message = full.report["message"].as_str().unwrap();
    assert!(message.contains("no room for") && message.contains("model.gguf"), "{message}");
    assert_eq!(full.report["bytes_total"], content(0).len());
    assert_eq!(model(folder.path()), None, "half a file is served");
    let part = folder.path().join("into/files/model.gguf.part");
    assert!(std::fs::metadata(&part).is_ok_and(|part| part.len() > 500_000), "what came is kept");

    fetch(folder.path(), &arguments).assert_ended(0, "Fetched");
    assert_eq!(model(folder.path()), Some(content(0)));
    assert!(!part.exists());
}
