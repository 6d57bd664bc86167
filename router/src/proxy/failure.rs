//! How an attempt at a replica fails before its first byte, and what that means for the next.

use http::Response;

use super::Body;
use crate::error::Error;

/// Why a replica gave no answer that is passed on.
#[derive(Debug)]
pub(super) enum Failure {
    /// It took no connection: nothing was sent.
    Connect,
    /// The connection broke before the answer had begun.
    Broken,
    /// It did not begin to answer in time.
    TimedOut,
    /// It has stopped to report, while the request waited for it.
    Hangs,
    /// It has no room: 429 or 503.
    Busy(Response<Body>),
    /// It failed to answer: another 5xx.
    Failed(Response<Body>),
}

impl Failure {
    /// What it is called in metrics and logs.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Broken => "broken",
            Self::TimedOut => "timeout",
            Self::Hangs => "hangs",
            Self::Busy(_) => "busy",
            Self::Failed(_) => "status",
        }
    }

    /// Whether it is the replica's fault.
    pub(super) fn is_fault(&self) -> bool {
        !matches!(self, Self::Busy(_))
    }

    /// What the client is told if this was the last attempt of so many: the replica's own words if it had any.
    pub(super) fn last(self, attempts: u32) -> Result<Response<Body>, Error> {
        match self {
            Self::Busy(answer) | Self::Failed(answer) => Ok(answer),
            Self::TimedOut | Self::Hangs => Err(Error::AllTimedOut { attempts }),
            Self::Connect | Self::Broken => Err(Error::AllFailed { attempts, last: self.label() }),
        }
    }
}
