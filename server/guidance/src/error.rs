//! What can be wrong with a form, and with a vocabulary.

use crate::Place;

/// Why a form cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {problem}")]
pub struct Invalid {
    /// Where it is, as a path from the request's root, such as
    /// `response_format.json_schema.schema.properties.age`.
    pub at: Place,
    /// What it is.
    pub problem: String,
}

impl Invalid {
    /// A problem at a place.
    pub fn new(at: impl Into<Place>, problem: impl Into<String>) -> Self {
        Self { at: at.into(), problem: problem.into() }
    }
}

/// Why a vocabulary cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed to prepare the vocabulary for guided decoding: {0}")]
pub struct BuildError(pub String);
