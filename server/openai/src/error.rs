//! What an error looks like.

use serde::Serialize;

/// The body of every answer that is not a success, and of an error within a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorObject,
}

/// An error as the official clients read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorObject {
    /// For people.
    pub message: String,
    /// The class of the error: `invalid_request_error`, `server_error` and so on.
    pub r#type: &'static str,
    /// The parameter at fault, as a path: `messages[0].content`.
    pub param: Option<String>,
    /// For programs: `model_not_found`, `context_length_exceeded` and so on.
    pub code: Option<&'static str>,
}
