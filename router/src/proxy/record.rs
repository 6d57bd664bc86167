//! One request's times, tokens and outcome, from its arrival to its answer's end: for metrics, quotas, the access
//! log and the trace.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};

use super::usage::{Usage, usage};
use super::{Arrival, Endpoint, Outgoing};
use crate::access::Client;
use crate::app::{Admitted, App};
use crate::dispatch::Placed;
use crate::error::Error;
use crate::later::later;
use crate::policy::Demand;
use crate::trace::Span;

/// A request in work. If it is dropped before its end was recorded, its client went away.
pub(super) struct Record(Option<Inner>);

struct Inner {
    app: App,
    endpoint: Endpoint,
    request_id: HeaderValue,
    arrived: Instant,
    first_byte: Option<Instant>,
    span: Option<Span>,
    client: Option<Client>,
    /// Tokens taken from the client's quota.
    taken: u32,
    /// Of them, those expected of the prompt.
    prompt_tokens: u32,
    replica: Option<HeaderValue>,
    model: Option<String>,
    attempts: u32,
    admitted: Option<Admitted>,
    ended: Option<Instant>,
}

/// What is known of the tokens that a request used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spent {
    /// No replica computed anything that counts.
    Nothing,
    /// The replica reported them.
    Reported(Usage),
    /// The replica reported nothing. The tokens of the answer were estimated by its events; so was the prompt before.
    Counted(u32),
    /// Only what was expected when the request came.
    Unknown,
}

impl Record {
    pub(super) fn new(app: &App, arrival: &Arrival, headers: &HeaderMap) -> Self {
        let endpoint = arrival.endpoint;
        Self(Some(Inner {
            span: app.tracer().map(|tracer| tracer.start(endpoint.name(), headers)),
            app: app.clone(),
            endpoint,
            request_id: arrival.request_id.clone(),
            arrived: Instant::now(),
            first_byte: None,
            client: None,
            taken: 0,
            prompt_tokens: 0,
            replica: None,
            model: None,
            attempts: 0,
            admitted: None,
            ended: None,
        }))
    }

    /// The rest of the record, for the part that passes the answer on.
    pub(super) fn take(&mut self) -> Self {
        Self(self.0.take())
    }

    /// The trace header for the replica, if it differs from the client's.
    pub(super) fn trace(&self) -> Option<HeaderValue> {
        self.0.as_ref()?.span.as_ref().map(Span::header)
    }

    pub(super) fn admitted(&mut self, admitted: Admitted, client: Option<Client>) {
        if let Some(inner) = &mut self.0 {
            inner.admitted = Some(admitted);
            inner.client = client;
        }
    }

    /// So many tokens were taken from the client's quota for this demand.
    pub(super) fn taken(&mut self, tokens: u32, demand: &Demand) {
        if let Some(inner) = &mut self.0 {
            inner.taken = tokens;
            inner.prompt_tokens = demand.prompt_tokens;
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

    /// The answer was complete before any of it was passed on, and the router learns from it.
    pub(super) fn answered(&mut self, placed: &Placed, outgoing: &Outgoing, answer: (StatusCode, Bytes)) {
        self.first_byte();
        let mut record = self.finished();
        let fleet = Arc::clone(&placed.fleet);
        let (prompt_bytes, choices) = (outgoing.prompt_bytes, outgoing.choices);
        later(move || {
            let (status, body) = answer;
            let spent = match usage(&body) {
                _ if !status.is_success() => Spent::Nothing,
                Some(usage) => {
                    let each = usage.completion.map(|tokens| tokens / choices.max(1));
                    fleet.learn(Some((prompt_bytes, usage.prompt)), each);
                    Spent::Reported(usage)
                }
                None => Spent::Unknown,
            };
            record.whole(status, spent);
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
        self.close(error.label(), error.status(), Spent::Nothing);
    }

    /// The answer is complete.
    pub(super) fn whole(&mut self, status: StatusCode, spent: Spent) {
        if self.0.as_ref().is_some_and(|inner| inner.first_byte.is_none()) {
            self.first_byte();
        }
        let is_error = status.is_client_error() || status.is_server_error();
        self.close(if is_error { "replica_error" } else { "ok" }, status, spent);
    }

    /// The replica failed after the answer had begun.
    pub(super) fn broken(&mut self, status: StatusCode, spent: Spent) {
        self.close("broken", status, spent);
    }

    /// The client went away after the answer had begun.
    pub(super) fn cancelled(&mut self, status: StatusCode, spent: Spent) {
        self.close("cancelled", status, spent);
    }

    fn close(&mut self, outcome: &'static str, status: StatusCode, spent: Spent) {
        let Some(mut inner) = self.0.take() else { return };
        let took = inner.ended.unwrap_or_else(Instant::now) - inner.arrived;
        inner.app.metrics().count(inner.endpoint.name(), outcome, status);
        inner.app.metrics().ended(took);
        let used = match spent {
            Spent::Nothing => Some(0),
            Spent::Reported(usage) => Some(usage.total()),
            Spent::Counted(tokens) => Some(inner.prompt_tokens.saturating_add(tokens)),
            Spent::Unknown => None,
        };
        if let (Some(client), Some(used), true) = (&inner.client, used, inner.taken > 0) {
            inner.app.access().settle(client, inner.taken, used);
        }
        let replica = inner.replica.as_ref().and_then(|name| name.to_str().ok()).unwrap_or_default();
        let request_id = inner.request_id.to_str().unwrap_or_default();
        let first_byte = inner.first_byte.map(|at| at - inner.arrived);
        if inner.app.settings().access_log {
            tracing::info!(
                request_id,
                endpoint = inner.endpoint.name(),
                outcome,
                status = status.as_u16(),
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
                ("ovfleet.request_id", request_id),
            ]);
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let is_placed = self.0.as_ref().is_some_and(|inner| inner.attempts > 0);
        self.close("cancelled", StatusCode::OK, if is_placed { Spent::Unknown } else { Spent::Nothing });
    }
}
