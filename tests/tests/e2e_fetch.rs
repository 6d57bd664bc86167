//! Tests `ovfleet-server fetch` as a process, from a Hub, from S3 and onto a full disk. The tests check the files, the
//! report and the exit code, by which a cluster decides whether to retry.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tests::hub::{COMMIT, Hub};
use tests::process::Process;
use tests::s3::{Bucket, Credentials, S3};
use tests::server::{START_LIMIT, bare_command};

/// The result of a fetch.
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

    /// Asserts the exit code and the reason in the report.
    #[track_caller]
    fn assert_ended(&self, code: i32, reason: &str) {
        assert_eq!((self.code, self.reason()), (Some(code), reason), "{self:#?}");
        let line = self.output.lines().any(|line| line.starts_with("error: "));
        assert_eq!(line, code != 0, "{self:#?}");
    }
}

/// Fetches into `directory`/into and writes the report to `directory`/report.
fn fetch(directory: &Path, arguments: &[&str]) -> Fetch {
    run(bare_command().unwrap(), directory, arguments)
}

fn run(mut command: Command, directory: &Path, arguments: &[&str]) -> Fetch {
    let report = directory.join("report");
    command.arg("fetch").arg("--into").arg(directory.join("into")).arg("--report").arg(&report);
    let ended = Process::start(command.args(arguments)).unwrap().wait(START_LIMIT).unwrap();
    let report = std::fs::read(&report).unwrap_or_default();
    Fetch {
        code: ended.status.code(),
        report: serde_json::from_slice(&report).unwrap_or_default(),
        output: ended.output,
    }
}

fn model(directory: &Path) -> Option<Vec<u8>> {
    std::fs::read(directory.join("into/current")).ok()
}

/// Writes a directory of credentials, with one file for each entry.
fn credentials(directory: &Path, entries: &[(&str, &str)]) -> String {
    let path = directory.join("credentials");
    std::fs::create_dir_all(&path).unwrap();
    for (name, value) in entries {
        std::fs::write(path.join(name), format!("{value}\n")).unwrap();
    }
    path.display().to_string()
}

/// The content of a file that is large enough to arrive in many pieces.
fn content(seed: u8) -> Vec<u8> {
    (0..1_500_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8 ^ seed).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_match_the_pattern_are_fetched_once_from_a_hub() {
    let files = tempfile::tempdir().unwrap();
    let [small, large] = ["model-Q4.gguf", "model-Q8.gguf"].map(|name| files.path().join(name));
    std::fs::write(&small, content(4)).unwrap();
    std::fs::write(&large, content(8)).unwrap();
    let hub = Hub::start("127.0.0.1", "owner/name", &[&small, &large]).await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let url = hub.url();
    let arguments = ["--hf-endpoint", &url, "--hf-repo", "owner/name", "--hf-file", "*-Q4.gguf"];
    let fetched = fetch(directory.path(), &arguments);
    fetched.assert_ended(0, "Fetched");
    assert_eq!(model(directory.path()), Some(content(4)));
    let hex: String = Sha256::digest(content(4)).iter().map(|byte| format!("{byte:02x}")).collect();
    let digest: String =
        Sha256::digest(format!("{hex}  model-Q4.gguf\n")).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(fetched.report["digest"], format!("sha256:{digest}"));
    assert_eq!(fetched.report["revision"], COMMIT, "the commit of the branch");
    drop(hub);
    let again = fetch(directory.path(), &arguments);
    again.assert_ended(0, "Fetched");
    assert_eq!(again.report["revision"], COMMIT);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_parts_of_a_split_model_are_fetched_if_the_first_is_selected() {
    let files = tempfile::tempdir().unwrap();
    let part = |model: &str, part: u8| format!("{model}-0000{part}-of-00003.gguf");
    let names = [1, 2, 3].map(|number| part("model-Q4", number));
    let mut listed: Vec<_> = names.iter().map(|name| files.path().join(name)).collect();
    // The Hub has a complete model, and a part of another model.
    listed.push(files.path().join(part("model-Q8", 1)));
    for (seed, path) in (0..).zip(&listed) {
        std::fs::write(path, content(seed)).unwrap();
    }
    let paths: Vec<&Path> = listed.iter().map(PathBuf::as_path).collect();
    let hub = Hub::start("127.0.0.1", "owner/name", &paths).await.unwrap();
    let url = hub.url();
    let from = |directory: &Path, pattern: &str| {
        fetch(directory, &["--hf-endpoint", &url, "--hf-repo", "owner/name", "--hf-file", pattern])
    };
    for pattern in [&*names[0], "*Q4*"] {
        let directory = tempfile::tempdir().unwrap();
        from(directory.path(), pattern).assert_ended(0, "Fetched");
        assert_eq!(model(directory.path()), Some(content(0)), "the link points to the first part");
        for (seed, name) in (0..).zip(&names) {
            let path = directory.path().join("into/files").join(name);
            assert!(std::fs::read(path).is_ok_and(|found| found == content(seed)), "{name}");
        }
    }
    for (pattern, problem) in [
        (part("model-Q8", 1), "model-Q8-00002-of-00003.gguf is not among the files to fetch"),
        (names[1].clone(), "model-Q4-00001-of-00003.gguf is not among the files to fetch"),
        ("*".to_owned(), "has 4 GGUF files that are not the parts of one model; select one model"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let refused = from(directory.path(), &pattern);
        refused.assert_ended(13, "InvalidSource");
        assert!(refused.report["message"].as_str().unwrap().contains(problem), "{refused:?}");
        assert!(!directory.path().join("into/files").exists(), "a file was fetched");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_failure_of_a_hub_has_its_own_reason() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("model.gguf");
    std::fs::write(&file, content(0)).unwrap();
    let open = Hub::start("127.0.0.1", "owner/name", &[&file]).await.unwrap();
    let private =
        Hub::start_with_token("127.0.0.1", "owner/name", &[&file], Some("hf_secret")).await.unwrap();
    let (open, private) = (open.url(), private.url());
    let directory = tempfile::tempdir().unwrap();
    let from = |url: &str, more: &[&str]| {
        let arguments = [&["--hf-endpoint", url, "--hf-repo", "owner/name"], more].concat();
        fetch(directory.path(), &arguments)
    };
    let repo = ["--hf-endpoint", &open, "--hf-repo", "owner/other"];
    fetch(directory.path(), &repo).assert_ended(10, "NotFound");
    from(&open, &["--hf-file", "*.bin"]).assert_ended(13, "InvalidSource");
    from(&private, &[]).assert_ended(12, "Unauthorized");
    let wrong = credentials(directory.path(), &[("token", "hf_wrong")]);
    let refused = from(&private, &["--credentials", &wrong]);
    refused.assert_ended(12, "Unauthorized");
    assert!(!refused.output.contains("hf_wrong"), "{}", refused.output);
    // The file has changed since it was listed.
    std::fs::write(&file, content(1)).unwrap();
    from(&open, &[]).assert_ended(11, "DigestMismatch");
    assert_eq!(model(directory.path()), None, "a file with a wrong digest is served");

    std::fs::write(&file, content(0)).unwrap();
    let right = credentials(directory.path(), &[("token", "hf_secret")]);
    from(&private, &["--credentials", &right]).assert_ended(0, "Fetched");
    assert_eq!(model(directory.path()), Some(content(0)));
}

async fn start_s3(region: &str, secret: &str, token: Option<&str>) -> S3 {
    let credentials = Credentials {
        access_key_id: "AKIATEST".to_owned(),
        secret_access_key: secret.to_owned(),
        session_token: token.map(str::to_owned),
    };
    let objects = objects();
    let bucket = Bucket { name: "models".to_owned(), region: region.to_owned(), credentials, objects };
    S3::start("127.0.0.1", bucket).await.unwrap()
}

fn objects() -> BTreeMap<String, Vec<u8>> {
    let names =
        ["chat/openvino_model.xml", "chat/openvino_model.bin", "chat/deep/a b+ü.json", "chat/tokenizer.json"];
    let mut objects: BTreeMap<_, _> =
        (0..).zip(names).map(|(seed, name)| (name.to_owned(), content(seed))).collect();
    objects.insert("chat/".to_owned(), Vec::new());
    objects.insert("one/model.gguf".to_owned(), content(9));
    objects.insert("split/model-00001-of-00002.gguf".to_owned(), content(10));
    objects.insert("split/model-00002-of-00002.gguf".to_owned(), content(11));
    objects
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_or_a_directory_is_fetched_from_s3_with_signed_requests() {
    let region = "eu-west-1";
    let s3 = start_s3(region, "secret/+", Some("to=ken")).await;
    let url = s3.url();
    let directory = tempfile::tempdir().unwrap();
    let entries = [("accessKeyId", "AKIATEST"), ("secretAccessKey", "secret/+"), ("sessionToken", "to=ken")];
    let credentials = credentials(directory.path(), &entries);
    let from = |object: &str| {
        let source = ["--s3-endpoint", &url, "--s3-region", region, "--credentials", &credentials];
        fetch(directory.path(), &[&source[..], &["--s3-object", object]].concat())
    };
    from("models/one/model.gguf").assert_ended(0, "Fetched");
    assert_eq!(model(directory.path()), Some(content(9)));
    // Fetch both parts of a split model, by the key of the first part and by their common prefix.
    for object in ["models/split/model-00001-of-00002.gguf", "models/split/"] {
        from(object).assert_ended(0, "Fetched");
        assert_eq!(model(directory.path()), Some(content(10)), "{object}");
        let second = std::fs::read(directory.path().join("into/files/model-00002-of-00002.gguf"));
        assert!(second.is_ok_and(|second| second == content(11)), "{object}");
    }
    // The directory has more objects than a page of the listing.
    from("models/chat/").assert_ended(0, "Fetched");
    for (key, content) in
        objects().iter().filter(|(key, content)| key.starts_with("chat/") && !content.is_empty())
    {
        let path = directory.path().join("into/current").join(key.strip_prefix("chat/").unwrap());
        assert!(std::fs::read(&path).is_ok_and(|found| found == *content), "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vision_language_model_is_recognized() {
    let files = tempfile::tempdir().unwrap();
    let names = ["openvino_language_model.xml", "openvino_vision_embeddings_model.xml", "config.json"];
    let paths = names.map(|name| files.path().join(name));
    for (seed, path) in (0..).zip(&paths) {
        std::fs::write(path, content(seed)).unwrap();
    }
    let listed: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    let hub = Hub::start("127.0.0.1", "owner/name", &listed).await.unwrap();
    let url = hub.url();
    for format in ["auto", "openvino-ir"] {
        let directory = tempfile::tempdir().unwrap();
        let arguments = ["--hf-endpoint", &url, "--hf-repo", "owner/name", "--format", format];
        fetch(directory.path(), &arguments).assert_ended(0, "Fetched");
        for (seed, name) in (0..).zip(names) {
            let fetched = std::fs::read(directory.path().join("into/current").join(name));
            assert!(fetched.is_ok_and(|fetched| fetched == content(seed)), "{name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_failure_of_s3_has_its_own_reason() {
    let s3 = start_s3("eu-west-1", "secret", None).await;
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
        let directory = tempfile::tempdir().unwrap();
        let mut arguments = vec!["--s3-endpoint", &url, "--s3-region", region, "--s3-object", object];
        let secret = secret.map(|secret| {
            credentials(directory.path(), &[("accessKeyId", "AKIATEST"), ("secretAccessKey", secret)])
        });
        arguments.extend(secret.iter().flat_map(|secret| ["--credentials", secret]));
        let refused = fetch(directory.path(), &arguments);
        refused.assert_ended(code, reason);
        assert_eq!(model(directory.path()), None, "{object}");
        // Neither the signature nor the secret may be logged.
        assert!(!refused.output.contains("X-Amz") && !refused.output.contains("guess"), "{}", refused.output);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_reported_and_the_fetch_resumes_when_there_is_space() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("model.gguf");
    std::fs::write(&file, content(0)).unwrap();
    let hub = Hub::start("127.0.0.1", "owner/name", &[&file]).await.unwrap();
    let url = hub.url();
    let arguments = ["--hf-endpoint", &url, "--hf-repo", "owner/name"];
    let directory = tempfile::tempdir().unwrap();
    // The file size limit of 1 MiB makes a write fail halfway, as on a full disk.
    let mut limited = tests::server::without_settings(Command::new("bash"));
    limited
        .args(["-c", "trap '' XFSZ; ulimit -f 1024; exec \"$@\"", "limited"])
        .arg(tests::server::binary().unwrap());
    let full = run(limited, directory.path(), &arguments);
    full.assert_ended(20, "DiskFull");
    let message = full.report["message"].as_str().unwrap();
    assert!(
        message.contains("does not fit into its file system") && message.contains("model.gguf"),
        "{message}"
    );
    assert_eq!(full.report["bytes_total"], content(0).len());
    assert_eq!(model(directory.path()), None, "an incomplete file is served");
    let part = directory.path().join("into/files/model.gguf.part");
    assert!(std::fs::metadata(&part).is_ok_and(|part| part.len() > 500_000), "the received part is missing");

    fetch(directory.path(), &arguments).assert_ended(0, "Fetched");
    assert_eq!(model(directory.path()), Some(content(0)));
    assert!(!part.exists());
}
