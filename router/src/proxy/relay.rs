//! An answer that is being passed on: as it comes, piece by piece, and with a proper end whatever happens to
//! the replica.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::response::Parts;
use http::{Response, StatusCode};
use tokio::time::Sleep;

use super::record::{Record, Spent};
use super::sse::Events;
use super::upstream::Link;
use super::{Body, Outgoing, Worker};
use crate::dispatch::{Outcome, Placed};
use crate::fleet::Fleet;
use crate::later::later;

/// How often a silent stream looks whether its replica still lives.
const TICK: Duration = Duration::from_secs(2);

/// An answer that has begun.
pub(super) struct Streamed {
    pub(super) parts: Parts,
    pub(super) link: Link,
    /// What came of it already.
    pub(super) first: Option<Bytes>,
    /// It consists of events, not of bytes in general.
    pub(super) is_events: bool,
}

impl Streamed {
    /// The answer for the client, who from now on drives it.
    pub(super) fn into_response(
        self,
        worker: &Arc<Worker>,
        placed: Placed,
        outgoing: &Outgoing,
        record: &mut Record,
    ) -> Response<Body> {
        let Self { parts, link, first, is_events } = self;
        record.first_byte();
        let events = |endpoint| {
            if outgoing.hides_usage { Events::hiding_usage(endpoint) } else { Events::new(endpoint) }
        };
        let relay = Relay {
            worker: Arc::clone(worker),
            status: parts.status,
            prompt_bytes: outgoing.prompt_bytes,
            choices: outgoing.choices,
            upstream: Some(link),
            fleet: Arc::clone(&placed.fleet),
            placed: Some(placed),
            record: record.take(),
            first,
            events: is_events.then(|| events(outgoing.endpoint)),
            silence: None,
            failure: None,
        };
        Response::from_parts(parts, Body::relay(relay))
    }
}

/// An answer on its way. Dropping it closes the connection to the replica.
pub(super) struct Relay {
    worker: Arc<Worker>,
    status: StatusCode,
    prompt_bytes: usize,
    choices: u32,
    /// `None` once it has ended.
    upstream: Option<Link>,
    placed: Option<Placed>,
    fleet: Arc<Fleet>,
    record: Record,
    first: Option<Bytes>,
    events: Option<Events>,
    /// Since when nothing has come although somebody wants it.
    silence: Option<Silence>,
    /// What it ends with, once all that went before is on its way.
    failure: Option<io::Error>,
}

struct Silence {
    /// `None` from the moment something comes until more is wanted, which a slow client may not do for long.
    since: Option<Instant>,
    /// Looks again.
    timer: Pin<Box<Sleep>>,
}

impl Relay {
    /// The next bytes for the client.
    pub(super) fn poll_bytes(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if let Some(first) = self.first.take() {
            let bytes = self.pass(first);
            if !bytes.is_empty() {
                return Poll::Ready(Some(Ok(bytes)));
            }
        }
        loop {
            let Some(link) = &mut self.upstream else {
                return Poll::Ready(self.failure.take().map(Err));
            };
            match link.poll_body(context) {
                Poll::Ready(Some(Ok(bytes))) => {
                    if let Some(silence) = &mut self.silence {
                        silence.since = None;
                    }
                    let bytes = self.pass(bytes);
                    if !bytes.is_empty() {
                        return Poll::Ready(Some(Ok(bytes)));
                    }
                }
                Poll::Ready(None) => {
                    let rest = self.end();
                    return Poll::Ready((!rest.is_empty()).then_some(Ok(rest)));
                }
                Poll::Ready(Some(Err(error))) => {
                    tracing::debug!(replica = self.replica(), %error, "an answer broke off");
                    return self.break_off("the replica died while it was answering", context);
                }
                Poll::Pending => {
                    if !self.is_silent_too_long(context) {
                        return Poll::Pending;
                    }
                    return self.break_off("the replica stopped answering", context);
                }
            }
        }
    }

    fn pass(&mut self, bytes: Bytes) -> Bytes {
        match &mut self.events {
            Some(events) => events.pass(bytes),
            None => bytes,
        }
    }

    /// What is known so far of the tokens that the request used.
    fn spent(&self) -> Spent {
        match &self.events {
            _ if !self.status.is_success() => Spent::Nothing,
            Some(Events { usage: Some(usage), .. }) => Spent::Reported(*usage),
            Some(events) => {
                Spent::Counted(self.fleet.expectations().estimates.tokens_of_events(events.with_tokens()))
            }
            None => Spent::Unknown,
        }
    }

    fn replica(&self) -> &str {
        self.placed.as_ref().map_or("", |placed| &placed.replica.found.name)
    }

    /// The answer is complete.
    fn end(&mut self) -> Bytes {
        let spent = self.spent();
        if let (Some(link), Some(placed)) = (self.upstream.take(), &mut self.placed) {
            self.worker.pool.give(placed.replica.found.http, link);
            placed.end(Outcome::Answered);
            let (status, prompt_bytes, choices) = (self.status, self.prompt_bytes, self.choices.max(1));
            let fleet = Arc::clone(&self.fleet);
            let events = self.events.as_ref().map(Events::with_tokens);
            let mut record = self.record.finished();
            later(move || {
                match spent {
                    Spent::Reported(usage) => {
                        let each = usage.completion.map(|tokens| tokens / choices);
                        fleet.learn(Some((prompt_bytes, usage.prompt)), each);
                        if let (Some(events), Some(tokens)) = (events, usage.completion) {
                            fleet.learn_events(events, tokens);
                        }
                    }
                    Spent::Counted(tokens) => fleet.learn(None, Some(tokens / choices)),
                    Spent::Nothing | Spent::Unknown => {}
                }
                record.whole(status, spent);
            });
        }
        self.placed = None;
        self.events.as_mut().map(Events::rest).unwrap_or_default()
    }

    /// The replica is gone. A stream of events ends with one that says so, anything else just breaks off.
    fn break_off(&mut self, message: &str, context: &Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        self.upstream = None;
        if let Some(mut placed) = self.placed.take() {
            placed.end(Outcome::Failed);
        }
        self.record.broken(self.status, self.spent());
        if let Some(events) = &self.events {
            return Poll::Ready(Some(Ok(events.broken(message))));
        }
        // With an error the connection is dropped, and with it what is not written yet: that goes first.
        self.failure = Some(io::Error::new(io::ErrorKind::ConnectionReset, message.to_owned()));
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Nothing is there at the moment: whether that has been so for too long. Arranges to be asked again.
    fn is_silent_too_long(&mut self, context: &mut Context<'_>) -> bool {
        let now = Instant::now();
        let silence = self
            .silence
            .get_or_insert_with(|| Silence { since: None, timer: Box::pin(tokio::time::sleep(TICK)) });
        let since = *silence.since.get_or_insert(now);
        while silence.timer.as_mut().poll(context).is_ready() {
            let settings = self.worker.app.settings();
            let quiet = now.saturating_duration_since(since);
            let limit = match &self.placed {
                Some(placed) if placed.replica.hangs(now, settings.hang_timeout) => settings.hang_timeout,
                _ => settings.idle_timeout,
            };
            if quiet >= limit.min(settings.idle_timeout) {
                return true;
            }
            let next = TICK.min(limit.saturating_sub(quiet)).max(Duration::from_millis(1));
            silence.timer.as_mut().reset(tokio::time::Instant::now() + next);
        }
        false
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // Without effect if the answer has ended.
        self.record.cancelled(self.status, self.spent());
    }
}
