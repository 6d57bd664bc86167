//! The replicas: as fast as can be, so that what is measured is in front of them. They answer as an OpenAI server does,
//! each event in a chunk and a write of its own, report their load as ours do, and say what the other routers ask for.

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

/// Notices of clients that have gone; further ones are lost.
const GONE_MAX: usize = 64;

/// Replicas in a thread of their own. Dropping it ends them.
pub(crate) struct Upstream {
    pub(crate) replicas: Vec<Arc<Replica>>,
    /// When a replica noticed that the client of a silent stream had gone.
    pub(crate) gone: mpsc::Receiver<Instant>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl Upstream {
    pub(crate) async fn start(count: u32) -> anyhow::Result<Self> {
        let stop = CancellationToken::new();
        let (tell, told) = oneshot::channel();
        let (noticed, gone) = mpsc::channel(GONE_MAX);
        let until = stop.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("upstream".to_owned()).spawn(move || {
            runtime.block_on(async {
                let mut tasks = JoinSet::new();
                // Nobody who is not there any more wants to be told.
                let _ = tell.send(replicas(count, &noticed, &mut tasks).await);
                until.cancelled().await;
            });
        })?;
        let replicas = told.await.context("the replicas are gone")??;
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
            // If it panicked, that has been said.
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
                    // How a connection ends is the other side's affair.
                    let _ = connection.serve(&replica, &gone).await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// What somebody asks.
#[derive(Debug, PartialEq)]
enum Asked {
    /// This, in one piece.
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
        while let Some(asked) = self.next().await? {
            match asked {
                Asked::Page(body) => self.stream.write_all(&whole(&body)).await?,
                Asked::Answer(kind, dispatch) => {
                    let _work = replica.work(dispatch);
                    self.answer(kind, gone).await?;
                }
            }
        }
        Ok(())
    }

    /// The next request, all of it.
    async fn next(&mut self) -> io::Result<Option<Asked>> {
        loop {
            if let Some((asked, length)) = read(&self.buffer) {
                self.buffer.advance(length);
                return Ok(Some(asked));
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
                    // Another stream's event comes first, as where sequences take turns.
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
                // Nothing more comes but the end.
                let _ = stream.read_buf(buffer).await;
                let _ = gone.try_send(Instant::now());
                Err(io::ErrorKind::ConnectionReset.into())
            }
        }
    }
}

/// The first request in `bytes`, and how long it is; `None` if not all of it is there.
fn read(bytes: &[u8]) -> Option<(Asked, usize)> {
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
    let asked = if first.starts_with("GET ") {
        Asked::Page(page(first))
    } else if has("\"user\":\"idle\"") {
        Asked::Answer(Kind::Idle, dispatch)
    } else if has("\"user\":\"paced\"") {
        Asked::Answer(Kind::Paced, dispatch)
    } else if has("\"stream\":true") {
        Asked::Answer(Kind::Stream, dispatch)
    } else {
        Asked::Answer(Kind::Json, dispatch)
    };
    Some((asked, end + length))
}

/// What a router wants to know before it sends anything.
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

/// The chunks of a short answer, the last with the end of the answer behind it.
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
    fn a_request_is_read_when_all_of_it_is_there() {
        let text = "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 15\r\n\
                    x-ovfleet-dispatch: 000000000000000a/7\r\n\r\n{\"stream\":true}GET /health HTTP/1.1\r\n\r\n";
        let first = text.len() - "GET /health HTTP/1.1\r\n\r\n".len();
        for length in 0..first {
            assert_eq!(read(&text.as_bytes()[..length]), None);
        }
        let dispatch = Dispatch { router: 10, number: 7 };
        let (asked, length) = read(text.as_bytes()).unwrap();
        assert_eq!((asked, length), (Asked::Answer(Kind::Stream, Some(dispatch)), first));
        assert_eq!(read(&text.as_bytes()[first..]).unwrap().0, Asked::Page("{}".to_owned()));
    }

    #[test]
    fn answers_are_what_clients_can_read() {
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
