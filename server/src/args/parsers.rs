//! How a parser of answers is chosen on the command line.

use std::str::FromStr;

/// A format of calls or of reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice<T> {
    /// As the chat template tells.
    Auto,
    /// This one.
    Format(T),
}

impl<T> Choice<T> {
    /// The format, if it is given.
    pub fn given(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Format(format) => Some(format),
        }
    }
}

pub(super) fn choice<T: FromStr>(name: &str) -> Result<Choice<T>, T::Err> {
    if name == "auto" { Ok(Choice::Auto) } else { name.parse().map(Choice::Format) }
}
