//! Simulated replicas, which are as fast as possible, so that the benchmark measures the programs in front of them.
//! They answer as an OpenAI server does, write each event as a separate chunk, report their load, and answer the
//! queries of the other routers.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::Context as _;
use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::client::{Kind, MODEL, PACE, STREAM_EVENTS};
use crate::report::{self, Dispatch, Replica};

/// The number of buffered notifications about clients that have disconnected. Further notifications are lost.
const GONE_MAX: usize = 64;

/// Replicas in a separate thread. Dropping this value stops them.
pub(crate) struct Upstream {
    pub(crate) replicas: Vec<Arc<Replica>>,
    /// The times at which a replica noticed that the client of a silent stream had disconnected.
    pub(crate) gone: mpsc::Receiver<Instant>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Upstream {
    pub(crate) async fn start(count: u32) -> anyhow::Result<Self> {
        let stop = CancellationToken::new();
        let (started_sender, started) = oneshot::channel();
        let (noticed, gone) = mpsc::channel(GONE_MAX);
        let until = stop.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("upstream".to_owned()).spawn(move || {
            runtime.block_on(async {
                let mut tasks = JoinSet::new();
                // The receiver may have been dropped.
                let _ = started_sender.send(replicas(count, &noticed, &mut tasks).await);
                until.cancelled().await;
            });
        })?;
        let replicas =
            started.await.context("the thread of the replicas ended before it had started them")??;
        Ok(Self { replicas, gone, stop, thread: Some(thread) })
    }

    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        self.replicas.iter().map(|replica| replica.http).collect()
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been reported already.
            let _ = thread.join();
        }
    }
}

async fn replicas(
    count: u32,
    gone: &mpsc::Sender<Instant>,
    tasks: &mut JoinSet<()>,
) -> anyhow::Result<Vec<Arc<Replica>>> {
    let mut replicas = Vec::new();
    for number in 0..count {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let reports = TcpListener::bind("127.0.0.1:0").await?;
        let replica =
            Arc::new(Replica::new(u64::from(number), listener.local_addr()?, reports.local_addr()?));
        tasks.spawn(report::serve(Arc::clone(&replica), reports));
        tasks.spawn(accept(Arc::clone(&replica), listener, gone.clone()));
        replicas.push(replica);
    }
    Ok(replicas)
}

async fn accept(replica: Arc<Replica>, listener: TcpListener, gone: mpsc::Sender<Instant>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let (replica, gone) = (Arc::clone(&replica), gone.clone());
                connections.spawn(async move {
                    let connection = Connection { stream, buffer: BytesMut::new() };
                    // Connection errors are caused by the other side.
                    let _ = connection.serve(&replica, &gone).await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// A request to a simulated replica.
#[derive(Debug, PartialEq)]
enum ClientRequest {
    /// A GET request, with the body of its response.
    Page(String),
    Answer(Kind, Option<Dispatch>),
}

struct Connection {
    stream: TcpStream,
    buffer: BytesMut,
}

impl Connection {
    async fn serve(mut self, replica: &Replica, gone: &mpsc::Sender<Instant>) -> io::Result<()> {
        self.stream.set_nodelay(true)?;
        while let Some(request) = self.next().await? {
            match request {
                ClientRequest::Page(body) => self.stream.write_all(&whole(&body)).await?,
                ClientRequest::Answer(kind, dispatch) => {
                    let _work = replica.work(dispatch);
                    self.answer(kind, gone).await?;
                }
            }
        }
        Ok(())
    }

    /// Reads the next request completely.
    async fn next(&mut self) -> io::Result<Option<ClientRequest>> {
        loop {
            if let Some((request, length)) = read(&self.buffer) {
                self.buffer.advance(length);
                return Ok(Some(request));
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
    }

    async fn answer(&mut self, kind: Kind, gone: &mpsc::Sender<Instant>) -> io::Result<()> {
        let Self { stream, buffer } = self;
        if kind == Kind::Json {
            return stream.write_all(&JSON).await;
        }
        stream.write_all(STREAM.as_bytes()).await?;
        match kind {
            Kind::Stream => {
                for event in &*EVENTS {
                    stream.write_all(event).await?;
                    // Yield to other streams, like a scheduler that alternates between sequences.
                    tokio::task::yield_now().await;
                }
                Ok(())
            }
            Kind::Paced => {
                let mut ticks = tokio::time::interval(PACE);
                ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
                loop {
                    ticks.tick().await;
                    stream.write_all(&EVENTS[1]).await?;
                }
            }
            Kind::Idle | Kind::Json => {
                stream.write_all(&EVENTS[0]).await?;
                // The client sends nothing more, so this read waits until the client closes the connection.
                let _ = stream.read_buf(buffer).await;
                let _ = gone.try_send(Instant::now());
                Err(io::ErrorKind::ConnectionReset.into())
            }
        }
    }
}

/// The first request in `bytes` and its length, or `None` if the request is incomplete or invalid.
fn read(bytes: &[u8]) -> Option<(ClientRequest, usize)> {
    let end = memchr::memmem::find(bytes, b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&bytes[..end]).ok()?;
    let (first, rest) = head.split_once("\r\n")?;
    let mut length = 0;
    let mut dispatch = None;
    for (name, value) in rest.lines().filter_map(|line| line.split_once(": ")) {
        if name.eq_ignore_ascii_case("content-length") {
            length = value.parse().ok()?;
        } else if name.eq_ignore_ascii_case("x-ovfleet-dispatch") {
            dispatch = Dispatch::read(value);
        }
    }
    let body = bytes.get(end..end + length)?;
    let has = |text: &str| memchr::memmem::find(body, text.as_bytes()).is_some();
    let request = if first.starts_with("GET ") {
        ClientRequest::Page(page(first))
    } else if has("\"user\":\"idle\"") {
        ClientRequest::Answer(Kind::Idle, dispatch)
    } else if has("\"user\":\"paced\"") {
        ClientRequest::Answer(Kind::Paced, dispatch)
    } else if has("\"stream\":true") {
        ClientRequest::Answer(Kind::Stream, dispatch)
    } else {
        ClientRequest::Answer(Kind::Json, dispatch)
    };
    Some((request, end + length))
}

/// The body of the response to a GET request, with which a router lists the models or checks the health of a replica.
fn page(first_line: &str) -> String {
    if first_line.contains("/models") {
        format!(
            "{{\"object\":\"list\",\"data\":[{{\"id\":\"{MODEL}\",\"object\":\"model\",\"owned_by\":\"bench\"}}]}}"
        )
    } else if first_line.contains("info") {
        format!(
            "{{\"model_path\":\"{MODEL}\",\"served_model_name\":\"{MODEL}\",\"tp_size\":1,\"dp_size\":1,\
             \"is_generation\":true,\"version\":\"1\"}}"
        )
    } else {
        "{}".to_owned()
    }
}

fn whole(body: &str) -> Vec<u8> {
    let head = "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: bench\r\n\
                content-type: application/json";
    format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

const STREAM: &str = "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: bench\r\n\
    cache-control: no-cache\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

const ID: &str = "chatcmpl-0123456789abcdef0123456789abcdef";

static JSON: LazyLock<Vec<u8>> = LazyLock::new(|| {
    whole(&format!(
        "{{\"id\":\"{ID}\",\"object\":\"chat.completion\",\"created\":1767225600,\"model\":\"{MODEL}\",\"choices\":\
         [{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"The first one is longer; it runs through \
         eleven countries.\",\"tool_calls\":[]}},\"logprobs\":null,\"finish_reason\":\"stop\"}}],\"usage\":\
         {{\"prompt_tokens\":62,\"total_tokens\":76,\"completion_tokens\":14,\"prompt_tokens_details\":null}}}}"
    ))
});

/// The chunks of a short stream. The last one includes the end of the answer.
static EVENTS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let words = "The first one is longer ; it runs through eleven countries , some more";
    let choice = |delta: &str, reason: &str| {
        format!(
            "data: {{\"id\":\"{ID}\",\"object\":\"chat.completion.chunk\",\"created\":1767225600,\"model\":\"{MODEL}\",\
             \"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{reason}}}]}}\n\n"
        )
    };
    let role = choice("{\"role\":\"assistant\",\"content\":\"\"}", "null");
    let tokens = words.split(' ').map(|word| choice(&format!("{{\"content\":\" {word}\"}}"), "null"));
    let events = std::iter::once(role).chain(tokens).chain([choice("{}", "\"stop\"")]);
    let mut chunks: Vec<Vec<u8>> =
        events.map(|event| format!("{:x}\r\n{event}\r\n", event.len()).into_bytes()).collect();
    chunks.push(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n".to_vec());
    assert_eq!(chunks.len() as u64, STREAM_EVENTS);
    chunks
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::Answer;

    #[test]
    fn a_request_is_parsed_only_when_it_is_complete() {
        let text = "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 15\r\n\
                    x-ovfleet-dispatch: 000000000000000a/7\r\n\r\n{\"stream\":true}GET /health HTTP/1.1\r\n\r\n";
        let first = text.len() - "GET /health HTTP/1.1\r\n\r\n".len();
        for length in 0..first {
            assert_eq!(read(&text.as_bytes()[..length]), None);
        }
        let dispatch = Dispatch { router: 10, number: 7 };
        let (request, length) = read(text.as_bytes()).unwrap();
        assert_eq!((request, length), (ClientRequest::Answer(Kind::Stream, Some(dispatch)), first));
        assert_eq!(read(&text.as_bytes()[first..]).unwrap().0, ClientRequest::Page("{}".to_owned()));
    }

    #[test]
    fn the_client_parses_the_answers_of_the_upstream() {
        let mut answer = Answer::new();
        answer.feed(STREAM.as_bytes()).unwrap();
        for event in &*EVENTS {
            assert!(!answer.is_done());
            answer.feed(event).unwrap();
        }
        assert!(answer.is_done());
        assert_eq!((answer.status, answer.events), (200, STREAM_EVENTS));
        let mut answer = Answer::new();
        answer.feed(&JSON).unwrap();
        assert!(answer.is_done());
    }
}
