//! Forwards an answer to the client as it arrives, and ends it properly if the replica fails.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::response::Parts;
use http::{Response, StatusCode};
use process::error::chain;
use tokio::time::Sleep;

use super::outgoing::OutgoingRequest;
use super::record::{RequestRecord, TokensUsed};
use super::sse::Events;
use super::upstream::ReplicaConnection;
use super::usage::UsageScanner;
use super::worker::Worker;
use crate::deferred::defer;
use crate::dispatch::{Outcome, Placement};
use crate::served_model::ServedModel;

/// The longest time between two checks of a replica that sends no data. Each check determines whether the replica still
/// reports its load, and whether it has been silent for too long.
const SILENCE_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// An answer that has begun.
pub(super) struct StreamedAnswer {
    pub(super) parts: Parts,
    pub(super) connection: ReplicaConnection,
    /// The first part of the body, if it has been received already.
    pub(super) first: Option<Bytes>,
    /// Whether the body consists of server-sent events.
    pub(super) is_events: bool,
}

impl StreamedAnswer {
    /// Creates the answer for the client. From then on, the client's connection polls the answer.
    pub(super) fn into_response(
        self,
        worker: &Arc<Worker>,
        mut placement: Placement,
        outgoing: &OutgoingRequest,
        record: &mut RequestRecord,
    ) -> Response<Relay> {
        let Self { parts, connection, first, is_events } = self;
        placement.record_answer_began();
        record.first_byte();
        let events = |endpoint| {
            if outgoing.hides_usage { Events::hiding_usage(endpoint) } else { Events::new(endpoint) }
        };
        let relay = Relay {
            worker: Arc::clone(worker),
            status: parts.status,
            is_computed: outgoing.is_computed,
            prompt_bytes: outgoing.prompt_bytes,
            choices: outgoing.choices,
            upstream: Some(connection),
            served_model: Arc::clone(&placement.served_model),
            placement: Some(placement),
            record: record.detach(),
            first,
            events: is_events.then(|| events(outgoing.endpoint)),
            usage: UsageScanner::default(),
            idle_period: None,
            failure: None,
        };
        Response::from_parts(parts, relay)
    }
}

/// The body of a forwarded answer. Dropping it before the answer has ended closes the connection to the replica.
pub(super) struct Relay {
    worker: Arc<Worker>,
    status: StatusCode,
    is_computed: bool,
    prompt_bytes: usize,
    choices: u32,
    /// `None` once the answer has ended.
    upstream: Option<ReplicaConnection>,
    placement: Option<Placement>,
    served_model: Arc<ServedModel>,
    record: RequestRecord,
    first: Option<Bytes>,
    events: Option<Events>,
    /// Reads the usage of an answer that is not a stream of events.
    usage: UsageScanner,
    idle_period: Option<IdlePeriod>,
    /// The error that ends the body after all earlier data has been sent.
    failure: Option<io::Error>,
}

/// A period in which the client waits for data and the replica sends none.
struct IdlePeriod {
    /// The beginning of the period. `None` from the arrival of data until the client polls for more, which may take a
    /// long time if the client is slow.
    since: Option<Instant>,
    /// Wakes the relay for the next check.
    timer: Pin<Box<Sleep>>,
}

impl Relay {
    /// The next bytes for the client.
    pub(super) fn poll_bytes(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if let Some(first) = self.first.take() {
            let bytes = self.forward(first);
            if !bytes.is_empty() {
                return Poll::Ready(Some(Ok(bytes)));
            }
        }
        loop {
            let Some(connection) = &mut self.upstream else {
                return Poll::Ready(self.failure.take().map(Err));
            };
            match connection.poll_body(context) {
                Poll::Ready(Some(Ok(bytes))) => {
                    if let Some(idle_period) = &mut self.idle_period {
                        idle_period.since = None;
                    }
                    let bytes = self.forward(bytes);
                    if !bytes.is_empty() {
                        return Poll::Ready(Some(Ok(bytes)));
                    }
                }
                Poll::Ready(None) => {
                    let rest = self.end();
                    return Poll::Ready((!rest.is_empty()).then_some(Ok(rest)));
                }
                Poll::Ready(Some(Err(error))) => {
                    tracing::debug!(
                        replica = self.replica(),
                        error = chain(&error),
                        "the connection broke during an answer"
                    );
                    return self.break_off("the connection to the replica broke during the answer", context);
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

    fn forward(&mut self, bytes: Bytes) -> Bytes {
        match &mut self.events {
            Some(events) => events.forward(bytes),
            None => {
                if self.is_computed {
                    self.usage.scan(&bytes);
                }
                bytes
            }
        }
    }

    /// Returns the number of tokens that the request has used so far, as far as the router knows it.
    fn tokens_used(&self) -> TokensUsed {
        match &self.events {
            _ if !self.is_computed || !self.status.is_success() => TokensUsed::None,
            Some(Events { usage: Some(usage), .. }) => TokensUsed::Reported(*usage),
            Some(events) => {
                let estimates = self.served_model.expectations().estimates;
                TokensUsed::Estimated(estimates.tokens_of_events(events.token_events()))
            }
            None => self.usage.usage().map_or(TokensUsed::Unknown, TokensUsed::Reported),
        }
    }

    fn replica(&self) -> &str {
        self.placement.as_ref().map_or("", |placement| &placement.replica.discovered.name)
    }

    /// Completes the answer.
    fn end(&mut self) -> Bytes {
        let used = self.tokens_used();
        if let (Some(connection), Some(placement)) = (self.upstream.take(), &mut self.placement) {
            self.worker.pool.put(placement.replica.discovered.http, connection);
            placement.set_outcome(Outcome::Answered);
            let (status, prompt_bytes, choices) = (self.status, self.prompt_bytes, self.choices);
            let served_model = Arc::clone(&self.served_model);
            let token_events = self.events.as_ref().map(Events::token_events);
            let mut record = self.record.finished();
            defer(move || {
                match used {
                    TokensUsed::Reported(usage) => {
                        usage.observe(&served_model, prompt_bytes, choices);
                        if let Some((tokens, events)) = usage.completion.zip(token_events) {
                            served_model.observe_events(events, tokens);
                        }
                    }
                    TokensUsed::Estimated(tokens) => served_model.observe_output(tokens / choices.max(1)),
                    TokensUsed::None | TokensUsed::Unknown => {}
                }
                record.completed(status, used);
            });
        }
        self.placement = None;
        self.events.as_mut().map(Events::take_held_bytes).unwrap_or_default()
    }

    /// Ends an answer whose replica has failed. The router ends a stream of events with an error event, and any other
    /// answer by closing the connection to the client.
    fn break_off(&mut self, message: &str, context: &Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        self.upstream = None;
        if let Some(mut placement) = self.placement.take() {
            placement.set_outcome(Outcome::Failed);
        }
        self.record.broken(self.status, self.tokens_used());
        if let Some(events) = &self.events {
            return Poll::Ready(Some(Ok(events.error_events(message))));
        }
        // Returning an error drops the connection together with unwritten data. Return it at the next poll, so that the
        // connection writes this data first.
        self.failure = Some(io::Error::new(io::ErrorKind::ConnectionReset, message.to_owned()));
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Whether the replica has been silent for too long. Called when no data is available; sets a timer for the next
    /// check.
    fn is_silent_too_long(&mut self, context: &mut Context<'_>) -> bool {
        let now = Instant::now();
        let idle_period = self.idle_period.get_or_insert_with(|| IdlePeriod {
            since: None,
            timer: Box::pin(tokio::time::sleep(SILENCE_CHECK_INTERVAL)),
        });
        let since = *idle_period.since.get_or_insert(now);
        while idle_period.timer.as_mut().poll(context).is_ready() {
            let settings = self.worker.app.settings();
            let duration = now.saturating_duration_since(since);
            let limit = match &self.placement {
                Some(placement) if placement.replica.hangs(now, settings.hang_timeout) => {
                    settings.hang_timeout
                }
                _ => settings.idle_timeout,
            };
            if duration >= limit.min(settings.idle_timeout) {
                return true;
            }
            let next =
                SILENCE_CHECK_INTERVAL.min(limit.saturating_sub(duration)).max(Duration::from_millis(1));
            idle_period.timer.as_mut().reset(tokio::time::Instant::now() + next);
        }
        false
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // This call has no effect if the outcome was already recorded.
        self.record.cancelled(self.status, self.tokens_used());
    }
}
