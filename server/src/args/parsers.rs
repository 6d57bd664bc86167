//! The values of `--tool-parser` and `--reasoning-parser`.

use std::str::FromStr;

/// How the format of tool calls or of reasoning is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParserChoice<T> {
    /// The format is detected from the chat template.
    Auto,
    /// The format is given explicitly.
    Format(T),
}

impl<T> ParserChoice<T> {
    /// Returns the format if it is given explicitly.
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
