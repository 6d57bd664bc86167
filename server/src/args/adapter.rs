//! The value of `--lora`.

use std::path::PathBuf;
use std::str::FromStr;

/// A LoRA adapter and its name in requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedAdapter {
    /// The name that requests use as their model.
    pub name: String,
    /// The directory of the adapter.
    pub path: PathBuf,
}

impl FromStr for NamedAdapter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Self { name: name.to_owned(), path: path.into() })
            }
            _ => Err(format!("{text:?} must be NAME=PATH")),
        }
    }
}
