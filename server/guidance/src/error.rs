//! What can be wrong with a form, and with a vocabulary.

use std::fmt;

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

/// What the engine says is wrong, for who wrote the form: not the state of its parser, nor that of its reader.
pub(crate) fn told(error: impl fmt::Display) -> String {
    let text = format!("{error:#}");
    let said = text.split("\n<state>").next().unwrap_or_default();
    if said == "NoExtensionBias" {
        return "nothing can ever be all of what it asks for".to_owned();
    }
    match said.split_once(" is not present in a registry") {
        Some((resource, _)) => format!("{resource} is not in the schema, and nothing is fetched"),
        None => said.to_owned(),
    }
}

/// Why a vocabulary cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed to prepare the vocabulary for guided decoding: {0}")]
pub struct BuildError(pub String);
