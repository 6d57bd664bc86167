//! One request's times and outcome, from its arrival to its answer's end.

use std::time::Instant;

use axum::http::StatusCode;
use server_openai::Usage;

use crate::app::App;
use crate::error::Error;
use crate::limits::Admitted;

/// A request in work. Dropped before [`Record::ended`] or [`Record::failed`] it is a request whose client
/// went away.
#[derive(Debug)]
pub(crate) struct Record {
    app: App,
    endpoint: &'static str,
    id: String,
    arrived: Instant,
    first_token: Option<Instant>,
    tokens: u64,
    done: bool,
    _admitted: Admitted,
}

impl Record {
    pub(crate) fn new(
        app: App,
        endpoint: &'static str,
        id: String,
        (arrived, admitted): (Instant, Admitted),
    ) -> Self {
        Self { app, endpoint, id, arrived, first_token: None, tokens: 0, done: false, _admitted: admitted }
    }

    /// A token came, after another of the same choice at `last`.
    pub(crate) fn token(&mut self, now: Instant, last: Option<Instant>) {
        self.tokens += 1;
        if self.first_token.is_none() {
            self.first_token = Some(now);
            self.app.metrics().first_token(now - self.arrived);
        }
        if let Some(last) = last {
            self.app.metrics().next_token(now - last);
        }
    }

    /// The answer is complete.
    pub(crate) fn ended(&mut self, usage: Usage) {
        if !self.close("ok", StatusCode::OK) {
            return;
        }
        self.app.admission().ended(Instant::now());
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

    /// The answer ends with an error.
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
        if std::mem::replace(&mut self.done, true) {
            return false;
        }
        self.app.metrics().count(self.endpoint, outcome, status);
        self.app.metrics().request_ended(self.arrived.elapsed());
        true
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if self.close("cancelled", StatusCode::OK) {
            tracing::debug!(
                id = self.id,
                endpoint = self.endpoint,
                outcome = "cancelled",
                completion_tokens = self.tokens,
                total_ms = self.arrived.elapsed().as_millis() as u64,
                "the client went away"
            );
        }
    }
}
