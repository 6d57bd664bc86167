//! A server process for tests.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time limit for a log message. Messages are usually logged much sooner.
const LOG_DEADLINE: Duration = Duration::from_secs(60);

/// A running server. Dropping it kills the process.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ovfleet-server"));
    command.args(["--backend", "sim", "--port", "0", "--grpc-port", "0"]).args(arguments);
    command
}

/// Wraps `command` in a shell that limits its open file descriptors to `count`.
pub(crate) fn with_descriptors(count: usize, command: &Command) -> Command {
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("ulimit -n {count} && exec \"$0\" \"$@\"")]);
    limited.arg(command.get_program()).args(command.get_args());
    limited
}

impl Server {
    /// Starts a server and waits until it is ready.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let log = Arc::new(Mutex::new(String::new()));
        let mut address = None;
        for line in lines.by_ref() {
            if let Some((_, rest)) = line.split_once("http://") {
                address = rest.split(',').next().map(str::to_owned);
            }
            let ready = line.ends_with("ready") || line.contains(r#""message":"ready""#);
            *log.lock().unwrap() += &(line + "\n");
            if ready {
                break;
            }
        }
        let address = address.unwrap_or_else(|| panic!("the server is not ready: {}", log.lock().unwrap()));
        let more = Arc::clone(&log);
        let reader =
            std::thread::spawn(move || lines.for_each(|line| *more.lock().unwrap() += &(line + "\n")));
        Self { child, address, log, reader: Some(reader) }
    }

    /// Returns the text after `mark` in the first log line that contains it.
    pub(crate) fn logged(&self, mark: &str) -> String {
        let log = self.log.lock().unwrap();
        let said = log.lines().find_map(|line| Some(line.split_once(mark)?.1.trim().to_owned()));
        said.unwrap_or_else(|| panic!("no {mark:?} in {log}"))
    }

    /// Returns the peak resident memory of the process in bytes.
    pub(crate) fn peak_memory(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        peak.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
    }

    pub(crate) fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).unwrap()
    }

    /// Requests an answer of `max_tokens` tokens, and returns the connection when the answer has begun. Sampling is
    /// greedy, because a randomly sampled first token can be an incomplete character, which the server does not send.
    pub(crate) fn begun(&self, max_tokens: u32) -> TcpStream {
        let body = format!(
            r#"{{"model":"sim","messages":[{{"role":"user","content":"a secret"}}],"stream":true,
                "temperature":0,"ignore_eos":true,"max_tokens":{max_tokens}}}"#
        );
        let mut stream = self.connect();
        write!(
            stream,
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut begun = [0; 12];
        stream.read_exact(&mut begun).unwrap();
        assert_eq!(&begun, b"HTTP/1.1 200");
        stream
    }

    pub(crate) fn signal(&self, name: &str) {
        let process = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &process]).status().unwrap().success());
    }

    /// Waits for this message in the log.
    pub(crate) fn await_log(&self, message: &str) {
        let end = Instant::now() + LOG_DEADLINE;
        while !self.log.lock().unwrap().contains(message) {
            assert!(Instant::now() < end, "no {message:?} in {}", self.log.lock().unwrap());
            std::thread::yield_now();
        }
    }

    pub(crate) fn ended(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        let log = self.log.lock().unwrap().clone();
        (status, log)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn rest(mut stream: TcpStream) -> String {
    let mut rest = Vec::new();
    // A connection that is cut off may end with an error.
    let _ = stream.read_to_end(&mut rest);
    String::from_utf8_lossy(&rest).into_owned()
}
