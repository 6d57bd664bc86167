//! Reads the configuration of a model and of its image processor, with errors that name the file and the field.

use std::{fs, io, path::Path};

use serde_json::Value;

use crate::{error::LoadError, limits::CONFIG_BYTES_MAX};

const CONFIG: &str = "config.json";
const PREPROCESSOR: &str = "preprocessor_config.json";
const PROCESSOR: &str = "processor_config.json";

/// The files of a model that configure its image processor.
#[derive(Debug)]
pub(crate) struct ModelConfig {
    /// The content of `config.json`.
    pub(crate) model: JsonFile,
    /// The content of `preprocessor_config.json`, or the part of `processor_config.json` that replaces it since
    /// transformers 5.
    pub(crate) preprocessor: JsonFile,
}

impl ModelConfig {
    /// Reads the files in the directory of a model.
    pub(crate) fn read(directory: &Path) -> Result<Self, LoadError> {
        let model = JsonFile::read(directory, CONFIG)?
            .ok_or_else(|| LoadError::NoFile { directory: directory.to_owned(), file: CONFIG })?;
        if let Some(preprocessor) = JsonFile::read(directory, PREPROCESSOR)? {
            return Ok(Self { model, preprocessor });
        }
        let processor = JsonFile::read(directory, PROCESSOR)?;
        let nested = processor.and_then(|mut file| file.value.get_mut("image_processor").map(Value::take));
        let value = nested
            .ok_or_else(|| LoadError::NoFile { directory: directory.to_owned(), file: PREPROCESSOR })?;
        Ok(Self { model, preprocessor: JsonFile { name: PROCESSOR, value } })
    }

    /// Creates a configuration from values that were read elsewhere.
    pub(crate) fn new(model: Value, preprocessor: Value) -> Self {
        let preprocessor = JsonFile { name: PREPROCESSOR, value: preprocessor };
        Self { model: JsonFile { name: CONFIG, value: model }, preprocessor }
    }
}

/// The content of a JSON file. Methods identify a field by its path with dots, such as `vision_config.patch_size`; a
/// field with the value null counts as missing.
#[derive(Debug)]
pub(crate) struct JsonFile {
    pub(crate) name: &'static str,
    pub(crate) value: Value,
}

impl JsonFile {
    fn read(directory: &Path, name: &'static str) -> Result<Option<Self>, LoadError> {
        let path = directory.join(name);
        let failed = |source| LoadError::Read { path: path.clone(), source };
        match fs::metadata(&path) {
            Ok(about) if about.len() > CONFIG_BYTES_MAX => {
                let problem = format!("the file has {} bytes (limit: {CONFIG_BYTES_MAX} bytes)", about.len());
                return Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, problem)));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        }
        let text = fs::read_to_string(&path).map_err(failed)?;
        let value = serde_json::from_str(&text).map_err(|source| LoadError::Json { path, source })?;
        Ok(Some(Self { name, value }))
    }

    /// Creates an error about a field. `problem` is a phrase that follows the name of the field.
    pub(crate) fn fault(&self, field: &str, problem: impl Into<String>) -> LoadError {
        LoadError::Field { file: self.name, field: field.to_owned(), problem: problem.into() }
    }

    /// Returns the value of the field, unless it is missing or null.
    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        let value = field.split('.').try_fold(&self.value, |value, name| value.get(name))?;
        Some(value).filter(|value| !value.is_null())
    }

    fn required<T>(&self, field: &str, value: Option<T>) -> Result<T, LoadError> {
        value.ok_or_else(|| self.fault(field, "is missing"))
    }

    /// Returns the field as a positive integer.
    pub(crate) fn optional_count(&self, field: &str) -> Result<Option<u32>, LoadError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        // Some configurations write integers as floats, such as 14.0.
        let integer =
            value.as_u64().or_else(|| value.as_f64().filter(|v| v.fract() == 0.0).map(|v| v as u64));
        let count = integer.and_then(|value| u32::try_from(value).ok()).filter(|value| *value > 0);
        let problem = || format!("is {value}; an integer from 1 to {} is expected", u32::MAX);
        count.map(Some).ok_or_else(|| self.fault(field, problem()))
    }

    /// Returns the field as a positive integer. A missing field is an error.
    pub(crate) fn count(&self, field: &str) -> Result<u32, LoadError> {
        self.required(field, self.optional_count(field)?)
    }

    /// Returns the first of `fields` that is present, as a positive integer.
    pub(crate) fn first_count(&self, fields: &[&str]) -> Result<Option<u32>, LoadError> {
        for field in fields {
            if let Some(count) = self.optional_count(field)? {
                return Ok(Some(count));
            }
        }
        Ok(None)
    }

    /// Returns the field as a positive integer up to a limit. A missing field is an error.
    pub(crate) fn count_up_to(&self, field: &str, limit: u32) -> Result<u32, LoadError> {
        let count = self.count(field)?;
        self.at_most(field, count, limit)
    }

    /// Returns the value of a field, or an error if the value exceeds the limit.
    pub(crate) fn at_most(&self, field: &str, value: u32, limit: u32) -> Result<u32, LoadError> {
        if value <= limit {
            Ok(value)
        } else {
            Err(self.fault(field, format!("is {value}; at most {limit} is supported")))
        }
    }

    /// Returns the field as a number.
    pub(crate) fn optional_number(&self, field: &str) -> Result<Option<f64>, LoadError> {
        let number = |value: &Value| {
            let number = value.as_f64().filter(|value| value.is_finite());
            number.ok_or_else(|| self.fault(field, format!("is {value}; a number is expected")))
        };
        self.get(field).map(number).transpose()
    }

    /// Returns the field as a boolean.
    pub(crate) fn optional_bool(&self, field: &str) -> Result<Option<bool>, LoadError> {
        let boolean = |value: &Value| {
            value.as_bool().ok_or_else(|| self.fault(field, format!("is {value}; a boolean is expected")))
        };
        self.get(field).map(boolean).transpose()
    }

    /// Returns the field as a string.
    pub(crate) fn optional_str(&self, field: &str) -> Result<Option<&str>, LoadError> {
        let string = |value| {
            let problem = || format!("is {value}; a string is expected");
            Value::as_str(value).ok_or_else(|| self.fault(field, problem()))
        };
        self.get(field).map(string).transpose()
    }

    /// Returns the field as one number for each color. A single number applies to all colors.
    pub(crate) fn optional_colors(&self, field: &str) -> Result<Option<[f64; 3]>, LoadError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let colors = match value {
            Value::Array(values) => {
                let numbers: Option<Vec<f64>> = values.iter().map(Value::as_f64).collect();
                numbers.and_then(|numbers| <[f64; 3]>::try_from(numbers).ok())
            }
            value => value.as_f64().map(|value| [value; 3]),
        };
        let problem =
            || self.fault(field, format!("is {value}; a number or a list of three numbers is expected"));
        colors.map(Some).ok_or_else(problem)
    }

    /// Returns the numbers in a field that is a nested list, in order.
    pub(crate) fn optional_numbers(&self, field: &str) -> Result<Option<Vec<f32>>, LoadError> {
        fn collect(value: &Value, numbers: &mut Vec<f32>) -> bool {
            match value {
                Value::Array(values) => values.iter().all(|value| collect(value, numbers)),
                value => value.as_f64().map(|value| numbers.push(value as f32)).is_some(),
            }
        }
        let Some(value) = self.get(field) else { return Ok(None) };
        let mut numbers = Vec::new();
        if collect(value, &mut numbers) && !numbers.is_empty() {
            Ok(Some(numbers))
        } else {
            Err(self.fault(field, "is not a list of numbers"))
        }
    }

    /// Checks that a field has the only supported value, which is also its default.
    pub(crate) fn expect_bool(&self, field: &str, expected: bool) -> Result<(), LoadError> {
        match self.optional_bool(field)? {
            Some(value) if value != expected => {
                Err(self.fault(field, format!("is {value}; only {expected} is supported")))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn file(value: Value) -> JsonFile {
        JsonFile { name: "config.json", value }
    }

    #[test]
    fn fields_are_paths_and_null_is_missing() {
        let file = file(json!({"a": {"b": 3, "c": null, "d": 14.0}}));
        assert_eq!(file.count("a.b").unwrap(), 3);
        assert_eq!(file.count("a.d").unwrap(), 14);
        assert_eq!(file.optional_count("a.c").unwrap(), None);
        assert_eq!(file.first_count(&["x", "a.b"]).unwrap(), Some(3));
        assert_eq!(file.count("a.x").unwrap_err().to_string(), "config.json: a.x is missing");
    }

    #[test]
    fn invalid_fields_are_named() {
        let file = file(json!({"zero": 0, "half": 0.5, "mean": [0.5, 0.5], "text": 1, "rows": [["x"]]}));
        for field in ["zero", "half"] {
            let message = file.count(field).unwrap_err().to_string();
            assert!(message.starts_with(&format!("config.json: {field} is ")), "{message}");
        }
        assert!(file.optional_colors("mean").is_err());
        assert!(file.optional_str("text").is_err());
        assert!(file.optional_numbers("rows").is_err());
    }

    #[test]
    fn colors_and_nested_numbers_are_read() {
        let file = file(json!({"one": 0.5, "three": [0.1, 0.2, 0.3], "rows": [[1, 2], [3.5]]}));
        assert_eq!(file.optional_colors("one").unwrap(), Some([0.5; 3]));
        assert_eq!(file.optional_colors("three").unwrap(), Some([0.1, 0.2, 0.3]));
        assert_eq!(file.optional_numbers("rows").unwrap(), Some(vec![1.0, 2.0, 3.5]));
    }
}
