//! The functions and filters that chat templates expect.

use std::{cell::Cell, fmt, time::SystemTime};

use jiff::fmt::strtime::{BrokenDownTime, Config, PosixCustom};
use jiff::{Timestamp, tz::TimeZone};
use minijinja::{
    Error, ErrorKind, Value, filters,
    formatting::{self, FormatStyle},
    value::{Kwargs, Rest, StringInput, ValueKind},
};

use super::{limits, python};

/// An exception that a template raised with `raise_exception`.
#[derive(Debug)]
pub(super) struct RaisedException(pub(super) String);

impl fmt::Display for RaisedException {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RaisedException {}

thread_local! {
    /// The time that `strftime_now` formats on this thread.
    static NOW: Cell<SystemTime> = const { Cell::new(SystemTime::UNIX_EPOCH) };
}

/// Calls `render`. During the call, `strftime_now` formats the time `now`.
pub(super) fn at_time<T>(now: SystemTime, render: impl FnOnce() -> T) -> T {
    NOW.set(now);
    render()
}

#[expect(clippy::needless_pass_by_value, reason = "the engine passes arguments by value")]
pub(super) fn raise_exception(message: Value) -> Result<Value, Error> {
    let message = python::str(&message);
    Err(Error::new(ErrorKind::InvalidOperation, "the template raised an exception")
        .with_source(RaisedException(message)))
}

pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    let failed = |error| Error::new(ErrorKind::InvalidOperation, "strftime_now failed").with_source(error);
    formatted(NOW.get(), format).map_err(failed)
}

/// Formats `time` in UTC, in the POSIX locale, as Python does by default.
fn formatted(time: SystemTime, format: &str) -> Result<String, jiff::Error> {
    let config = Config::new().custom(PosixCustom::new());
    let time = Timestamp::try_from(time)?.to_zoned(TimeZone::UTC);
    let mut text = String::new();
    BrokenDownTime::from(&time).format_with_config(&config, format, &mut text)?;
    Ok(text)
}

/// Implements the filter `tojson` as `transformers` defines it: Python's `json.dumps` without HTML escaping.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes arguments by value")]
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
    let value = serde_json::to_value(value).map_err(|error| {
        Error::new(ErrorKind::BadSerialization, "a value cannot be converted to JSON").with_source(error)
    })?;
    bounded(style.write(&value))
}

/// Rejects text that is longer than the output limit, because chained filters could multiply its length.
fn bounded(text: String) -> Result<String, Error> {
    if text.len() <= limits::OUTPUT_BYTES_MAX {
        return Ok(text);
    }
    Err(too_long())
}

fn too_long() -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("the result of a filter is longer than {} bytes", limits::OUTPUT_BYTES_MAX),
    )
}

fn indent(value: &Value) -> Result<String, Error> {
    const SPACES_MAX: usize = 64;
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    match value.as_usize() {
        Some(spaces) if spaces <= SPACES_MAX => Ok(" ".repeat(spaces)),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "indent must be a string or a number from 0 to 64")),
    }
}

/// Width in characters to which a chat template may indent or pad text. Without this limit, the template engine would
/// allocate memory for any width.
///
/// If exceeded: 400, `invalid_value`.
const WIDTH_MAX: usize = 4096;

/// Implements the filter `text | format(…)`.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes arguments by value")]
pub(super) fn printf(text: &str, arguments: Rest<Value>) -> Result<String, Error> {
    check_widths(text)?;
    formatting::format(FormatStyle::Printf, text, &arguments)
}

/// Implements the filter `text | indent(…)`, with all parameters of the engine's filter.
pub(super) fn indented(
    text: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let named = match width {
        Some(width) => Some(width),
        None => options.get::<Option<usize>>("width")?,
    };
    if named.is_some_and(|width| width > WIDTH_MAX) {
        return Err(too_wide());
    }
    filters::indent(text, width, first, blank, options)
}

/// Rejects a format string with a width or precision above [`WIDTH_MAX`], or with `*`, which reads a width or precision
/// from the arguments. Every number in the format string counts as a width.
pub(super) fn check_widths(format: &str) -> Result<(), Error> {
    let mut numbers = format.split(|letter: char| !letter.is_ascii_digit()).filter(|part| !part.is_empty());
    let is_wide = |number: &str| number.parse::<usize>().map_or(true, |number| number > WIDTH_MAX);
    if format.contains('*') || numbers.any(is_wide) { Err(too_wide()) } else { Ok(()) }
}

fn too_wide() -> Error {
    Error::new(ErrorKind::InvalidOperation, "a width must be a number of at most 4096")
}

/// Implements the filter `join`, which converts non-string values to text as Python does.
pub(super) fn join(value: &Value, separator: Option<&str>, attribute: Option<&str>) -> Result<String, Error> {
    if value.is_undefined() {
        return Ok(String::new());
    }
    let separator = separator.unwrap_or_default();
    let mut text = String::new();
    if let (ValueKind::String, Some(characters)) = (value.kind(), value.as_str()) {
        for (index, character) in characters.chars().enumerate() {
            text.push_str(if index > 0 { separator } else { "" });
            text.push(character);
            if text.len() > limits::OUTPUT_BYTES_MAX {
                return Err(too_long());
            }
        }
        return Ok(text);
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
        if text.len() > limits::OUTPUT_BYTES_MAX {
            break;
        }
    }
    bounded(text)
}
