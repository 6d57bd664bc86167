//! A router process, replicas that are implemented by closures, and a client that understands only the framing of HTTP.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest time that a test waits for any condition.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// A request as a replica receives it.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Request {
    /// The value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }
}

pub(crate) fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().skip(1).find_map(|line| {
        let (given, value) = line.split_once(':')?;
        given.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// A replica whose requests are answered by a closure. The replica answers `/v3/models` without the closure, so that
/// the router knows its model.
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<Request>>>,
    closed: Arc<AtomicUsize>,
}

impl Upstream {
    /// Starts a replica. The closure receives the connection: it may answer completely, partly, or not at all. It
    /// returns whether the connection remains open.
    pub(crate) fn start(
        model: &str,
        answer: impl Fn(&Request, &mut TcpStream) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").unwrap(), model, answer)
    }

    /// Like [`Upstream::start`], with a given listener.
    pub(crate) fn on(
        listener: TcpListener,
        model: &str,
        answer: impl Fn(&Request, &mut TcpStream) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self::with_store(listener, model, 0, answer)
    }

    /// Like [`Upstream::on`], for a replica whose store has the ID `store_id`, or that has no store if `store_id` is 0.
    pub(crate) fn with_store(
        listener: TcpListener,
        model: &str,
        store_id: u64,
        answer: impl Fn(&Request, &mut TcpStream) -> bool + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let models = whole(&format!(r#"{{"object":"list","data":[{{"id":"{model}"}}]}}"#));
        let models = models.replacen("\r\n", &format!("\r\nx-ovfleet-store-id: {store_id:016x}\r\n"), 1);
        let (answer, recorded) = (Arc::new(answer), Arc::clone(&seen));
        let closed = Arc::new(AtomicUsize::new(0));
        let closing = Arc::clone(&closed);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (answer, recorded, models) = (Arc::clone(&answer), Arc::clone(&recorded), models.clone());
                let closing = Arc::clone(&closing);
                std::thread::spawn(move || {
                    if serve(stream, &recorded, &models, &*answer) == Closer::Answer {
                        closing.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        Self { address, seen, closed }
    }

    /// Waits until the closure has closed `count` connections.
    pub(crate) fn await_closed(&self, count: usize) {
        await_condition("connections to be closed", || {
            (self.closed.load(Ordering::Relaxed) >= count).then_some(())
        });
    }

    /// The argument that adds this replica to the router.
    pub(crate) fn argument(&self) -> String {
        format!("--replica={}", self.address)
    }

    /// The requests that have arrived so far.
    pub(crate) fn seen(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }
}

/// The side that closed a connection between the router and a replica.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Closer {
    /// The router closed the connection.
    Router,
    /// The closure that answers closed the connection.
    Answer,
}

fn serve(
    mut stream: TcpStream,
    seen: &Mutex<Vec<Request>>,
    models: &str,
    answer: &dyn Fn(&Request, &mut TcpStream) -> bool,
) -> Closer {
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    while let Some(request) = read_request(&mut stream) {
        if request.head.starts_with("GET /v3/models ") {
            if stream.write_all(models.as_bytes()).is_err() {
                return Closer::Router;
            }
            continue;
        }
        seen.lock().unwrap().push(request.clone());
        if !answer(&request, &mut stream) {
            return Closer::Answer;
        }
    }
    Closer::Router
}

/// Reads the next request completely.
pub(crate) fn read_request(stream: &mut TcpStream) -> Option<Request> {
    let mut bytes = Vec::new();
    let mut byte = [0];
    while !bytes.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        bytes.push(byte[0]);
    }
    let head = String::from_utf8(bytes).unwrap();
    let length = header(&head, "content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some(Request { head, body })
}

/// A JSON answer with the status 200.
pub(crate) fn whole(body: &str) -> String {
    with_status("200 OK", body)
}

/// A JSON answer with a status.
pub(crate) fn with_status(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// The head of a stream.
pub(crate) const STREAM: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
/// The end of a stream.
pub(crate) const END: &str = "0\r\n\r\n";

/// An event of a stream, as a chunk.
pub(crate) fn event(data: &str) -> String {
    let event = format!("data: {data}\n\n");
    format!("{:x}\r\n{event}\r\n", event.len())
}

/// Sends `text`. Returns whether that succeeded, so that a closure can return the result to keep the connection open.
pub(crate) fn send(stream: &mut TcpStream, text: &str) -> bool {
    stream.write_all(text.as_bytes()).is_ok()
}

/// Sends `text`. Returns `false`, so that a closure can return the result to close the connection.
pub(crate) fn send_and_close(stream: &mut TcpStream, text: &str) -> bool {
    // The other side may have closed the connection already.
    let _ = stream.write_all(text.as_bytes());
    false
}

/// A running router. Dropping it kills the process.
pub(crate) struct Router {
    child: Child,
    pub(crate) address: String,
    log: Arc<(Mutex<String>, Condvar)>,
    reader: Option<JoinHandle<()>>,
}

/// The command of a router, without the environment variables that set flags.
pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ovfleet-router"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("OVFLEET_")) {
        command.env_remove(name);
    }
    command.args(["--port", "0", "--threads", "1"]).args(arguments);
    command
}

impl Router {
    /// Starts a router for `upstreams` and waits until it is ready.
    pub(crate) fn start(upstreams: &[&Upstream], arguments: &[&str]) -> Self {
        let replicas: Vec<String> = upstreams.iter().map(|upstream| upstream.argument()).collect();
        let all: Vec<&str> = replicas.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
        let router = Self::unready(&all);
        router.await_log("ready");
        for upstream in upstreams {
            router.await_served(upstream.address);
        }
        router
    }

    /// Starts a router and waits until it listens.
    pub(crate) fn unready(arguments: &[&str]) -> Self {
        let mut child = command(arguments).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let log = Arc::new((Mutex::new(String::new()), Condvar::new()));
        let append = |log: &(Mutex<String>, Condvar), line: String| {
            *log.0.lock().unwrap() += &(line + "\n");
            log.1.notify_all();
        };
        let mut address = None;
        for line in lines.by_ref() {
            address = line.split_once("http://").map(|(_, rest)| {
                // A quotation mark (in JSON logs) or a comma may follow the address.
                let end = rest.find(|letter: char| !letter.is_ascii_digit() && !".:".contains(letter));
                rest[..end.unwrap_or(rest.len())].to_owned()
            });
            append(&log, line);
            if address.is_some() {
                break;
            }
        }
        let address =
            address.unwrap_or_else(|| panic!("the router does not listen: {}", log.0.lock().unwrap()));
        let more = Arc::clone(&log);
        let reader = std::thread::spawn(move || lines.for_each(|line| append(&more, line)));
        Self { child, address, log, reader: Some(reader) }
    }

    /// Waits until the router knows the models of the replica at this address.
    pub(crate) fn await_served(&self, replica: SocketAddr) {
        let prefix = format!("\"address\":\"{replica}\",");
        await_condition("a replica to be known", || {
            let known = self.get("/debug/replicas").body;
            known.split(&prefix).nth(1)?.starts_with("\"models\":[\"").then_some(())
        });
    }

    /// Waits until the log contains `text`.
    pub(crate) fn await_log(&self, text: &str) {
        let log = self.log.0.lock().unwrap();
        let (log, waited) = self.log.1.wait_timeout_while(log, LIMIT, |log| !log.contains(text)).unwrap();
        assert!(!waited.timed_out(), "{text:?} is not in the log:\n{log}");
    }

    pub(crate) fn log(&self) -> String {
        self.log.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Sends a request over a new connection, and reads its answer.
    pub(crate) fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let mut stream = self.connect();
        stream.write_all(raw(method, path, headers, body).as_bytes()).unwrap();
        Answer::read(&mut stream)
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Answer {
        self.request("POST", path, "", body)
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.request("GET", path, "", "")
    }

    pub(crate) fn signal(&self, name: &str) {
        let process = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &process]).status().unwrap().success());
    }

    pub(crate) fn ended(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        (status, self.log())
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let log = self.log();
        if !std::thread::panicking() {
            assert!(!log.contains("panicked"), "{log}");
        }
    }
}

/// The bytes of a request. The connection is closed after the answer.
pub(crate) fn raw(method: &str, path: &str, headers: &str, body: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nhost: router\r\nconnection: close\r\ncontent-type: application/json\r\n\
         {headers}content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// The body of a chat request for a model.
pub(crate) fn chat(model: &str, stream: bool) -> String {
    format!(r#"{{"model":"{model}","stream":{stream},"messages":[{{"role":"user","content":"Hello"}}]}}"#)
}

pub(crate) const CHAT: &str = "/v3/chat/completions";

/// An answer, read to the end of its connection.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    /// The body without its framing.
    pub(crate) body: String,
    /// Whether the body is complete according to its framing.
    pub(crate) is_complete: bool,
}

impl Answer {
    pub(crate) fn read(stream: &mut TcpStream) -> Self {
        let mut bytes = Vec::new();
        // A connection that is cut off may end with an error.
        let _ = stream.read_to_end(&mut bytes);
        Self::parse(&bytes)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let (head, rest) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        let (body, is_complete) = if header(head, "transfer-encoding").is_some() {
            unchunked(rest)
        } else {
            let length = header(head, "content-length").and_then(|length| length.parse().ok());
            (rest.to_owned(), length == Some(rest.len()))
        };
        Self { status, head: head.to_owned(), body, is_complete }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }
}

/// A body without its chunk framing, and whether the last chunk has arrived.
fn unchunked(mut rest: &str) -> (String, bool) {
    let mut body = String::new();
    loop {
        let Some((size, after)) = rest.split_once("\r\n") else { return (body, false) };
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return (body, true);
        }
        let Some(chunk) = after.get(..size) else { return (body, false) };
        body.push_str(chunk);
        rest = after.get(size + 2..).unwrap_or_default();
    }
}

/// Reads until the text `wanted` has arrived, and returns everything that was read.
pub(crate) fn read_until(stream: &mut TcpStream, wanted: &str) -> String {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    while !String::from_utf8_lossy(&bytes).contains(wanted) {
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0, "{wanted:?} did not arrive: {}", String::from_utf8_lossy(&bytes));
        bytes.extend_from_slice(&buffer[..count]);
    }
    String::from_utf8(bytes).unwrap()
}

/// Waits until `condition` returns a value.
pub(crate) fn await_condition<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < end, "timed out waiting for {what}");
        std::thread::yield_now();
    }
}

/// The sum of all series of a metric.
pub(crate) fn metric(text: &str, name: &str) -> f64 {
    let lines = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
