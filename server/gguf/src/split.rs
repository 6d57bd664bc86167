//! The names and the metadata of split models. llama.cpp's `gguf-split` writes a model as several files, the parts: the
//! first part contains the metadata of the model, and the tensors are distributed over the parts.

use crate::{FormatError, Value, limits, value::integer};

/// The name of a part of a split model: `PREFIX-00001-of-00003.gguf`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartName<'a> {
    /// The beginning of the name, which is the same for all parts.
    pub prefix: &'a str,
    /// The number of the part; the first is 1.
    pub part: u64,
    /// The number of parts of the model.
    pub parts: u64,
}

impl<'a> PartName<'a> {
    /// Parses a file name; `None` if it is not the name of a part.
    pub fn parse(name: &'a str) -> Option<Self> {
        let (name, parts) = split_number(name.strip_suffix(".gguf")?, "-of-")?;
        let (prefix, part) = split_number(name, "-")?;
        (part >= 1 && part <= parts).then_some(Self { prefix, part, parts })
    }

    /// The name of another part of the same model.
    #[must_use]
    pub fn of_part(self, part: u64) -> String {
        format!("{}-{part:05}-of-{:05}.gguf", self.prefix, self.parts)
    }
}

/// Removes a number of five digits, and the separator before it, from the end of a name. Returns the rest and the
/// number.
fn split_number<'a>(name: &'a str, separator: &str) -> Option<(&'a str, u64)> {
    let (rest, digits) = name.split_at_checked(name.len().checked_sub(5)?)?;
    let number = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())??;
    Some((rest.strip_suffix(separator)?, number))
}

/// The metadata of a file about the split model to which it belongs. A file without such metadata is the only part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SplitMetadata {
    /// The number of the part; the first is 1.
    pub(crate) part: u64,
    /// The number of parts of the model; at least 1.
    pub(crate) parts: u64,
    /// The number of tensors of all parts together, or 0 if the metadata does not contain this number.
    pub(crate) tensors: u64,
}

impl SplitMetadata {
    pub(crate) fn read(metadata: &[(String, Value)]) -> Result<Self, FormatError> {
        let number = |key: &str| integer(metadata, key);
        let parts = number("split.count")?.unwrap_or(1).max(1);
        if parts > limits::PARTS_MAX {
            let what = "the number of parts of the split model".to_owned();
            return Err(FormatError::Limit { what, value: parts, limit: limits::PARTS_MAX });
        }
        // The metadata numbers the parts from 0, and the names of the files number them from 1.
        let part = number("split.no")?.unwrap_or(0).saturating_add(1);
        Ok(Self { part, parts, tensors: number("split.tensors.count")?.unwrap_or(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_parsed_and_lead_to_the_other_parts() {
        let name = PartName::parse("Qwen3-8B-00002-of-00003.gguf").unwrap();
        assert_eq!(name, PartName { prefix: "Qwen3-8B", part: 2, parts: 3 });
        assert_eq!(name.of_part(1), "Qwen3-8B-00001-of-00003.gguf");
        assert_eq!(PartName::parse("ü-00001-of-00001.gguf").map(|name| name.prefix), Some("ü"));
        for other in [
            "model.gguf",
            "model-00001-of-00003",
            "model-0001-of-00003.gguf",
            "model-00000-of-00003.gguf",
            "model-00004-of-00003.gguf",
            "model-+0001-of-00003.gguf",
            "model00001-of-00003.gguf",
            "ü1-of-00003.gguf",
            "-of-00003.gguf",
            ".gguf",
        ] {
            assert_eq!(PartName::parse(other), None, "{other}");
        }
    }
}
