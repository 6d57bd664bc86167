//! Classifies the failures of an attempt before the first byte of the answer, and decides whether another attempt may
//! follow.

use bytes::Bytes;
use http::{Response, StatusCode};

use super::retry_safety::RetrySafety;
use crate::error::Error;

/// The reason why an attempt failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// No connection was established, or it was closed before any byte of the request was sent.
    Connect,
    /// The connection broke, or the answer was invalid, after the replica may have received the request and before
    /// enough of the answer had arrived to forward it.
    Broken {
        /// Whether the connection had been idle before the request, so that the replica may have closed it without
        /// having failed.
        was_reused: bool,
    },
    /// The time limit passed before enough of the answer had arrived to forward it.
    TimedOut,
    /// The replica stopped reporting its load while the router waited for the answer.
    Hung,
    /// The replica rejected the request because the replica token of this router is invalid or missing.
    Unauthenticated,
    /// The replica has no room: it answered 429 or 503.
    Busy(Response<Bytes>),
    /// The replica answered with another 5xx status.
    Status(Response<Bytes>),
}

impl Failure {
    /// The label of the failure in metrics and logs.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Broken { .. } => "broken",
            Self::TimedOut => "timeout",
            Self::Hung => "hung",
            Self::Unauthenticated => "unauthenticated",
            Self::Busy(_) => "busy",
            Self::Status(_) => "server_error",
        }
    }

    /// Whether the failure counts against the health of the replica.
    pub(super) fn is_fault(&self) -> bool {
        !matches!(self, Self::Busy(_) | Self::Broken { was_reused: true })
    }

    /// Whether the request may be retried after this failure.
    pub(super) fn permits_retry(&self, retry_safety: RetrySafety) -> bool {
        match self {
            // The replica did not process the request.
            Self::Connect | Self::Unauthenticated | Self::Busy(_) => true,
            Self::Broken { .. } | Self::TimedOut | Self::Hung | Self::Status(_) => {
                retry_safety != RetrySafety::Unsafe
            }
        }
    }

    /// The answer for the client if this was the last of `attempts` attempts: the replica's own answer, if there is
    /// one.
    pub(super) fn into_answer(
        self,
        attempts: u32,
        retry_safety: RetrySafety,
    ) -> Result<Response<Bytes>, Error> {
        match self {
            Self::Busy(answer) | Self::Status(answer) => Ok(answer),
            Self::TimedOut | Self::Hung if retry_safety == RetrySafety::Unsafe => {
                Err(Error::UnknownAfterTimeout)
            }
            Self::TimedOut | Self::Hung => Err(Error::AllTimedOut { attempts }),
            Self::Broken { .. } if retry_safety == RetrySafety::Unsafe => Err(Error::OutcomeUnknown),
            Self::Connect | Self::Unauthenticated | Self::Broken { .. } => {
                Err(Error::AllFailed { attempts, last: self.label() })
            }
        }
    }
}

/// Whether the status means that another replica may still answer the request.
pub(super) fn is_failure(status: StatusCode) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error()
}
