//! How an attempt at a replica fails before its first byte, and what that means for the next attempt.

use http::{Response, StatusCode};

use super::Body;
use super::repeat::Repeat;
use crate::error::Error;

/// Why a replica gave no answer that is passed on.
#[derive(Debug)]
pub(super) enum Failure {
    /// It accepted no connection: nothing was sent.
    Connect,
    /// The connection broke after the request was sent and before the answer was complete enough to pass on.
    Broken {
        /// The connection was idle before, so the replica may have closed it without having failed.
        was_reused: bool,
    },
    /// It did not begin to answer in time.
    TimedOut,
    /// It has stopped to report, while the request waited for it.
    Hangs,
    /// It rejected this router's replica token, or the lack of one, and did nothing with the request.
    Unauthenticated,
    /// It has no room: 429 or 503.
    Busy(Response<Body>),
    /// It failed to answer: another 5xx.
    Failed(Response<Body>),
}

impl Failure {
    /// Its name in metrics and logs.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Broken { .. } => "broken",
            Self::TimedOut => "timeout",
            Self::Hangs => "hangs",
            Self::Unauthenticated => "unauthenticated",
            Self::Busy(_) => "busy",
            Self::Failed(_) => "status",
        }
    }

    /// Whether it counts against the replica's health.
    pub(super) fn is_fault(&self) -> bool {
        !matches!(self, Self::Busy(_) | Self::Broken { was_reused: true })
    }

    /// Whether the request may be sent again after it.
    pub(super) fn allows(&self, repeat: Repeat) -> bool {
        match self {
            // The replica did nothing with the request.
            Self::Connect | Self::Unauthenticated | Self::Busy(_) => true,
            Self::Broken { .. } | Self::TimedOut | Self::Hangs | Self::Failed(_) => repeat != Repeat::Never,
        }
    }

    /// The client's answer if this was the last of so many attempts: the replica's own if it gave one.
    pub(super) fn last(self, attempts: u32, repeat: Repeat) -> Result<Response<Body>, Error> {
        match self {
            Self::Busy(answer) | Self::Failed(answer) => Ok(answer),
            Self::TimedOut | Self::Hangs => Err(Error::AllTimedOut { attempts }),
            Self::Broken { .. } if repeat == Repeat::Never => Err(Error::OutcomeUnknown),
            Self::Connect | Self::Unauthenticated | Self::Broken { .. } => {
                Err(Error::AllFailed { attempts, last: self.label() })
            }
        }
    }
}

/// Whether a replica refused a request or failed to answer it, so that another replica may answer.
pub(super) fn is_refusal(status: StatusCode) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error()
}
