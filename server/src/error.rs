//! Defines every error of a request. Exhaustive matches map each error to its HTTP status and code, to its message, and
//! to its label in metrics.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use proto::replica_token;
use server_engine::{Failure, Rejection, SleepError, SubmitError};
use server_openai::{ErrorBody, ErrorObject, RequestError};

/// The reason why a request was rejected or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// The body is not a JSON object, or a value is missing or has the wrong type.
    #[error("{}", .0.message)]
    Malformed(RequestError),
    /// A value is missing, out of range or not supported.
    #[error("{message}")]
    Invalid { code: &'static str, param: String, message: String },
    /// The prompt and the completion together exceed the context length.
    #[error("{message}")]
    ContextLength { param: String, message: String },
    #[error("this server does not serve the model {0:?}")]
    UnknownModel(String),
    /// The request cannot be prepared before these media are fetched. Clients never see this error.
    #[error("the media of the request were not fetched")]
    MediaNeeded(Vec<MediaReference>),
    /// The object with this ID is not stored. It may have been deleted.
    #[error("{message}")]
    NotStored { code: &'static str, param: Option<String>, message: String },
    /// The request has no valid replica token.
    #[error(
        "this replica serves requests from its routers only, and the request has no valid replica token: send it to the \
         router"
    )]
    Unauthenticated,
    /// The request can be parsed but violates a rule of HTTP/1.1, has a transfer coding other than a single `chunked`,
    /// or has a path that is not UTF-8.
    #[error("{0}")]
    MalformedHttp(&'static str),
    #[error("the path {0} does not exist")]
    UnknownPath(String),
    #[error("{path} does not support {method}")]
    MethodNotAllowed { method: String, path: String },
    #[error("the request body is larger than {0} bytes")]
    BodyTooLarge(usize),
    #[error(
        "the request body has too many objects, arrays or elements: its values would take more than {0} bytes of memory"
    )]
    TooManyValues(usize),
    /// The answer is larger than the buffer for answers that clients have not read, so it can never be sent.
    #[error("the answer has {bytes} bytes, which exceeds the limit of {bytes_max} bytes")]
    AnswerTooLarge { bytes: usize, bytes_max: usize },
    /// The body did not arrive completely: the connection broke, or the body took too long.
    #[error("failed to receive the request body: {0}")]
    BodyIncomplete(String),
    #[error("too many concurrent requests (limit: {limit})")]
    TooManyRequests { limit: usize, retry_after: Duration },
    #[error("the queue is full (limit: {limit} sequences)")]
    QueueFull { limit: u32, retry_after: Duration },
    /// A resource outside the engine that all requests share is exhausted.
    #[error("{resource} (limit: {limit})")]
    Overloaded { resource: Resource, limit: String, retry_after: Duration },
    #[error(
        "the memory for images has no room for the images of this request, because images of other requests use it (limit: \
         {0} bytes)"
    )]
    ImageMemoryFull(usize),
    #[error("the model is being loaded")]
    Starting,
    #[error("the server is shutting down")]
    Stopping,
    #[error("{}", SleepError::Busy)]
    Busy,
    /// The engine rejected a request that the server should have rejected earlier, or a part of the server failed.
    #[error("{0}")]
    Internal(String),
    /// The process that checks whether a form is too costly could not be started, or it failed. The replica can serve
    /// other requests, and other replicas can serve this one.
    #[error("{0}")]
    FormCheck(String),
    /// The engine did not complete the request. Unless the engine has stopped, other requests may succeed.
    #[error("{0}")]
    Failed(Failure),
}

/// A reference to media in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MediaReference {
    /// The URL or the path.
    pub(crate) url: String,
    /// The request parameter that contains the reference. Error messages name this parameter.
    pub(crate) param: String,
}

/// A resource outside the engine that all requests share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Resource {
    #[error("the buffer for request bodies has no room for this request")]
    BodyBytes,
    #[error("too many requests are being prepared")]
    Preparation,
    #[error("too many images are being fetched")]
    ImageFetches,
    #[error("the buffer for answers that clients have not read has no room for this answer")]
    UnreadAnswers,
}

impl Resource {
    fn code(self) -> &'static str {
        match self {
            Self::BodyBytes => "body_buffer_full",
            Self::Preparation => "preparation_busy",
            Self::ImageFetches => "image_fetch_busy",
            Self::UnreadAnswers => "answer_buffer_full",
        }
    }
}

/// The code of the error for a missing parameter.
const MISSING: &str = "missing_required_parameter";
/// Maximum length of an error message in characters. Messages can repeat names from the request, which can be long.
///
/// If exceeded: the message is truncated and ends with `…`.
const MESSAGE_MAX: usize = 1_000;
/// Maximum length of the parameter path in an error, in characters.
///
/// If exceeded: the path is truncated and ends with `…`.
const PARAM_MAX: usize = 200;

/// The shortest `Retry-After`, which the server also uses if it cannot estimate when a retry will succeed.
const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);

impl Error {
    /// Returns the error for an invalid value. The message begins with the name of the parameter.
    pub(crate) fn invalid(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        Self::coded("invalid_value", param, problem)
    }

    /// Returns the error for an invalid value, with a code that is more specific than `invalid_value`.
    pub(crate) fn coded(
        code: &'static str,
        param: impl Into<String>,
        problem: impl std::fmt::Display,
    ) -> Self {
        let param = param.into();
        let message = format!("{param}: {problem}");
        Self::Invalid { code, param, message }
    }

    /// Returns the error for a missing value.
    pub(crate) fn missing(param: impl Into<String>) -> Self {
        Self::coded(MISSING, param, "is missing")
    }

    /// Returns the error for a request whose images do not fit into the buffer for request bodies, which has
    /// `bytes_max` bytes. A retry after a second may succeed, because most requests are prepared in less than a second,
    /// which frees their memory.
    pub(crate) fn body_buffer_full(bytes_max: usize) -> Self {
        let limit = format!("{bytes_max} bytes");
        Self::Overloaded { resource: Resource::BodyBytes, limit, retry_after: RETRY_AFTER_MIN }
    }

    /// Returns the status, the type, the code and the parameter of the error.
    fn parts(&self) -> (StatusCode, &'static str, Option<&'static str>, Option<&str>) {
        const REQUEST: &str = "invalid_request_error";
        const SERVER: &str = "server_error";
        const RATE: &str = "rate_limit_error";
        match self {
            Self::Malformed(malformed) => {
                let code = if malformed.is_missing { MISSING } else { "invalid_type" };
                let param = malformed.param.as_deref();
                (StatusCode::BAD_REQUEST, REQUEST, param.map(|_| code), param)
            }
            Self::Invalid { code, param, .. } => (StatusCode::BAD_REQUEST, REQUEST, Some(code), Some(param)),
            Self::ContextLength { param, .. } => {
                (StatusCode::BAD_REQUEST, REQUEST, Some("context_length_exceeded"), Some(param))
            }
            Self::UnknownModel(_) => (StatusCode::NOT_FOUND, REQUEST, Some("model_not_found"), Some("model")),
            Self::NotStored { code, param, .. } => {
                (StatusCode::NOT_FOUND, REQUEST, Some(code), param.as_deref())
            }
            Self::Unauthenticated => {
                (StatusCode::UNAUTHORIZED, "authentication_error", Some("invalid_replica_token"), None)
            }
            Self::MalformedHttp(_) => (StatusCode::BAD_REQUEST, REQUEST, Some("malformed_http"), None),
            Self::UnknownPath(_) => (StatusCode::NOT_FOUND, REQUEST, Some("unknown_url"), None),
            Self::MethodNotAllowed { .. } => {
                (StatusCode::METHOD_NOT_ALLOWED, REQUEST, Some("method_not_supported"), None)
            }
            Self::BodyTooLarge(_) => {
                (StatusCode::PAYLOAD_TOO_LARGE, REQUEST, Some("request_too_large"), None)
            }
            Self::TooManyValues(_) => (StatusCode::BAD_REQUEST, REQUEST, Some("too_many_values"), None),
            Self::AnswerTooLarge { .. } => (StatusCode::BAD_REQUEST, REQUEST, Some("answer_too_large"), None),
            Self::BodyIncomplete(_) => {
                (StatusCode::REQUEST_TIMEOUT, REQUEST, Some("request_incomplete"), None)
            }
            Self::TooManyRequests { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, RATE, Some("too_many_requests"), None)
            }
            Self::QueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, RATE, Some("queue_full"), None),
            Self::Overloaded { resource, .. } => {
                (StatusCode::TOO_MANY_REQUESTS, RATE, Some(resource.code()), None)
            }
            Self::ImageMemoryFull(_) => {
                (StatusCode::TOO_MANY_REQUESTS, RATE, Some("image_memory_full"), None)
            }
            Self::Busy => (StatusCode::CONFLICT, REQUEST, Some("requests_in_flight"), None),
            Self::Starting => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("starting"), None),
            Self::Stopping => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("stopping"), None),
            Self::Failed(Failure::Stopped) => {
                (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("stopped"), None)
            }
            Self::Failed(Failure::NoToken(_)) => {
                (StatusCode::BAD_REQUEST, REQUEST, Some("no_token_left"), None)
            }
            Self::Failed(Failure::TooComplex(_)) => {
                (StatusCode::BAD_REQUEST, REQUEST, Some("form_too_complex"), None)
            }
            Self::Failed(Failure::Wake(_)) => {
                (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("wake_failed"), None)
            }
            // After a 503, the router retries on another replica, and does not count the 503 as a failure of this
            // replica.
            Self::FormCheck(_) => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("form_check_failed"), None),
            Self::Failed(Failure::Image(_)) => {
                (StatusCode::INTERNAL_SERVER_ERROR, SERVER, Some("image_failed"), None)
            }
            Self::Failed(Failure::Step(_)) => {
                (StatusCode::INTERNAL_SERVER_ERROR, SERVER, Some("step_failed"), None)
            }
            Self::Internal(_) | Self::MediaNeeded(_) => {
                (StatusCode::INTERNAL_SERVER_ERROR, SERVER, Some("internal"), None)
            }
        }
    }

    /// Returns the label of the error in metrics and logs.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "malformed",
            Self::Invalid { .. } => "invalid",
            Self::ContextLength { .. } => "too_long",
            Self::UnknownModel(_) => "unknown_model",
            Self::NotStored { .. } => "object_not_found",
            Self::Unauthenticated => "unauthenticated",
            Self::MalformedHttp(_) => "malformed_http",
            Self::UnknownPath(_) => "unknown_path",
            Self::MethodNotAllowed { .. } => "method",
            Self::BodyTooLarge(_) => "body_too_large",
            Self::TooManyValues(_) => "too_many_values",
            Self::AnswerTooLarge { .. } => "answer_too_large",
            Self::BodyIncomplete(_) => "body_incomplete",
            Self::TooManyRequests { .. } => "too_many_requests",
            Self::QueueFull { .. } => "queue_full",
            Self::Overloaded { resource, .. } => resource.code(),
            Self::ImageMemoryFull(_) => "image_memory_full",
            Self::Starting => "starting",
            Self::Stopping => "stopping",
            Self::Busy => "busy",
            Self::Internal(_) | Self::MediaNeeded(_) => "internal",
            Self::FormCheck(_) => "form_check_failed",
            Self::Failed(Failure::NoToken(_)) => "no_token_left",
            Self::Failed(Failure::TooComplex(_)) => "form_too_complex",
            Self::Failed(Failure::Wake(_)) => "wake_failed",
            Self::Failed(Failure::Image(_)) => "image_failed",
            Self::Failed(Failure::Step(_)) => "step_failed",
            Self::Failed(Failure::Stopped) => "stopped",
        }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.parts().0
    }

    pub(crate) fn body(&self) -> ErrorBody {
        let (_, r#type, code, param) = self.parts();
        let param = param.map(|param| shortened(param.to_owned(), PARAM_MAX));
        let message = self.message();
        ErrorBody { error: ErrorObject { message, r#type, param, code } }
    }

    /// Returns the message for the client.
    pub(crate) fn message(&self) -> String {
        shortened(self.to_string(), MESSAGE_MAX)
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::TooManyRequests { retry_after, .. }
            | Self::QueueFull { retry_after, .. }
            | Self::Overloaded { retry_after, .. } => Some(*retry_after),
            Self::ImageMemoryFull(_)
            | Self::Starting
            | Self::Stopping
            | Self::FormCheck(_)
            | Self::Failed(Failure::Stopped | Failure::Wake(_)) => Some(RETRY_AFTER_MIN),
            _ => None,
        }
    }

    /// Converts an error of the engine to an error that names the parameters of the request. `sequences_param` is the
    /// parameter with the number of sequences.
    pub(crate) fn from_submit(
        error: SubmitError,
        retry_after: Duration,
        sequences_param: &'static str,
    ) -> Self {
        match error {
            SubmitError::Rejected(Rejection::QueueFull { max_queue }) => {
                Self::QueueFull { limit: max_queue, retry_after }
            }
            SubmitError::Rejected(Rejection::TooManySequences { .. }) => {
                Self::coded("integer_above_max_value", sequences_param, error)
            }
            SubmitError::Rejected(Rejection::TooLong { .. }) => {
                Self::ContextLength { param: "max_tokens".to_owned(), message: error.to_string() }
            }
            SubmitError::UnknownToken { .. } => Self::invalid("prompt", error),
            SubmitError::Draining => Self::Stopping,
            SubmitError::Stopped => Self::Failed(Failure::Stopped),
            SubmitError::Rejected(Rejection::EmptyPrompt) | SubmitError::Invalid { .. } => {
                Self::Internal(format!("the engine rejected the request: {error}"))
            }
        }
    }
}

/// Returns the text, or its first `characters_max` characters and `…`.
pub(crate) fn shortened(mut text: String, characters_max: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(characters_max) {
        text.truncate(end);
        text.push('…');
    }
    text
}

impl From<SleepError> for Error {
    fn from(error: SleepError) -> Self {
        match error {
            SleepError::Busy => Self::Busy,
            SleepError::Wake(message) => Self::Failed(Failure::Wake(message)),
            SleepError::Stopped => Self::Stopping,
        }
    }
}

impl From<RequestError> for Error {
    fn from(malformed: RequestError) -> Self {
        Self::Malformed(malformed)
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let mut response = (self.status(), axum::Json(self.body())).into_response();
        if let Some(retry_after) = self.retry_after() {
            let seconds = retry_after.max(RETRY_AFTER_MIN).as_secs_f64().ceil() as u64;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self == Self::Unauthenticated {
            let scheme = HeaderValue::from_static(replica_token::SCHEME);
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        let is_unread =
            matches!(self, Self::Unauthenticated | Self::Overloaded { resource: Resource::BodyBytes, .. });
        if is_unread || matches!(self, Self::BodyTooLarge(_) | Self::BodyIncomplete(_)) {
            // The server does not read the rest of the body, so the connection cannot be reused.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}
