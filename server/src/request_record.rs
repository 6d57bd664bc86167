//! Records the times and the outcome of one request, from its arrival to the end of its answer.

use std::time::Instant;

use axum::http::StatusCode;
use server_openai::Usage;

use crate::error::Error;
use crate::limits::AdmittedRequest;
use crate::metrics::Metrics;

/// The record of a request in progress. If the record is dropped before [`RequestRecord::ended`] or
/// [`RequestRecord::failed`] is called, the request is counted as canceled, usually because its client has
/// disconnected.
#[derive(Debug)]
pub(crate) struct RequestRecord {
    metrics: Metrics,
    endpoint: &'static str,
    id: String,
    arrived: Instant,
    admitted: AdmittedRequest,
    first_token: Option<Instant>,
    tokens: u64,
    is_closed: bool,
}

impl RequestRecord {
    pub(crate) fn new(
        metrics: Metrics,
        endpoint: &'static str,
        id: String,
        arrived: Instant,
        admitted: AdmittedRequest,
    ) -> Self {
        Self { metrics, endpoint, id, arrived, admitted, first_token: None, tokens: 0, is_closed: false }
    }

    /// Records a token; `last` is the time of the previous token of the same choice.
    pub(crate) fn token(&mut self, now: Instant, last: Option<Instant>) {
        self.tokens += 1;
        if self.first_token.is_none() {
            self.first_token = Some(now);
            self.metrics.first_token(now - self.arrived);
        }
        if let Some(last) = last {
            self.metrics.next_token(now - last);
        }
    }

    /// Records that the answer is complete.
    pub(crate) fn ended(&mut self, usage: Usage) {
        if !self.close("ok", StatusCode::OK) {
            return;
        }
        self.admitted.ended(Instant::now());
        tracing::debug!(
            id = self.id,
            endpoint = self.endpoint,
            outcome = "ok",
            prompt_tokens = usage.prompt_tokens,
            cached_tokens = usage.prompt_tokens_details.cached_tokens,
            completion_tokens = usage.completion_tokens,
            first_token_ms = self.first_token.map(|at| (at - self.arrived).as_millis() as u64),
            total_ms = self.arrived.elapsed().as_millis() as u64,
            "request answered"
        );
    }

    /// Records that the answer ends with an error.
    pub(crate) fn failed(&mut self, error: &Error) {
        if self.close(error.label(), error.status()) {
            tracing::warn!(
                id = self.id,
                endpoint = self.endpoint,
                outcome = error.label(),
                error = %error,
                completion_tokens = self.tokens,
                "request failed"
            );
        }
    }

    fn close(&mut self, outcome: &'static str, status: StatusCode) -> bool {
        if std::mem::replace(&mut self.is_closed, true) {
            return false;
        }
        self.metrics.count(self.endpoint, outcome, status);
        self.metrics.request_ended(self.arrived.elapsed());
        true
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        if self.close("cancelled", StatusCode::OK) {
            tracing::debug!(
                id = self.id,
                endpoint = self.endpoint,
                outcome = "cancelled",
                completion_tokens = self.tokens,
                total_ms = self.arrived.elapsed().as_millis() as u64,
                "request canceled"
            );
        }
    }
}
