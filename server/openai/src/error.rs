//! The body of error responses.

use serde::Serialize;

/// The body of unsuccessful responses, and the data of an error within a stream of the chat and completions endpoints.
/// `--ovms-compat` replaces it with the format of OVMS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// The error that occurred.
    pub error: ErrorObject,
}

/// An error in the format that the official clients read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorObject {
    /// The human-readable description of the error.
    pub message: String,
    /// The class of the error, such as `invalid_request_error` or `server_error`.
    pub r#type: &'static str,
    /// The path of the parameter that caused the error, such as `messages[0].content`.
    pub param: Option<String>,
    /// The machine-readable code, such as `model_not_found` or `context_length_exceeded`.
    pub code: Option<&'static str>,
}
