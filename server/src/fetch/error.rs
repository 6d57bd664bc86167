//! The errors of a fetch, with one exhaustive match for the exit code and one for the machine-readable reason. Exit
//! codes from 10 to 13 mean that a retry cannot succeed.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use reqwest::StatusCode;

/// The reason why a fetch failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The file or the repository does not exist at the source.
    #[error("{url} does not exist (status {status})")]
    NotFound { url: String, status: StatusCode },
    /// The digest of the file differs from the expected one.
    #[error("{name} has the SHA-256 digest {found}, but {expected} was expected")]
    Digest { name: String, found: String, expected: String },
    /// The source rejects the credentials, or requires credentials.
    #[error("{url} rejects {} (status {status})", if *.had_credentials { "these credentials" } else { "access without credentials" })]
    Credentials { url: String, status: StatusCode, had_credentials: bool },
    /// The flags or the source are invalid.
    #[error("{0}")]
    Wrong(String),
    /// The disk or a quota is full, or the file is too large for the file system.
    #[error("{path} does not fit into its file system: {problem}")]
    DiskFull { path: PathBuf, problem: String },
    /// The source accepts no connection or sends no data in time.
    #[error("{url} is too slow: connecting timed out, or no data arrived within --idle-timeout")]
    Slow { url: String },
    /// The source cannot be reached, or returned an error.
    #[error("failed to fetch {url}: {problem}")]
    Source { url: String, problem: String },
    /// Reading from or writing to the disk failed.
    #[error("failed to {verb} {path}: {problem}")]
    Disk { verb: &'static str, path: PathBuf, problem: String },
    /// The process received a signal.
    #[error("interrupted by a signal; the next fetch reuses the downloaded data if the data can be verified")]
    Interrupted,
}

impl Error {
    /// Returns the reason that the operator shows in conditions: a stable name in CamelCase.
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

    /// Returns the exit code of the process.
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

    /// Whether a retry within seconds may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::Slow { .. } | Self::Source { .. })
    }

    #[expect(clippy::needless_pass_by_value, reason = "the closures of map_err pass the error by value")]
    pub(crate) fn disk(verb: &'static str, path: &Path, source: io::Error) -> Self {
        match source.kind() {
            // `FileTooLarge` means that the file system does not allow a file of this size.
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
        // Report only the cause, which is at the end of the chain: the errors before it can include the URL, which may
        // contain secrets.
        let mut cause: &dyn std::error::Error = error;
        while let Some(deeper) = cause.source() {
            cause = deeper;
        }
        let problem =
            if error.source().is_some() { cause.to_string() } else { "the request failed".to_owned() };
        Self::Source { url, problem }
    }

    /// Returns the error for the status of an answer, unless the status means success.
    pub(crate) fn status(url: &str, status: StatusCode, had_credentials: bool) -> Option<Self> {
        let url = without_query(url);
        match status.as_u16() {
            200..=299 => None,
            401 | 403 | 407 => Some(Self::Credentials { url, status, had_credentials }),
            404 | 410 => Some(Self::NotFound { url, status }),
            408 | 425 | 429 | 500..=599 => Some(Self::Source { url, problem: format!("status {status}") }),
            _ => Some(Self::Wrong(format!("{url} answered with status {status}"))),
        }
    }
}

/// Returns the URL without its query, which may contain signatures and tokens.
fn without_query(url: &str) -> String {
    url.split('?').next().unwrap_or_default().to_owned()
}
