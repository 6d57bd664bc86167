//! Tests the router in front of real servers that are killed, stopped and restarted under load. The router must retry
//! requests transparently until the client has received the first byte. Some of the clients are instances of the
//! official Python client.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tests::clients::Client;
use tests::http::{self, metric};
use tests::router::{Router, replica};
use tests::server::{Server, bare_command};
use tokio::task::JoinSet;

/// The number of concurrent clients per simulator in a fleet of four, from which the other tests derive theirs.
const CLIENTS: usize = 4;
/// The number of concurrent clients per server with the real model. It is small, because these servers share the
/// processors of one machine.
const CLIENTS_OF_MODELS: usize = 2;
/// The time limit for any awaited event.
const LIMIT: Duration = Duration::from_secs(120);

/// Flags for servers that use few resources, because the tests may start more servers than the machine has processors.
const MODEL: [&str; 4] = ["--kv-cache-size", "128MiB", "--plugin-config", "INFERENCE_NUM_THREADS=1"];

/// Flags for a simulator that is slow enough that requests are always in flight.
const SIM: [&str; 6] = ["--backend", "sim", "--sim-step-time", "4ms", "--sim-prefill-token-time", "20us"];

/// A server that can be restarted on the same ports.
struct RestartableServer {
    arguments: Vec<String>,
    server: Option<Server>,
}

impl RestartableServer {
    fn start(arguments: &[&str]) -> Self {
        let ports: Vec<String> = (0..2)
            .map(|_| TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string())
            .collect();
        let mut all = vec!["--host=127.0.0.1".to_owned(), format!("--port={}", ports[0])];
        all.push(format!("--grpc-port={}", ports[1]));
        if !arguments.contains(&"sim") {
            all.push(format!("--model={}", tests::sample_model().display()));
        }
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        let mut server = Self { arguments: all, server: None };
        server.restart();
        server
    }

    fn restart(&mut self) {
        self.server = None;
        let mut command = bare_command().unwrap();
        self.server = Some(Server::from_command(command.args(&self.arguments)).expect("the server starts"));
    }

    fn server(&self) -> &Server {
        self.server.as_ref().expect("the server was started")
    }

    fn signal(&self, name: &str) {
        self.server().process().signal(name).unwrap();
    }
}

#[derive(Debug, Default)]
struct Tally {
    whole: AtomicUsize,
    broken: AtomicUsize,
    is_over: AtomicBool,
    /// The number of complete responses by replica.
    by_replica: std::sync::Mutex<BTreeMap<String, usize>>,
    /// The number of complete responses by client.
    by_client: Vec<AtomicUsize>,
}

impl Tally {
    fn answers(&self, replica: &str) -> usize {
        self.by_replica.lock().unwrap().get(replica).copied().unwrap_or_default()
    }

    /// Waits for `count` more complete responses of `replica`.
    async fn await_more(&self, count: usize, replica: &str) {
        let wanted = self.answers(replica) + count;
        self.wait_until(|| self.answers(replica) >= wanted).await;
    }

    /// Waits until each client has `count` more complete responses, so that no client is stuck.
    async fn await_more_of_each_client(&self, count: usize) {
        let present = || self.by_client.iter().map(|answers| answers.load(Ordering::Relaxed));
        let wanted: Vec<usize> = present().map(|answers| answers + count).collect();
        self.wait_until(|| present().zip(&wanted).all(|(answers, wanted)| answers >= *wanted)).await;
    }

    async fn wait_until(&self, condition: impl Fn() -> bool) {
        let end = tokio::time::Instant::now() + LIMIT;
        while !condition() {
            assert!(tokio::time::Instant::now() < end, "timed out waiting for responses: {self:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Sends one request at a time and checks each response.
async fn client(number: usize, url: String, model: Value, tally: Arc<Tally>) {
    let client = http::client();
    for count in 0.. {
        if tally.is_over.load(Ordering::Relaxed) {
            return;
        }
        let stream = !(number + count).is_multiple_of(3);
        let body = json!({
            "model": model,
            "messages": [{"role": "user", "content": format!("Client {number} asks for the {count}th time.")}],
            "temperature": 0,
            "max_tokens": 6,
            "stream": stream,
        });
        let response = client.post(&url).json(&body).send().await.expect("the router responds");
        let status = response.status();
        let replica =
            response.headers().get("x-ovfleet-replica").map(|name| name.to_str().unwrap().to_owned());
        let text = response.text().await.expect("a response that has begun is complete");
        assert_eq!(status.as_u16(), 200, "a request failed before its first byte: {text}");
        let is_broken = if stream {
            assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
            text.contains("\"replica_failed\"")
        } else {
            let answer: Value = serde_json::from_str(&text).expect("a complete response is JSON");
            assert!(answer["choices"][0]["message"]["content"].is_string(), "{text}");
            false
        };
        if is_broken {
            tally.broken.fetch_add(1, Ordering::Relaxed);
        } else {
            *tally.by_replica.lock().unwrap().entry(replica.unwrap()).or_default() += 1;
            tally.whole.fetch_add(1, Ordering::Relaxed);
            tally.by_client[number].fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Kills one server, stops another with SIGSTOP, and restarts both while clients send requests.
async fn kill_stop_and_restart(count: usize, clients_each: usize, arguments: &[&str]) {
    let mut servers: Vec<RestartableServer> =
        (0..count).map(|_| RestartableServer::start(arguments)).collect();
    let names: Vec<String> = servers.iter().map(|server| server.server().address().to_owned()).collect();
    let mut all: Vec<String> = servers.iter().map(|server| replica(server.server())).collect();
    // These timeouts are long enough for a busy machine.
    all.extend(["--hang-timeout=4s", "--replica-wait-timeout=60s", "--threads=1"].map(str::to_owned));
    let router = Router::start(&all).expect("the router starts");
    let models = http::get(&router.url("/v3/models")).await.expect("the models are listed");
    let model = models.body["data"][0]["id"].clone();

    let by_client = (0..count * clients_each).map(|_| AtomicUsize::default()).collect();
    let tally = Arc::new(Tally { by_client, ..Tally::default() });
    let mut clients = JoinSet::new();
    for number in 0..count * clients_each {
        let url = router.url("/v3/chat/completions");
        clients.spawn(client(number, url, model.clone(), Arc::clone(&tally)));
    }
    let official = Client::Python.start("outages", &[&router.url("/v3"), model.as_str().unwrap()]);
    official.process().await_line(LIMIT, |line| (line == "asking").then_some(())).unwrap();
    for name in &names {
        tally.await_more(3, name).await;
    }
    servers[0].signal("KILL");
    tally.await_more_of_each_client(1).await;
    // Restarting a server blocks the thread, which must not be one of those that run the clients.
    servers = tokio::task::spawn_blocking(move || {
        servers[0].restart();
        servers
    })
    .await
    .unwrap();
    tally.await_more(3, &names[0]).await;

    servers[1].signal("STOP");
    // Other replicas respond to the requests that were sent to the stopped one.
    tally.await_more_of_each_client(2).await;
    servers[1].signal("KILL");
    servers = tokio::task::spawn_blocking(move || {
        servers[1].restart();
        servers
    })
    .await
    .unwrap();
    for name in &names {
        tally.await_more(3, name).await;
    }
    tally.is_over.store(true, Ordering::Relaxed);
    official.process().signal("TERM").unwrap();
    clients.join_all().await;
    official.assert_success();
    eprintln!("{:?}", *tally);
    await_idle(&router).await;
    drop(servers);
    router.process().signal("TERM").unwrap();
    let ended = router.wait().unwrap();
    assert!(ended.status.success() && !ended.output.contains("panicked"), "{}", ended.output);
}

/// Waits until the router has no requests queued or in flight.
async fn await_idle(router: &Router) {
    let end = tokio::time::Instant::now() + LIMIT;
    loop {
        let text = http::get(&router.url("/metrics")).await.expect("the router returns metrics").body;
        let text = text.as_str().expect("metrics are text").to_owned();
        let names = ["requests_in_flight", "requests_queued", "replica_in_flight", "replica_unreported"];
        if names.iter().all(|name| metric(&text, &format!("ovfleet_router_{name}")) == Some(0.0)) {
            return;
        }
        assert!(tokio::time::Instant::now() < end, "{text}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_before_its_first_byte_with_two_simulators() {
    kill_stop_and_restart(2, 2 * CLIENTS, &SIM).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_before_its_first_byte_with_four_simulators() {
    kill_stop_and_restart(4, CLIENTS, &SIM).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_before_its_first_byte_with_four_servers_of_the_sample_model() {
    // A restarted server loads the compiled model from the cache that an earlier server has written.
    let directory = tempfile::tempdir().expect("the directory can be created");
    let cache = format!("--cache-dir={}", directory.path().display());
    kill_stop_and_restart(4, CLIENTS_OF_MODELS, &[&MODEL[..], &[&cache]].concat()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replacing_the_replica_token_under_load_fails_no_request() {
    const OLD: &str = "old-0123456789abcdef";
    const NEW: &str = "new-0123456789abcdef";
    let directory = tempfile::tempdir().unwrap();
    // Each process has its own file, because kubelets do not update the files of all pods at the same time.
    let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
    let flag = |name: &str| {
        write(name, OLD);
        format!("--replica-token-file={}", directory.path().join(name).display())
    };
    let arguments = |name: &str| {
        [&SIM[..], &["--admin-port=0"]]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .chain([flag(name)])
            .collect::<Vec<_>>()
    };
    let servers = ["0", "1"].map(|name| {
        let arguments = arguments(name);
        RestartableServer::start(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    });
    let names = servers.each_ref().map(|server| server.server().address().to_owned());
    let mut all = servers.each_ref().map(|server| replica(server.server())).to_vec();
    all.extend(["--threads=1".to_owned(), flag("router")]);
    let router = Router::start(&all).expect("the router starts");
    let by_client = (0..CLIENTS).map(|_| AtomicUsize::default()).collect();
    let tally = Arc::new(Tally { by_client, ..Tally::default() });
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        let url = router.url("/v3/chat/completions");
        clients.spawn(client(number, url, json!("sim"), Arc::clone(&tally)));
    }
    let processes = [
        ("router", router.process()),
        ("0", servers[0].server().process()),
        ("1", servers[1].server().process()),
    ];
    let both = format!("{NEW}\n{OLD}\n");
    for (order, text, tokens) in [([0, 1, 2], both.as_str(), "tokens=2"), ([1, 0, 2], NEW, "tokens=1")] {
        for process in order.map(|index| &processes[index]) {
            let (name, process) = process;
            write(name, text);
            let has_read = |line: &str| {
                (line.contains("the replica tokens have changed") && line.contains(tokens)).then_some(())
            };
            process.await_line(LIMIT, has_read).unwrap();
            for replica in &names {
                tally.await_more(2, replica).await;
            }
        }
    }
    tally.is_over.store(true, Ordering::Relaxed);
    clients.join_all().await;
    assert_eq!(tally.broken.load(Ordering::Relaxed), 0);
    let retries = http::get(&router.url("/metrics")).await.unwrap().body;
    let retries = metric(retries.as_str().unwrap(), "ovfleet_router_retries_total").unwrap_or(0.0);
    assert!(
        retries.abs() < f64::EPSILON,
        "{retries} retries, although the replicas accept the token of the router"
    );
    let client = http::client();
    for (token, status) in [(OLD, 401), (NEW, 200)] {
        for server in &servers {
            let url = server.server().url("/v3/models");
            let answer = client.get(url).header("x-ovfleet-replica-token", token).send().await.unwrap();
            assert_eq!(answer.status().as_u16(), status);
        }
    }
    await_idle(&router).await;
}

#[tokio::test]
async fn requests_wait_in_the_router_while_the_fleet_is_full() {
    // Each of the two replicas runs one sequence at a time.
    let mut arguments = SIM.to_vec();
    arguments.extend(["--max-num-seqs", "1", "--max-queue", "1"]);
    let servers: Vec<RestartableServer> = (0..2).map(|_| RestartableServer::start(&arguments)).collect();
    let all: Vec<String> = servers.iter().map(|server| replica(server.server())).collect();
    let router = Router::start(&all).expect("the router starts");
    let body = json!({"model": "sim", "prompt": "wait", "max_tokens": 30, "ignore_eos": true});
    let url = router.url("/v1/completions");
    let answers = http::join_all((0..24).map(|_| http::post(&url, &body))).await;
    for answer in answers {
        let answer = answer.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    let text = http::get(&router.url("/metrics")).await.unwrap().body;
    let text = text.as_str().unwrap();
    let waited = metric(text, "ovfleet_router_queue_time_seconds_count").unwrap();
    assert!(waited >= 12.0, "{waited} of 24 requests waited");
    await_idle(&router).await;
    assert_eq!(metric(text, "ovfleet_router_expired_dispatches_total"), Some(0.0));
}

#[tokio::test]
async fn a_draining_replica_gets_no_new_requests() {
    let servers: Vec<RestartableServer> = (0..2).map(|_| RestartableServer::start(&SIM)).collect();
    let all: Vec<String> = servers.iter().map(|server| replica(server.server())).collect();
    let router = Router::start(&all).expect("the router starts");
    let body = json!({"model": "sim", "prompt": "drain", "max_tokens": 2});
    servers[0].signal("TERM");
    let other = servers[1].server().address().to_owned();
    let client = http::client();
    let end = tokio::time::Instant::now() + LIMIT;
    let mut in_a_row = 0;
    while in_a_row < 20 {
        assert!(tokio::time::Instant::now() < end);
        let response = client.post(router.url("/v1/completions")).json(&body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 200);
        in_a_row = if response.headers()["x-ovfleet-replica"] == other.as_str() { in_a_row + 1 } else { 0 };
    }
}
