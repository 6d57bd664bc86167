//! The reasons why a reconcile is retried.

/// The reason why a reconcile is retried.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Some objects could not be created, applied, patched or deleted, and a retry may succeed.
    #[error("failed to change {0} of the resource's objects")]
    Apply(usize),
    /// The status could not be read.
    #[error("failed to read the status")]
    ReadStatus(#[source] kube::Error),
    /// The status could not be written.
    #[error("failed to write the status")]
    WriteStatus(#[source] kube::Error),
}

impl Error {
    /// Returns the outcome of a reconcile that failed with this error, for metrics and spans.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Apply(_) => "apply_failed",
            Self::ReadStatus(_) | Self::WriteStatus(_) => "status_failed",
        }
    }
}
