//! Records the times, tokens and outcome of one request, from its arrival to the end of its answer, for metrics,
//! quotas, the access log and the trace.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode};

use super::outgoing::OutgoingRequest;
use super::usage::{Usage, usage};
use crate::access::Client;
use crate::app::{App, RequestPermit};
use crate::deferred::defer;
use crate::dispatch::Placement;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::trace::Span;

/// The record of a request. If it is dropped before the outcome is recorded, the request counts as canceled by the
/// client.
pub(super) struct RequestRecord(Option<Inner>);

struct Inner {
    app: App,
    endpoint: Endpoint,
    request_id: HeaderValue,
    arrived: Instant,
    first_byte: Option<Instant>,
    span: Option<Span>,
    client: Option<Client>,
    /// The number of tokens that were charged to the client's quota.
    charged_tokens: u32,
    /// The part of `charged_tokens` that is for the prompt.
    prompt_tokens: u32,
    replica: Option<HeaderValue>,
    model: Option<String>,
    attempts: u32,
    permit: Option<RequestPermit>,
    ended: Option<Instant>,
}

/// The number of tokens that a request used, as far as the router knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokensUsed {
    /// The request used no tokens that are charged.
    None,
    /// The replica reported the usage.
    Reported(Usage),
    /// The replica reported no usage. The tokens of the answer, which are the content of this variant, were estimated
    /// from its events. The tokens of the prompt were estimated from its bytes on arrival.
    Estimated(u32),
    /// The usage is unknown. Only the estimate that was charged on arrival is available.
    Unknown,
}

impl RequestRecord {
    pub(super) fn new(app: &App, endpoint: Endpoint, request_id: &HeaderValue, headers: &HeaderMap) -> Self {
        Self(Some(Inner {
            span: app.tracer().map(|tracer| Span::start(tracer, endpoint.name(), headers)),
            app: app.clone(),
            endpoint,
            request_id: request_id.clone(),
            arrived: Instant::now(),
            first_byte: None,
            client: None,
            charged_tokens: 0,
            prompt_tokens: 0,
            replica: None,
            model: None,
            attempts: 0,
            permit: None,
            ended: None,
        }))
    }

    /// Moves the content of the record into a new one, which can outlive the function that handles the request.
    pub(super) fn detach(&mut self) -> Self {
        Self(self.0.take())
    }

    /// The trace header for the replica, if the router traces the request.
    pub(super) fn trace(&self) -> Option<HeaderValue> {
        self.0.as_ref()?.span.as_ref().map(Span::header)
    }

    pub(super) fn admitted(&mut self, permit: RequestPermit, client: Option<Client>) {
        if let Some(inner) = &mut self.0 {
            inner.permit = Some(permit);
            inner.client = client;
        }
    }

    /// Records that `tokens` tokens were charged to the client's quota, `prompt_tokens` of them for the prompt.
    pub(super) fn charged(&mut self, tokens: u32, prompt_tokens: u32) {
        if let Some(inner) = &mut self.0 {
            inner.charged_tokens = tokens;
            inner.prompt_tokens = prompt_tokens;
        }
    }

    pub(super) fn placed(&mut self, placement: &Placement) {
        if let Some(inner) = &mut self.0 {
            inner.attempts += 1;
            inner.replica = Some(placement.replica.name.clone());
            if inner.span.is_some() || inner.app.settings().access_log {
                inner.model = Some(placement.served_model.name.clone());
            }
        }
    }

    /// Records that the answer has begun.
    pub(super) fn first_byte(&mut self) {
        if let Some(inner) = &mut self.0 {
            let now = Instant::now();
            inner.first_byte = Some(now);
            let (app, time) = (inner.app.clone(), now - inner.arrived);
            defer(move || app.metrics().record_first_byte(time));
        }
    }

    /// Records that the answer of a replica was received completely. The usage that the answer reports improves the
    /// estimates for the next requests.
    pub(super) fn answered(
        &mut self,
        placement: &Placement,
        outgoing: &OutgoingRequest,
        answer: &Response<Bytes>,
    ) {
        self.first_byte();
        let mut record = self.finished();
        let served_model = Arc::clone(&placement.served_model);
        let (prompt_bytes, choices) = (outgoing.prompt_bytes, outgoing.choices);
        let (status, body) = (answer.status(), answer.body().clone());
        let uses_tokens = outgoing.is_computed && status.is_success();
        defer(move || {
            let used = match usage(&body) {
                _ if !uses_tokens => TokensUsed::None,
                Some(usage) => {
                    usage.observe(&served_model, prompt_bytes, choices);
                    TokensUsed::Reported(usage)
                }
                None => TokensUsed::Unknown,
            };
            record.completed(status, used);
        });
    }

    /// Ends the request and releases its permit. The caller records the outcome later, in the returned record.
    pub(super) fn finished(&mut self) -> Self {
        if let Some(inner) = &mut self.0 {
            inner.ended = Some(Instant::now());
            inner.permit = None;
        }
        self.detach()
    }

    /// Records that the client receives an error from the router instead of an answer from a replica.
    pub(super) fn rejected(&mut self, error: &Error) {
        self.close(error.label(), error.status(), TokensUsed::None);
    }

    /// Records that the answer is complete.
    pub(super) fn completed(&mut self, status: StatusCode, used: TokensUsed) {
        if self.0.as_ref().is_some_and(|inner| inner.first_byte.is_none()) {
            self.first_byte();
        }
        let is_error = status.is_client_error() || status.is_server_error();
        self.close(if is_error { "replica_error" } else { "ok" }, status, used);
    }

    /// Records that the replica failed after the answer had begun.
    pub(super) fn broken(&mut self, status: StatusCode, used: TokensUsed) {
        self.close("broken", status, used);
    }

    /// Records that the client disconnected after the answer had begun.
    pub(super) fn cancelled(&mut self, status: StatusCode, used: TokensUsed) {
        self.close("cancelled", status, used);
    }

    fn close(&mut self, outcome: &'static str, status: StatusCode, used: TokensUsed) {
        let Some(mut inner) = self.0.take() else { return };
        let duration = inner.ended.unwrap_or_else(Instant::now) - inner.arrived;
        inner.app.metrics().record_request(inner.endpoint.name(), outcome, status);
        inner.app.metrics().record_duration(duration);
        let used = match used {
            TokensUsed::None => Some(0),
            TokensUsed::Reported(usage) => Some(usage.total()),
            TokensUsed::Estimated(tokens) => Some(inner.prompt_tokens.saturating_add(tokens)),
            TokensUsed::Unknown => None,
        };
        if let (Some(client), Some(used), true) = (&inner.client, used, inner.charged_tokens > 0) {
            inner.app.access().settle(client, inner.charged_tokens, used);
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
                total_ms = duration.as_millis() as u64,
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

impl Drop for RequestRecord {
    fn drop(&mut self) {
        let is_placed = self.0.as_ref().is_some_and(|inner| inner.attempts > 0);
        let used = if is_placed { TokensUsed::Unknown } else { TokensUsed::None };
        self.close("cancelled", StatusCode::OK, used);
    }
}
