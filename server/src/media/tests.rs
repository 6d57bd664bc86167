//! Tests fetches from web servers that each test starts. A fake resolver resolves their host names. Most tests pause
//! the clock, so that a timeout expires as soon as no task can make progress.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use futures_util::FutureExt as _;
use reqwest::dns::{Addrs, Name, Resolving};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::*;

const BYTES_MAX: usize = 1000;

/// An answer of a [`WebServer`].
#[derive(Clone, Debug)]
enum Answer {
    /// The bytes of an answer, after which the connection is closed.
    Bytes(Vec<u8>),
    /// The bytes of an answer, after which the connection stays open and further requests get the same answer.
    KeepAlive(Vec<u8>),
    /// Accepts the request and does not answer.
    Silence,
    /// Sends a byte of a long body every second.
    Trickle,
    /// Sends an endless body, whose length is not declared, as fast as the client reads.
    Flood,
}

impl Answer {
    fn with_body(body: &[u8]) -> Self {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        Self::KeepAlive([head.as_bytes(), body].concat())
    }

    fn with_head(head: &str) -> Self {
        Self::Bytes(format!("HTTP/1.1 {head}\r\ncontent-length: 0\r\n\r\n").into_bytes())
    }

    fn redirect(target: &str) -> Self {
        Self::with_head(&format!("302 Found\r\nlocation: {target}"))
    }
}

/// A web server that sends its answers in order, one per connection, and the last one to all further connections.
struct WebServer {
    address: SocketAddr,
    /// The heads of the requests.
    requests: Arc<Mutex<Vec<String>>>,
    _connections: JoinSet<()>,
}

impl WebServer {
    async fn start<const N: usize>(answers: [Answer; N]) -> Self {
        Self::listen("127.0.0.1:0", answers).await
    }

    async fn listen<const N: usize>(address: &str, answers: [Answer; N]) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let mut answers = VecDeque::from(answers);
        let mut connections = JoinSet::new();
        let heads = Arc::clone(&requests);
        connections.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (connection, _) = listener.accept().await.unwrap();
                let answer = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
                let answer = answer.expect("every server has an answer");
                connections.spawn(serve(connection, answer, Arc::clone(&heads)));
            }
        });
        Self { address, requests, _connections: connections }
    }

    fn port(&self) -> u16 {
        self.address.port()
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn serve(mut connection: TcpStream, answer: Answer, heads: Arc<Mutex<Vec<String>>>) {
    while let Some(head) = read_head(&mut connection).await {
        heads.lock().unwrap().push(head);
        match &answer {
            Answer::KeepAlive(bytes) => drop(connection.write_all(bytes).await),
            Answer::Bytes(bytes) => {
                let _ = connection.write_all(bytes).await;
                return;
            }
            Answer::Silence => std::future::pending().await,
            Answer::Trickle => {
                let mut bytes = &b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n"[..];
                while connection.write_all(bytes).await.is_ok() {
                    bytes = b"x";
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
            Answer::Flood => {
                let _ = connection.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
                while connection.write_all(b"3\r\nabc\r\n").await.is_ok() {}
            }
        }
    }
}

/// Reads the head of a request. Returns `None` if the client closes the connection.
async fn read_head(connection: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(connection.read_u8().await.ok()?);
    }
    Some(String::from_utf8(head).unwrap())
}

/// A resolver that returns its answers in order, and the last one for all further lookups.
struct FakeResolver {
    answers: Mutex<VecDeque<Vec<IpAddr>>>,
    names: Mutex<Vec<String>>,
}

impl FakeResolver {
    fn new<const N: usize>(answers: [&[&str]; N]) -> Arc<Self> {
        let parsed = answers.map(|addresses| addresses.iter().map(|text| text.parse().unwrap()).collect());
        Arc::new(Self { answers: Mutex::new(parsed.into()), names: Mutex::default() })
    }

    fn names(&self) -> Vec<String> {
        self.names.lock().unwrap().clone()
    }
}

impl Resolve for FakeResolver {
    fn resolve(&self, name: Name) -> Resolving {
        self.names.lock().unwrap().push(name.as_str().to_owned());
        let mut answers = self.answers.lock().unwrap();
        let addresses = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
        let addresses = addresses.into_iter().flatten().map(|address| SocketAddr::new(address, 0));
        let addresses: Vec<SocketAddr> = addresses.collect();
        Box::pin(async move { Ok(Box::new(addresses.into_iter()) as Addrs) })
    }
}

/// Returns a policy that allows `domains`, public addresses and 127.0.0.1.
fn policy(domains: &[&str]) -> MediaPolicy {
    MediaPolicy {
        allowed_media_domains: domains.iter().map(|domain| domain.parse().unwrap()).collect(),
        allowed_media_networks: vec!["127.0.0.1/32".parse().unwrap()],
        allowed_local_media_path: None,
        media_url_allow_redirects: false,
        image_fetch_timeout: Duration::from_secs(5),
        max_image_bytes: ByteSize(BYTES_MAX as u64),
    }
}

fn fetcher(policy: MediaPolicy) -> MediaFetcher {
    MediaFetcher::with_resolver(policy, FakeResolver::new([&["127.0.0.1"]])).unwrap()
}

/// Fetches an image from the server, whose host is `images.test`.
async fn fetch_from(server: &WebServer) -> Result<Bytes, MediaError> {
    let host = format!("images.test:{}", server.port());
    let url = format!("http://{host}/a.png");
    fetcher(policy(&[&host])).fetch(&url, Tenant::default()).await
}

#[tokio::test(start_paused = true)]
async fn an_image_of_an_allowed_host_is_fetched() {
    let server = WebServer::start([Answer::with_body(b"image")]).await;
    let host = format!("images.test:{}", server.port());
    let resolver = FakeResolver::new([&["127.0.0.1"]]);
    let fetcher = MediaFetcher::with_resolver(policy(&[&host]), resolver.clone()).unwrap();
    assert_eq!(
        fetcher.fetch(&format!("http://{host}/a%20b.png?size=1#part"), Tenant::default()).await.unwrap(),
        "image"
    );
    assert_eq!(resolver.names(), ["images.test"]);
    let requests = server.requests();
    let [request] = &requests[..] else { panic!("{requests:?}") };
    let head = request.to_ascii_lowercase();
    assert!(request.starts_with("GET /a%20b.png?size=1 HTTP/1.1\r\n"), "{request}");
    assert!(head.contains(&format!("\r\nhost: {host}\r\n")), "{request}");
    assert!(head.contains("\r\naccept-encoding: identity\r\n"), "{request}");
    assert!(
        !head.contains("referer") && !head.contains("cookie") && !head.contains("authorization"),
        "{request}"
    );
}

#[tokio::test]
async fn nothing_is_fetched_by_default() {
    let default = MediaPolicy { allowed_media_networks: Vec::new(), ..policy(&[]) };
    let fetcher = MediaFetcher::new(default).unwrap();
    let error = fetcher.fetch("http://images.test/a.png", Tenant::default()).await.unwrap_err();
    assert!(matches!(error, MediaError::UrlsDisabled), "{error:?}");
    assert!(error.to_string().contains("--allowed-media-domains"), "{error}");
    for path in ["/etc/passwd", "file:///etc/passwd"] {
        let error = fetcher.fetch(path, Tenant::default()).await.unwrap_err();
        assert!(matches!(error, MediaError::FilesDisabled), "{error:?}");
        assert!(error.to_string().contains("--allowed-local-media-path"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn addresses_are_refused_after_the_name_is_resolved() {
    let server = WebServer::start([Answer::with_body(b"secret")]).await;
    let host = format!("images.test:{}", server.port());
    let url = format!("http://{host}/");
    let without_networks = || MediaPolicy { allowed_media_networks: Vec::new(), ..policy(&[&host]) };
    let answers: [&[&str]; 8] = [
        &["127.0.0.1"],
        &["::1"],
        &["::ffff:127.0.0.1"],
        &["0.0.0.0"],
        &["10.0.0.1", "192.168.0.1", "fd00::1"],
        &["169.254.169.254"],
        &["64:ff9b::127.0.0.1"],
        &[],
    ];
    for answer in answers {
        let fetcher = MediaFetcher::with_resolver(without_networks(), FakeResolver::new([answer])).unwrap();
        let error = fetcher.fetch(&url, Tenant::default()).await.unwrap_err();
        assert!(matches!(error, MediaError::NoAllowedAddress { .. }), "{answer:?}: {error:?}");
        // The message is the same for every name without an allowed address, and does not contain the address.
        let message = "the host \"images.test\" has no public address and no address in --allowed-media-networks, or its \
                       name cannot be resolved";
        assert_eq!(error.to_string(), message);
    }
    assert_eq!(server.requests(), [""; 0]);
}

#[tokio::test]
async fn the_name_localhost_is_resolved_and_refused() {
    let server = WebServer::start([Answer::with_body(b"secret")]).await;
    for name in ["localhost", "localhost."] {
        let host = format!("localhost:{}", server.port());
        let policy = MediaPolicy { allowed_media_networks: Vec::new(), ..policy(&[&host]) };
        let fetcher = MediaFetcher::new(policy).unwrap();
        let error =
            fetcher.fetch(&format!("http://{name}:{}/", server.port()), Tenant::default()).await.unwrap_err();
        assert!(matches!(error, MediaError::NoAllowedAddress { .. }), "{name}: {error:?}");
    }
    assert_eq!(server.requests(), [""; 0]);
    // If the network is allowed, the server connects to the address from the system's resolver.
    let fetcher = MediaFetcher::new(policy(&[&format!("localhost:{}", server.port())])).unwrap();
    let url = format!("http://localhost:{}/", server.port());
    assert_eq!(fetcher.fetch(&url, Tenant::default()).await.unwrap(), "secret");
}

#[tokio::test(start_paused = true)]
async fn addresses_in_urls_need_an_allowed_network() {
    let server = WebServer::start([Answer::with_body(b"image")]).await;
    let address = server.address.to_string();
    assert_eq!(
        fetcher(policy(&[&address])).fetch(&format!("http://{address}/"), Tenant::default()).await.unwrap(),
        "image"
    );
    assert_eq!(server.requests().len(), 1);
    let policy = MediaPolicy { allowed_media_networks: Vec::new(), ..policy(&[&address]) };
    let fetcher = fetcher(policy);
    for host in ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1"] {
        let error =
            fetcher.fetch(&format!("http://{host}:{}/", server.port()), Tenant::default()).await.unwrap_err();
        assert!(matches!(error, MediaError::AddressNotAllowed { .. }), "{host}: {error:?}");
    }
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_name_server_cannot_exchange_the_address_after_the_check() {
    let allowed = WebServer::start([Answer::with_body(b"image")]).await;
    let host = format!("images.test:{}", allowed.port());
    // This server listens on the same port, but at an address that the policy does not allow.
    let internal =
        WebServer::listen(&format!("127.0.0.2:{}", allowed.port()), [Answer::with_body(b"secret")]).await;
    let resolver = FakeResolver::new([&["127.0.0.1"], &["127.0.0.2"], &["127.0.0.2", "127.0.0.1"]]);
    let fetcher = MediaFetcher::with_resolver(policy(&[&host]), resolver.clone()).unwrap();
    let url = format!("http://{host}/a.png");
    // The client connects to the address that was checked, because it resolves the name only once.
    assert_eq!(fetcher.fetch(&url, Tenant::default()).await.unwrap(), "image");
    assert_eq!(resolver.names().len(), 1);
    // The next fetch checks the new address, and does not use the previous connection.
    let error = fetcher.fetch(&url, Tenant::default()).await.unwrap_err();
    assert!(matches!(error, MediaError::NoAllowedAddress { .. }), "{error:?}");
    // Of several addresses, only those that are allowed are used.
    assert_eq!(fetcher.fetch(&url, Tenant::default()).await.unwrap(), "image");
    assert_eq!((resolver.names().len(), allowed.requests().len()), (3, 2));
    assert_eq!(internal.requests(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn redirects_are_refused_by_default() {
    let server = WebServer::start([Answer::redirect("/b.png")]).await;
    let error = fetch_from(&server).await.unwrap_err();
    assert!(matches!(error, MediaError::RedirectNotAllowed { .. }), "{error:?}");
    assert!(error.to_string().contains("--media-url-allow-redirects"), "{error}");
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn each_target_of_a_redirect_is_checked() {
    let internal = WebServer::listen("127.0.0.2:0", [Answer::with_body(b"secret")]).await;
    let refused = [
        ("http://evil.test/", "HostNotAllowed"),
        ("//evil.test/", "HostNotAllowed"),
        ("http://images.test/", "PortNotAllowed"),
        ("http://169.254.169.254/", "AddressNeverAllowed"),
        ("http://2130706434:PORT/", "AddressNotAllowed"),
        ("http://localhost:PORT/", "NoAllowedAddress"),
        ("http://user@images.test/", "Credentials"),
        ("file:///etc/passwd", "UnsupportedScheme"),
        ("ftp://images.test/", "UnsupportedScheme"),
        ("http://", "InvalidRedirect"),
    ];
    for (target, reason) in refused {
        let target = target.replace("PORT", &internal.port().to_string());
        let server = WebServer::start([Answer::redirect(&target), Answer::with_body(b"image")]).await;
        let images = format!("images.test:{}", server.port());
        let domains = [
            &images,
            "169.254.169.254",
            &internal.address.to_string(),
            &format!("localhost:{}", internal.port()),
        ];
        let policy = MediaPolicy { media_url_allow_redirects: true, ..policy(&domains) };
        let resolver = FakeResolver::new([&["127.0.0.1"], &["127.0.0.2"]]);
        let fetcher = MediaFetcher::with_resolver(policy, resolver).unwrap();
        let error = fetcher.fetch(&format!("http://{images}/"), Tenant::default()).await.unwrap_err();
        assert!(format!("{error:?}").starts_with(reason), "{target}: {error:?}");
        assert_eq!(server.requests().len(), 1, "{target}");
    }
    assert_eq!(internal.requests(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn redirects_to_allowed_urls_are_followed_up_to_a_limit() {
    let server = WebServer::start([Answer::redirect("b.png?x"), Answer::with_body(b"image")]).await;
    let host = format!("images.test:{}", server.port());
    let following = |host: &str| fetcher(MediaPolicy { media_url_allow_redirects: true, ..policy(&[host]) });
    assert_eq!(
        following(&host).fetch(&format!("http://{host}/dir/a.png"), Tenant::default()).await.unwrap(),
        "image"
    );
    let requests = server.requests();
    assert!(requests[1].starts_with("GET /dir/b.png?x HTTP/1.1\r\n"), "{requests:?}");
    assert!(!requests[1].to_ascii_lowercase().contains("referer"), "{requests:?}");

    let endless = WebServer::start([Answer::redirect("/again")]).await;
    let host = format!("images.test:{}", endless.port());
    let error = following(&host).fetch(&format!("http://{host}/"), Tenant::default()).await.unwrap_err();
    assert!(matches!(error, MediaError::TooManyRedirects { redirects_max: 5 }), "{error:?}");
    assert_eq!(endless.requests().len(), 6);
}

#[tokio::test(start_paused = true)]
async fn an_image_has_at_most_the_maximum_size() {
    let body = vec![7; BYTES_MAX + 1];
    let exact = WebServer::start([Answer::with_body(&body[..BYTES_MAX])]).await;
    assert_eq!(fetch_from(&exact).await.unwrap(), body[..BYTES_MAX]);
    // This answer declares a length but has no body: the length suffices to refuse the image.
    let declared = Answer::Bytes(b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n".to_vec());
    let unframed = Answer::Bytes([b"HTTP/1.1 200 OK\r\n\r\n", &body[..]].concat());
    for answer in [declared, Answer::with_body(&body), unframed, Answer::Flood] {
        let server = WebServer::start([answer.clone()]).await;
        let error = fetch_from(&server).await.unwrap_err();
        assert!(matches!(error, MediaError::TooLarge { bytes_max: BYTES_MAX }), "{answer:?}: {error:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn compressed_answers_are_not_decompressed() {
    let answer =
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\n\x1f\x8b\x08\x00".to_vec();
    let server = WebServer::start([Answer::Bytes(answer)]).await;
    assert_eq!(fetch_from(&server).await.unwrap(), &b"\x1f\x8b\x08\x00"[..]);
}

#[tokio::test(start_paused = true)]
async fn a_fetch_ends_after_its_timeout() {
    for answer in [Answer::Silence, Answer::Trickle] {
        let server = WebServer::start([answer.clone()]).await;
        let error = fetch_from(&server).await.unwrap_err();
        assert!(matches!(error, MediaError::TimedOut { .. }), "{answer:?}: {error:?}");
        assert_eq!(error.to_string(), "the image could not be fetched within 5s (--image-fetch-timeout)");
    }
}

#[tokio::test(start_paused = true)]
async fn failures_report_the_status_of_the_host_and_nothing_else() {
    let answer =
        b"HTTP/1.1 403 Secret-Reason\r\nx-secret: secret\r\ncontent-length: 6\r\n\r\nsecret".to_vec();
    let server = WebServer::start([Answer::Bytes(answer)]).await;
    let error = fetch_from(&server).await.unwrap_err();
    assert_eq!(error.to_string(), "the host \"images.test\" answered with status 403");
    // These are a redirect without a `Location` header, an answer to a conditional request, and an error.
    for head in ["302 Found", "304 Not Modified", "500 Oops"] {
        let server = WebServer::start([Answer::with_head(head)]).await;
        let error = fetch_from(&server).await.unwrap_err();
        assert!(matches!(error, MediaError::Status { .. }), "{head}: {error:?}");
    }
    let garbage = [&b"SSH-2.0-secret\r\n"[..], b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nsecret"];
    for answer in garbage {
        let server = WebServer::start([Answer::Bytes(answer.to_vec())]).await;
        let error = fetch_from(&server).await.unwrap_err();
        assert!(matches!(error, MediaError::Transport { .. }), "{error:?}");
        assert_eq!(error.to_string(), "failed to fetch the image from the host \"images.test\"");
    }
    // The port is closed again when the listener is dropped.
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let error = fetcher(policy(&[&closed.to_string()]))
        .fetch(&format!("http://{closed}/"), Tenant::default())
        .await
        .unwrap_err();
    assert!(matches!(error, MediaError::Transport { .. }), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_server_without_tls_is_not_used_for_https() {
    let server = WebServer::start([Answer::with_body(b"image")]).await;
    let address = server.address.to_string();
    let mut policy = policy(&[&address]);
    // The server waits for the end of an HTTP request's head, which never arrives, so the fetch may last until this
    // timeout.
    policy.image_fetch_timeout = Duration::from_secs(1);
    let error = fetcher(policy).fetch(&format!("https://{address}/"), Tenant::default()).await.unwrap_err();
    assert!(matches!(error, MediaError::Transport { .. } | MediaError::TimedOut { .. }), "{error:?}");
    assert_eq!(server.requests(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn fetches_beyond_the_limit_wait_for_a_slot() {
    let server = WebServer::start([Answer::with_body(b"image")]).await;
    let host = format!("images.test:{}", server.port());
    let directory = tempfile::tempdir().unwrap();
    let path = Some(directory.path().to_owned());
    let fetcher = fetcher(MediaPolicy { allowed_local_media_path: path, ..policy(&[&host]) });
    let url = format!("http://{host}/");
    let mut slots = Vec::new();
    for _ in 0..FETCHES_MAX {
        slots.push(fetcher.slot(Tenant::default()).await.unwrap());
    }
    let error = fetcher.fetch(&url, Tenant::default()).await.unwrap_err();
    assert!(matches!(error, MediaError::Busy), "{error:?}");
    // A reference that is not allowed is refused without waiting.
    assert!(matches!(
        fetcher.fetch("http://evil.test/", Tenant::default()).await,
        Err(MediaError::HostNotAllowed { .. })
    ));
    assert!(matches!(
        fetcher.fetch("/etc/passwd", Tenant::default()).await,
        Err(MediaError::PathNotAllowed { .. })
    ));
    let (fetched, ()) = tokio::join!(fetcher.fetch(&url, Tenant::default()), async {
        tokio::task::yield_now().await;
        slots.pop();
    });
    assert_eq!(fetched.unwrap(), "image");
    let free = fetcher.slot(Tenant::default()).now_or_never();
    assert!(matches!(free, Some(Ok(_))), "the slot is free again");
}

#[tokio::test]
async fn files_are_read_below_the_allowed_directory() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a b.png");
    std::fs::write(&file, "image").unwrap();
    let policy = MediaPolicy { allowed_local_media_path: Some(directory.path().to_owned()), ..policy(&[]) };
    let fetcher = fetcher(policy.clone());
    assert_eq!(fetcher.fetch(file.to_str().unwrap(), Tenant::default()).await.unwrap(), "image");
    let url = format!("file://{}/a%20b.png", directory.path().display());
    assert_eq!(fetcher.fetch(&url, Tenant::default()).await.unwrap(), "image");
    for outside in
        ["/etc/passwd", "file:///etc/passwd", &format!("{url}/../../x"), &format!("{url}/..%2f..%2fx")]
    {
        let error = fetcher.fetch(outside, Tenant::default()).await.unwrap_err();
        assert!(matches!(error, MediaError::PathNotAllowed { .. }), "{outside}: {error:?}");
    }
    std::fs::write(&file, vec![7; BYTES_MAX + 1]).unwrap();
    assert!(matches!(fetcher.fetch(&url, Tenant::default()).await, Err(MediaError::TooLarge { .. })));

    let missing = MediaPolicy { allowed_local_media_path: Some(directory.path().join("missing")), ..policy };
    let error = MediaFetcher::new(missing).unwrap_err();
    assert!(error.to_string().contains("failed to open --allowed-local-media-path"), "{error}");
}
