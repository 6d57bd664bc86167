//! The errors with which the router itself answers a request. One exhaustive match maps each error to its status and
//! code, and another maps it to its label in metrics. If the last attempt ends with an error response of a replica, the
//! router forwards this response, unless the replica rejected the replica token of the router or the body is too large
//! to buffer.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use serde::Serialize;

use crate::dispatch::{PlacementError, WaitTarget};
use crate::limits::{RateExceeded, RateKind};
use crate::proxy::fields::MalformedBody;
use crate::queue::RETRY_AFTER_MIN;

/// The reasons why a request has no answer from a replica.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0}")]
    Malformed(MalformedBody),
    #[error("the router serves several models: set `model` to one of them")]
    MissingModel,
    #[error("the router does not serve the model {0:?}")]
    UnknownModel(String),
    /// The object was never stored, or the replica that stored it no longer exists or serves another model.
    #[error("{param}: {id:?} does not exist, or the replica that stored it is gone or serves another model")]
    ObjectNotFound { param: &'static str, code: &'static str, id: String },
    #[error("the replica that stored the referenced object is gone or serves another model")]
    ReplicaGone,
    #[error("{header}: {problem}")]
    Header { header: &'static str, problem: String },
    #[error("the content encoding {0:?} is not supported: send the body uncompressed")]
    ContentEncoding(String),
    #[error("unknown path {0}")]
    UnknownPath(String),
    #[error("{path} does not support {method}")]
    Method { method: String, path: String },
    #[error("the request body is larger than {0} bytes (--max-body-bytes)")]
    BodyTooLarge(u64),
    #[error(
        "the buffer for request bodies has no room for this body (limit for all bodies: {0} bytes, \
         --max-buffered-body-bytes)"
    )]
    BodyBufferFull(u64),
    /// The body did not arrive: the connection broke, or the time limit was exceeded.
    #[error("failed to receive the request body: {0}")]
    Body(String),
    #[error("missing API key: send it as `Authorization: Bearer KEY`")]
    MissingKey,
    #[error("invalid API key")]
    InvalidKey,
    #[error("{}", rate_problem(.0))]
    RateExceeded(RateExceeded),
    #[error("too many concurrent requests (limit: {0})")]
    TooManyRequests(u32),
    #[error(
        "the queue has no room for the request: too many requests or prompt tokens are waiting for a replica, either \
         in total or from this tenant"
    )]
    QueueFull { retry_after: Duration },
    #[error("timed out in the queue: no replica had room for the request")]
    QueueTimeout { retry_after: Duration },
    #[error("no replica that can answer the request is available")]
    NoReplica,
    #[error("no replica {} became available within the time in the x-ovfleet-timeout header", awaited(.0))]
    ClientTimeout(WaitTarget),
    /// No further attempt is permitted, for example because the number of attempts has reached its limit or the retry
    /// budget is exhausted.
    #[error("all attempts to answer the request failed (attempts: {attempts}, last failure: {last})")]
    AllFailed { attempts: u32, last: &'static str },
    /// The request itself may have caused the failures.
    #[error(
        "{0} connections to replicas broke after the request was sent; the request is not retried, because it may be \
         the cause"
    )]
    BrokeReplicas(u32),
    /// The connection broke during a request that may have changed stored objects.
    #[error(
        "the connection to the replica broke, but the replica may have received the request; the request is \
         not retried, because it may have changed stored objects"
    )]
    OutcomeUnknown,
    /// No answer arrived in time for a request that may still change stored objects.
    #[error(
        "the replica did not answer in time; the request is not retried, because it may still change stored \
         objects"
    )]
    UnknownAfterTimeout,
    #[error(
        "the request has already passed through this router: the address of a replica leads back to the router"
    )]
    Loop,
    #[error("no replica answered in time (attempts: {attempts})")]
    AllTimedOut { attempts: u32 },
}

fn rate_problem(exceeded: &RateExceeded) -> String {
    let kind = match exceeded.kind {
        RateKind::Requests => "requests",
        RateKind::Tokens => "tokens",
    };
    match exceeded.retry_after {
        Some(_) => {
            format!("the request and earlier ones together exceed the API key's limit on {kind} per minute")
        }
        None => format!("the request alone exceeds the API key's limit on {kind} per minute"),
    }
}

fn awaited(target: &WaitTarget) -> &'static str {
    match target {
        WaitTarget::Model => "of the model",
        WaitTarget::StoredObject => "with the stored object",
    }
}

/// The header by which OpenAI's clients decide whether to retry a request.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// OpenAI's error object.
#[derive(Debug, Serialize)]
pub(crate) struct ErrorObject<'a> {
    pub(crate) message: &'a str,
    pub(crate) r#type: &'a str,
    pub(crate) param: Option<&'a str>,
    pub(crate) code: Option<&'a str>,
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: ErrorObject<'a>,
}

impl Error {
    /// The status, type, code and parameter in the answer to the client.
    fn wire(&self) -> (StatusCode, &'static str, &'static str, Option<&'static str>) {
        const REQUEST: &str = "invalid_request_error";
        const SERVER: &str = "server_error";
        const RATE: &str = "rate_limit_error";
        match self {
            Self::Malformed(_) => (StatusCode::BAD_REQUEST, REQUEST, "malformed", None),
            Self::MissingModel => (StatusCode::BAD_REQUEST, REQUEST, "missing_model", Some("model")),
            Self::UnknownModel(_) => (StatusCode::NOT_FOUND, REQUEST, "model_not_found", Some("model")),
            Self::ObjectNotFound { param, code, .. } => (StatusCode::NOT_FOUND, REQUEST, code, Some(param)),
            Self::ReplicaGone => (StatusCode::NOT_FOUND, REQUEST, "object_not_found", None),
            Self::Header { .. } => (StatusCode::BAD_REQUEST, REQUEST, "invalid_header", None),
            Self::ContentEncoding(_) => {
                (StatusCode::UNSUPPORTED_MEDIA_TYPE, REQUEST, "unsupported_content_encoding", None)
            }
            Self::UnknownPath(_) => (StatusCode::NOT_FOUND, REQUEST, "unknown_url", None),
            Self::Method { .. } => (StatusCode::METHOD_NOT_ALLOWED, REQUEST, "method_not_supported", None),
            Self::BodyTooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, REQUEST, "request_too_large", None),
            Self::BodyBufferFull(_) => (StatusCode::TOO_MANY_REQUESTS, RATE, "body_buffer_full", None),
            Self::Body(_) => (StatusCode::REQUEST_TIMEOUT, REQUEST, "request_incomplete", None),
            Self::MissingKey | Self::InvalidKey => {
                (StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key", None)
            }
            Self::RateExceeded(_) => (StatusCode::TOO_MANY_REQUESTS, RATE, "rate_limit_exceeded", None),
            Self::TooManyRequests(_) => (StatusCode::TOO_MANY_REQUESTS, RATE, "too_many_requests", None),
            Self::QueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, RATE, "queue_full", None),
            Self::QueueTimeout { .. } => (StatusCode::TOO_MANY_REQUESTS, RATE, "queue_timeout", None),
            Self::NoReplica | Self::ClientTimeout(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, SERVER, "no_replica", None)
            }
            Self::AllFailed { .. } => (StatusCode::BAD_GATEWAY, SERVER, "replicas_failed", None),
            Self::BrokeReplicas(_) => (StatusCode::BAD_GATEWAY, SERVER, "replicas_failed", None),
            Self::OutcomeUnknown => (StatusCode::BAD_GATEWAY, SERVER, "outcome_unknown", None),
            Self::Loop => (StatusCode::LOOP_DETECTED, SERVER, "loop_detected", None),
            Self::UnknownAfterTimeout | Self::AllTimedOut { .. } => {
                (StatusCode::GATEWAY_TIMEOUT, SERVER, "replicas_timed_out", None)
            }
        }
    }

    /// The label of the error in metrics and logs.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "malformed",
            Self::MissingModel => "missing_model",
            Self::UnknownModel(_) => "unknown_model",
            Self::ObjectNotFound { .. } | Self::ReplicaGone => "object_not_found",
            Self::Header { .. } => "invalid_header",
            Self::ContentEncoding(_) => "unsupported_content_encoding",
            Self::UnknownPath(_) => "unknown_path",
            Self::Method { .. } => "method",
            Self::BodyTooLarge(_) => "body_too_large",
            Self::BodyBufferFull(_) => "body_buffer_full",
            Self::Body(_) => "body_incomplete",
            Self::MissingKey => "missing_key",
            Self::InvalidKey => "invalid_key",
            Self::RateExceeded(exceeded) => match exceeded.kind {
                RateKind::Requests => "request_rate_exceeded",
                RateKind::Tokens => "token_rate_exceeded",
            },
            Self::TooManyRequests(_) => "too_many_requests",
            Self::QueueFull { .. } => "queue_full",
            Self::QueueTimeout { .. } => "queue_timeout",
            Self::NoReplica | Self::ClientTimeout(_) => "no_replica",
            Self::AllFailed { .. } => "replicas_failed",
            Self::BrokeReplicas(_) => "broke_replicas",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::Loop => "loop_detected",
            Self::UnknownAfterTimeout | Self::AllTimedOut { .. } => "replicas_timed_out",
        }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.wire().0
    }

    /// Whether the client must not retry, because a retry could crash another replica, store an object twice, or run
    /// into the same loop.
    fn is_final(&self) -> bool {
        matches!(self, Self::BrokeReplicas(_) | Self::OutcomeUnknown | Self::UnknownAfterTimeout | Self::Loop)
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateExceeded(exceeded) => exceeded.retry_after,
            Self::QueueFull { retry_after } | Self::QueueTimeout { retry_after } => Some(*retry_after),
            Self::TooManyRequests(_)
            | Self::BodyBufferFull(_)
            | Self::NoReplica
            | Self::ClientTimeout(_)
            | Self::AllFailed { .. }
            | Self::AllTimedOut { .. } => Some(RETRY_AFTER_MIN),
            _ => None,
        }
    }

    /// The error object as JSON.
    fn json(&self) -> Vec<u8> {
        let (_, r#type, code, param) = self.wire();
        let message = self.to_string();
        let error = ErrorObject { message: &message, r#type, param, code: Some(code) };
        serde_json::to_vec(&ErrorBody { error }).expect("invariant: an error is JSON")
    }

    /// The answer to the client.
    pub(crate) fn into_response(self) -> Response<Bytes> {
        let mut response = Response::new(Bytes::from(self.json()));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(retry_after) = self.retry_after() {
            let seconds = retry_after.max(RETRY_AFTER_MIN).as_secs_f64().ceil() as u64;
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.is_final() {
            // OpenAI's clients retry a request after a 5xx status unless this header forbids it.
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        match self {
            Self::MissingKey | Self::InvalidKey => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Self::BodyTooLarge(_) | Self::BodyBufferFull(_) | Self::Body(_) | Self::ContentEncoding(_) => {
                // The rest of the body may remain unread, so the connection cannot carry another request.
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}

impl From<MalformedBody> for Error {
    fn from(malformed: MalformedBody) -> Self {
        Self::Malformed(malformed)
    }
}

impl From<PlacementError> for Error {
    fn from(error: PlacementError) -> Self {
        match error {
            PlacementError::QueueFull { retry_after } => Self::QueueFull { retry_after },
            PlacementError::QueueTimeout { retry_after } => Self::QueueTimeout { retry_after },
            PlacementError::NoReplica => Self::NoReplica,
            PlacementError::ClientTimeout(target) => Self::ClientTimeout(target),
            PlacementError::ReplicaGone => Self::ReplicaGone,
        }
    }
}
