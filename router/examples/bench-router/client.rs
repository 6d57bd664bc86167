//! A client with one connection, which sends requests and measures their times.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::answer::Answer;

/// The kind of a request. The upstream recognizes the kind by `stream` and `user`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An answer that is not streamed.
    Json,
    /// A short stream without pauses.
    Stream,
    /// A long stream with an event every [`PACE`].
    Paced,
    /// A stream that sends one event and is silent afterward.
    Idle,
}

/// Number of events of a short stream: the role, fourteen tokens, the finish reason, and the end.
pub(crate) const STREAM_EVENTS: u64 = 17;
/// The time between two events of a paced stream.
pub(crate) const PACE: Duration = Duration::from_millis(20);
/// The name of the model.
pub(crate) const MODEL: &str = "bench-model";

/// The times of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestTimes {
    /// The time until the first byte of the body.
    pub(crate) first: Duration,
    /// The time until the end of the body.
    pub(crate) whole: Duration,
}

/// A client with one connection.
#[derive(Debug)]
pub(crate) struct Client {
    connection: TcpStream,
    request: Vec<u8>,
    /// The position of `number` in the request.
    number_at: usize,
    number: u32,
    buffer: Vec<u8>,
}

impl Client {
    /// Connects to `target` for requests of one kind.
    pub(crate) async fn connect(target: SocketAddr, kind: Kind) -> anyhow::Result<Self> {
        let connection = TcpStream::connect(target).await.context("failed to connect")?;
        connection.set_nodelay(true)?;
        let (request, number_at) = request(kind);
        // Each client starts at a different number, so that two clients rarely send the same prompt.
        let number = u32::from(connection.local_addr()?.port()) * 1000;
        Ok(Self { connection, request, number_at, number, buffer: vec![0; 8192] })
    }

    /// Sends a request and reads the whole answer.
    pub(crate) async fn ask(&mut self) -> anyhow::Result<RequestTimes> {
        self.number += 1;
        let number = format!("{:08}", self.number % 100_000_000);
        self.request[self.number_at..self.number_at + number.len()].copy_from_slice(number.as_bytes());
        let began = Instant::now();
        self.connection.write_all(&self.request).await.context("failed to send the request")?;
        let mut answer = Answer::new();
        let mut first = None;
        while !answer.is_done() {
            self.read(&mut answer).await?;
            if first.is_none() && answer.bytes > 0 {
                first = Some(began.elapsed());
            }
        }
        let whole = began.elapsed();
        let is_json = answer.bytes > 0 && answer.events == 0;
        ensure!(
            is_json || answer.events == STREAM_EVENTS,
            "an answer of {} bytes is neither JSON nor a stream of {STREAM_EVENTS} events: it has {} events",
            answer.bytes,
            answer.events
        );
        Ok(RequestTimes { first: first.unwrap_or(whole), whole })
    }

    /// Sends a request and reads the first event.
    pub(crate) async fn open(&mut self) -> anyhow::Result<Answer> {
        self.connection.write_all(&self.request).await.context("failed to send the request")?;
        let mut answer = Answer::new();
        while answer.events == 0 {
            self.read(&mut answer).await?;
        }
        Ok(answer)
    }

    /// Reads the rest of the answer, and counts its events.
    pub(crate) async fn count(mut self, mut answer: Answer, events: &AtomicU64) -> anyhow::Result<()> {
        while !answer.is_done() {
            let before = answer.events;
            self.read(&mut answer).await?;
            events.fetch_add(answer.events - before, Ordering::Relaxed);
        }
        Ok(())
    }

    async fn read(&mut self, answer: &mut Answer) -> anyhow::Result<()> {
        let count = self.connection.read(&mut self.buffer).await.context("failed to read an answer")?;
        ensure!(count > 0, "an answer ended early");
        answer.feed(&self.buffer[..count])?;
        let has_head = answer.status != 0;
        let refused = || String::from_utf8_lossy(&self.buffer[..count]).into_owned();
        ensure!(!has_head || answer.status == 200, "unexpected answer: {}", refused());
        Ok(())
    }
}

/// The request, and the position of the number by which prompts differ.
fn request(kind: Kind) -> (Vec<u8>, usize) {
    let (stream, user, tokens) = match kind {
        Kind::Json => (false, "whole", 14),
        Kind::Stream => (true, "fast", 14),
        Kind::Paced => (true, "paced", 100_000),
        Kind::Idle => (true, "idle", 100_000),
    };
    let body = format!(
        "{{\"model\":\"{MODEL}\",\"messages\":[{{\"role\":\"system\",\"content\":\"You are a helpful assistant. Answer \
         shortly, in plain words, and say so when you do not know.\"}},{{\"role\":\"user\",\"content\":\"00000000: which \
         of the two rivers is the longer one, and through how many countries does it run?\"}}],\
         \"max_tokens\":{tokens},\"temperature\":0.7,\"stream\":{stream},\"user\":\"{user}\"}}"
    );
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: router.example\r\nuser-agent: bench-router\r\naccept: */*\r\n\
         content-type: application/json\r\nauthorization: Bearer none\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let number_at = head.len() + body.find("00000000").expect("invariant: it was just written");
    ((head + &body).into_bytes(), number_at)
}
