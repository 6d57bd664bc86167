//! One request's times, tokens and outcome, from its arrival to its answer's end: for metrics, rates, the
//! access log and the trace.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};

use super::usage::{Usage, usage};
use super::{Endpoint, Outgoing};
use crate::access::Client;
use crate::app::{Admitted, App};
use crate::dispatch::Placed;
use crate::error::Error;
use crate::later::later;
use crate::trace::Span;

/// A request in work. Dropped before it was told how it ended it is one whose client went away.
pub(super) struct Record(Option<Inner>);

struct Inner {
    app: App,
    endpoint: Endpoint,
    arrived: Instant,
    first_byte: Option<Instant>,
    span: Option<Span>,
    client: Option<Client>,
    /// Tokens taken from what the client may use.
    taken: u32,
    replica: Option<HeaderValue>,
    model: Option<String>,
    attempts: u32,
    admitted: Option<Admitted>,
    ended: Option<Instant>,
}

impl Record {
    pub(super) fn new(app: &App, endpoint: Endpoint, headers: &HeaderMap) -> Self {
        Self(Some(Inner {
            span: app.tracer().map(|tracer| tracer.start(endpoint.name(), headers)),
            app: app.clone(),
            endpoint,
            arrived: Instant::now(),
            first_byte: None,
            client: None,
            taken: 0,
            replica: None,
            model: None,
            attempts: 0,
            admitted: None,
            ended: None,
        }))
    }

    /// The rest of the record, for who passes the answer on.
    pub(super) fn take(&mut self) -> Self {
        Self(self.0.take())
    }

    /// The trace header for the replica, if it is to be another than the client's.
    pub(super) fn trace(&self) -> Option<HeaderValue> {
        self.0.as_ref()?.span.as_ref().map(Span::header)
    }

    pub(super) fn admitted(&mut self, admitted: Admitted, client: Option<Client>) {
        if let Some(inner) = &mut self.0 {
            inner.admitted = Some(admitted);
            inner.client = client;
        }
    }

    /// So many tokens were taken from what the client may use.
    pub(super) fn taken(&mut self, tokens: u32) {
        if let Some(inner) = &mut self.0 {
            inner.taken = tokens;
        }
    }

    pub(super) fn placed(&mut self, placed: &Placed) {
        if let Some(inner) = &mut self.0 {
            inner.attempts += 1;
            inner.replica = Some(placed.replica.name.clone());
            if inner.span.is_some() || inner.app.settings().access_log {
                inner.model = Some(placed.fleet.model.clone());
            }
        }
    }

    /// The answer has begun.
    pub(super) fn first_byte(&mut self) {
        if let Some(inner) = &mut self.0 {
            let now = Instant::now();
            inner.first_byte = Some(now);
            let (app, after) = (inner.app.clone(), now - inner.arrived);
            later(move || app.metrics().first_byte(after));
        }
    }

    /// The answer came whole, and teaches something about the model.
    pub(super) fn answered(&mut self, placed: &Placed, outgoing: &Outgoing, answer: (StatusCode, Bytes)) {
        self.first_byte();
        let mut record = self.finished();
        let fleet = Arc::clone(&placed.fleet);
        let (prompt_bytes, choices) = (outgoing.prompt_bytes, outgoing.choices);
        later(move || {
            let (status, body) = answer;
            let is_good = status.is_success();
            let usage = if is_good { usage(&body) } else { None };
            if let Some(Usage { prompt, completion }) = usage {
                fleet.learn(Some((prompt_bytes, prompt)), Some(completion / choices.max(1)));
            }
            record.whole(is_good, usage);
        });
    }

    /// The rest of the record of a request that is over: it makes room for another now, and is closed later.
    pub(super) fn finished(&mut self) -> Self {
        if let Some(inner) = &mut self.0 {
            inner.ended = Some(Instant::now());
            inner.admitted = None;
        }
        self.take()
    }

    /// The router refused it.
    pub(super) fn refused(&mut self, error: &Error) {
        self.close(error.label(), error.status(), Some(0));
    }

    /// The answer came whole.
    pub(super) fn whole(&mut self, is_good: bool, usage: Option<Usage>) {
        if self.0.as_ref().is_some_and(|inner| inner.first_byte.is_none()) {
            self.first_byte();
        }
        let (outcome, status) =
            if is_good { ("ok", StatusCode::OK) } else { ("replica_error", StatusCode::BAD_REQUEST) };
        let used = usage.map(|usage| usage.prompt.saturating_add(usage.completion));
        self.close(outcome, status, used.or((!is_good).then_some(0)));
    }

    /// The stream is complete.
    pub(super) fn ended(&mut self, usage: Option<Usage>, completion: Option<u32>) {
        let used = usage.map(|usage| usage.prompt.saturating_add(usage.completion)).or(completion);
        self.close("ok", StatusCode::OK, used);
    }

    /// The replica died in the middle of it.
    pub(super) fn broken(&mut self) {
        self.close("broken", StatusCode::OK, None);
    }

    /// `used`: tokens, if known.
    fn close(&mut self, outcome: &'static str, status: StatusCode, used: Option<u32>) {
        let Some(mut inner) = self.0.take() else { return };
        let took = inner.ended.unwrap_or_else(Instant::now) - inner.arrived;
        inner.app.metrics().count(inner.endpoint.name(), outcome, status);
        inner.app.metrics().ended(took);
        if let (Some(client), Some(used), true) = (&inner.client, used, inner.taken > 0) {
            inner.app.access().settle(client, inner.taken, used);
        }
        let replica = inner.replica.as_ref().and_then(|name| name.to_str().ok()).unwrap_or_default();
        let first_byte = inner.first_byte.map(|at| at - inner.arrived);
        if inner.app.settings().access_log {
            tracing::info!(
                endpoint = inner.endpoint.name(),
                outcome,
                model = inner.model.as_deref().unwrap_or_default(),
                client = inner.client.as_ref().map_or("", |client| &client.name),
                replica,
                attempts = inner.attempts,
                first_byte_ms = first_byte.map(|time| time.as_millis() as u64),
                total_ms = took.as_millis() as u64,
                tokens = used,
                "request"
            );
        }
        if let Some(span) = inner.span.take() {
            span.end(&[
                ("outcome", outcome),
                ("gen_ai.request.model", inner.model.as_deref().unwrap_or_default()),
                ("ovfleet.replica", replica),
            ]);
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.close("cancelled", StatusCode::OK, None);
    }
}
