//! The errors for forms that cannot be compiled and vocabularies that cannot be used.

use std::fmt;

/// The reason why a form cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {problem}")]
pub struct FormError {
    /// The path of the invalid part from the root of the request, such as
    /// `response_format.json_schema.schema.properties.age`. It is empty if the part cannot be located.
    pub at: String,
    /// The problem, as a phrase that follows the path.
    pub problem: String,
    /// Whether compiling failed for a reason unrelated to the form, which may be valid.
    pub is_internal: bool,
}

impl FormError {
    /// Creates an error with the path of the invalid part.
    pub fn new(at: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { at: at.into(), problem: problem.into(), is_internal: false }
    }
}

/// Converts an error of llguidance to a message for the author of a form, without the parser state and the backtrace of
/// a panic.
pub(crate) fn readable(error: impl fmt::Display) -> String {
    let text = format!("{error:#}");
    let end = ["\n<state>", "\n<backtrace>"].iter().filter_map(|part| text.find(part)).min();
    let message = &text[..end.unwrap_or(text.len())];
    if message == "NoExtensionBias" {
        return "the form cannot be satisfied by any finite output".to_owned();
    }
    match message.split_once(" is not present in a registry") {
        Some((resource, _)) => {
            format!("{resource} is not part of the schema, and external schemas are not fetched")
        }
        None => message.to_owned(),
    }
}

/// The reason why a vocabulary cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed to prepare the vocabulary for structured outputs: {0}")]
pub struct VocabularyError(pub String);
