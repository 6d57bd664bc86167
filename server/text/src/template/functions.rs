//! The functions and filters that chat templates expect.

use std::{cell::Cell, fmt, time::SystemTime};

use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, ValueKind},
};

use super::{python, strftime};

/// What a template said through `raise_exception`.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

thread_local! {
    /// The time of the rendering that this thread does.
    static NOW: Cell<SystemTime> = const { Cell::new(SystemTime::UNIX_EPOCH) };
}

/// Calls `render` with `now` as the time that `strftime_now` tells.
pub(super) fn at_time<T>(now: SystemTime, render: impl FnOnce() -> T) -> T {
    NOW.set(now);
    render()
}

#[expect(clippy::needless_pass_by_value, reason = "the engine passes arguments so")]
pub(super) fn raise_exception(message: Value) -> Result<Value, Error> {
    let message = python::str(&message);
    Err(Error::new(ErrorKind::InvalidOperation, "the template raised an exception")
        .with_source(Raised(message)))
}

pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    strftime::utc(NOW.get(), format).map_err(|problem| Error::new(ErrorKind::InvalidOperation, problem))
}

/// `tojson` as `transformers` defines it: Python's `json.dumps`, nothing escaped for HTML.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes arguments so")]
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = match options.get::<Option<Value>>("indent")? {
        Some(value) if !value.is_none() && !value.is_undefined() => Some(indent(&value)?),
        _ => None,
    };
    let separators = match options.get::<Option<Vec<String>>>("separators")? {
        Some(pair) => <[String; 2]>::try_from(pair)
            .map_err(|_| Error::new(ErrorKind::InvalidOperation, "separators must be two strings"))?,
        None if indent.is_some() => [",".to_owned(), ": ".to_owned()],
        None => [", ".to_owned(), ": ".to_owned()],
    };
    let style = python::JsonStyle {
        indent,
        separators,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let value = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "not JSON").with_source(error))?;
    Ok(style.write(&value))
}

fn indent(value: &Value) -> Result<String, Error> {
    const SPACES_MAX: usize = 64;
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    match value.as_usize() {
        Some(spaces) if spaces <= SPACES_MAX => Ok(" ".repeat(spaces)),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "indent must be a small number or a string")),
    }
}

/// `join` with Python's way of writing what is not a string.
pub(super) fn join(value: &Value, separator: Option<&str>, attribute: Option<&str>) -> Result<String, Error> {
    if value.is_undefined() {
        return Ok(String::new());
    }
    let separator = separator.unwrap_or_default();
    let mut text = String::new();
    if let (ValueKind::String, Some(characters)) = (value.kind(), value.as_str()) {
        let characters: Vec<String> = characters.chars().map(String::from).collect();
        return Ok(characters.join(separator));
    }
    for (index, item) in value.try_iter()?.enumerate() {
        if index > 0 {
            text.push_str(separator);
        }
        let item = match attribute {
            Some(name) => item.get_attr(name)?,
            None => item,
        };
        text.push_str(&python::str(&item));
    }
    Ok(text)
}
