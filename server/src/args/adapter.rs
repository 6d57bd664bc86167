//! An adapter on the command line.

use std::path::PathBuf;
use std::str::FromStr;

/// An adapter, and the name by which requests ask for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedAdapter {
    /// The name.
    pub name: String,
    /// Its folder.
    pub path: PathBuf,
}

impl FromStr for NamedAdapter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Self { name: name.to_owned(), path: path.into() })
            }
            _ => Err(format!("{text:?} is not NAME=PATH")),
        }
    }
}
