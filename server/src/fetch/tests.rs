//! Tests fetches from a web server, which each test starts and which can simulate faults.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use clap::Parser as _;
use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;

use super::*;

/// A fault of the web server in one request. The faults of a server occur in order, one per request; later requests
/// succeed.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Answers without a fault.
    Succeeds,
    /// Closes the connection after this number of bytes.
    Disconnects(usize),
    /// Sends no more data after this number of bytes.
    Stalls(usize),
    /// Sends this number of bytes, and the rest only after [`Web::resume`] has been notified.
    Pauses(usize),
    /// Answers with status 502.
    Fails,
}

#[derive(Debug, Default)]
struct Web {
    files: BTreeMap<&'static str, Vec<u8>>,
    faults: Mutex<Vec<Fault>>,
    /// The `Range` headers of the requests.
    requested_ranges: Mutex<Vec<Option<String>>>,
    token: Option<&'static str>,
    /// Whether the server ignores `If-Range` and `If-None-Match`.
    ignores_conditions: bool,
    /// Whether partial answers (status 206) have no ETag.
    omits_etag_of_ranges: bool,
    /// Continues an answer that [`Fault::Pauses`] has interrupted.
    resume: Arc<Notify>,
}

impl Web {
    fn of(content: &[u8], faults: &[Fault]) -> Arc<Self> {
        Self::with_files([("model.gguf", content.to_vec())], faults)
    }

    fn with_files<const N: usize>(files: [(&'static str, Vec<u8>); N], faults: &[Fault]) -> Arc<Self> {
        let faults = Mutex::new(faults.to_vec());
        Arc::new(Self { files: BTreeMap::from(files), faults, ..Self::default() })
    }

    async fn start(self: &Arc<Self>, tasks: &mut JoinSet<()>) -> String {
        let router = Router::new().route("/{*file}", get(answer)).with_state(Arc::clone(self));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tasks.spawn(async move { drop(axum::serve(listener, router).await) });
        format!("http://{address}")
    }

    fn requested_ranges(&self) -> Vec<Option<String>> {
        self.requested_ranges.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn answer(State(web): State<Arc<Web>>, UrlPath(file): UrlPath<String>, headers: HeaderMap) -> Response {
    let header = |name| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    if web.token.is_some_and(|token| header(header::AUTHORIZATION) != Some(format!("Bearer {token}"))) {
        return StatusCode::FORBIDDEN.into_response();
    }
    let Some(content) = web.files.get(file.as_str()) else { return StatusCode::NOT_FOUND.into_response() };
    let range = header(header::RANGE);
    web.requested_ranges.lock().unwrap().push(range.clone());
    let etag = format!("\"{}\"", hex(content));
    let condition = |name| header(name).filter(|_| !web.ignores_conditions);
    if condition(header::IF_NONE_MATCH).is_some_and(|mark| mark == etag) {
        return (StatusCode::NOT_MODIFIED, [(header::ETAG, etag)]).into_response();
    }
    let from = range
        .filter(|_| condition(header::IF_RANGE).is_none_or(|mark| mark == etag))
        .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let mut faults = web.faults.lock().unwrap();
    let fault = (!faults.is_empty()).then(|| faults.remove(0));
    drop(faults);
    let rest = content[from.unwrap_or(0)..].to_vec();
    let length = rest.len();
    let body = match fault {
        Some(Fault::Fails) => return StatusCode::BAD_GATEWAY.into_response(),
        Some(Fault::Disconnects(bytes)) => stream(rest[..bytes.min(length)].to_vec(), StreamEnd::Error),
        Some(Fault::Stalls(bytes)) => stream(rest[..bytes.min(length)].to_vec(), StreamEnd::Silence),
        Some(Fault::Pauses(bytes)) => {
            let (first, held) = rest.split_at(bytes);
            stream(first.to_vec(), StreamEnd::Rest(held.to_vec(), Arc::clone(&web.resume)))
        }
        Some(Fault::Succeeds) | None => Body::from(rest),
    };
    let mut response = Response::builder().header(header::CONTENT_LENGTH, length);
    if from.is_none() || !web.omits_etag_of_ranges {
        response = response.header(header::ETAG, etag);
    }
    if let Some(from) = from {
        let range = format!("bytes {from}-{}/{}", content.len() - 1, content.len());
        response = response.status(StatusCode::PARTIAL_CONTENT).header(header::CONTENT_RANGE, range);
    }
    response.body(body).unwrap()
}

enum StreamEnd {
    Error,
    Silence,
    Rest(Vec<u8>, Arc<Notify>),
}

fn stream(bytes: Vec<u8>, after: StreamEnd) -> Body {
    use futures_util::StreamExt as _;
    let first = futures_util::stream::iter([Ok(bytes)]);
    let rest = futures_util::stream::once(async move {
        match after {
            StreamEnd::Error => {
                // Yield, so that the bytes before the fault are sent first.
                tokio::task::yield_now().await;
                Err(std::io::Error::other("broken off"))
            }
            StreamEnd::Silence => std::future::pending().await,
            StreamEnd::Rest(rest, resume) => {
                resume.notified().await;
                Ok(rest)
            }
        }
    });
    Body::from_stream(first.chain(rest))
}

fn hex(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn arguments(into: &std::path::Path, more: &[&str]) -> FetchArgs {
    let into = into.to_str().unwrap();
    let first = ["server", "fetch", "--into", into, "--idle-timeout", "1"];
    match crate::Args::parse_from(first.iter().chain(more)).command {
        Some(crate::Command::Fetch(args)) => *args,
        other => panic!("{other:?}"),
    }
}

fn content() -> Vec<u8> {
    (0..300_000_u32).flat_map(u32::to_le_bytes).collect()
}

/// Returns different content of the same size as [`content`].
fn other_content() -> Vec<u8> {
    content().into_iter().rev().collect()
}

/// Waits until the file at `path` has `bytes` bytes.
async fn wait_for_size(path: &std::path::Path, bytes: u64) {
    let has_size = || std::fs::metadata(path).is_ok_and(|found| found.len() == bytes);
    let wait = async {
        while !has_size() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("the bytes arrive");
}

#[tokio::test]
async fn interrupted_downloads_are_resumed_and_the_complete_file_is_verified() {
    let mut tasks = JoinSet::new();
    let content = content();
    let web = Web::of(&content, &[Fault::Fails, Fault::Disconnects(400_000), Fault::Stalls(100_000)]);
    let url = format!("{}/model.gguf", web.start(&mut tasks).await);
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report");
    let sha256 = hex(&content);
    let more = ["--url", &url, "--sha256", &sha256, "--report", report.to_str().unwrap()];
    arguments(directory.path(), &more).run().await.unwrap();
    assert_eq!(std::fs::read(directory.path().join("current")).unwrap(), content);
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    assert_eq!((&report["reason"], &report["bytes"]), (&"Fetched".into(), &content.len().into()));
    let requested_ranges = web.requested_ranges();
    assert_eq!(requested_ranges[..2], [None, None]);
    assert!(requested_ranges[2..].iter().all(Option::is_some), "{requested_ranges:?}");
    // The files are complete, so no request is sent.
    arguments(directory.path(), &more).run().await.unwrap();
    assert_eq!(web.requested_ranges().len(), requested_ranges.len());
}

#[tokio::test]
async fn a_failed_fetch_is_resumed_by_the_next_one() {
    let mut tasks = JoinSet::new();
    let content = content();
    let web = Web::of(&content, &[Fault::Stalls(600_000), Fault::Stalls(0)]);
    let url = format!("{}/model.gguf", web.start(&mut tasks).await);
    let directory = tempfile::tempdir().unwrap();
    let args = arguments(directory.path(), &["--url", &url, "--attempts", "1"]);
    assert_eq!(args.clone().run().await.unwrap_err().reason(), "SourceTooSlow");
    assert!(!directory.path().join("current").exists(), "an incomplete file is not served");
    args.run().await.unwrap();
    assert_eq!(std::fs::read(directory.path().join("current")).unwrap(), content);
    let last = web.requested_ranges().last().unwrap().clone();
    assert_eq!(last.as_deref(), Some("bytes=600000-"));
}

#[tokio::test]
async fn a_changed_file_at_the_same_url_is_fetched_from_its_beginning() {
    let mut tasks = JoinSet::new();
    let old = Web::of(&content(), &[Fault::Stalls(600_000), Fault::Stalls(0)]);
    let directory = tempfile::tempdir().unwrap();
    let url = format!("{}/model.gguf", old.start(&mut tasks).await);
    let args = arguments(directory.path(), &["--url", &url, "--attempts", "1"]);
    args.run().await.unwrap_err();
    let new = other_content();
    let url = format!("{}/model.gguf", Web::of(&new, &[]).start(&mut tasks).await);
    arguments(directory.path(), &["--url", &url]).run().await.unwrap();
    assert_eq!(std::fs::read(directory.path().join("current")).unwrap(), new);
}

#[tokio::test]
async fn a_changed_file_is_not_resumed_from_a_source_that_ignores_if_range() {
    let mut tasks = JoinSet::new();
    let old = Web::of(&content(), &[Fault::Stalls(600_000), Fault::Stalls(0)]);
    let directory = tempfile::tempdir().unwrap();
    let url = format!("{}/model.gguf", old.start(&mut tasks).await);
    arguments(directory.path(), &["--url", &url, "--attempts", "1"]).run().await.unwrap_err();
    let files = BTreeMap::from([("model.gguf", other_content())]);
    let new = Arc::new(Web { files, ignores_conditions: true, ..Web::default() });
    let url = format!("{}/model.gguf", new.start(&mut tasks).await);
    arguments(directory.path(), &["--url", &url]).run().await.unwrap();
    assert!(std::fs::read(directory.path().join("current")).unwrap() == other_content());
    assert_eq!(new.requested_ranges(), [Some("bytes=600000-".to_owned()), None]);
}

#[tokio::test]
async fn a_source_that_never_confirms_its_content_is_an_error() {
    let mut tasks = JoinSet::new();
    let files = BTreeMap::from([("model.gguf", content())]);
    let faults = Mutex::new(vec![Fault::Disconnects(400_000); 8]);
    let web = Arc::new(Web { files, faults, omits_etag_of_ranges: true, ..Web::default() });
    let directory = tempfile::tempdir().unwrap();
    let url = format!("{}/model.gguf", web.start(&mut tasks).await);
    arguments(directory.path(), &["--url", &url, "--attempts", "2"]).run().await.unwrap_err();
    assert_eq!(
        web.requested_ranges().len(),
        4,
        "two downloads, each discarded after a request for the rest of the file"
    );
}

#[tokio::test]
async fn a_failed_list_of_files_is_requested_again() {
    let mut tasks = JoinSet::new();
    let listing = br#"{"sha": "c", "siblings": [{"rfilename": "model.gguf"}]}"#;
    let files = [("api/models/o/n/revision/main", listing.to_vec()), ("o/n/resolve/c/model.gguf", content())];
    let web = Web::with_files(files, &[]);
    let endpoint = web.start(&mut tasks).await;
    for (attempts, is_fetched) in [("1", false), ("2", true)] {
        *web.faults.lock().unwrap() = vec![Fault::Fails];
        let directory = tempfile::tempdir().unwrap();
        let more = ["--hf-endpoint", &endpoint, "--hf-repo", "o/n", "--attempts", attempts];
        let fetched = arguments(directory.path(), &more).run().await;
        assert_eq!(fetched.is_ok(), is_fetched, "{attempts} attempts: {fetched:?}");
    }
}

#[tokio::test]
async fn a_complete_part_is_used_only_if_the_source_still_has_its_content() {
    for (part, ignores_conditions) in
        [(content(), false), (content(), true), (other_content(), false), (other_content(), true)]
    {
        let mut tasks = JoinSet::new();
        let is_current = part == content();
        let listing = format!(
            r#"{{"sha": "c", "siblings": [{{"rfilename": "model.gguf", "size": {}}}]}}"#,
            content().len()
        );
        let files = BTreeMap::from([
            ("api/models/o/n/revision/main", listing.into_bytes()),
            ("o/n/resolve/c/model.gguf", content()),
        ]);
        // If the part is current, stall the download of the file, so that the fetch succeeds only if it uses the part.
        let faults = if is_current { vec![Fault::Succeeds, Fault::Stalls(0)] } else { Vec::new() };
        let faults = Mutex::new(faults);
        let web = Arc::new(Web { files, faults, ignores_conditions, ..Web::default() });
        let endpoint = web.start(&mut tasks).await;
        let directory = tempfile::tempdir().unwrap();
        let files = directory.path().join("files");
        std::fs::create_dir(&files).unwrap();
        std::fs::write(files.join("model.gguf.part"), &part).unwrap();
        std::fs::write(files.join("model.gguf.part.etag"), format!("\"{}\"", hex(&part))).unwrap();
        let more = ["--hf-endpoint", &endpoint, "--hf-repo", "o/n", "--attempts", "1"];
        let fetched = arguments(directory.path(), &more).run().await;
        assert!(fetched.is_ok(), "{is_current} {ignores_conditions}: {fetched:?}");
        let model = std::fs::read(directory.path().join("current")).unwrap();
        assert!(model == content(), "{is_current} {ignores_conditions}");
    }
}

#[tokio::test]
async fn a_second_fetch_into_the_same_directory_waits_for_the_first() {
    let mut tasks = JoinSet::new();
    let content = content();
    let web = Web::of(&content, &[Fault::Pauses(600_000)]);
    let url = format!("{}/model.gguf", web.start(&mut tasks).await);
    let directory = tempfile::tempdir().unwrap();
    let mut args = arguments(directory.path(), &["--url", &url]);
    args.idle_timeout = 60;
    let mut fetches = JoinSet::new();
    fetches.spawn(args.clone().run());
    wait_for_size(&directory.path().join("files/model.gguf.part"), 600_000).await;
    fetches.spawn(args.run());
    // Without a lock, the second fetch would resume the partial download of the first one and finish before it.
    let ended = tokio::time::timeout(Duration::from_millis(500), fetches.join_next()).await;
    assert!(ended.is_err(), "the second fetch did not wait: {ended:?}");
    web.resume.notify_one();
    while let Some(fetch) = fetches.join_next().await {
        fetch.unwrap().unwrap();
    }
    assert!(std::fs::read(directory.path().join("current")).unwrap() == content);
    assert_eq!(web.requested_ranges().len(), 1, "the second fetch uses the files of the first one");
}

#[tokio::test]
async fn a_file_to_which_another_process_has_written_is_rejected() {
    use std::io::Write as _;
    let mut tasks = JoinSet::new();
    let web = Web::of(&content(), &[Fault::Pauses(600_000)]);
    let url = format!("{}/model.gguf", web.start(&mut tasks).await);
    let directory = tempfile::tempdir().unwrap();
    let sha256 = hex(&content());
    let mut args = arguments(directory.path(), &["--url", &url, "--sha256", &sha256]);
    args.idle_timeout = 60;
    let mut fetches = JoinSet::new();
    fetches.spawn(args.clone().run());
    let part = directory.path().join("files/model.gguf.part");
    wait_for_size(&part, 600_000).await;
    std::fs::OpenOptions::new().append(true).open(&part).unwrap().write_all(b"other").unwrap();
    web.resume.notify_one();
    let error = fetches.join_next().await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.reason(), "DiskFailed", "{error}");
    assert!(error.to_string().contains("1200005 bytes, but 1200000 bytes were downloaded"), "{error}");
    assert!(!directory.path().join("current").exists());
    args.run().await.unwrap();
    assert!(std::fs::read(directory.path().join("current")).unwrap() == content());
}

/// Returns a web server with a model in two parts of nine bytes each. `contents[i]` is the value of every byte of part
/// `i`.
fn split_model(contents: [u8; 2], faults: &[Fault]) -> Arc<Web> {
    let [first, second] = contents.map(|byte| vec![byte; 9]);
    Web::with_files([("m-00001-of-00002.gguf", first), ("m-00002-of-00002.gguf", second)], faults)
}

#[tokio::test]
async fn a_previous_model_is_withdrawn_before_one_of_its_files_is_replaced() {
    let mut tasks = JoinSet::new();
    let directory = tempfile::tempdir().unwrap();
    let (current, files) = (directory.path().join("current"), directory.path().join("files"));
    let previous = split_model([1, 2], &[]);
    let previous_url = format!("{}/m-00001-of-00002.gguf", previous.start(&mut tasks).await);
    let fetch_previous = || arguments(directory.path(), &["--url", &previous_url]).run();
    fetch_previous().await.unwrap();
    let next = split_model([3, 4], &[Fault::Succeeds, Fault::Stalls(4), Fault::Stalls(0)]);
    let next_url = format!("{}/m-00001-of-00002.gguf", next.start(&mut tasks).await);
    let args = arguments(directory.path(), &["--url", &next_url, "--attempts", "1"]);
    args.run().await.unwrap_err();
    assert_eq!(std::fs::read(files.join("m-00001-of-00002.gguf")).unwrap(), [3; 9]);
    assert!(std::fs::symlink_metadata(&current).is_err(), "the mixture of two models is not served");
    assert!(!directory.path().join("manifest.json").exists());

    fetch_previous().await.unwrap();
    assert_eq!(std::fs::read(&current).unwrap(), [1; 9]);
    assert_eq!(std::fs::read(files.join("m-00002-of-00002.gguf")).unwrap(), [2; 9]);
    // The model is complete again, so no request is sent.
    let requests = previous.requested_ranges().len();
    fetch_previous().await.unwrap();
    assert_eq!(previous.requested_ranges().len(), requests);
}

#[tokio::test]
async fn a_previous_model_is_available_while_the_same_files_are_fetched_from_another_source() {
    let mut tasks = JoinSet::new();
    let directory = tempfile::tempdir().unwrap();
    let current = directory.path().join("current");
    let previous = split_model([1, 2], &[]);
    let previous_url = format!("{}/m-00001-of-00002.gguf", previous.start(&mut tasks).await);
    arguments(directory.path(), &["--url", &previous_url]).run().await.unwrap();
    let mirror = split_model([1, 2], &[Fault::Succeeds, Fault::Stalls(4), Fault::Stalls(0)]);
    let mirror_url = format!("{}/m-00001-of-00002.gguf", mirror.start(&mut tasks).await);
    let args = arguments(directory.path(), &["--url", &mirror_url, "--attempts", "1"]);
    args.clone().run().await.unwrap_err();
    assert_eq!(std::fs::read(&current).unwrap(), [1; 9]);
    // The previous model is still complete, so no request is sent.
    let requests = previous.requested_ranges().len();
    arguments(directory.path(), &["--url", &previous_url]).run().await.unwrap();
    assert_eq!(previous.requested_ranges().len(), requests);
    args.run().await.unwrap();
    assert_eq!(std::fs::read(&current).unwrap(), [1; 9]);
}

#[tokio::test]
async fn a_complete_model_needs_no_lock() {
    let mut tasks = JoinSet::new();
    let directory = tempfile::tempdir().unwrap();
    let url = format!("{}/model.gguf", Web::of(b"model", &[]).start(&mut tasks).await);
    let args = arguments(directory.path(), &["--url", &url]);
    args.clone().run().await.unwrap();
    // A directory in place of the lock file cannot be opened for writing, just like a file on a read-only file system.
    let lock = directory.path().join("lock");
    std::fs::remove_file(&lock).unwrap();
    std::fs::create_dir(&lock).unwrap();
    args.clone().run().await.unwrap();
    std::fs::remove_file(directory.path().join("current")).unwrap();
    assert_eq!(args.run().await.unwrap_err().reason(), "DiskFailed");
}

#[tokio::test]
async fn each_error_has_its_own_reason_and_leaves_no_model() {
    let mut tasks = JoinSet::new();
    let base = Web::of(b"model", &[]).start(&mut tasks).await;
    let (file, gone, wrong) = (format!("{base}/model.gguf"), format!("{base}/gone.gguf"), "0".repeat(64));
    let private = Arc::new(Web {
        files: BTreeMap::from([("model.gguf", b"model".to_vec())]),
        token: Some("secret"),
        ..Web::default()
    });
    let private = format!("{}/model.gguf", private.start(&mut tasks).await);
    for (more, reason) in [
        (vec!["--url", gone.as_str()], "NotFound"),
        (vec!["--url", &file, "--sha256", &wrong], "DigestMismatch"),
        (vec!["--url", &private], "Unauthorized"),
        (vec!["--url", "nowhere"], "InvalidSource"),
        (vec!["--url", &file, "--format", "openvino-ir"], "InvalidSource"),
        (vec!["--url", "http://127.0.0.1:1/model.gguf", "--attempts", "2"], "SourceUnreachable"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let error = arguments(directory.path(), &more).run().await.unwrap_err();
        assert_eq!(error.reason(), reason, "{error}");
        assert!(!directory.path().join("current").exists(), "{reason}");
    }
    let directory = tempfile::tempdir().unwrap();
    let credentials = directory.path().join("credentials");
    std::fs::create_dir(&credentials).unwrap();
    std::fs::write(credentials.join("token"), "secret\n").unwrap();
    let more = ["--url", &private, "--credentials", credentials.to_str().unwrap()];
    arguments(directory.path(), &more).run().await.unwrap();
}

#[tokio::test]
async fn the_url_of_a_part_fetches_all_parts() {
    let mut tasks = JoinSet::new();
    let parts = ["a%2Bb-00001-of-00002.gguf", "a%2Bb-00002-of-00002.gguf"];
    let web = Web::with_files(
        [("m/a+b-00001-of-00002.gguf", vec![1; 9]), ("m/a+b-00002-of-00002.gguf", vec![2; 8])],
        &[Fault::Disconnects(4)],
    );
    let base = web.start(&mut tasks).await;
    for part in parts {
        let directory = tempfile::tempdir().unwrap();
        arguments(directory.path(), &["--url", &format!("{base}/m/{part}?download=true")])
            .run()
            .await
            .unwrap();
        assert_eq!(std::fs::read(directory.path().join("current")).unwrap(), [1; 9]);
        let first = directory.path().join("current").canonicalize().unwrap();
        assert_eq!(first.file_name().unwrap(), parts[0]);
        assert_eq!(std::fs::read(first.with_file_name(parts[1])).unwrap(), [2; 8]);
    }
    let first = format!("{base}/m/{}", parts[0]);
    let directory = tempfile::tempdir().unwrap();
    let missing = Web::with_files([("m/a+b-00001-of-00002.gguf", vec![1])], &[]).start(&mut tasks).await;
    let sha256 = "0".repeat(64);
    for (more, reason, named) in [
        (vec!["--url", &format!("{missing}/m/{}", parts[0])], "NotFound", parts[1]),
        (
            vec!["--url", &first, "--sha256", &sha256],
            "InvalidSource",
            "a source with one file, but the source has 2 files",
        ),
        (vec!["--url", &format!("{base}/a-00001-of-00257.gguf")], "InvalidSource", "limit: 256"),
    ] {
        let error = arguments(directory.path(), &more).run().await.unwrap_err();
        assert_eq!(error.reason(), reason, "{error}");
        assert!(error.to_string().contains(named), "{error}");
        assert!(!directory.path().join("current").exists(), "{reason}");
    }
}

#[test]
fn a_full_disk_has_its_own_reason() {
    use std::io::Write as _;
    let path = std::path::Path::new("/dev/full");
    let error = std::fs::OpenOptions::new().write(true).open(path).unwrap().write_all(b"model").unwrap_err();
    let error = Error::disk("write", path, error);
    assert_eq!((error.reason(), error.is_transient()), ("DiskFull", false));
}

#[test]
fn names_match_patterns() {
    use hub::matches_pattern;
    for (name, pattern) in
        [("a.gguf", "*.gguf"), ("a.gguf", "a.gguf"), ("x/y.z", "x/*"), ("abc", "a*b*c"), ("ab", "a*b*")]
    {
        assert!(matches_pattern(name, pattern), "{name} {pattern}");
    }
    for (name, pattern) in [("a.bin", "*.gguf"), ("ab", "a"), ("aa", "a*aa"), ("abc", "a*c*b")] {
        assert!(!matches_pattern(name, pattern), "{name} {pattern}");
    }
}

#[test]
fn paths_of_a_source_stay_within_the_directory() {
    for path in ["/etc/x", "../x", "a//b", "a/../b", ".", "", "a\\b"] {
        assert!(source::checked_path(path).is_err(), "{path}");
    }
    assert_eq!(source::checked_path("a/b.gguf").unwrap(), "a/b.gguf");
}
