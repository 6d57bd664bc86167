//! Everything that a fetch can end with but success: one exhaustive match to the exit code and one to the reason by which
//! programs know it. Codes from 10 to 19 mean that trying again is in vain.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use reqwest::StatusCode;

/// Why a model was not fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The source does not have it.
    #[error("{url} is not there (status {status})")]
    NotFound { url: String, status: StatusCode },
    /// What came is not what was asked for.
    #[error("{name} has the SHA-256 {found}, not {wanted}")]
    Digest { name: String, found: String, wanted: String },
    /// The source wants other credentials.
    #[error("{url} refuses {} (status {status})", if *.had_credentials { "these credentials" } else { "access without credentials" })]
    Credentials { url: String, status: StatusCode, had_credentials: bool },
    /// What is asked for makes no sense.
    #[error("{0}")]
    Wrong(String),
    /// There is no room.
    #[error("there is no room for {path}: {problem}")]
    DiskFull { path: PathBuf, problem: String },
    /// The source keeps silent.
    #[error("{url} is too slow: nothing came for as long as was waited")]
    Slow { url: String },
    /// The source cannot be reached, or fails.
    #[error("failed to fetch {url}: {problem}")]
    Source { url: String, problem: String },
    /// The disk fails.
    #[error("failed to {verb} {path}: {problem}")]
    Disk { verb: &'static str, path: PathBuf, problem: String },
    /// The process was asked to end.
    #[error("asked to end; what has come so far is kept")]
    Interrupted,
}

impl Error {
    /// For conditions: stable, in CamelCase.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "NotFound",
            Self::Digest { .. } => "DigestMismatch",
            Self::Credentials { .. } => "Unauthorized",
            Self::Wrong(_) => "InvalidSource",
            Self::DiskFull { .. } => "DiskFull",
            Self::Slow { .. } => "SourceTooSlow",
            Self::Source { .. } => "SourceUnreachable",
            Self::Disk { .. } => "DiskFailed",
            Self::Interrupted => "Interrupted",
        }
    }

    /// What the process ends with.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::NotFound { .. } => 10,
            Self::Digest { .. } => 11,
            Self::Credentials { .. } => 12,
            Self::Wrong(_) => 13,
            Self::DiskFull { .. } => 20,
            Self::Slow { .. } => 21,
            Self::Source { .. } => 22,
            Self::Disk { .. } => 23,
            Self::Interrupted => 30,
        })
    }

    /// Whether it may pass within seconds.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, Self::Slow { .. } | Self::Source { .. })
    }

    #[expect(clippy::needless_pass_by_value, reason = "it comes out of map_err")]
    pub(crate) fn disk(verb: &'static str, path: &Path, source: io::Error) -> Self {
        match source.kind() {
            // The last one where a single file may not grow so large.
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Self::DiskFull { path: path.to_owned(), problem: source.to_string() }
            }
            _ => Self::Disk { verb, path: path.to_owned(), problem: source.to_string() },
        }
    }

    pub(crate) fn transport(url: &str, error: &reqwest::Error) -> Self {
        use std::error::Error as _;
        let url = without_query(url);
        if error.is_timeout() {
            return Self::Slow { url };
        }
        // What went wrong is at the end of the chain; what is before names the address, with what may be secret in it.
        let mut cause: &dyn std::error::Error = error;
        while let Some(deeper) = cause.source() {
            cause = deeper;
        }
        let problem =
            if error.source().is_some() { cause.to_string() } else { "the request failed".to_owned() };
        Self::Source { url, problem }
    }

    /// What an answer's status means, if it is no success.
    pub(crate) fn status(url: &str, status: StatusCode, had_credentials: bool) -> Option<Self> {
        let url = without_query(url);
        match status.as_u16() {
            200..=299 => None,
            401 | 403 | 407 => Some(Self::Credentials { url, status, had_credentials }),
            404 | 410 => Some(Self::NotFound { url, status }),
            408 | 425 | 429 | 500..=599 => Some(Self::Source { url, problem: format!("status {status}") }),
            _ => Some(Self::Wrong(format!("{url} answers with status {status}"))),
        }
    }
}

/// Signatures and tokens are in the query.
fn without_query(url: &str) -> String {
    url.split('?').next().unwrap_or_default().to_owned()
}
