//! Reads the JSON files of a model directory, with errors that name the file and the field.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::LoadError;

/// Size of a file with the tokenizer, the chat template or the configuration of a model. The largest known
/// `tokenizer.json` is 40 MB.
///
/// If exceeded: the server does not start.
const FILE_BYTES_MAX: u64 = 512 << 20;

/// The content of a JSON file, with its path for errors. A missing file is equivalent to an empty object.
#[derive(Debug)]
pub(crate) struct JsonFile {
    pub(crate) path: PathBuf,
    pub(crate) value: Value,
}

/// Reads a text file; `None` if the file does not exist.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>, LoadError> {
    let failed = |source| LoadError::Read { path: path.to_owned(), source };
    match fs::metadata(path) {
        Ok(about) if about.len() > FILE_BYTES_MAX => {
            let size = about.len();
            let problem =
                format!("the file has {size} bytes, which exceeds the limit of {FILE_BYTES_MAX} bytes");
            Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, problem)))
        }
        Ok(_) => fs::read_to_string(path).map(Some).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

impl JsonFile {
    /// Reads the file `directory/name`.
    pub(crate) fn read(directory: &Path, name: &str) -> Result<Self, LoadError> {
        let path = directory.join(name);
        let value = match read_text(&path)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|source| LoadError::Json { path: path.clone(), source })?,
            None => Value::Null,
        };
        Ok(Self { path, value })
    }

    /// Returns the value of the field, unless it is absent or null.
    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        self.value.get(field).filter(|value| !value.is_null())
    }

    /// Creates an error about a field.
    pub(crate) fn fault(&self, field: &str, problem: &str) -> LoadError {
        LoadError::Field { path: self.path.clone(), field: field.to_owned(), problem: problem.to_owned() }
    }

    /// Returns the field, which may be any number, as an `f32`.
    pub(crate) fn f32(&self, field: &str) -> Result<Option<f32>, LoadError> {
        self.get(field)
            .map(|value| value.as_f64().map(|v| v as f32).ok_or_else(|| self.fault(field, "is not a number")))
            .transpose()
    }

    /// Returns the field as an unsigned integer.
    pub(crate) fn u32(&self, field: &str) -> Result<Option<u32>, LoadError> {
        self.get(field)
            .map(|value| {
                let value = value.as_u64().and_then(|value| u32::try_from(value).ok());
                value.ok_or_else(|| self.fault(field, "is not an unsigned 32-bit integer"))
            })
            .transpose()
    }

    /// Returns the field as a boolean.
    pub(crate) fn bool(&self, field: &str) -> Result<Option<bool>, LoadError> {
        self.get(field)
            .map(|value| value.as_bool().ok_or_else(|| self.fault(field, "is not a boolean")))
            .transpose()
    }

    /// Returns the field as a token: a string, or an object whose `content` is a string.
    pub(crate) fn token(&self, field: &str) -> Result<Option<&str>, LoadError> {
        self.get(field)
            .map(|value| {
                let text = value.as_str().or_else(|| value.get("content")?.as_str());
                text.ok_or_else(|| self.fault(field, "is neither a string nor an object with content"))
            })
            .transpose()
    }
}
