//! How a parser of answers is chosen on the command line.

use std::str::FromStr;

/// A format of calls or of reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParserChoice<T> {
    /// As the chat template tells.
    Auto,
    /// This one.
    Format(T),
}

impl<T> ParserChoice<T> {
    /// The format, if it is given.
    pub fn given(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Format(format) => Some(format),
        }
    }
}

pub(super) fn choice<T: FromStr>(name: &str) -> Result<ParserChoice<T>, T::Err> {
    if name == "auto" { Ok(ParserChoice::Auto) } else { name.parse().map(ParserChoice::Format) }
}
