//! The report of the container that fetches a model. This module is pure.

use k8s_openapi::api::core::v1::ContainerStatus;
use serde::{Deserialize, Serialize};

use super::containers::last_exit;
use super::exit_reason::exit_message;

/// The report of a fetch, which `ovfleet-server fetch` writes as the termination message of its container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FetchReport {
    /// `Fetched`, or the reason for the failure: stable and in CamelCase.
    pub reason: String,
    /// The message, in human-readable form.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// The digest of all files, as `sha256:…`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// The commit of the repository that was fetched, if the source has commits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// The number of bytes that were fetched.
    pub bytes: i64,
    /// The total number of bytes, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_total: Option<i64>,
}

impl FetchReport {
    /// The reason that a successful fetch reports.
    pub const FETCHED: &str = "Fetched";

    /// Whether the fetch succeeded.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.reason == Self::FETCHED
    }
}

/// Returns the last report of a fetching container.
pub(super) fn last_report(container: &ContainerStatus) -> Option<FetchReport> {
    let exit = last_exit(container)?;
    let message = exit.message.as_deref().unwrap_or_default();
    let code = exit.exit_code;
    Some(serde_json::from_str(message.trim()).unwrap_or_else(|_| FetchReport {
        reason: if code == 0 { FetchReport::FETCHED.to_owned() } else { "FetchFailed".to_owned() },
        message: if code == 0 { String::new() } else { exit_message(message, code) },
        ..FetchReport::default()
    }))
}
